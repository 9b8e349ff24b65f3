"""The .bin/.idx format against Megatron's own code, and every way such a pair of files can be broken."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from corpora import write_numbered

from fsdp2.errors import ConfigurationError
from mindspeed_llm.data.indexed_dataset import DTYPES, HEADER, MAGIC, IndexedDataset, IndexedDatasetWriter, token_dtype

DOCUMENTS = [[[5, 6, 7], [8]], [[1]], [[2, 3, 250], [4, 100], [9, 9, 9, 9]]]  # document -> sequences -> tokens


@pytest.fixture(scope="module")
def megatron():
    return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def write_ours(prefix: Path, dtype: np.dtype) -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in DOCUMENTS:
            writer.add_document([token for sequence in document for token in sequence], [len(s) for s in document])


def write_megatron(megatron, prefix: Path, dtype: np.dtype) -> None:
    import torch

    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
    for document in DOCUMENTS:
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


# Megatron's own reader and writer go through torch tensors, which know no float codes here.
@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.kind in "iu" and d != np.int8], ids=str)
def test_files_equal_megatrons_byte_for_byte(megatron, tmp_path, dtype):
    write_ours(tmp_path / "ours", dtype)
    write_megatron(megatron, tmp_path / "theirs", dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_megatron_reads_ours_and_we_read_megatrons(megatron, tmp_path):
    write_ours(tmp_path / "ours", np.dtype(np.uint16))
    write_megatron(megatron, tmp_path / "theirs", np.dtype(np.int32))
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [theirs[i].tolist() for i in range(len(theirs))] == sequences
    assert theirs.document_indices.tolist() == [0, 2, 3, 6]
    ours = IndexedDataset(tmp_path / "theirs")
    assert [ours[i].tolist() for i in range(len(ours))] == sequences
    assert ours.document_count == 3
    assert ours.document_offsets().tolist() == [0, 4, 5, 14]
    assert ours.document_offsets(1, 2).tolist() == [4, 5]


@pytest.mark.parametrize("vocab", [100, 65499, 65500, 151669])
def test_dtype_rule_is_megatrons(megatron, vocab):
    assert token_dtype(vocab) == megatron.DType.optimal_dtype(vocab)


def test_a_mapped_dataset_travels_to_another_process(tmp_path):
    write_numbered(tmp_path / "data", [3, 4])
    data = pickle.loads(pickle.dumps(IndexedDataset(tmp_path / "data.idx")))
    assert data[1].tolist() == [3, 4, 5, 6]
    with pytest.raises(IndexError):
        data[2]
    with pytest.raises(IndexError):
        data[-1]


def test_offsets_beyond_four_gigabytes(tmp_path):
    """2.6e9 tokens: their byte offsets fit neither int32 nor uint32. The files are sparse, so they cost nothing."""
    lengths = np.array([1_300_000_000, 1_299_999_998, 2], dtype=np.int64)
    pointers = (np.cumsum(lengths) - lengths) * 2
    with open(tmp_path / "big.idx", "wb") as index:
        index.write(HEADER.pack(MAGIC, 1, 8, 3, 4))
        index.write(lengths.astype("<i4").tobytes() + pointers.tobytes() + np.array([0, 1, 2, 3]).tobytes())
    with open(tmp_path / "big.bin", "wb") as tokens:
        tokens.truncate(2 * int(lengths.sum()))
        tokens.seek(2 * int(lengths.sum()) - 4)
        tokens.write(struct.pack("<2H", 111, 222))
    data = IndexedDataset(tmp_path / "big")
    assert data[2].tolist() == [111, 222]
    assert data.document_offsets().tolist() == [0, 1_300_000_000, 2_599_999_998, 2_600_000_000]


def test_an_error_while_writing_leaves_the_old_pair_and_nothing_else(tmp_path):
    old = write_numbered(tmp_path / "data", [5])
    with pytest.raises(KeyError), IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document([1, 2])
        raise KeyError
    assert IndexedDataset(tmp_path / "data")[0].tolist() == old.tolist()
    assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]


def test_tokens_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(OverflowError, match="65536"), IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document([65536])
    assert os.listdir(tmp_path) == []


def truncate(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


# 3 documents of 10, 20, 30 tokens: an index of 34 + 3 * 12 + 4 * 8 = 102 bytes, 240 bytes of int32 tokens.
BROKEN = {
    "empty idx": (lambda p: truncate(p / "d.idx", 0), "0 bytes, but the header alone has 34"),
    "idx cut in the header": (lambda p: truncate(p / "d.idx", 33), "33 bytes, but the header alone has 34"),
    "idx cut in the body": (
        lambda p: truncate(p / "d.idx", 101),
        "101 bytes, but 3 sequences and 4 document indices take 102.*truncated",
    ),
    "idx with a tail": (lambda p: truncate(p / "d.idx", 120), "120 bytes, .* take 102.*damaged"),
    "foreign idx": (lambda p: overwrite(p / "d.idx", 0, b"TNTIDX"), "starts with b'TNTIDX"),
    "unknown version": (lambda p: overwrite(p / "d.idx", 9, b"\x02"), "version 2; only version 1"),
    "unknown dtype": (lambda p: overwrite(p / "d.idx", 17, b"\x09"), "dtype code 9; allowed: 1 .uint8"),
    "negative length": (
        lambda p: overwrite(p / "d.idx", 34, struct.pack("<i", -10)),
        "sequence 0 has -10 tokens at byte 0",
    ),
    "wrong pointer": (
        lambda p: overwrite(p / "d.idx", 34 + 12 + 8, struct.pack("<q", 44)),
        "sequence 1 has 20 tokens at byte 44, but the one before ends at byte 40",
    ),
    "wrong documents": (
        lambda p: overwrite(p / "d.idx", 34 + 36 + 24, struct.pack("<q", 7)),
        "document indices run from 0 to 7; .* the 3 sequences",
    ),
    "bin cut": (lambda p: truncate(p / "d.bin", 239), r"d\.bin: 239 bytes, but .*d\.idx describes 240 .*truncated"),
    "bin longer": (lambda p: truncate(p / "d.bin", 244), "244 bytes, .* describes 240 .*of another dataset"),
    "no bin": (lambda p: os.remove(p / "d.bin"), r"d\.bin does not exist"),
    "no idx": (lambda p: os.remove(p / "d.idx"), r"d\.idx does not exist"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_broken_files_say_what_is_wrong(tmp_path, damage):
    write_numbered(tmp_path / "d", [10, 20, 30])
    damaging, message = BROKEN[damage]
    damaging(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        IndexedDataset(tmp_path / "d")


def test_the_modes_of_a_multimodal_index_are_allowed(tmp_path):
    write_numbered(tmp_path / "d", [10, 20, 30])
    with open(tmp_path / "d.idx", "ab") as index:
        index.write(bytes(3))
    assert len(IndexedDataset(tmp_path / "d")) == 3


def test_a_forgotten_ending_is_found(tmp_path):
    write_numbered(tmp_path / "corpus_text_document", [10])
    with pytest.raises(ConfigurationError, match=r"did you mean .*/corpus_text_document\?"):
        IndexedDataset(tmp_path / "corpus")
    shutil.rmtree(tmp_path)
    with pytest.raises(ConfigurationError, match="does not exist; a dataset is the two files"):
        IndexedDataset(tmp_path / "corpus")
