"""Logits, the router's balancing loss and every gradient equal transformers' in fp32 to 1e-4 relative, for every family
and variant.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed_llm.models import build_model, load_hf_weights
from mindspeed_llm.models.hf_weights import disk_tensors
from tests.models.families import VARIANTS, save_reference

TOLERANCE = 1e-4


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest reference value."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)).item()


def reference_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients under the names on disk: transformers merges experts in memory too, as [E, 2 out, in] and [E, out, in].
    """
    gradients = {}
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for expert, pair in enumerate(parameter.grad):
                for part, value in zip(("gate_proj", "up_proj"), pair.chunk(2)):
                    gradients[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = value
        elif name.endswith("experts.down_proj"):
            for expert, value in enumerate(parameter.grad):
                gradients[name.replace("down_proj", f"{expert}.down_proj.weight")] = value
        else:
            gradients[name] = parameter.grad
    return gradients


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_every_gradient_equal_transformers(variant, tmp_path):
    theirs = save_reference(variant, tmp_path)
    ours = build_model(tmp_path, device="cpu")
    load_hf_weights(ours, tmp_path)

    ids = torch.randint(0, 160, (2, 40), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    expected = theirs(input_ids=ids)
    got = ours(ids)
    assert relative(got.logits, expected.logits) < TOLERANCE

    loss = F.cross_entropy(got.logits.flatten(0, 1), labels.flatten())
    expected_loss = F.cross_entropy(expected.logits.flatten(0, 1), labels.flatten())
    if "moe" in variant:
        assert relative(got.router_aux_loss, expected.aux_loss) < TOLERANCE
        loss, expected_loss = loss + 0.1 * got.router_aux_loss, expected_loss + 0.1 * expected.aux_loss
    else:
        assert got.router_aux_loss is None
    loss.backward()
    expected_loss.backward()

    gradients = reference_gradients(theirs)
    compared = set()
    for name, parameter in ours.named_parameters():
        for disk_name, expert, (width, *_), column in disk_tensors(name, parameter.shape):
            grad = parameter.grad if expert is None else parameter.grad[expert, :, column : column + width].t()
            scale = gradients[disk_name].abs().max()
            assert (grad - gradients[disk_name]).abs().max() <= TOLERANCE * scale, disk_name
            compared.add(disk_name)
    assert compared == set(gradients)


def test_given_positions_equal_transformers(tmp_path):
    theirs = save_reference("llama-rope-dynamic", tmp_path)
    ours = build_model(tmp_path, device="cpu")
    load_hf_weights(ours, tmp_path)
    ids = torch.randint(0, 160, (2, 12), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(9, 21).expand(2, 12)
    assert relative(ours(ids, positions).logits, theirs(input_ids=ids, position_ids=positions).logits) < TOLERANCE


def test_experts_without_tokens_get_zero_gradients(tmp_path):
    save_reference("qwen3_moe-idle-experts", tmp_path)
    model = build_model(tmp_path, device="cpu")
    load_hf_weights(model, tmp_path)
    model(torch.tensor([[3, 7, 11]])).logits.sum().backward()
    for layer in model.model.layers:
        used = layer.mlp.experts.down_proj.weight.grad.flatten(1).abs().amax(1) > 0
        assert 1 <= used.sum() <= 3
        assert layer.mlp.experts.gate_up_proj.weight.grad[~used].abs().max() == 0


@pytest.mark.parametrize("variant", ["llama-tied-biased", "qwen3", "qwen3_moe"])
def test_bf16_stays_close_to_fp32(variant, tmp_path):
    """The 16-bit path (fp32 attention and head norms on a CPU) is the same model, rounded."""
    save_reference(variant, tmp_path)
    model = build_model(tmp_path, device="cpu")
    load_hf_weights(model, tmp_path)
    ids = torch.randint(0, 160, (2, 40), generator=torch.Generator().manual_seed(3))
    exact = model(ids).logits.detach()
    rounded = model.bfloat16()(ids).logits
    assert rounded.dtype == torch.bfloat16
    assert ((rounded.float() - exact).norm() / exact.norm()).item() < 0.05
    rounded.float().logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.bfloat16 for p in model.parameters())
