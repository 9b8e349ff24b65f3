"""torch DCP's files, read without running what a stranger put into them.

DCP keeps its index, `.metadata`, as a pickle, and unpickling a pickle runs whatever it says. This reader builds only
the few classes that such an index consists of, and follows only plain file names inside the folder. The tensors
themselves are read by torch with `weights_only`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from fsdp2.errors import ConfigurationError

_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_CLASSES = {
    "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "TensorProperties", "_MEM_FORMAT_ENCODING", "_StorageInfo",
}  # fmt: skip
_OTHERS = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("torch._utils", "_get_layout"),
    ("collections", "OrderedDict"), ("builtins", "dict"), ("builtins", "set"), ("builtins", "list"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    """Builds what a DCP index consists of and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and name in _DTYPES
        if (module in _MODULES and name in _CLASSES) or (module, name) in _OTHERS or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")


_DTYPES = {
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn",
    "float8_e5m2",
}  # fmt: skip


class SafeReader(FileSystemReader):
    """DCP's reader of a folder, with a checked index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        except FileNotFoundError:
            raise ConfigurationError(f"{path}: does not exist, {self.path} is no checkpoint") from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError) as error:
            raise ConfigurationError(f"{path}: is damaged, or not an index of tensors: {error}") from None
        if not isinstance(metadata, Metadata):
            raise ConfigurationError(f"{path}: is not an index of tensors")
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != str(info.relative_path):
                raise ConfigurationError(f"{path}: names a file outside of the folder: {info.relative_path}")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
