"""The Triton kernels without a GPU: the golden file and the kernel tests again, under Triton's interpreter.

TRITON_INTERPRET must be set before Triton is imported, so the tests run in a process of their own, with the backend
`cuda` on CPU tensors. The torch for CPUs brings no Triton along: where it cannot be imported from the environment or
from tests/material/triton, this is skipped; under CI it is fetched (286 MB).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENT = "triton==3.9.0"
FETCHED = REPOSITORY / "tests" / "material" / "triton"


def triton_folder() -> str:
    """A folder for PYTHONPATH from which Triton can be imported, "" when that needs none."""
    if importlib.util.find_spec("triton") is not None:
        return ""
    if not (FETCHED / "triton").is_dir():
        if not os.environ.get("CI"):
            pytest.skip(f"triton is not installed (pip install --no-deps --target {FETCHED} {REQUIREMENT})")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", FETCHED, REQUIREMENT]
        subprocess.run(command, check=True, timeout=900)
    return str(FETCHED)


def test_triton_kernels_give_the_bytes_of_the_reference():
    paths = [path for path in (triton_folder(), os.environ.get("PYTHONPATH")) if path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    files = ["tests/quantization/test_golden.py", "tests/quantization/test_kernels.py"]
    command = [sys.executable, "-m", "pytest", "-k", "cuda", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]
