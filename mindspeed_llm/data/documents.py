"""Raw text files to documents: jsonl, json, txt and parquet, each record with the file and line it came from.

A corpus has a broken record somewhere. What matters is that the message says where it is and what was expected there,
so each batch of records carries its place, and the parsing (done in worker processes) turns every mistake into one
sentence. Empty documents are no mistake: they are counted.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2.errors import ConfigurationError, nearest

SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
TXT_DOCUMENTS = ("line", "paragraph", "file")
_BATCH_BYTES = 1 << 18  # raw bytes a worker gets at a time


@dataclass(frozen=True)
class RawBatch:
    """Some consecutive records of one file, not yet parsed.

    `kind`: "jsonl" (records are lines, bytes), "text" (records are documents, bytes) or "rows" (records are dicts).
    `first`: number of the first record, counted from 1; `unit`: what is counted. `raw_bytes`: how far reading the
    file went on with this batch (for the progress bar).
    """

    path: str
    kind: str
    unit: str
    first: int
    records: list
    raw_bytes: int


def find_files(inputs: Sequence[str]) -> list[Path]:
    """Files of `inputs` (files, folders, or patterns with * ? [), sorted within each input; raises ConfigurationError
    where there are none."""
    files: list[Path] = []
    for entry in inputs:
        path = Path(entry)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and _suffix(p) in SUFFIXES)
            if not found:
                raise ConfigurationError(
                    f"--input {entry}: the folder holds no file that ends in {', '.join(SUFFIXES)}"
                )
        elif path.is_file():
            found = [path]
        else:
            found = sorted(Path(name) for name in glob.glob(entry, recursive=True) if os.path.isfile(name))
            if not found:
                siblings = os.listdir(path.parent) if path.parent.is_dir() else []
                raise ConfigurationError(f"--input {entry}: no such file or folder{nearest(path.name, siblings)}")
        files.extend(found)
    for file in files:
        if _suffix(file) not in SUFFIXES:
            raise ConfigurationError(
                f"--input {file}: unknown kind of file; allowed: {', '.join(SUFFIXES)} (the first three also with .gz)"
            )
    return files


def read_batches(path: Path, keys: Sequence[str], txt_document: str = "line") -> Iterator[RawBatch]:
    """Batches of the records of one file, in order."""
    suffix = _suffix(path)
    if suffix == ".parquet":
        yield from _parquet(path, keys)
    elif suffix == ".txt":
        yield from _text(path, txt_document)
    elif suffix == ".json" and _first_byte(path) == b"[":
        yield from _json_array(path)
    else:  # many a ".json" holds one object a line
        yield from _lines(path, "jsonl")


def parse(batch: RawBatch, keys: Sequence[str]) -> list[tuple[str, ...]]:
    """The text of each key of each record of `batch`; an empty line, a missing value (null) and blank text give ""."""
    if batch.kind == "text":
        return [(_decode(record, batch, i),) * len(keys) for i, record in enumerate(batch.records)]
    texts = []
    for i, record in enumerate(batch.records):
        if batch.kind == "jsonl":
            line = _decode(record, batch, i)
            if not line.strip():
                texts.append(("",) * len(keys))
                continue
            record = _json_object(line, batch, i)
        if not isinstance(record, dict):
            raise ConfigurationError(
                f'{_place(batch, i)}: {_kind(record)}, but every record must be an object like {{"{keys[0]}": "..."}}'
            )
        texts.append(tuple(_value(record, key, batch, i) for key in keys))
    return texts


def _value(record: dict, key: str, batch: RawBatch, i: int) -> str:
    if key not in record:
        names = ", ".join(map(str, record)) or "nothing"
        raise ConfigurationError(
            f"{_place(batch, i)}: no key '{key}' (it has: {names}); name the right one with"
            f" --json-keys{nearest(key, record)}"
        )
    value = record[key]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigurationError(f"{_place(batch, i)}: '{key}' holds {_kind(value)}; it must be a text")
    if not value.strip():
        return ""
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, "\\ud800" in JSON, is half a character: it can't be written as utf-8
        return value.encode("utf-8", "replace").decode()
    return value


def _json_object(line: str, batch: RawBatch, i: int) -> object:
    try:
        return json.loads(line)
    except ValueError as error:
        detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ConfigurationError(
            f'{_place(batch, i)}: not valid JSON ({detail}); every line must be one object like {{"text": "..."}}'
        ) from None


def _decode(record: bytes, batch: RawBatch, i: int) -> str:
    try:
        text = record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{_place(batch, i)}: byte {error.start} ({record[error.start]:#04x}) is not utf-8; convert the file first"
        ) from None
    if batch.kind == "text" and not text.strip():
        return ""
    return text.removeprefix("\ufeff") if i == 0 and batch.first == 1 else text


def _place(batch: RawBatch, i: int) -> str:
    return f"{batch.path}, {batch.unit} {batch.first + i}"


def _kind(value: object) -> str:
    return {
        list: "a list",
        dict: "an object",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }.get(type(value), "null")


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def _open(path: Path) -> tuple[io.BufferedIOBase, io.BufferedIOBase]:
    """(stream of the text's bytes, stream whose position says how much of the file is read)."""
    try:
        raw = open(path, "rb")  # noqa: SIM115 (closed by the callers)
    except OSError as error:
        raise ConfigurationError(f"--input {path}: cannot be read ({error.strerror})") from None
    return (gzip.open(raw) if path.suffix.lower() == ".gz" else raw), raw


def _first_byte(path: Path) -> bytes:
    """First byte that isn't space, looking no further than a few kilobytes."""
    stream, raw = _open(path)
    with raw, stream:
        return _reading(path, lambda: stream.read(4096)).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _whole(path: Path) -> bytes:
    stream, raw = _open(path)
    with raw, stream:
        return _reading(path, stream.read)


def _reading(path: Path, read: Callable, done: str = "") -> Any:
    """Result of `read()`; a damaged file is the user's to replace, so it's no traceback."""
    try:
        return read()
    except (EOFError, OSError, zlib.error) as error:
        raise ConfigurationError(f"{path}{done}: cannot be read on ({error}); damaged or truncated") from None


def _lines(path: Path, kind: str) -> Iterator[RawBatch]:
    stream, raw = _open(path)
    with raw, stream:
        first, position = 1, 0
        while lines := _reading(path, lambda: stream.readlines(_BATCH_BYTES), f", after line {first - 1}"):
            lines = [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines]
            yield RawBatch(str(path), kind, "line", first, lines, raw.tell() - position)
            first, position = first + len(lines), raw.tell()


def _text(path: Path, txt_document: str) -> Iterator[RawBatch]:
    if txt_document == "line":
        yield from _lines(path, "text")
        return
    text = _whole(path)
    if txt_document == "file":
        yield RawBatch(str(path), "text", "document", 1, [text], path.stat().st_size)
        return
    paragraphs = text.replace(b"\r\n", b"\n").split(b"\n\n")
    for start in range(0, len(paragraphs), 1000):
        some = [paragraph.strip(b"\n") for paragraph in paragraphs[start : start + 1000]]
        yield RawBatch(str(path), "text", "paragraph", start + 1, some, sum(map(len, some)) + 2 * len(some))


def _json_array(path: Path) -> Iterator[RawBatch]:
    text = _whole(path)
    try:
        records = json.loads(text.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f'{path}, line {error.lineno}: not valid JSON ({error.msg}, column {error.colno}); want a list of objects'
            f' like [{{"text": "..."}}]'
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path}: byte {error.start} ({text[error.start]:#04x}) is not utf-8; convert the file first"
        ) from None
    share = path.stat().st_size // max(1, (len(records) + 255) // 256)
    for start in range(0, len(records), 256):
        yield RawBatch(str(path), "rows", "record", start + 1, records[start : start + 256], share)


def _parquet(path: Path, keys: Sequence[str]) -> Iterator[RawBatch]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ConfigurationError(f"--input {path}: not a readable parquet file ({error})") from None
    with file:
        names = file.schema_arrow.names
        for key in keys:
            if key not in names:
                raise ConfigurationError(
                    f"{path}: no column '{key}' (it has: {', '.join(names)}); name the right one with"
                    f" --json-keys{nearest(key, names)}"
                )
        bytes_a_row = path.stat().st_size / max(1, file.metadata.num_rows)
        first = 1
        try:
            for batch in file.iter_batches(batch_size=512, columns=list(keys)):
                yield RawBatch(str(path), "rows", "row", first, batch.to_pylist(), round(bytes_a_row * batch.num_rows))
                first += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise ConfigurationError(f"{path}, after row {first - 1}: cannot be read on ({error})") from None
