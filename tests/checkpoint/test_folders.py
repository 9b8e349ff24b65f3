"""Broken, foreign and partial checkpoints are recognized, and the one that would work is named."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2.errors import ConfigurationError
from mindspeed_llm.training import checkpoint, checkpoint_folder
from mindspeed_llm.training.checkpoint import TrainerState, find_checkpoint
from mindspeed_llm.training.dcp_files import SafeReader
from mindspeed_llm.training.output_lock import OutputLock, first_start
from tests.training.conftest import one_process  # noqa: F401 (a fixture)
from tests.training.test_checkpoint import CPU, one_step, sharded


@pytest.fixture
def root(tmp_path, one_process) -> Path:  # noqa: F811
    """Two real checkpoints, of steps 1 and 2."""
    model, optimizer = sharded(1)
    one_step(model, optimizer)
    for step in (1, 2):
        checkpoint.save(tmp_path / "checkpoints", model, optimizer, TrainerState(step=step), "training: {}\n")
    return tmp_path / "checkpoints"


def truncate(folder: Path) -> None:
    data = next(folder.glob("*.distcp"))
    os.truncate(data, data.stat().st_size - 1000)


def drop(folder: Path) -> None:
    next(folder.glob("*.distcp")).unlink()


def change_state(**values: object):
    def change(folder: Path) -> None:
        path = folder / checkpoint.STATE_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "is truncated"),
        (drop, "lacks the file __0_0.distcp"),
        (change_state(only_model=True), "holds weights only"),
    ],
)
def test_a_broken_newest_checkpoint(root, damage, words):
    damage(root / "step_00000002")
    assert find_checkpoint("auto", root) == root / "step_00000001"
    assert words in checkpoint_folder.skipped(root, root / "step_00000001")[0]
    for wish in ("latest", str(root), str(root / "step_00000002")):
        with pytest.raises(ConfigurationError) as error:
            find_checkpoint(wish, root)
        assert words in str(error.value) and f"would work is {root / 'step_00000001'}" in str(error.value)
    model, optimizer = sharded(2)
    with pytest.raises(ConfigurationError, match=words):
        checkpoint.load(root / "step_00000002", model, optimizer, CPU)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change_state(format_version=99), "is of a newer release (format 99"),
        (change_state(iteration=5), "is not a state of this trainer: it has 'iteration'"),
        (lambda folder: (folder / checkpoint.STATE_FILE).write_text('{"step": 1'), "cannot be read"),
        (lambda folder: (folder / checkpoint.STATE_FILE).unlink(), "is half-written"),
    ],
)
def test_a_foreign_or_half_written_checkpoint(root, damage, words):
    damage(root / "step_00000002")
    assert find_checkpoint("auto", root) == root / "step_00000001"
    with pytest.raises(ConfigurationError) as error:
        find_checkpoint(str(root / "step_00000002"), root)
    assert words in str(error.value) and f"would work is {root / 'step_00000001'}" in str(error.value)


def test_auto_never_starts_anew_in_silence(root):
    for folder in root.iterdir():
        truncate(folder)
    with pytest.raises(ConfigurationError, match=r"no checkpoint in .* can be resumed from .*truncated"):
        find_checkpoint("auto", root)


def test_a_checkpoint_of_the_first_format_is_read(root):
    path = root / "step_00000002" / checkpoint.STATE_FILE
    state = json.loads(path.read_text())
    for key in ("files", "format_version", "only_model"):
        del state[key]
    path.write_text(json.dumps(state))
    model, optimizer = sharded(2)
    assert checkpoint.load(find_checkpoint("latest", root), model, optimizer, CPU).step == 2


def test_what_killed_jobs_leave_is_no_checkpoint(root):
    shutil.copytree(root / "step_00000002", root / "writing_step_00000003")
    shutil.copytree(root / "step_00000002", root / "removed_step_00000000")
    assert find_checkpoint("latest", root) == root / "step_00000002"
    with pytest.raises(ConfigurationError, match="half-written"):
        find_checkpoint(str(root / "writing_step_00000003"), root)


class Stranger:
    def __reduce__(self):
        return os.system, ("touch /tmp/should_not_exist",)


def test_an_index_runs_nothing(root):
    path = root / "step_00000002" / ".metadata"
    path.write_bytes(pickle.dumps(Stranger()))
    with pytest.raises(ConfigurationError, match=r"posix\.system, which no index needs"):
        SafeReader(root / "step_00000002").read_metadata()
    metadata = SafeReader(root / "step_00000001").read_metadata()
    info = next(iter(metadata.storage_data.values()))
    object.__setattr__(info, "relative_path", "../elsewhere")
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigurationError, match="outside of the folder"):
        SafeReader(root / "step_00000002").read_metadata()


def test_weights_only(tmp_path, one_process):  # noqa: F811
    model, optimizer = sharded(1)
    one_step(model, optimizer)
    both = [
        checkpoint.save(tmp_path / name, model, optimizer, TrainerState(step=1), "", only_model=name == "model")
        for name in ("model", "all")
    ]
    names = [SafeReader(folder).read_metadata().state_dict_metadata.keys() for folder in both]
    assert names[0] == {name for name in names[1] if name.startswith("model.")}
    with pytest.raises(ConfigurationError, match=r"no checkpoint in .* can be resumed .*holds weights only"):
        find_checkpoint("auto", tmp_path / "model")


HOLD = """
import sys, time
from pathlib import Path
from mindspeed_llm.training.output_lock import OutputLock
with OutputLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_job_a_folder_and_a_dead_one_keeps_nothing(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match=rf"another job is writing there \(process {holder.pid} on"):
            OutputLock(tmp_path).__enter__()
    finally:
        holder.kill()
        holder.wait()
    with OutputLock(tmp_path):
        assert 0 < first_start(tmp_path) < float("inf")


def test_restarts_keep_the_time_of_the_first_start(tmp_path, monkeypatch):
    with OutputLock(tmp_path):
        started = first_start(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with OutputLock(tmp_path):
        assert first_start(tmp_path) == started


def test_a_broken_checkpoint_never_pushes_out_a_whole_one(root):
    truncate(root / "step_00000002")
    model, optimizer = sharded(1)
    one_step(model, optimizer)
    checkpoint.save(root, model, optimizer, TrainerState(step=3), "", keep=2)
    assert find_checkpoint("latest", root) == root / "step_00000003"
    assert (root / "step_00000001").exists(), "the only older checkpoint that works"
