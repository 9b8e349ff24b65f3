"""Every command of README.md, in its order, in a fresh copy of the repository; but few steps and a tiny model.

A command that this file does not know how to shorten fails the test, so that README.md holds none that nobody ran.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import free_port
from tests.system.tiny import MODEL, ROOT, environment

SCRIPT = "bash pretrain_qwen3_moe_tiny_fsdp2_quant.sh"


def readme_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return "".join(blocks).replace("\\\n", "").strip().splitlines()


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / "tiny.json").write_text(json.dumps({**MODEL, "vocab_size": 8192, "num_hidden_layers": 1}))
    return folder


def bash(command: str, clone: Path, **env) -> subprocess.Popen:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = environment(PATH=path, **env)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", "-c", command], cwd=clone, env=variables, **pipes)


def run(command: str, clone: Path, status: int = 0, **env) -> str:
    process = bash(command, clone, **env)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, f"{command}\n{output}"
    return output


def short(command: str) -> str:
    """The same command, made to end soon."""
    if SCRIPT in command:
        return command.replace("MAX_STEPS=600", "MAX_STEPS=3") + (
            " --model.model_name_or_path tiny.json --training.eval_iters 1"
        )
    if command.startswith("bash tests/run_tests.sh"):
        return command + " tests/training/test_schedule.py -k reference"
    if command.startswith("tensorboard "):
        return command + " --inspect"
    if command.startswith(("python ", "torchrun ", "source ", "echo ", "WORLD_SIZE=64 python ")):
        return command
    raise AssertionError(f"README.md has a command that no test knows: {command}")


def test_every_command_of_the_readme(clone):
    for command in readme_commands():
        if "NNODES=2" in command:
            local = short(command).replace("10.0.0.1", "127.0.0.1").replace("29500", str(free_port()))
            ranks = [local, local.replace("NODE_RANK=0", "NODE_RANK=1")]
            env = {"OUTPUT_DIR": "outputs/cluster", "NPROC_PER_NODE": 1, "MAX_STEPS": 2}
            nodes = [bash(rank, clone, **env) for rank in ranks]
            outputs = [node.communicate(timeout=300)[0] for node in nodes]
            assert [node.returncode for node in nodes] == [0, 0], outputs
            assert "Next, try:" in outputs[0] and "on 2 cpu rank(s)" in outputs[0]
        else:
            run(short(command), clone, MAX_STEPS=2)
    main = clone / "outputs" / "pretrain_qwen3_moe_tiny_fsdp2_quant"
    assert json.loads((main / "report.json").read_text())["steps"] == 3  # resumed by a later command
    assert "iteration        3/       3" in (main / "log_node0.txt").read_text()
    for file in ("config.yaml", "quantization_plan.json", "metrics.jsonl", "report.md", "hf/tokenizer.model"):
        assert (main / file).is_file()


def test_the_script_reuses_its_data_and_keeps_the_exit_status(clone):
    """A mistake ends the script in its check, with the message alone, before it makes or starts anything."""
    data = clone / "outputs" / "data" / "python_library"
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*") if path.is_file()}
    assert len(before) >= 4
    output = run(f"{SCRIPT} --training.lrr 1", clone, status=2)
    assert output == "error: unknown flag --training.lrr; did you mean '--training.lr'? (--help lists all flags)\n"
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*") if path.is_file()} == before
