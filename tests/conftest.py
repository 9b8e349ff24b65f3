"""Settings of all tests: the same hypothesis examples in every run, so that a green suite stays green."""

from hypothesis import settings

settings.register_profile("same examples", derandomize=True, deadline=None)
settings.load_profile("same examples")
