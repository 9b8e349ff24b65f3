"""A Hugging Face folder of safetensors: what its tensors are called and how they are read, slice by slice.

Names on disk are the model's own, but for the experts: on disk every expert has gate_proj, up_proj and down_proj as
[out, in]; in memory a layer's experts are two tensors, gate_up_proj [E, in, 2 out] (gate first) and down_proj [E, in,
out]. A weight in MXFP8 is two tensors, codes `X.weight` (float8_e4m3fn) and scales `X.weight_scale_inv` (uint8, E8M0,
one for 32 columns), and reads like any other. Files come from strangers: what a header claims is checked first.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdp2.errors import ConfigurationError
from fsdp2.quantization.formats import MX_BLOCK
from fsdp2.quantization.mx import MXTensor

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALE_SUFFIX = "_scale_inv"
LARGEST_HEADER = 100 * 2**20  # bytes; safetensors' own limit
MERGED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)\.weight")


def disk_tensors(name: str, shape: torch.Size) -> list[tuple[str, int | None, tuple[int, ...], int]]:
    """What parameter `name` of `shape` is on disk: (disk name, expert or None, disk shape, first column of the memory
    tensor that it fills).
    """
    merged = MERGED.fullmatch(name)
    if merged is None:
        return [(name, None, tuple(shape), 0)]
    prefix, projection = merged.groups()
    experts, inputs, outputs = shape
    parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
    width = outputs // len(parts)
    return [
        (f"{prefix}.{expert}.{part}.weight", expert, (width, inputs), column * width)
        for expert in range(experts)
        for column, part in enumerate(parts)
    ]


class TensorFolder:
    """The tensors of a Hugging Face folder by name; files are opened once, memory-mapped, and read slice by slice."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._open: dict[str, safe_open] = {}
        index = self.folder / INDEX_FILE
        if index.is_file():
            try:
                self.file_of: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigurationError(f"{index}: is not an index of safetensors files: {error}") from None
        elif (self.folder / SINGLE_FILE).is_file():
            self.file_of = dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise ConfigurationError(f"{folder}: holds neither {INDEX_FILE} nor {SINGLE_FILE}")
        scales = {name for name in self.file_of if name.removesuffix(SCALE_SUFFIX) in self.file_of}
        self.scale_of = {name.removesuffix(SCALE_SUFFIX): name for name in scales if name.endswith(SCALE_SUFFIX)}

    def _file(self, name: str):
        if name not in self._open:
            path = self.folder / name
            check_safetensors(path, self.folder)
            try:
                self._open[name] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ConfigurationError(f"{path}: cannot be read: {error}") from None
        return self._open[name]

    def slice(self, name: str):
        """A lazily read tensor: `.get_shape()`, and indexing reads numbers from the file, from MXFP8 too."""
        if name in self.scale_of:
            return _MXFP8Slice(name, self._raw(name), self._raw(self.scale_of[name]))
        return self._raw(name)

    def _raw(self, name: str):
        try:
            return self._file(self.file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise ConfigurationError(f"{self.folder / self.file_of[name]}: {name}: {error}") from None


class _MXFP8Slice:
    """A weight [rows, columns] in codes and scales; indexing gives bf16 numbers."""

    def __init__(self, name: str, codes, scales) -> None:
        rows, columns = codes.get_shape()
        wanted = [rows, -(-columns // MX_BLOCK)]
        if codes.get_dtype() != "F8_E4M3" or scales.get_dtype() != "U8" or list(scales.get_shape()) != wanted:
            raise ConfigurationError(
                f"{name}: is no MXFP8 weight: codes {codes.get_dtype()} {[rows, columns]}, scales {scales.get_dtype()} "
                f"{list(scales.get_shape())}; wanted are F8_E4M3 and U8 {wanted}"
            )
        self.codes, self.scales, self.columns = codes, scales, columns

    def get_shape(self) -> list[int]:
        return self.codes.get_shape()

    def __getitem__(self, where) -> Tensor:
        rows, columns = (slice(None), slice(None)) if where is Ellipsis else where
        begin, end, _ = columns.indices(self.columns)
        first = begin // MX_BLOCK  # whole blocks around the columns
        codes = self.codes[rows, first * MX_BLOCK : min(-(-end // MX_BLOCK) * MX_BLOCK, self.columns)]
        scales = self.scales[rows, first : -(-end // MX_BLOCK)]
        codes = codes.contiguous().view(torch.uint8)
        numbers = MXTensor(codes, scales.contiguous(), "E4M3", (1, MX_BLOCK), -1, codes.shape).dequantize()
        return numbers[:, begin - first * MX_BLOCK : end - first * MX_BLOCK]


def check_safetensors(path: Path, folder: Path) -> None:
    """Raise ConfigurationError unless `path` is a file of `folder` whose header fits into it.

    A link is followed only within the folder's repository, as Hugging Face's cache has it (`snapshots/X/file` ->
    `blobs/Y`).
    """
    if Path(path).parent.resolve() != Path(folder).resolve():
        raise ConfigurationError(f"{path}: is outside of {folder}")
    if path.is_symlink():
        root = folder.resolve()
        root = root.parent.parent if root.parent.name == "snapshots" else root
        if not path.resolve().is_relative_to(root):
            raise ConfigurationError(f"{path}: is a link to {path.resolve()}, outside of {root}")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    header = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= header <= min(size - 8, LARGEST_HEADER):
        raise ConfigurationError(
            f"{path}: cannot be read: it claims a header of {header:,} bytes and has {size:,} in all "
            f"(at most {LARGEST_HEADER:,} are read)"
        )
