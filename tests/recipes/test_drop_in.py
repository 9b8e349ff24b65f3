"""Recipes written for the reference stack run unchanged: its keys, its spellings, its habits; what has no effect
is said.

The YAML files here are what such recipes look like: hub flags, a chat template beside pre-training, tokenizing options,
a data set as `file_name`, no `fsdp_size` where all processes share one copy, fused operations switched on.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments import parse_arguments
from tests.system.tiny import ROOT, Material, environment
from tools.plan import main as plan

MOE = """\
model:
  model_id: qwen3_moe
  model_name_or_path: {model}
  trust_remote_code: True
  train_from_scratch: True
  tokenizer_name_or_path: {tokenizer}
  init_model_with_meta_device: True
data:
  dataset:
    file_name: "{dataset}"
  template: qwen3
  cutoff_len: 64
  max_samples: 100000
  overwrite_cache: True
  preprocessing_num_workers: 1
  data_manager_type: mg
  packing: False
parallel:
{sharding}  fsdp_modules:
    - model.layers.{{*}}
    - model.embed_tokens
    - lm_head
  fsdp_implementation: custom
  tp_size: 1
  ep_size: 1
  ep_modules:
    - model.layers.{{*}}.mlp.experts
  ep_fsdp_size: 1
  ep_fsdp_modules:
    - model.layers.{{*}}.mlp.experts
  ep_dispatcher: eager
  recompute: True
  recompute_modules:
    - model.layers.{{*}}
  reduce_dtype: bf16
  cp_size: 1
  cp_type: ulysses
training:
  stage: pt
  per_device_train_batch_size: 1
  gradient_accumulation_steps: 1
  dataloader_num_workers : 4
  disable_shuffling: True
  seed: 42
  dataloader_drop_last: True
  output_dir: {output}
  optimizer: adamw
  lr: 1e-05
  adam_epsilon: 1e-08
  lr_scheduler_type: cosine
  warmup_ratio: 0.0
  min_lr: 1e-06
  num_train_epochs: 3.0
  max_steps: 2000
  save_steps: 500
  logging_steps: 1
optimization:
  use_fused_rmsnorm: True
  use_fused_rotary_pos_emb: True
  moe_grouped_gemm: True
  use_flash_attn: True
  chunk_loss_size: 1024
"""
QUANT_ARGS = [
    *("--model.quant_recipe_name", "mxfp8", "--model.enable_fsdp_low_precision_all_gather"),
    *("--model.quant_converters", "quantize.linear.mx", "quantize.moe.mx"),
    *("--parallel.efsdp_shard_placement_fn", "shard_by_dim_0", "--parallel.ep_dispatcher", "eager"),
]


def recipe(folder: Path, material: Material, *, model: Path | None = None, sharding: str = "") -> Path:
    path = folder / "reference.yaml"
    path.write_text(
        MOE.format(
            model=model or material.model,
            tokenizer=material.tokenizer,
            dataset=material.dataset,
            sharding=sharding,
            output=folder / "output",
        )
    )
    return path


@pytest.mark.parametrize("quantization", [[], QUANT_ARGS], ids=["bf16", "quant"])
@pytest.mark.parametrize("sharding", ["", "  fsdp_size: 16\n"], ids=["size left out", "size given"])
def test_a_published_size_plans_unchanged(tmp_path, material, quantization, sharding):
    path = recipe(tmp_path, material, model=ROOT / "configs/models/qwen3_30b_a3b", sharding=sharding)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert plan([str(path), *quantization, "--parallel.world_size", "16"]) == 0
    assert "on 16 npu rank(s): sharded over 16" in output.getvalue()
    assert ("mxfp8 in 288 of 337" in output.getvalue()) == bool(quantization)


def test_the_script_s_way_of_starting_it(tmp_path, material):
    """`source env_config.sh`, node variables of its own, words unquoted with line ends, then train_fsdp2.py; every flag
    that does nothing is said once."""
    script = f"""
source examples/fsdp2/env_config.sh
NPUS_PER_NODE=2
MASTER_ADDR=localhost
MASTER_PORT=6499
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
QUANT_ARGS="
    --model.quant_recipe_name mxfp8 \\
    --model.quant_converters quantize.linear.mx quantize.moe.mx \\
"
WORLD_SIZE=$WORLD_SIZE {sys.executable} train_fsdp2.py {recipe(tmp_path, material)} $QUANT_ARGS --training.dry_run
"""
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "on 2 cpu rank(s): sharded over 2" in done.stdout
    warned = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("warning: ")]
    expected = ("data.template", "data.max_samples", "data.overwrite_cache", "model.trust_remote_code")
    assert len(warned) == len(set(warned)) and {f"--{name}" for name in expected} <= set(warned)


def test_what_is_misspelled_there_is_an_error_here(tmp_path, material):
    """The reference stack ignores keys that it does not know; older recipes have some in another group."""
    path = recipe(tmp_path, material)
    path.write_text(path.read_text().replace("optimization:\n", ""))
    with pytest.raises(ConfigurationError, match=r"unknown key training\.use_flash_attn; did you mean 'optimization\."):
        parse_arguments([str(path)])


def test_one_process_a_copy_stays_a_choice(tmp_path, material):
    path = recipe(tmp_path, material, sharding="  dp_replicate_size: 2\n")
    arguments = parse_arguments([str(path)])
    assert arguments.on(2).parallel.fsdp_size == 1 and arguments.on(2) == arguments
    assert parse_arguments([str(recipe(tmp_path, material))]).on(8).parallel.fsdp_size == 8
