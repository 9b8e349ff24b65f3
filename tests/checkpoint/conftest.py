"""The tiny model, tokenizer and corpus of tests/system, made once."""

from tests.system.conftest import material  # noqa: F401 (a fixture)
