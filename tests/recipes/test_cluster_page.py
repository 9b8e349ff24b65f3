"""Every command of docs/cluster.md: plans at their real sizes, two nodes that train, with a tiny model instead.

Only `tests/gpu/check.sh` is not run: it needs a GPU. A block that this file does not know fails the test.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import free_port
from tests.recipes.test_recipes import planned, words_of
from tests.system.tiny import ROOT, Material, environment

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
PLANS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("DRY_RUN=1")]


def shell(block: str, **variables: object) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", block]
    env = environment(PATH=path, **variables)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_blocks_are_all_known():
    known = ("DRY_RUN=1 ", "python tools/preprocess_data.py ", "export DEVICE=cpu ", "bash tests/gpu/check.sh\n")
    assert all(block.startswith(known) for block in BLOCKS) and len(BLOCKS) >= 5


@pytest.mark.parametrize("line", PLANS)
def test_plans(line):
    words = shlex.split(line)
    recipe = next(word for word in words if word.endswith(".sh"))
    variables = dict(word.split("=") for word in words[: words.index("bash")] if not word.startswith("DRY_RUN"))
    platform = re.search(r"_(A2|A3|A5|gpu)\.sh", recipe)[1]
    text = planned(words_of(ROOT / recipe, *words[words.index(recipe) + 1 :], **variables), platform)
    assert "quantization: mxfp8 in" in text
    if "--parallel.recompute" in line:  # what the page says of recomputation
        sent = re.search(r"all-gather in backward, sent +([\d,]+) B +([\d,]+) B", text)
        assert int(sent[1].replace(",", "")) < 0.56 * int(sent[2].replace(",", ""))


def test_data_is_prepared(tmp_path, material: Material):
    (block,) = (block for block in BLOCKS if "preprocess_data" in block)
    block = block.replace("outputs/data/python_library/tokenizer", str(material.tokenizer))
    shell(block.replace("outputs/cluster_data", str(tmp_path / "tokens")))
    assert (tmp_path / "tokens_text_document.idx").is_file()


def test_two_nodes_train_by_a_recipe_scaled_down(tmp_path, material: Material):
    (block,) = (block for block in BLOCKS if "NNODES=2" in block)
    for there, here in (
        ("configs/models/qwen3_moe_tiny", material.model),
        ("outputs/data/python_library/tokenizer", material.tokenizer),
        ("outputs/data/python_library/tokens_text_document", material.dataset),
        ("outputs/two_nodes", tmp_path / "run"),
        ("cutoff_len 128", "cutoff_len 64"),
        ("max_steps 3", "max_steps 2 --training.eval_steps 0 --data.split 100,0,0"),
    ):
        assert there in block
        block = block.replace(there, str(here))
    output = shell(block + "wait $!\n", MASTER_PORT=free_port(), LOG_DIR=tmp_path / "logs")
    assert "iteration        2/       2" in output and "on 2 cpu rank(s)" in output
    assert sorted(log.name[-10:] for log in (tmp_path / "logs").iterdir()) == ["_node0.log", "_node1.log"]


def test_the_prepared_check_is_whole():
    """It has not run on a GPU; what it calls is there, and its time limits add up to less than it promises."""
    script = ROOT / "tests" / "gpu" / "check.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text(encoding="utf-8")
    called = re.findall(r"(?:bash|python) ([\w/]+\.(?:sh|py))", text)
    assert len(called) >= 4 and all((ROOT / name).is_file() for name in called)
    limits = [int(number) for number in re.findall(r"\bstep \w+ (\d+) ", text)]
    assert len(limits) == 5 and sum(limits) <= 600
