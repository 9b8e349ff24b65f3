"""A tiny model, tokenizer and data set, made once for all tests of recipes."""

from __future__ import annotations

import pytest

from tests.system.tiny import Material, make_material


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Material:
    return make_material(tmp_path_factory.mktemp("recipes") / "tiny")
