"""The corpus and tokenizer of the main job, built once for all data tests with the tools that a user runs."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from tools import build_corpus, train_tokenizer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    build_corpus.build(Path(sysconfig.get_paths()["stdlib"]), path, seed=1234, progress=False)
    return path


@pytest.fixture(scope="session")
def texts(corpus: Path) -> list[str]:
    with open(corpus, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


@pytest.fixture(scope="session")
def tokenizer_folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer.train(texts, tmp_path_factory.mktemp("tokenizer"), vocab_size=8192).parent
