"""Documents to token ids on disk, in as many processes as wanted, with the same bytes for any number of them.

The main process reads raw records in batches and writes results; workers parse and tokenize. Batches are handed out a
few at a time (a corpus far larger than memory passes through) and collected in order. With one worker everything
happens in this process, which for a small corpus is faster than starting another.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdp2.errors import ConfigurationError

from .documents import RawBatch, find_files, parse, read_batches
from .indexed_dataset import IndexedDatasetWriter, token_dtype
from .tokenizer import Tokenizer, load_tokenizer

_WAITING_A_WORKER = 4  # batches in flight for each worker


@dataclass
class Written:
    """What became of one key of the corpus. `skipped`: empty documents; `text_bytes`: utf-8 bytes of those kept."""

    key: str
    prefix: str
    documents: int = 0
    skipped: int = 0
    tokens: int = 0
    text_bytes: int = 0


@dataclass(frozen=True)
class Tokenized:
    """One batch, for each key: the documents' tokens one after another, their lengths, and what was counted."""

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    skipped: list[int]
    text_bytes: list[int]
    raw_bytes: int


class BatchTokenizer:
    """Turns a RawBatch into Tokenized; made once in every worker."""

    def __init__(self, tokenizer: Tokenizer, keys: Sequence[str], append_eod: bool) -> None:
        self.tokenizer, self.keys = tokenizer, list(keys)
        self.tail = [tokenizer.eos_id] if append_eod else []
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, batch: RawBatch) -> Tokenized:
        rows = parse(batch, self.keys)
        tokens, lengths, skipped, text_bytes = [], [], [], []
        for column in zip(*rows) if rows else [()] * len(self.keys):
            documents = [self.tokenizer.encode(text) + self.tail for text in column if text]
            tokens.append(np.array([i for document in documents for i in document], dtype=self.dtype))
            lengths.append(np.array([len(document) for document in documents], dtype=np.int64))
            skipped.append(len(column) - len(documents))
            text_bytes.append(sum(len(text.encode()) for text in column))
        return Tokenized(tokens, lengths, skipped, text_bytes, batch.raw_bytes)


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer_path: str,
    *,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    txt_document: str = "line",
    progress: bool | None = None,
) -> tuple[list[Written], float]:
    """Tokenize `inputs` into `{output_prefix}_{key}_document.bin/.idx` for each key.

    Args:
        inputs: files, folders or patterns, see `documents.find_files`.
        txt_document: what a document is in a .txt file: a "line", a "paragraph" (up to an empty line) or the "file".
        progress: True shows a bar, False doesn't, None shows it on a terminal.

    Returns:
        What was written for each key, and megabytes (1e6) of input read per second.

    Raises:
        ConfigurationError: with the file and line, where the input isn't what was said; nothing is written then.
    """
    from tqdm import tqdm

    files = find_files(inputs)
    tokenizer = load_tokenizer(tokenizer_path, "--tokenizer-name-or-path")
    if append_eod and tokenizer.eos_id is None:
        raise ConfigurationError(
            f"--append-eod: tokenizer {tokenizer.path} names no end-of-text token; "
            'give "eos_token" in a tokenizer_config.json beside it'
        )
    total = sum(file.stat().st_size for file in files)
    written = [Written(key, f"{output_prefix}_{key}_document") for key in keys]
    batches = (batch for file in files for batch in read_batches(file, keys, txt_document))
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(
                total=total,
                unit="B",
                unit_scale=True,
                desc="tokenizing",
                disable=None if progress is None else not progress,
            )
        )
        dtype = token_dtype(tokenizer.vocab_size)
        writers = [stack.enter_context(IndexedDatasetWriter(entry.prefix, dtype)) for entry in written]
        for result in _tokenized(batches, tokenizer, keys, append_eod, workers):
            _write(result, writers, written)
            bar.update(result.raw_bytes)
        for entry in written:
            if entry.documents == 0:
                raise ConfigurationError(
                    f"--input: {len(files)} file(s) hold no text under '{entry.key}'; "
                    f"all {entry.skipped} documents are empty"
                )
    return written, total / 1e6 / max(time.perf_counter() - start, 1e-9)


def _write(result: Tokenized, writers: list[IndexedDatasetWriter], written: list[Written]) -> None:
    for i, (writer, entry) in enumerate(zip(writers, written)):
        writer.add_documents(result.tokens[i], result.lengths[i])
        entry.documents += len(result.lengths[i])
        entry.skipped += result.skipped[i]
        entry.tokens += len(result.tokens[i])
        entry.text_bytes += result.text_bytes[i]


def _tokenized(
    batches: Iterator[RawBatch], tokenizer: Tokenizer, keys: Sequence[str], append_eod: bool, workers: int
) -> Iterator[Tokenized]:
    if workers <= 1:
        yield from map(BatchTokenizer(tokenizer, keys, append_eod), batches)
        return
    # A tokenizer's library may have threads running already, and a forked child of such a process can hang: spawn.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _Worker.start, (tokenizer.path, list(keys), append_eod)
    )
    waiting: deque = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_Worker.run, batch))
            if len(waiting) >= workers * _WAITING_A_WORKER:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ConfigurationError(
            f"--workers {workers}: a worker process was ended from outside, most often for want of memory; use fewer"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """The BatchTokenizer of a worker process, which it needs from one batch to the next."""

    tokenize: BatchTokenizer

    @classmethod
    def start(cls, tokenizer_path: Path, keys: list[str], append_eod: bool) -> None:
        cls.tokenize = BatchTokenizer(load_tokenizer(tokenizer_path), keys, append_eod)

    @classmethod
    def run(cls, batch: RawBatch) -> Tokenized:
        return cls.tokenize(batch)
