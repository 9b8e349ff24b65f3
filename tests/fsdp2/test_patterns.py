"""Module-name patterns: exact names, wildcards, coverage of what lies inside."""

import pytest
from torch import nn

from fsdp2.errors import ConfigurationError
from fsdp2.patterns import covers, match_modules, matches


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.0", "model.layers.{*}", True),
        ("model.layers.0.mlp", "model.layers.{*}", False),
        ("model.layers.0.mlp", "model.layers.*", True),
        ("model.layers.3", "model.layers.{0-3}", True),
        ("model.layers.4", "model.layers.{0-3}", False),
        ("model.layers.12", "model.layers.?", False),
        ("model.layers.0.self_attn", "model.layers.0.self_attn", True),
        ("model.layers.0.self_attn.q_proj", "*.q_proj", True),
        ("lm_head", "*lm_head", True),
        ("model.layers.0.mlp.gate_proj", "*gate", False),
        ("model.layers.0.mlp.gate", "*gate", True),
        ("modelxlayers.0", "model.layers.{*}", False),
        ("a+b", "a+b", True),
    ],
)
def test_matches(name, pattern, expected):
    assert matches(name, [pattern]) is expected


def test_every_pattern_counts():
    assert matches("b", ["a", "b"]) and not matches("c", ["a", "b"])


def test_covers_everything_inside():
    assert covers("model.layers.0.self_attn.q_proj", ["model.layers.{*}"])
    assert covers("model.layers.0.self_attn.q_proj", ["model.layers.0.self_attn"])
    assert not covers("model.layers.1.self_attn.q_proj", ["model.layers.0.self_attn"])
    assert not covers("model.layersX", ["model.layers"])


def test_unknown_wildcard_is_refused():
    with pytest.raises(ConfigurationError, match=r"\{a\}"):
        matches("x", ["model.{a}"])


def test_match_modules_keeps_the_models_order():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    assert [name for name, _ in match_modules(model, ["{0-2}"])] == ["0", "1", "2"]
