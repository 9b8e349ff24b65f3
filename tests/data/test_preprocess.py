"""tools/preprocess_data.py: the same tokens from every kind of file and with any number of workers, and bad input."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fsdp2.errors import ConfigurationError
from mindspeed_llm.data import IndexedDataset, load_tokenizer
from mindspeed_llm.data.documents import read_batches
from mindspeed_llm.data.preprocessing import preprocess

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = ["first line\nof the first document", "", "  zweites Dokument: äöü 中文\n", "third"]  # one is empty


def jsonl(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def run(inputs: Path | str, prefix: Path, tokenizer: Path, **options):
    written, speed = preprocess([str(inputs)], str(prefix), str(tokenizer), progress=False, **options)
    assert speed > 0
    return written


def documents(prefix: str) -> list[list[int]]:
    data = IndexedDataset(prefix)
    offsets = data.document_offsets()
    return [data.tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def test_every_kind_of_file_gives_the_same_tokens(tmp_path, tokenizer_folder):
    import pyarrow as pa
    import pyarrow.parquet

    records = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    jsonl(tmp_path / "a.jsonl", records)
    jsonl(tmp_path / "lines.json", records)
    (tmp_path / "array.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(records).encode())
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "crlf.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes().replace(b"\n", b"\r\n"))
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as zipped:
        zipped.write((tmp_path / "a.jsonl").read_bytes())
    pa.parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    tokenizer = load_tokenizer(tokenizer_folder)
    expected = [[*tokenizer.encode(text), 2] for text in TEXTS if text]
    for name in os.listdir(tmp_path):
        (entry,) = run(tmp_path / name, tmp_path / "out" / name, tokenizer_folder, append_eod=True)
        assert documents(entry.prefix) == expected, name
        assert (entry.documents, entry.skipped, entry.tokens) == (3, 1, sum(map(len, expected))), name
        assert entry.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_what_a_document_of_a_txt_is(tmp_path, tokenizer_folder):
    text = "\none line\nanother\n\n\nafter empty lines\n"
    (tmp_path / "a.txt").write_text(text)
    tokenizer = load_tokenizer(tokenizer_folder)
    wanted = {
        "line": (["one line", "another", "after empty lines"], 3),
        "paragraph": (["one line\nanother", "after empty lines"], 0),
        "file": ([text], 0),
    }
    for kind, (expected, skipped) in wanted.items():
        (entry,) = run(tmp_path / "a.txt", tmp_path / kind, tokenizer_folder, txt_document=kind)
        assert [tokenizer.decode(ids) for ids in documents(entry.prefix)] == expected
        assert entry.skipped == skipped


def test_workers_change_nothing(tmp_path, tokenizer_folder, corpus):
    assert len(list(read_batches(corpus, ["text"]))) > 9  # more batches than are in flight at a time
    for workers in (1, 2):
        run(corpus, tmp_path / f"with{workers}", tokenizer_folder, append_eod=True, workers=workers)
    for suffix in (".bin", ".idx"):
        one, two = ((tmp_path / f"with{n}_text_document{suffix}").read_bytes() for n in (1, 2))
        assert one == two
    data = IndexedDataset(tmp_path / "with1_text_document")
    assert data.dtype == np.uint16 and data.document_count > 700
    assert (data.tokens == 2).sum() == data.document_count  # an end after each, and none from the text itself


def test_several_keys_folders_and_patterns(tmp_path, tokenizer_folder):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    jsonl(tmp_path / "in" / "b.jsonl", [{"question": "q2", "answer": "a2"}])
    jsonl(tmp_path / "in" / "deep" / "a.jsonl", [{"question": "q1", "answer": None}])
    (tmp_path / "in" / "readme.md").write_text("no data")
    tokenizer = load_tokenizer(tokenizer_folder)
    question, answer = run(tmp_path / "in", tmp_path / "out", tokenizer_folder, keys=["question", "answer"])
    assert question.prefix.endswith("out_question_document")
    assert [tokenizer.decode(ids) for ids in documents(question.prefix)] == ["q2", "q1"]
    assert [tokenizer.decode(ids) for ids in documents(answer.prefix)] == ["a2"] and answer.skipped == 1
    (entry,) = run(tmp_path / "in" / "*.jsonl", tmp_path / "some", tokenizer_folder, keys=["answer"])
    assert entry.documents == 1


def test_half_a_character_is_replaced(tmp_path, tokenizer_folder):
    (tmp_path / "a.jsonl").write_text('{"text": "broken \\ud83d emoji"}\n')
    (entry,) = run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer_folder)
    assert load_tokenizer(tokenizer_folder).decode(documents(entry.prefix)[0]) == "broken ? emoji"


GOOD = b'{"text": "fine"}\n'
BAD_FILES = {
    "broken line": ("a.jsonl", GOOD * 2 + b'{"text": "unfinished\n', r"a\.jsonl, line 3: not valid JSON .*column 10"),
    "no object": ("a.jsonl", GOOD + b'"text"\n', r'line 2: a text, but every record must be an object like \{"text"'),
    "wrong key": ("a.jsonl", b"\n" + b'{"txt": "a", "id": 1}\n', r"line 2: no key 'text' \(it has: txt, id\).*'txt'\?"),
    "no text": ("a.jsonl", GOOD + b'{"text": ["a"]}\n', r"line 2: 'text' holds a list; it must be a text"),
    "not utf-8": ("a.jsonl", GOOD + b'{"text": "\xe4"}\n', r"line 2: byte 10 \(0xe4\) is not utf-8"),
    "txt not utf-8": ("a.txt", b"fine\n\xff\n", r"a\.txt, line 2: byte 0 \(0xff\) is not utf-8"),
    "broken array": ("a.json", b'[\n{"text": "a"},\n{"text": }\n]', r"a\.json, line 3: not valid JSON"),
    "array of texts": ("a.json", b'["a", "b"]', r"a\.json, record 1: a text, but every record must be an object"),
    "only empty": ("a.jsonl", b'\n{"text": ""}\n{"text": null}\n', r"no text under 'text'; all 3 documents are empty"),
    "nothing at all": ("a.jsonl", b"", r"no text under 'text'; all 0 documents are empty"),
    "not parquet": ("a.parquet", b"PAR1 is how it begins", r"a\.parquet: not a readable parquet file"),
    "half a gzip": ("a.jsonl.gz", gzip.compress(GOOD * 999)[:40], r"a\.jsonl\.gz, after line 0: cannot be read on"),
    "not gzip": ("a.json.gz", b"plain", r"a\.json\.gz: cannot be read on"),
    "unknown kind": ("a.csv", b"a,b", r"a\.csv: unknown kind of file; allowed: \.jsonl, \.json, \.txt, \.parquet"),
}


@pytest.mark.parametrize("bad", BAD_FILES)
def test_bad_files_say_where_and_what(tmp_path, tokenizer_folder, bad):
    name, content, message = BAD_FILES[bad]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        run(tmp_path / name, tmp_path / "out", tokenizer_folder)
    assert os.listdir(tmp_path) == [name]


def test_a_missing_column_of_a_parquet(tmp_path, tokenizer_folder):
    import pyarrow as pa
    import pyarrow.parquet

    pa.parquet.write_table(pa.table({"content": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"no column 'context' \(it has: content, id\).*'content'\?"):
        run(tmp_path / "a.parquet", tmp_path / "out", tokenizer_folder, keys=["context"])


def test_a_missing_input_and_an_output_that_cannot_be_written(tmp_path, tokenizer_folder):
    jsonl(tmp_path / "corpus.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigurationError, match=r"--input .*corpsu.jsonl: no such file or folder; did you mean"):
        run(tmp_path / "corpsu.jsonl", tmp_path / "out", tokenizer_folder)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match=r"the folder holds no file that ends in \.jsonl"):
        run(tmp_path / "folder", tmp_path / "out", tokenizer_folder)
    with pytest.raises(ConfigurationError, match=r"corpus.jsonl/x_text_document.bin: cannot be written \(.*\)"):
        run(tmp_path / "corpus.jsonl", tmp_path / "corpus.jsonl" / "x", tokenizer_folder)


def test_end_of_text_without_such_a_token(tmp_path):
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigurationError, match=r"--append-eod: tokenizer .* names no end-of-text token"):
        run(tmp_path / "a.jsonl", tmp_path / "out", tmp_path, append_eod=True)


def command(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, REPOSITORY / "tools" / "preprocess_data.py", *map(str, words)], capture_output=True, text=True
    )


def test_command_line(tmp_path, tokenizer_folder):
    data = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS] * 50)
    data.write_bytes(b"\n" + data.read_bytes())
    words = ["--input", data, "--output-prefix", tmp_path / "out", "--tokenizer-name-or-path", tokenizer_folder]
    done = command(*words, "--append-eod", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert "150 documents" in done.stdout and "51 empty documents skipped" in done.stdout and "MB/s" in done.stdout
    data.write_bytes(data.read_bytes() + b'{"text": 1\n')
    done = command(*words, "--workers", 2)  # a mistake that a worker finds
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "line 202: not valid JSON" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(documents(str(tmp_path / "out_text_document"))) == 150  # the earlier result stands


@pytest.mark.parametrize(
    "words,message",
    [
        (["--json-key", "a"], "unknown argument --json-key; did you mean '--json-keys'?"),
        (["--workers", "0"], "--workers 0: want 1 or more"),
        (["--json-keys", "a", "a"], "--json-keys a a: a key is named twice"),
        (["--txt-document", "page"], "invalid choice: 'page'"),
    ],
)
def test_wrong_usage(words, message):
    done = command("--input", "a", "--output-prefix", "b", "--tokenizer-name-or-path", "c", *words)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
