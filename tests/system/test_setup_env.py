"""tools/setup_env.sh uses a Python that has everything, and adds what is missing to one that has the right torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.system.tiny import ROOT

PROBE = 'source tools/setup_env.sh extra words; echo "status $?"; command -v python; command -v torchrun; '
PROBE += 'python -c "import torch, tqdm; print(torch.__file__, tqdm.__file__, sep=chr(10))"'


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with what setup_env.sh reads."""
    (tmp_path / "project" / "tools").mkdir(parents=True)
    shutil.copy2(ROOT / "tools" / "setup_env.sh", tmp_path / "project" / "tools")
    shutil.copy2(ROOT / "requirements.txt", tmp_path / "project")
    return tmp_path / "project"


@pytest.fixture
def container(tmp_path) -> Path:
    """A Python of its own, as in a container, with all packages of this one but tqdm."""
    venv.create(tmp_path / "container", symlinks=True)
    packages = next((tmp_path / "container" / "lib").glob("python*/site-packages"))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("tqdm") and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    return tmp_path / "container"


def source(project: Path, first_on_path: Path) -> list[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "SETUP_TESTS", "PYTHONPATH")}
    env["PATH"] = f"{first_on_path}:/usr/bin:/bin"
    command = ["bash", "-euo", "pipefail", "-c", PROBE]
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_python_that_has_everything_is_used_as_it_is(project):
    bin_folder = Path(sys.executable).parent
    status, python, *_ = source(project, bin_folder)
    assert (status, python) == ("status 0", f"{bin_folder}/python")
    assert not (project / ".venv").exists()


def test_what_a_container_lacks_is_added_beside_its_torch(project, container):
    before = {path.name for path in next((container / "lib").glob("python*/site-packages")).iterdir()}
    for _ in range(2):  # the second time nothing is made
        status, python, torchrun, torch, tqdm = source(project, container / "bin")
        assert (status, python) == ("status 0", f"{project}/.venv/bin/python")
        assert torchrun == f"{project}/.venv/bin/torchrun"
        assert torch.startswith(str(container)) and tqdm.startswith(f"{project}/.venv/")
    help_text = subprocess.run([torchrun, "--help"], capture_output=True, text=True)
    assert help_text.returncode == 0 and "nproc" in help_text.stdout
    assert before == {path.name for path in next((container / "lib").glob("python*/site-packages")).iterdir()}
