"""What cannot work is refused before anything is allocated, with the numbers; what can is described."""

from __future__ import annotations

import pytest

from fsdp2.errors import ConfigurationError
from fsdp2.plan import lay_out
from mindspeed_llm.models import build_model
from tests.expert_parallel.layouts import CONFIG, plan_of


def model(**config):
    return build_model(CONFIG | config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep_size": 3}, r"ep_size 3 times .*ep_fsdp_size 1 is 3, which does not divide the 4 processes; .*ep_size 2"),
        ({"ep_size": 4, "ep_fsdp_size": 2}, r"is 8, which does not divide the 4 .*--parallel.ep_fsdp_size 1 fits"),
        ({"ep_fsdp_size": 0}, r"ep_fsdp_size 0: must be at least 1"),
        ({"ep_dispatcher": "mc2"}, r"mc2 needs an NPU.*this run is on cpu"),
        ({"ep_dispatcher": "fussed"}, r"ep_dispatcher 'fussed': allowed are eager, fused, mc2.*fused"),
        ({"ep_dispatch_precision": "mxfp4"}, r"ep_dispatch_precision 'mxfp4'.*mxfp8"),
        ({"expert_shard_placement": "shard_by_dim_2"}, r"efsdp_shard_placement_fn 'shard_by_dim_2'"),
    ],
)
def test_sizes_and_words_that_cannot_work(options, message):
    with pytest.raises(ConfigurationError, match=message):
        plan_of(4, **options).check_sizes()


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({"ep_size": 4}, {"num_experts": 6}, r"ep_size 4: the 6 experts of .* do not divide by it; 3 does"),
        ({"ep_size": 2, "ep_modules": ("model.layers.{*}.mlp.expert",)}, {}, r"ep_modules '.*' matches no .*mean"),
        ({"ep_size": 2, "ep_modules": ("model.layers.{*}.mlp",)}, {}, r"layers.0.mlp' is no expert module"),
        (
            {"ep_size": 2, "ep_fsdp_size": 2, "ep_fsdp_modules": ("model.layers.0.mlp.experts",)},
            {},
            r"must name the same modules.*layers.1.mlp.experts",
        ),
        ({"ep_fsdp_size": 4, "recipe": "mxfp8"}, {"num_experts": 6}, r"holds 6 experts .*do not divide by it; 3 does"),
        (
            {"ep_fsdp_size": 4, "recipe": "mxfp8", "expert_shard_placement": "shard_by_dim_1"},
            {},
            r"efsdp_shard_placement_fn shard_by_dim_1: the quantized experts .*dimension 0 only; set shard_by_dim_0",
        ),
    ],
)
def test_experts_that_do_not_fit(options, config, message):
    with pytest.raises(ConfigurationError, match=message):
        lay_out(model(**config), plan_of(4, **options))


def test_unasked_the_dimension_is_the_one_that_works():
    quantized = {"ep_fsdp_size": 4, "recipe": "mxfp8"}
    assert set(lay_out(model(), plan_of(4, **quantized))[1].shard_dims.values()) == {0}
    assert set(lay_out(model(), plan_of(4, **quantized, gather=False))[1].shard_dims.values()) == {1}
    assert set(lay_out(model(num_experts=6), plan_of(4, ep_fsdp_size=4))[1].shard_dims.values()) == {1}


def test_rows_and_description_speak_of_the_experts_mesh():
    plan = plan_of(4, recipe="mxfp8", ep_size=2, ep_fsdp_size=2, ep_dispatch_precision="mxfp8")
    row = next(row for row in plan.quantization_rows(model()) if row["module"].endswith("experts.gate_up_proj"))
    local = 4 * 64 * 64 // 2
    assert (row["gather"], row["gather_bytes_forward"], row["gather_bytes_bf16"]) == ("mx", local * 33 // 32, 2 * local)
    text = plan.describe(model())
    assert "spread over 2, sharded over 2 (dimension 0), tokens dispatched eager in mxfp8, replicated over 1" in text
