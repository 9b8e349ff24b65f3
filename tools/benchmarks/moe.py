"""How fast the MoE block runs next to transformers' Qwen3MoeSparseMoeBlock, and in MXFP8 next to bf16.

Forward and backward of one block: 16 experts, top-4, hidden 512, 4,096 tokens, bf16, on all cores. All sides run in one
process, one after the other in every round, and medians are compared, so that a busy or slow machine changes all alike.
The bare GEMMs of the block are timed too: what no block can beat.

    python tools/benchmarks/moe.py --json FILE

writes moe_block_vs_transformers (ratio of rates, larger is better), moe_block_mxfp8_vs_bf16 (ratio of times, smaller is
better), moe_block_vs_bare_gemms (ratio of times), tokens_per_second, and the seconds behind them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdp2.plan import QuantizationPlan
from fsdp2.quantization import QuantRecipe
from fsdp2.quantization.converters import convert, decide
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.layers.moe import MixtureOfExperts


def model_config(arguments: argparse.Namespace) -> dict[str, object]:
    """A config.json of the family with the sizes to measure; both sides read it."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": 64,
        "hidden_size": arguments.hidden,
        "intermediate_size": 4 * arguments.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": arguments.experts,
        "num_experts_per_tok": arguments.top_k,
        "moe_intermediate_size": arguments.intermediate,
        "norm_topk_prob": True,
    }


def our_block(config: dict[str, object], recipe: str | None) -> nn.Module:
    """The block in bf16, on `recipe` where one is given."""
    torch.manual_seed(0)
    block = MixtureOfExperts(ModelConfig.from_dict(config)).to(torch.bfloat16)
    if recipe is not None:
        wrapper = nn.ModuleDict({"mlp": block})
        plan = QuantizationPlan(QuantRecipe.from_name(recipe), ("quantize.moe.mx",), ("mlp",), ("*gate",))
        convert(wrapper, plan, decide(wrapper, plan))
    return block


def their_block(config: dict[str, object]) -> nn.Module | None:
    """transformers' block in bf16, or None when it is not installed."""
    try:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    except ImportError:
        return None
    torch.manual_seed(0)
    values = {key: value for key, value in config.items() if key != "model_type"}
    block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**values))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block.to(torch.bfloat16)


def step(block: nn.Module, x_BSH: torch.Tensor, dy_BSH: torch.Tensor) -> Callable[[], None]:
    """One forward and backward of `block`."""

    def run() -> None:
        block.zero_grad(set_to_none=True)
        x_BSH.grad = None
        y = block(x_BSH)
        (y[0] if isinstance(y, tuple) else y).backward(dy_BSH)

    return run


def bare_gemms(arguments: argparse.Namespace) -> Callable[[], None]:
    """The block's expert GEMMs alone, on rows that are sorted already and evenly many for every expert."""
    rows = arguments.tokens * arguments.top_k // arguments.experts
    shapes = [(arguments.hidden, 2 * arguments.intermediate), (arguments.intermediate, arguments.hidden)]
    operands = [
        (torch.randn(rows, i).bfloat16(), torch.randn(i, o).bfloat16(), torch.randn(rows, o).bfloat16())
        for i, o in shapes
    ]

    def run() -> None:
        for _ in range(arguments.experts):
            for x, w, dy in operands:
                x @ w, dy @ w.t(), x.t() @ dy

    return run


def median_seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run every call once a round, `rounds` times after two rounds of warm-up; return each one's median seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Time the blocks on the same normal tokens; return the report."""
    config = model_config(arguments)
    x_BSH = torch.randn(1, arguments.tokens, arguments.hidden).bfloat16().requires_grad_()
    dy_BSH = torch.randn(1, arguments.tokens, arguments.hidden).bfloat16()
    blocks = {
        "bf16": our_block(config, None),
        arguments.recipe: our_block(config, arguments.recipe),
        "transformers": their_block(config),
    }
    calls: dict[str, Callable[[], object]] = {
        name: step(block, x_BSH, dy_BSH) for name, block in blocks.items() if block is not None
    }
    calls["bare_gemms"] = bare_gemms(arguments)
    seconds = median_seconds(calls, arguments.rounds)
    ours = seconds["bf16"]
    return {
        "moe_block_vs_transformers": seconds["transformers"] / ours if "transformers" in seconds else None,
        "moe_block_mxfp8_vs_bf16": seconds[arguments.recipe] / ours,
        "moe_block_vs_bare_gemms": ours / seconds["bare_gemms"],
        "tokens_per_second": {name: arguments.tokens / value for name, value in seconds.items()},
        "seconds": seconds,
        "sizes": {name: getattr(arguments, name) for name in ("experts", "top_k", "hidden", "intermediate", "tokens")},
        "recipe": arguments.recipe,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256, help="of one expert")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds; the median counts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    for name, rate in report["tokens_per_second"].items():
        print(f"{name:28s} {rate:10,.0f} tokens/s {report['seconds'][name] * 1e3:8.1f} ms")
    for name in ("moe_block_vs_transformers", "moe_block_mxfp8_vs_bf16", "moe_block_vs_bare_gemms"):
        print(f"{name:28s} {report[name]:10.2f}" if report[name] is not None else f"{name:28s} not measured")


if __name__ == "__main__":
    main()
