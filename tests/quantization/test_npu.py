"""The Ascend backend without an NPU: its calls meet torch_npu's real schemas and shape functions.

torch_npu cannot be imported without CANN, so a process of its own imports the unpacked wheel next to stand-ins for
CANN's libraries (`npu_stub.py`) and runs `npu_contract.py` (operators) or `npu_model_contract.py` (the main job's
model). The wheel (44 MB) is fetched into tests/material/torch_npu under CI; elsewhere the test is skipped unless it
lies there already.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quantization import npu_stub

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENT = "torch_npu==2.13.0"
FETCHED = REPOSITORY / "tests" / "material" / "torch_npu"


@pytest.fixture(scope="module")
def wheel() -> Path:
    if importlib.util.find_spec("torch_npu") is not None:
        pytest.skip("torch_npu is installed here: stand-ins for CANN must not be loaded beside the real one")
    missing = [tool for tool in ("cc", "nm") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"building the stand-ins for CANN needs {' and '.join(missing)}")
    if not (FETCHED / "torch_npu").is_dir():
        if not os.environ.get("CI"):
            pytest.skip(f"torch_npu is not there (pip install --no-deps --target {FETCHED} {REQUIREMENT})")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", FETCHED, REQUIREMENT]
        subprocess.run(command, check=True, timeout=900)
    return FETCHED


@pytest.mark.parametrize("contract", ["npu_contract", "npu_model_contract"])
def test_every_call_fits_the_real_operators(wheel, tmp_path, contract):
    npu_stub.build(wheel / "torch_npu", tmp_path)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(wheel)]),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [sys.executable, str(REPOSITORY / "tests" / "quantization" / f"{contract}.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "contract holds" in run.stdout, run.stdout[-2000:] + run.stderr[-4000:]
