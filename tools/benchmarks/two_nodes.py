"""Step time and bytes on the wire of bf16 and low-precision communication, interleaved in one job on two hosts.

Started on each host by `two_nodes.sh`, which makes the hosts and the slow link between them. Three models of the same
sizes train side by side: bf16; `mxfp8-32x32` with the low-precision all-gather; and that with the low-precision
reduce-scatter too. A round gives each a step; medians over the rounds are compared. Bytes are those that the network
interface itself counts as sent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fsdp2
from fsdp2.gradients import clip_grad_norm_
from fsdp2.quantization import QuantRecipe
from mindspeed_llm.models import build_model, initialize_weights

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
WAYS = {"bf16": (None, "none"), "gather": ("mxfp8-32x32", "none"), "all": ("mxfp8-32x32", "mxfp8")}


class Way:
    """One way to communicate: a model that trains so."""

    def __init__(self, name: str, vocab_size: int):
        recipe, reduce_scatter = WAYS[name]
        quantization = fsdp2.QuantizationPlan(QuantRecipe.from_name(recipe)) if recipe else None
        ranks = dist.get_world_size()
        plan = fsdp2.ParallelPlan(
            ranks, "cpu", ranks, quantization=quantization, low_precision_reduce_scatter=reduce_scatter
        )
        self.vocab_size = vocab_size
        self.model = fsdp2.parallelize(build_model(CONFIG | {"vocab_size": vocab_size}), plan)
        initialize_weights(self.model, 0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self.seconds: list[float] = []
        self.sent: list[int] = []

    def step(self, interface: str, number: int, tokens: int) -> None:
        """Train on `tokens` tokens a rank; note the time and the bytes that left `interface`."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        text = torch.randint(0, self.vocab_size, (1, tokens + 1), generator=generator)
        dist.barrier()
        sent, start = bytes_sent(interface), time.perf_counter()
        logits = self.model(text[:, :-1]).logits
        F.cross_entropy(logits.float().view(-1, self.vocab_size), text[0, 1:]).backward()
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.sent.append(bytes_sent(interface) - sent)


def bytes_sent(interface: str) -> int:
    """Bytes that the network interface has sent so far, headers included, as the kernel counts them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise SystemExit(f"no network interface {interface} on this host")


def measure(vocab_size: int, interface: str, rounds: int, tokens: int) -> dict[str, float]:
    """Ratios to bf16 of median step time and bytes sent, and the medians themselves."""
    ways = {name: Way(name, vocab_size) for name in WAYS}
    for number in tqdm(range(rounds + 1), desc=f"vocabulary {vocab_size}", disable=dist.get_rank() != 0):
        for way in ways.values():
            way.step(interface, number, tokens)
    seconds = {name: statistics.median(way.seconds[1:]) for name, way in ways.items()}
    sent = {name: statistics.median(way.sent[1:]) for name, way in ways.items()}
    return {
        "step_ratio_all": seconds["all"] / seconds["bf16"],
        "step_ratio_gather": seconds["gather"] / seconds["bf16"],
        "wire_bytes_ratio_all": sent["all"] / sent["bf16"],
        "wire_bytes_ratio_gather": sent["gather"] / sent["bf16"],
        "parameters": sum(p.numel() for p in ways["bf16"].model.parameters()),
        "step_s": seconds,
        "wire_bytes": sent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="file that rank 0 writes")
    parser.add_argument("--interface", required=True, help="network interface to the other host")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64, help="tokens a rank and step")
    parser.add_argument("--link", default="", help="what the link is limited to, kept in the result")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    result = measure(512, arguments.interface, arguments.rounds, arguments.tokens)
    result["vocabulary_8192"] = measure(8192, arguments.interface, arguments.rounds, arguments.tokens)
    result["link"] = arguments.link
    if dist.get_rank() == 0:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")
        for vocab_size, found in ((512, result), (8192, result["vocabulary_8192"])):
            print(
                f"vocabulary {vocab_size}, {found['parameters'] / 1e6:.1f} M parameters, {arguments.link}: "
                f"step time gather {found['step_ratio_gather']:.3f}, all {found['step_ratio_all']:.3f} of bf16's "
                f"{found['step_s']['bf16']:.2f} s; bytes on the wire gather {found['wire_bytes_ratio_gather']:.3f}, "
                f"all {found['wire_bytes_ratio_all']:.3f} of bf16's {found['wire_bytes']['bf16'] / 2**20:.1f} MiB"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
