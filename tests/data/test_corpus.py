"""The main job's corpus and tokenizer: what is in it, what must not be, and that it is the same every time."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from fsdp2.errors import ConfigurationError
from mindspeed_llm.data import build_pretraining_datasets
from mindspeed_llm.data.preprocessing import preprocess
from tools import build_corpus, train_tokenizer

STDLIB = Path(sysconfig.get_paths()["stdlib"])


def test_the_library_is_in_it_and_its_tests_are_not(texts):
    found = set(texts)
    for name in ("json/decoder.py", "asyncio/tasks.py", "argparse.py"):
        assert (STDLIB / name).read_text(encoding="utf-8") in found
    for name in ("pydoc_data/topics.py", "unittest/test/test_case.py", "idlelib/pyshell.py"):
        if (STDLIB / name).is_file():
            assert (STDLIB / name).read_text(encoding="utf-8") not in found
    assert set(topics.values()) <= found
    assert 8e6 < sum(map(len, texts)) < 20e6


def test_nothing_is_in_it_twice_or_empty(texts):
    assert len(set(texts)) == len(texts) and all(text.strip() for text in texts)


def test_same_seed_same_bytes_in_a_shuffled_order(corpus, texts, tmp_path):
    build_corpus.build(STDLIB, tmp_path / "again.jsonl", seed=1234, progress=False)
    assert (tmp_path / "again.jsonl").read_bytes() == corpus.read_bytes()
    build_corpus.build(STDLIB, tmp_path / "other.jsonl", seed=7, progress=False)
    other = [json.loads(line)["text"] for line in (tmp_path / "other.jsonl").read_text(encoding="utf-8").splitlines()]
    assert set(other) == set(texts) and other != texts
    topic_places = [i for i, text in enumerate(texts) if text in set(topics.values())]
    assert min(topic_places) < len(texts) * 0.1 and max(topic_places) > len(texts) * 0.9


def test_duplicates_empty_and_foreign_files_are_left_out(tmp_path):
    files = {"a.py": b"x = 1\n", "b/copy.py": b"x = 1\n", "c.py": b"", "d.py": b"# -*- coding: latin-1 -*-\n# \xe4\n"}
    files |= {"test/e.py": b"y = 1\n", "site-packages/f.py": b"z = 1\n", "g.py": b"\xff\xfe", "h.txt": b"no\n"}
    for name, content in files.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_bytes(content)
    counts = build_corpus.build(tmp_path / "lib", tmp_path / "out" / "c.jsonl", seed=1, progress=False)
    assert counts["duplicates"] == 1 + len(topics) - len(set(topics.values()))
    assert (counts["empty"], counts["unreadable"]) == (1, 1)
    lines = (tmp_path / "out" / "c.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    written = [json.loads(line)["text"] for line in lines]
    assert set(written) - set(topics.values()) == {"x = 1\n", "# -*- coding: latin-1 -*-\n# ä\n"}


def test_a_python_without_sources(tmp_path, capsys):
    assert build_corpus.main(["--output", str(tmp_path / "c.jsonl"), "--stdlib", str(tmp_path)]) == 2
    assert "no *.py files" in capsys.readouterr().err


def test_training_a_tokenizer_gives_the_same_bytes(texts, tmp_path):
    some = texts[:60]
    one, two = (train_tokenizer.train(some, tmp_path / name, vocab_size=1000) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["one", "tokenizer.model", "tokenizer.model", "two"]


def test_chunks_are_the_texts_and_short_enough(texts):
    some = [*texts[:40], "x" * 9000, "中" * 5000 + "\n" + "y" * 3999 + "\n" * 5000]
    chunks = list(train_tokenizer.chunks(some))
    assert "".join(chunks) == "".join(some)
    assert max(len(chunk.encode()) for chunk in chunks) <= 4000


def test_the_tokenizer_can_leave_held_out_documents_unseen(tmp_path, corpus, texts):
    learned = train_tokenizer.documents([str(corpus)], "text", "95,5,0")
    assert learned == texts[: round(0.95 * len(texts))]
    with pytest.raises(ConfigurationError, match=r"--data.split x"):
        train_tokenizer.documents([str(corpus)], "text", "x")


def test_a_vocabulary_too_large_for_the_text(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("so little text\n" * 20)
    words = ["--input", str(tmp_path / "a.txt"), "--output-folder", str(tmp_path / "t")]
    assert train_tokenizer.main(words) == 2
    assert "--vocab-size 8192: sentencepiece cannot train it on 20 documents" in capsys.readouterr().err
    assert train_tokenizer.main([*words, "--vocab-size", "272"]) == 0


def test_the_held_out_documents_of_the_main_job(tmp_path, corpus, texts, tokenizer_folder):
    """From text to samples: what validation reads comes from the last documents, and from no other."""
    preprocess([str(corpus)], str(tmp_path / "c"), str(tokenizer_folder), append_eod=True, progress=False)
    train, valid, _ = build_pretraining_datasets(
        str(tmp_path / "c_text_document"),
        split="95,5,0",
        sequence_length=256,
        seed=42,
        train_samples=100,
        vocab_size=8192,
    )
    border = round(0.95 * len(texts))
    assert train.bounds == (0, border) and valid.bounds == (border, len(texts))
    assert len(valid) == (valid.tokens_per_epoch - 1) // 256 > 100
