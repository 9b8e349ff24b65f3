"""Megatron's tokenized corpus on disk: `PREFIX.bin` holds every token one after another, `PREFIX.idx` says where each
sequence and document lies.

The format is the currency between preprocessing tools, so it is kept byte for byte (little endian):

    .idx  9 bytes  magic "MMIDIDX\\0\\0"          8 bytes  version, 1            1 byte   dtype code (DTYPES)
          8 bytes  number of sequences n         8 bytes  number of document indices d
          int32 [n] tokens of each sequence      int64 [n] byte offset of each sequence in .bin
          int64 [d] first sequence of each document, and n at the end (so there are d - 1 documents)
          int8 [n] modes of a multimodal dataset, optional

Both files are memory-mapped for reading: a corpus far larger than memory opens in no time. What the index claims is
checked against the sizes of the files, so that a copy that broke off is found at the start and not in the middle of a
training run.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fsdp2.errors import ConfigurationError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_BLOCK = 1 << 22  # sequences checked at a time, so that the checks of a huge index need little memory


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest dtype for ids below `vocab_size`, by Megatron's rule: uint16 below 65,500, else int32."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def strip_suffix(prefix: str | Path) -> str:
    """The prefix, also when one of the two files was given for it."""
    prefix = os.fspath(prefix)
    return prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix


class IndexedDatasetWriter:
    """Writes documents one by one; the files appear under their names only when all is well.

    A context manager: leaving it normally publishes `PREFIX.bin`, then `PREFIX.idx` (a reader that sees an index
    finds its tokens); leaving it through an exception removes what was written, and an older pair of files stays as
    it was.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self.prefix = strip_suffix(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODES:
            raise ConfigurationError(
                f"{self.prefix}.idx: dtype {self.dtype} has no code in this format; allowed:"
                f" {', '.join(map(str, _CODES))}"
            )
        self._lengths = array("q")  # 8 bytes a document, where a list would take 36
        self._document_indices = array("q", [0])
        self._partial = [f"{self.prefix}{suffix}.partial.{os.getpid()}" for suffix in (".bin", ".idx")]
        try:
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._partial[0], "wb")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise ConfigurationError(f"{self.prefix}.bin: cannot be written ({error.strerror})") from None

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | None = None) -> None:
        """Append a document of `tokens` [n]; `lengths` cuts it into sequences (they sum to n; one when None)."""
        tokens = np.asarray(tokens)
        self._append(tokens, [len(tokens)] if lengths is None else lengths)
        self._document_indices.append(len(self._lengths))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append many documents at once: `tokens` [sum of lengths], `lengths` int [documents], a sequence each."""
        before = len(self._lengths)
        self._append(np.asarray(tokens), lengths)
        self._document_indices.extend(range(before + 1, len(self._lengths) + 1))

    def _append(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        if len(tokens) and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            if tokens.min() < limits.min or tokens.max() > limits.max:
                raise OverflowError(f"tokens {tokens.min()}..{tokens.max()} do not fit {self.dtype}")
        if sum(lengths) != len(tokens):
            raise ValueError(f"lengths sum to {sum(lengths)}, there are {len(tokens)} tokens")
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._lengths.extend(map(int, lengths))

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._bin.close()
            for path in self._partial:
                Path(path).unlink(missing_ok=True)

    def _publish(self) -> None:
        lengths = np.asarray(self._lengths, dtype=np.int64)
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise OverflowError(f"a sequence of {lengths.max():,} tokens: the format counts them in int32")
        pointers = (np.cumsum(lengths) - lengths) * self.dtype.itemsize
        with open(self._partial[1], "wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], len(lengths), len(self._document_indices)))
            index.write(lengths.astype("<i4").tobytes())
            index.write(pointers.astype("<i8").tobytes())
            index.write(np.asarray(self._document_indices, dtype="<i8").tobytes())
            _flush(index)
        _flush(self._bin)
        # An old index must never stand beside new tokens, so it goes first.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        os.replace(self._partial[0], f"{self.prefix}.bin")
        os.replace(self._partial[1], f"{self.prefix}.idx")


class IndexedDataset:
    """Memory-mapped reader of `PREFIX.bin` and `PREFIX.idx`.

    `sequence_lengths` int32 [n], `sequence_pointers` int64 [n] (bytes), `document_indices` int64 [documents + 1],
    `tokens` [all tokens] in `dtype`. A dataset can be sent to another process: it opens its files again there.

    Raises:
        ConfigurationError: a file is missing, of another kind, cut short or longer than the index says; with the
        numbers.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = strip_suffix(prefix)
        self._open()

    def __getstate__(self) -> dict:
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict) -> None:
        self.prefix = state["prefix"]
        self._open()

    def _open(self) -> None:
        index_path, bin_path = f"{self.prefix}.idx", f"{self.prefix}.bin"
        index_bytes, bin_bytes = self._size(index_path), self._size(bin_path)
        if index_bytes < HEADER.size:
            raise ConfigurationError(
                f"{index_path}: {index_bytes} bytes, but the header alone has {HEADER.size}; the file is truncated"
            )
        with open(index_path, "rb") as index:
            magic, version, code, sequences, documents = HEADER.unpack(index.read(HEADER.size))
        if magic != MAGIC:
            raise ConfigurationError(
                f"{index_path}: starts with {magic!r}, not {MAGIC!r}; not an index written by"
                " tools/preprocess_data.py or Megatron"
            )
        if version != VERSION:
            raise ConfigurationError(f"{index_path}: version {version}; only version {VERSION} is known")
        if code not in DTYPES:
            raise ConfigurationError(
                f"{index_path}: dtype code {code}; allowed: {', '.join(f'{c} ({d})' for c, d in DTYPES.items())}"
            )
        wanted = HEADER.size + 12 * sequences + 8 * documents
        if index_bytes not in (wanted, wanted + sequences):  # the optional modes of a multimodal dataset
            raise ConfigurationError(
                f"{index_path}: {index_bytes:,} bytes, but {sequences:,} sequences and {documents:,} document indices"
                f" take {wanted:,};"
                f" the file is {'truncated' if index_bytes < wanted else 'damaged'}: copy it again or run"
                " tools/preprocess_data.py again"
            )
        self.dtype = DTYPES[code].newbyteorder("<")
        index = np.memmap(index_path, dtype=np.uint8, mode="r")
        self.sequence_lengths = np.frombuffer(index, "<i4", sequences, HEADER.size)
        self.sequence_pointers = np.frombuffer(index, "<i8", sequences, HEADER.size + 4 * sequences)
        self.document_indices = np.frombuffer(index, "<i8", documents, HEADER.size + 12 * sequences)
        self._check(index_path, bin_path, bin_bytes)
        self.tokens = np.memmap(bin_path, dtype=self.dtype, mode="r") if bin_bytes else np.empty(0, self.dtype)

    def _size(self, path: str) -> int:
        try:
            return os.path.getsize(path)
        except OSError:
            pass
        folder, name = os.path.split(self.prefix)
        near = []
        if os.path.isdir(folder or "."):
            near = sorted(
                entry[:-4] for entry in os.listdir(folder or ".") if entry.endswith(".idx") and entry.startswith(name)
            )
        hint = f"; did you mean {os.path.join(folder, near[0])}?" if near and near[0] != name else ""
        raise ConfigurationError(
            f"--data.dataset {self.prefix}: {path} does not exist{hint}; a dataset is the two files PREFIX.bin and"
            " PREFIX.idx of tools/preprocess_data.py"
        )

    def _check(self, index_path: str, bin_path: str, bin_bytes: int) -> None:
        lengths, pointers, documents = self.sequence_lengths, self.sequence_pointers, self.document_indices
        end = 0
        for start in range(0, len(lengths), _BLOCK):
            block = lengths[start : start + _BLOCK].astype(np.int64)
            ends = end + np.cumsum(block) * self.dtype.itemsize
            wrong = (block < 0) | (pointers[start : start + _BLOCK] != ends - block * self.dtype.itemsize)
            if wrong.any():
                first = int(wrong.argmax())
                raise ConfigurationError(
                    f"{index_path}: sequence {start + first} has {block[first]} tokens at byte"
                    f" {pointers[start + first]}, but the one before ends at"
                    f" byte {ends[first] - block[first] * self.dtype.itemsize}; the index is damaged"
                )
            end = int(ends[-1])
        if end != bin_bytes:
            raise ConfigurationError(
                f"{bin_path}: {bin_bytes:,} bytes, but {index_path} describes {end:,} ({end // self.dtype.itemsize:,}"
                f" tokens of {self.dtype});"
                f" the file is {'truncated' if bin_bytes < end else 'of another dataset'}"
            )
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
            shown = f"run from {documents[0]} to {documents[-1]}" if len(documents) else "are missing"
            raise ConfigurationError(
                f"{index_path}: document indices {shown}; they must grow from 0 to the {len(lengths):,} sequences"
            )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of sequence `index`, a view of the mapped file."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.prefix}")
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sequence_lengths[index])]

    @property
    def document_count(self) -> int:
        return len(self.document_indices) - 1

    def document_offsets(self, first: int = 0, end: int | None = None) -> np.ndarray:
        """int64 [end - first + 1]: where the documents [first, end) begin in `tokens`, and where the last one ends."""
        sequences = self.document_indices[first : self.document_count + 1 if end is None else end + 1]
        if len(self) == 0:
            return np.zeros(len(sequences), dtype=np.int64)
        # The sequence after the last one begins where the tokens end.
        starts = self.sequence_pointers[np.minimum(sequences, len(self) - 1)] // self.dtype.itemsize
        return np.where(sequences == len(self), len(self.tokens), starts)


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())
