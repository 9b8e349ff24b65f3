"""A stranger's model: transformers' own Qwen3, unchanged, sharded, quantized and trained by `fsdp2` alone."""

import sys

import torch
import torch.distributed as dist
import transformers

import fsdp2
from fsdp2.communication import counters
from fsdp2.gradients import clip_grad_norm_
from fsdp2.quantization import MXLinear, QuantRecipe
from tests.processes import run_processes


def train_qwen3() -> dict:
    config = transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    results, world, rank = {}, dist.get_world_size(), dist.get_rank()
    for gather in (True, False):
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(config)
        quantization = fsdp2.QuantizationPlan(QuantRecipe.from_name("mxfp8"), low_precision_all_gather=gather)
        plan = fsdp2.ParallelPlan(
            world, "cpu", world, quantization=quantization, recompute=True, recompute_modules=("model.layers.{*}",)
        )
        described = plan.describe(model)
        model = fsdp2.parallelize(model, plan)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        text = torch.randint(0, 256, (2 * world, 32), generator=torch.Generator().manual_seed(1))
        tokens = text[2 * rank : 2 * rank + 2]
        losses = []
        for _ in range(8):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results[gather] = {
            "losses": losses,
            "counts": counters(model).take(),
            "converted": sum(isinstance(module, MXLinear) for module in model.modules()),
            "tied": model.lm_head.weight is model.model.embed_tokens.weight,
            "plan": described,
            "mindspeed_llm": "mindspeed_llm" in sys.modules,
        }
    return results


def test_transformers_qwen3_trains_unchanged():
    low, after = (run[gather] for run, gather in zip(run_processes(train_qwen3, 2)[:1] * 2, (True, False)))
    assert low["losses"] == after["losses"]
    assert low["losses"][-1] < 0.7 * low["losses"][0]
    assert low["converted"] == 2 * 7 and low["tied"] and not low["mindspeed_llm"]
    counts = low["counts"]
    assert counts["all_gather_bytes_backward_quantized"] == 2 * counts["all_gather_bytes_forward_quantized"] > 0
    assert "mxfp8 in 14 of 15" in low["plan"] and "(lm_head): outside quant_apply_modules" in low["plan"]
