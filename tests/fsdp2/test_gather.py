"""Bytes on the wire and equality of numbers: every way to gather a quantized weight, in real gloo processes."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.fsdp2.gather_model import QUANTIZED_ELEMENTS, plan_of, train
from tests.processes import run_processes

MODES = {
    "bf16": {"recipe": None},
    "bf16 kept": {"recipe": None, "reshard_after_forward": False},
    "after": {"gather": False},
    "after, recompute": {"gather": False, "recompute": True},
    "on-demand": {},
    "on-demand, recompute": {"recompute": True},
    "on-demand, kept": {"reshard_after_forward": False},
    "on-demand, no prefetch": {"num_to_forward_prefetch": 0, "num_to_backward_prefetch": 0},
    "all": {"mode": "all"},
    "all, recompute": {"mode": "all", "recompute": True},
    "all, kept": {"mode": "all", "reshard_after_forward": False},
    "offloaded": {"cpu_offload": True},
    "by columns": {"shard_placement": "shard_by_dim_1"},
    "four bits": {"recipe": "mxfp4-weights", "recompute": True},
    "four bits after": {"recipe": "mxfp4-weights", "gather": False},
    "tile": {"recipe": "mxfp8-32x32"},
    "tile after": {"recipe": "mxfp8-32x32", "gather": False},
    "tile, recompute": {"recipe": "mxfp8-32x32", "recompute": True},
    "tile, kept": {"recipe": "mxfp8-32x32", "reshard_after_forward": False},
    "on-demand, kept, recompute": {"reshard_after_forward": False, "recompute": True},
    "all, kept, recompute": {"mode": "all", "reshard_after_forward": False, "recompute": True},
    "tile, kept, recompute": {"recipe": "mxfp8-32x32", "reshard_after_forward": False, "recompute": True},
}
PLANE, TILE = 1.03125, 1 + 1 / 1024
# Bytes an element that a quantized weight sends in (forward, backward).
BYTES = {
    "on-demand": (PLANE, PLANE),
    "on-demand, recompute": (PLANE, 2 * PLANE),
    "on-demand, kept": (2 * PLANE, 0),
    "on-demand, no prefetch": (PLANE, PLANE),
    "offloaded": (PLANE, PLANE),
    "four bits": (PLANE - 0.5, 2 * (PLANE - 0.5)),
    "all": (2 * PLANE, 2 * PLANE),
    "all, recompute": (2 * PLANE, 2 * PLANE),
    "all, kept": (2 * PLANE, 0),
    "tile": (TILE, TILE),
    "tile, recompute": (TILE, TILE),
    "tile, kept": (TILE, 0),
    "on-demand, kept, recompute": (2 * PLANE, 0),
    "all, kept, recompute": (2 * PLANE, 0),
    "tile, kept, recompute": (TILE, 0),
}


def every_mode() -> dict:
    return {name: train(plan_of(dist.get_world_size(), **options)) for name, options in MODES.items()}


@pytest.fixture(scope="module")
def two():
    return run_processes(every_mode, 2)


@pytest.mark.parametrize("name", list(BYTES))
def test_bytes_sent_by_quantized_weights(two, name):
    for rank in two:
        counts, shard = rank[name]["counts"], QUANTIZED_ELEMENTS // 2
        sent = [counts[f"all_gather_bytes_{phase}_quantized"] / shard for phase in ("forward", "backward")]
        assert tuple(sent) == BYTES[name]
        baseline = rank["bf16 kept" if "kept" in name else "bf16"]["counts"]
        for phase in ("forward", "backward"):
            saved = baseline[f"all_gather_bytes_{phase}"] - counts[f"all_gather_bytes_{phase}"]
            gathers = 2 if baseline[f"all_gather_bytes_{phase}"] else 0
            assert saved == gathers * shard - counts[f"all_gather_bytes_{phase}_quantized"]
        in_bf16 = baseline["all_gather_bytes_forward"] + baseline["all_gather_bytes_backward"]
        assert counts["all_gather_bytes_if_bf16"] == in_bf16


def same(a: dict, b: dict) -> None:
    assert a["losses"] == b["losses"] and a["norms"] == b["norms"]
    assert all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])


@pytest.mark.parametrize("name", [n for n in BYTES if "tile" not in n and n != "four bits"] + ["after, recompute"])
def test_quantize_then_gather_equals_gather_then_quantize(two, name):
    same(two[0][name], two[0]["after"])


def test_packed_codes_too(two):
    same(two[0]["four bits"], two[0]["four bits after"])


def test_shards_of_columns_differ_in_the_sum_of_the_norm_only(two):
    columns, rows = two[0]["by columns"], two[0]["after"]
    assert columns["losses"][0] == rows["losses"][0]
    assert columns["losses"] == pytest.approx(rows["losses"], rel=1e-4)
    assert columns["norms"] == pytest.approx(rows["norms"], rel=1e-3)


@pytest.mark.parametrize("name", ["tile", "tile, recompute", "tile, kept", "tile, kept, recompute"])
def test_tiles_too(two, name):
    same(two[0][name], two[0]["tile after"])


def test_quantization_changes_the_numbers_a_little(two):
    bf16, mx = two[0]["bf16"]["losses"], two[0]["on-demand"]["losses"]
    assert bf16 != mx
    assert mx == pytest.approx(bf16, rel=0.05)


def two_hundred_steps() -> dict:
    """Peak of gathered bytes, and this process's resident memory after 60 and after 200 steps, with everything
    quantized that can be."""
    found = {}
    for name in ("bf16", "on-demand", "tile"):
        everything = {} if name == "bf16" else {"apply": ("layers.{*}", "head")}
        plan = plan_of(dist.get_world_size(), **MODES[name], **everything)
        found[name] = train(plan, steps=2)["counts"]["unsharded_bytes_peak"]
    plan, resident = plan_of(dist.get_world_size(), recompute=True), []
    train(plan, steps=200, each_step=lambda step: resident.append(resident_bytes()))
    found["growth"] = resident[-1] - resident[60]
    return found


def resident_bytes() -> int:
    """Memory of this process that is in RAM (Linux: second number of /proc/self/statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_gathered_memory_is_half_and_nothing_grows():
    for rank in run_processes(two_hundred_steps, 2):
        assert rank["on-demand"] <= 0.52 * rank["bf16"]
        assert rank["tile"] <= 0.52 * rank["bf16"]
        # Keeping the codes of one layer (0.27 MB) a step would add 38 MB.
        assert rank["growth"] < 8 * 2**20


def test_ranks_agree(two):
    for name in MODES:
        same(two[0][name], two[1][name])


# processes -> (dp_replicate_size, micro-batches a step)
LAYOUTS = {1: [(1, 1)], 3: [(1, 1)], 4: [(1, 1), (1, 3), (2, 1)]}


def layouts() -> dict:
    world = dist.get_world_size()
    return {
        (replicate, accumulate): {
            name: train(plan_of(world, replicate=replicate, **MODES[name]), steps=2, accumulate=accumulate)
            for name in ("after", "on-demand", "on-demand, recompute")
        }
        for replicate, accumulate in LAYOUTS[world]
    }


@pytest.mark.parametrize("world", list(LAYOUTS))
def test_one_uneven_hybrid_and_accumulated(world):
    """One process, shards that do not divide, hybrid sharding, gradient accumulation: the same equality."""
    ranks = run_processes(layouts, world)
    for key in LAYOUTS[world]:
        same(ranks[0][key]["on-demand"], ranks[0][key]["after"])
        same(ranks[0][key]["on-demand, recompute"], ranks[0][key]["after"])
        same(ranks[0][key]["on-demand"], ranks[-1][key]["on-demand"])
    if world == 4:
        once, accumulated = (ranks[0][1, n]["on-demand"]["counts"] for n in (1, 3))
        assert accumulated["reduce_scatter_bytes"] == once["reduce_scatter_bytes"] > 0  # once a step, whatever it takes
        assert accumulated["weights_quantized"] == once["weights_quantized"] > 0  # so are the shards quantized
        assert accumulated["all_gather_bytes_forward"] == 3 * once["all_gather_bytes_forward"]
