"""Activations are what a forward saves; the plan of published sizes takes seconds; what does not fit is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from fsdp2.errors import ConfigurationError
from fsdp2.plan import lay_out
from fsdp2.quantization.converters import convert
from mindspeed_llm.arguments import parse_arguments
from mindspeed_llm.models import build_model, initialize_weights
from mindspeed_llm.training.activations import activations
from mindspeed_llm.training.loss import cross_entropy
from tests.observability.test_forecast import MODEL, plan_of
from tools.plan import main

ROOT = Path(__file__).resolve().parents[2]
QUANTIZED = ["--model.quant_recipe_name", "mxfp8", "--model.quant_converters", "quantize.linear.mx", "quantize.moe.mx"]
EXPERTS_ONLY = MODEL | {"mlp_only_layers": []}
DENSE_ONLY = MODEL | {"mlp_only_layers": [0, 1, 2]}


def saved_bytes(config: dict, batch: int, sequence: int, **changes) -> tuple[int, int]:
    """(bytes a real forward and loss keep for backward, weights left out; what is forecast)."""
    plan = plan_of(1, **changes)
    model = build_model(config, device="cpu")
    initialize_weights(model, 0)
    gathers, _ = lay_out(model, plan)
    if plan.quantization:
        convert(model, plan.quantization, [gather.decision for gather in gathers])
    model.to(torch.bfloat16)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, 330, (batch, sequence), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = cross_entropy(model(tokens).logits, tokens)
    assert loss.requires_grad
    quantized = {gather.decision.module for gather in gathers if gather.decision.quantized}
    expected = activations(model.config, plan, quantized, batch, sequence)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), expected.kept


@pytest.mark.parametrize("config", [MODEL, EXPERTS_ONLY], ids=["mixed", "experts"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-32x32", None])
@pytest.mark.parametrize("batch, sequence", [(2, 128), (1, 320)])
def test_activations_are_what_a_forward_saves(config, recipe, batch, sequence):
    measured, expected = saved_bytes(config, batch, sequence, recipe=recipe)
    assert expected == pytest.approx(measured, rel=0.02)


def test_dense_layers_too():
    measured, expected = saved_bytes(DENSE_ONLY | {"tie_word_embeddings": True}, 2, 128, recipe=None)
    assert expected == pytest.approx(measured, rel=0.02)


def test_recomputed_layers_keep_their_inputs():
    plan = plan_of(1, recompute=True)
    config = build_model(MODEL).config
    plain, recomputed = (activations(config, p, set(), 2, 128) for p in (plan_of(1), plan))
    layers = plain.kept - (recomputed.kept - 3 * 2 * 128 * 64 * 2)
    assert 0 < recomputed.recomputed < layers < 3 * recomputed.recomputed


def words(model: str, world_size: int, *more: object) -> list[str]:
    fixed = ["--data.cutoff_len", "4096", "--training.per_device_train_batch_size", "1", "--parallel.bandwidth", "50"]
    sizes = ["--parallel.world_size", str(world_size), "--parallel.fsdp_size", str(world_size)]
    path = ["--model.model_name_or_path", str(ROOT / "configs/models" / model)]
    return [*path, *QUANTIZED, *fixed, *sizes, *map(str, more)]


def test_published_sizes_in_seconds(capsys):
    begin = time.perf_counter()
    assert main(words("qwen3_30b_a3b", 8)) == 0
    text = capsys.readouterr().out
    elements = 30_532_122_624
    assert f"{elements * 4 / 8 / 2**30:,.3f} GiB" in text  # masters: every parameter divides by 8
    assert f"{elements * 4:,} B" in text  # gradients sent in fp32
    assert main(words("qwen3_235b_a22b", 1024, "--parallel.recompute")) == 0
    text = capsys.readouterr().out
    assert "128 rows do not divide by 1024 ranks" in text and "times its share" in text
    assert time.perf_counter() - begin < 180


def test_a_layout_that_does_not_fit_is_refused_with_one_that_does(capsys):
    assert main(words("qwen3_30b_a3b", 8, "--parallel.device_memory", 64)) == 2
    error = capsys.readouterr().err
    assert "the nearest that fits is --parallel.recompute" in error
    assert main(words("qwen3_30b_a3b", 8, "--parallel.device_memory", 64, "--parallel.recompute")) == 0
    assert "fits into 64 GiB" in capsys.readouterr().out
    assert main(words("qwen3_30b_a3b", 8, "--parallel.device_memory", 0.5)) == 2
    assert "no layout fits" in capsys.readouterr().err


def test_a_world_that_does_not_multiply_is_refused_with_one_that_does(capsys):
    assert main([*words("qwen3_30b_a3b", 8), "--parallel.fsdp_size", "6"]) == 2
    assert "--parallel.fsdp_size 8 fits" in capsys.readouterr().err


def test_processes_that_are_not_there_do_not_train():
    arguments = parse_arguments(["--training.output_dir", "x", *words("qwen3_moe_tiny", 8)])
    with pytest.raises(ConfigurationError, match=r"world_size 8 .*--training\.dry_run"):
        arguments.validate(8)


def test_a_cpu_is_planned_for_as_a_cpu(capsys):
    assert main(["--device", "cpu", *words("qwen3_moe_tiny", 2)]) == 0
    assert "on 2 cpu rank(s)" in capsys.readouterr().out
