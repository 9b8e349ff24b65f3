"""The main job's model on a fake NPU, checked in a process that can import the real torch_npu wheel (test_npu.py).

Forward and backward on fake tensors, sharded over 4 fake ranks, in bf16 and both MX recipes, without and with the fused
operations: every call meets the real schema, shape function and autograd formula. Then each fused operation on CPU
tensors, by its documented formula under the real schema, against the plain function: values and gradients.
"""

import functools
import math
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import parallelize
from fsdp2.expert_parallel import grouped_linear, npu_grouped
from fsdp2.plan import ParallelPlan, QuantizationPlan
from fsdp2.quantization import QuantRecipe
from mindspeed_llm.arguments.optimization import OptimizationArguments
from mindspeed_llm.models import build_model, load_config
from mindspeed_llm.models.layers import attention, fused, mlp, moe, npu_ops, rms_norm
from mindspeed_llm.models.layers.rotary import RotaryTable
from mindspeed_llm.models.layers.router import configure_routing

CONFIG = load_config(Path(__file__).resolve().parents[2] / "configs" / "models" / "qwen3_moe_tiny")
BATCH, LENGTH = 2, 256
ROWS = BATCH * LENGTH * CONFIG.num_experts_per_tok


class EvenlyRouted(TorchDispatchMode):
    """Fake tensors have no values: where the host reads one, the counts of a router that treats all experts alike.
    Notes the operators of torch_npu that are called."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            one_of_all = args[0].untyped_storage().nbytes() >= 8 * CONFIG.num_experts
            return ROWS // CONFIG.num_experts if one_of_all else ROWS
        if func.namespace == "npu":
            self.called.add(func._schema.name.removeprefix("npu::"))
        return func(*args, **(kwargs or {}))


def run_model(recipe: str | None, flags: dict[str, bool]) -> set[str]:
    """The operators of torch_npu that a step of the model calls."""
    quantization = None
    if recipe:
        quantization = QuantizationPlan(
            recipe=QuantRecipe.from_name(recipe),
            converters=("quantize.linear.mx", "quantize.moe.mx"),
            apply_modules=("model.layers.{*}",),
            ignored_modules=("*lm_head", "*gate"),
            low_precision_all_gather=False,  # its marked shards are a subclass, which a fake tensor cannot become
        )
    plan = ParallelPlan(
        world_size=4,
        device_type="npu",
        fsdp_size=4,
        fsdp_modules=("model.layers.{*}", "model.embed_tokens", "lm_head"),
        quantization=quantization,
    )
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = build_model(CONFIG, device="npu:0")
    configure_routing(model, fixed=True)
    assert fused.choose_kernels(model, "npu", OptimizationArguments(**flags)) == []
    parallelize(model, plan)  # not in the fake mode: meshes are made of real numbers
    with fake, EvenlyRouted() as mode:
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="npu:0")
        output = model(ids)
        assert output.logits.shape == (BATCH, LENGTH, CONFIG.vocab_size) and output.logits.device.type == "npu"
        (output.logits.float().sum() + output.router_aux_loss).backward()
        for name, parameter in model.named_parameters():
            shard, grad = parameter.to_local(), parameter.grad.to_local()
            assert grad.shape == shard.shape and grad.device.type == "npu", (name, grad.shape, shard.shape)
    return mode.called


def check_model():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    every = dict.fromkeys(fused.FLAGS, True)
    forward = {"npu_rms_norm", "npu_rotary_mul", "npu_swiglu", "npu_fusion_attention"}
    forward |= {"npu_moe_token_permute", "_npu_moe_token_unpermute"}
    for recipe in (None, "mxfp8", "mxfp8-32x32"):
        for flags in ({}, every):
            called = run_model(recipe, flags)
            if flags:
                assert called >= forward, (recipe, forward - called, called)
                backward = {"npu_rms_norm_backward", "npu_rotary_mul_backward", "npu_swiglu_backward"}
                assert called >= backward | {"npu_fusion_attention_grad"}, (recipe, called)
            else:
                assert not called & (forward - {"npu_fusion_attention"}), (recipe, called)  # torch_npu's SDPA is that
            assert (recipe is not None) == ("npu_quant_matmul" in called), (recipe, called)
            assert bool(recipe or flags) == ("npu_grouped_matmul" in called), (recipe, called)
            print(recipe, "fused" if flags else "plain", sorted(called))


def documented_rms_norm(input, gamma, epsilon=1e-6):
    x = input.float()
    rstd = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x * rstd * gamma.float()).to(input.dtype), rstd


def documented_rotary(input, r1, r2, rotary_mode="half", rotate=None):
    assert rotary_mode == "half" and input.dtype == r1.dtype == r2.dtype
    a, b = input.chunk(2, -1)
    return input * r1 + torch.cat([-b, a], -1) * r2


def documented_swiglu(input, dim=-1):
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


def documented_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    assert num_out_tokens is None and not padded_mode and indices.dtype == torch.int32
    order = indices.flatten().argsort(stable=True)
    return tokens.index_select(0, order // indices.shape[1]), order.argsort(stable=True).int()


def documented_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    assert sorted_indices.dtype == torch.int32 and not padded_mode and restore_shape is None
    rows = permuted_tokens.index_select(0, sorted_indices).view(*probs.shape, -1).float()
    return (rows * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)


def documented_attention(
    query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, keep_prob=1.0,
    pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None, actual_seq_qlen=None,
    actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None,
    dropout_mask=None, seed=0, offset=0,
):  # fmt: skip
    assert head_num == query.shape[1] and input_layout == "BNSD" and sparse_mode == 3 and keep_prob == 1.0
    assert atten_mask.shape == (2048, 2048) and torch.equal(atten_mask, torch.ones(2048, 2048).triu(1).bool())
    groups = head_num // key.shape[1]
    k, v = (x.float().repeat_interleave(groups, 1) for x in (key, value))
    logits = query.float() @ k.transpose(-1, -2) * scale
    queries, keys = logits.shape[-2:]
    masked = torch.ones(queries, keys).triu(keys - queries + 1).bool()
    out = (logits.masked_fill(masked, -math.inf).softmax(-1) @ v).to(query.dtype)
    return out, torch.empty(0), torch.empty(0), torch.empty(0), 0, 0, 0


def documented_grouped_matmul(x, weight, *, group_list=None, split_item=0, group_type=None, group_list_type=0, **rest):
    assert split_item == 3 and group_list_type == 0 and group_list.dtype == torch.int64
    assert not any(rest.values()), rest  # neither scales nor anything else that the formula leaves out
    offsets = [0, *group_list.tolist()]
    if group_type == 2:
        return [grouped_linear.grouped_weight_gradient(x[0].t().float(), weight[0].float(), offsets).to(x[0].dtype)]
    return [grouped_linear.grouped_forward(x[0].float(), weight[0].float(), offsets).to(x[0].dtype)]


def same(ours, plain, *inputs):
    """`ours` and `plain` give the same values and gradients on `inputs`."""
    results = []
    for function in (ours, plain):
        given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        y = function(*given)
        torch.manual_seed(1)
        y.backward(torch.randn(y.shape).to(y.dtype))
        results.append([y, *(x.grad for x in given if x.is_floating_point())])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)


def check_fused_numbers():
    library = torch.library.Library("npu", "IMPL")
    for name, function in (
        ("npu_rms_norm", documented_rms_norm),
        ("npu_rotary_mul", documented_rotary),
        ("npu_swiglu", documented_swiglu),
        ("npu_moe_token_permute", documented_permute),
        ("npu_moe_token_unpermute", documented_unpermute),
        ("npu_fusion_attention", documented_attention),
    ):
        library.impl(name, function, "AutogradCPU")
    library.impl("npu_grouped_matmul", documented_grouped_matmul, "CPU")
    torch.manual_seed(0)

    def bf16(*shape):
        return torch.randn(shape, dtype=torch.bfloat16)

    same(lambda x, w: npu_ops.rms_norm(x, w, 1e-6), lambda x, w: rms_norm.rms_norm(x, w, 1e-6), bf16(7, 64), bf16(64))
    angles = torch.rand(1, 5, 1, 16) * 100
    table = RotaryTable(angles.cos(), angles.sin())
    turns = (functools.partial(f, table=table, dtype=torch.bfloat16) for f in (npu_ops.rotate, attention.rotate_heads))
    same(*turns, bf16(2, 5, 3, 32))
    same(npu_ops.weighted_swiglu, mlp.weighted_swiglu, bf16(9, 64), torch.rand(9))
    for queries in (6, 1, 4):
        q, k, v = bf16(2, 4, queries, 32), bf16(2, 2, 6, 32), bf16(2, 2, 6, 32)
        attends = (functools.partial(f, grouped=True) for f in (npu_ops.causal_attention, attention.causal_attention))
        same(*attends, q, k, v)
    experts_TK = torch.stack([torch.randperm(8)[:3] for _ in range(11)])
    for block in (1, 32):
        pairs = moe.SortedPairs.of(experts_TK, 8, block)
        same(lambda x, p=pairs: npu_ops.permute(x, p), lambda x, p=pairs: moe.dispatch(x, p), bf16(11, 16))
        rows = bf16(pairs.token_of_row.shape[0], 16)
        same(lambda y, p=pairs: npu_ops.unpermute(y, p), lambda y, p=pairs: moe.combine(y, p), rows)
    counts = torch.tensor([3, 0, 8])
    layers = [grouped_linear.GroupedLinear(3, 16, 24) for _ in range(2)]
    layers[0].products = npu_grouped.PRODUCTS

    def through(layer):
        def run(x, w):
            layer.own_weight = lambda: w
            return layer(x, counts)

        return run

    same(through(layers[0]), through(layers[1]), bf16(11, 16), bf16(3, 16, 24))
    return library


def main() -> int:
    try:
        check_model()
        library = check_fused_numbers()
        del library
    except Exception:
        traceback.print_exc()
        return 1
    print("torch_npu", torch_npu.__version__, "contract holds")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # torch_npu's own shutdown may abort without a device
