"""Every recipe of examples/fsdp2 plans at its real number of processes, fits its cards, and quantizes what it says.

A recipe is asked for its words (`DRY_RUN=words`), which are planned here, in one process: nothing is allocated.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.tiny import ROOT, environment
from tools.plan import main as plan

RECIPES = sorted((ROOT / "examples" / "fsdp2").glob("*/*.sh"))
DEVICES_PER_NODE = {"A2": 8, "A3": 16, "A5": 8, "gpu": 8}
DEVICE_MEMORY = {"A2": 56, "A3": 56, "A5": 112, "gpu": 72}
NAME = re.compile(r"(pretrain_(qwen3|llama3\.1)_[0-9.]+b_4k_fsdp2)(_quant)?_(A2|A3|A5|gpu)\.sh")
ARTICLE = ROOT / "examples/fsdp2/qwen3_moe/pretrain_qwen3_30b_4k_fsdp2_quant_A5.sh"


def run_recipe(recipe: Path, *words: str, **variables: object) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(recipe), *words]
    env = environment(PATH=path, **variables)
    return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=200, check=False)


def words_of(recipe: Path, *words: str, **variables: object) -> list[str]:
    done = run_recipe(recipe, *words, DRY_RUN="words", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def planned(words: list[str], platform: str) -> str:
    output = io.StringIO()
    memory = ["--parallel.device_memory", str(DEVICE_MEMORY[platform])]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.chdir(ROOT):
        status = plan([*words, *memory, "--device", platform])
    assert status == 0, output.getvalue()
    return output.getvalue()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_plans_at_its_real_size_and_fits(recipe):
    match = NAME.fullmatch(recipe.name)
    assert match, "names are pretrain_<model>_<size>_<sequence>_fsdp2[_quant]_<platform>.sh"
    stem, quantized, platform = match[1], match[3], match[4]
    words = words_of(recipe)
    assert Path(words[0]).name == f"{stem}_{platform}.yaml"
    nodes = int(re.search(r"^RECIPE_NNODES=(\d+)$", recipe.read_text(), re.MULTILINE)[1])
    ranks = nodes * DEVICES_PER_NODE[platform]
    text = planned(words, platform)
    device = "cuda" if platform == "gpu" else "npu"
    assert f" parameters on {ranks} {device} rank(s): sharded over {ranks}" in text
    assert ("quantization: mxfp8 in" in text) == bool(quantized)
    assert f"fits into {DEVICE_MEMORY[platform]} GiB" in text


def test_accumulated_gradients_are_planned_for():
    """They are reduced once a step and kept whole until then: what a card needs for 8 billion parameters in fp32."""
    recipe = ROOT / "examples/fsdp2/qwen3/pretrain_qwen3_8b_4k_fsdp2_A5.sh"
    once, twice = (
        planned([*words_of(recipe), "--training.gradient_accumulation_steps", steps], "A5") for steps in ("1", "2")
    )
    totals = [float(re.search(r"total on the device +([\d.]+) GiB", text)[1]) for text in (once, twice)]
    assert totals[1] - totals[0] == pytest.approx(8_190_735_360 * 4 / 2**30, abs=0.01)


def test_all_models_and_platforms_have_recipes():
    names = {recipe.name for recipe in RECIPES}
    for model in ("qwen3_0.6b", "qwen3_8b", "qwen3_14b", "qwen3_32b", "qwen3_30b", "qwen3_235b", "llama3.1_8b"):
        for suffix in ("A3", "A5", "quant_A5", "gpu", "quant_gpu"):
            assert f"pretrain_{model}_4k_fsdp2_{suffix}.sh" in names


def test_scripts_hold_no_logic_of_their_own():
    """What all recipes do stands once, in env_config.sh: they differ in names and in the words they launch with."""
    settings = "PLATFORM=|RECIPE_NNODES=|MODEL=|TOKENIZER=|DATA="
    allowed = re.compile(rf"(#|set -euo|cd |{settings}|source |QUANT_ARGS=\(|\)|launch )")
    for recipe in RECIPES:
        for line in recipe.read_text().splitlines():
            assert not line or line.startswith("    ") or allowed.match(line), (recipe.name, line)


def test_the_article_s_recipe_plans_from_the_shell():
    """All attention and expert weights are quantized, lm_head and router gates are not; memory stands beside bf16's."""
    done = run_recipe(ARTICLE, DRY_RUN=1)
    assert done.returncode == 0, done.stderr
    assert "on 8 npu rank(s)" in done.stdout
    assert "mxfp8 in 288 of 337 linear and expert weights" in done.stdout  # 48 layers x (4 attention + 2 experts)
    assert "left alone: 48 (model.layers.0.mlp.gate" in done.stdout and "left alone: 1 (lm_head)" in done.stdout
    total = re.search(r"total on the device +([\d.]+) GiB +([\d.]+) GiB", done.stdout)
    assert total and 0 < float(total[1]) < 112 and 0 < float(total[2]) < 112
    words = ARTICLE.read_text()
    for word in (
        "--model.quant_recipe_name mxfp8",
        "--model.quant_format E4M3",
        "--model.quant_block_size 32",
        "--model.enable_fsdp_low_precision_all_gather",
        "--model.quant_converters quantize.linear.mx quantize.moe.mx",
        "--parallel.efsdp_shard_placement_fn shard_by_dim_0",
    ):
        assert word in words


def test_nodes_come_from_the_environment_or_slurm(tmp_path):
    assert words_of(ARTICLE, NNODES=2)[-1] == "16"
    assert words_of(ARTICLE, NPUS_PER_NODE=4, NNODES=3)[-1] == "12"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$2 $3" = "hostnames node[07-10]" ] && printf "node07\\nnode08\\n"\n')
    scontrol.chmod(0o755)
    show = 'source examples/fsdp2/env_config.sh; echo "$NNODES $NODE_RANK $MASTER_ADDR $WORLD_SIZE"'
    slurm = {"SLURM_NNODES": 4, "SLURM_NODEID": 2, "SLURM_JOB_NODELIST": "node[07-10]", "PLATFORM": "A3"}
    env = environment(**slurm, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    shown = subprocess.run(["bash", "-euo", "pipefail", "-c", show], cwd=ROOT, env=env, capture_output=True, text=True)
    assert shown.stdout.split() == ["4", "2", "node07", "64"], shown.stderr
    env |= {"MASTER_ADDR": "10.0.0.9", "NNODES": "2", "NODE_RANK": "1"}  # a user's own values win
    shown = subprocess.run(["bash", "-euo", "pipefail", "-c", show], cwd=ROOT, env=env, capture_output=True, text=True)
    assert shown.stdout.split() == ["2", "1", "10.0.0.9", "32"], shown.stderr


def test_mx_recipes_are_refused_where_there_are_no_mx_units():
    recipe = ROOT / "examples/fsdp2/qwen3/pretrain_qwen3_8b_4k_fsdp2_A3.sh"
    words = words_of(recipe, "--model.quant_recipe_name", "mxfp8")
    with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.chdir(ROOT):
        assert plan([*words, "--device", "A3"]) == 2
    assert "only Ascend 950 (A5) has" in error.getvalue() and "--model.quant_emulate" in error.getvalue()
    assert "quantization: mxfp8 in 252" in planned([*words, "--model.quant_emulate"], "A3")


def test_a_recipe_without_data_says_what_it_needs():
    done = run_recipe(ARTICLE)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "needs TOKENIZER" in done.stderr
