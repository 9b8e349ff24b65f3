"""config.json: published sizes have the published numbers of parameters; what is not built, impossible or unreadable is
refused by name.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp2.errors import ConfigurationError
from mindspeed_llm.models import build_model, load_config, model_flops_per_token, parameter_count
from tests.models.families import tiny_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "models"
PUBLISHED = {
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "llama3.1_8b": 8_030_261_248,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    total, active = parameter_count(load_config(CONFIGS / name))
    assert total == PUBLISHED[name]
    named = {"qwen3_30b_a3b": 3.3e9, "qwen3_235b_a22b": 22e9}.get(name, total)  # the model cards say 3.3B and 22B
    assert active == pytest.approx(named, rel=0.02)


def test_every_shipped_configuration_builds_on_meta():
    names = {path.parent.name for path in CONFIGS.glob("*/config.json")}
    assert names == {*PUBLISHED, "qwen3_moe_tiny"}
    for name in names:
        model = build_model(CONFIGS / name)
        assert all(parameter.is_meta and parameter.shape[-1] % 32 == 0 for parameter in model.parameters())
    dense = build_model(CONFIGS / "qwen3_8b")
    assert dense(torch.zeros(2, 8, dtype=torch.int64, device="meta")).logits.shape == (2, 8, 151936)


def test_flops_count_the_multiplied_parameters_once():
    config = load_config(tiny_config("llama"))
    total, _ = parameter_count(config)
    attention = 12 * 3 * 4 * 16 * 128
    assert model_flops_per_token(config, 128) == 6 * (total - 160 * 64) + attention
    tied = load_config({**tiny_config("llama"), "tie_word_embeddings": True})
    assert model_flops_per_token(tied, 128) == model_flops_per_token(config, 128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen3moe"}, "model_type 'qwen3moe' is not built.*did you mean 'qwen3_moe'"),
        ({"model_type": None}, "model_type None is not built; built are llama, qwen3, qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not built; built is silu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling.rope_type 'longrope' is not built; built are"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a positive factor, not None"),
        ({"rope_parameters": {"rope_type": "yarnn", "factor": 2}}, "did you mean 'yarn'"),
        ({"hidden_size": "64"}, "hidden_size must be an integer of at least 1, not '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, not 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        ({"head_dim": 33}, "head_dim 33 must be even"),
    ],
)
def test_refusals_name_the_key_and_what_is_built(change, words):
    with pytest.raises(ConfigurationError, match=words):
        build_model({**tiny_config("qwen3_moe"), **change})


def test_unreadable_paths_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="nowhere: no such model configuration"):
        build_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json: cannot be read as JSON"):
        build_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="must hold a JSON object"):
        build_model(tmp_path / "config.json")
