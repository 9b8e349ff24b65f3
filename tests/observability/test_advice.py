"""Planted bad layers are found and named; healthy ones are left in peace; TensorBoard reads back what was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from fsdp2.quantization import QuantRecipe
from fsdp2.quantization.health import HealthCollector, TensorHealth
from fsdp2.quantization.linear import MXLinear
from mindspeed_llm.training.health_log import HealthLog, read_health
from tools.advise_precision import advise, averaged, main

LAYERS = 6


class Layer(nn.Module):
    """One quantized projection whose input may carry outliers."""

    def __init__(self, outliers: bool):
        super().__init__()
        self.outliers = outliers
        proj = nn.Linear(128, 128, bias=False)
        # Largest elements of 1.5 times a power of two: floor's scale holds them all.
        nn.init.uniform_(proj.weight, -1.5 / 16, 1.5 / 16)
        self.proj = MXLinear.from_float(proj, QuantRecipe.from_name("mxfp8"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clamp(-1.5, 1.5)
        if self.outliers:  # 1 in 1,000
            x = torch.where(torch.rand(x.shape) < 1e-3, 1e4, x)
        return x + self.proj(x).clamp(-1, 1)


def train(*, saturating: int | None = None, outliers: int | None = None, folder: Path) -> list[TensorHealth]:
    """Two measured steps of `LAYERS` layers, logged into `folder`."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.Sequential(*(Layer(i == outliers) for i in range(LAYERS)))
    if saturating is not None:
        with torch.no_grad():  # one row in five: floor saturates 20 % of this layer's blocks
            model.layers[saturating].proj.weight[::5] *= 1.28
    collector = HealthCollector(model)
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        log = HealthLog(folder, writer)
        for step in (10, 20):
            collector.start()
            model.layers(torch.rand(256, 128) * 3 - 1.5).square().mean().backward()
            log.write(collector.finish(step))
    return averaged(read_health(folder), last=5)


def test_healthy_layers_get_no_advice(tmp_path):
    rows = train(folder=tmp_path)
    weights = [row for row in rows if row.tensor != "gradient"]
    assert len(weights) == 2 * LAYERS
    assert advise(weights) == []


def test_saturated_weights_are_named(tmp_path):
    rows = [row for row in train(saturating=3, folder=tmp_path) if row.tensor == "weight"]
    bad = next(row for row in rows if row.module == "layers.3.proj")
    assert bad.saturated_block_fraction == pytest.approx(0.2, abs=0.01)
    (advice,) = advise(rows)
    assert (advice.flag, advice.value) == ("--model.quant_scale_rule", "rceil")
    assert [(f.problem, f.module, f.tensor) for f in advice.findings] == [("saturated", "layers.3.proj", "weight")]
    assert "19.1%" in advice.findings[0].evidence


def test_outliers_in_activations_are_named(tmp_path):
    rows = [row for row in train(outliers=4, folder=tmp_path) if row.tensor == "input"]
    advice = advise(rows)
    ignored = next(item for item in advice if item.flag == "--model.quant_ignored_modules")
    assert "layers.4.proj" in ignored.value.split()
    assert "layers.3.proj" not in ignored.value.split()
    finding = next(f for f in ignored.findings if f.module == "layers.4.proj")
    assert finding.problem == "outliers" and "(largest 9.98e+03)" in finding.evidence  # 1e4 in bf16


def test_the_command_says_it_with_evidence(tmp_path, capsys):
    train(outliers=2, folder=tmp_path)
    advice = tmp_path / "advice.json"
    assert main([str(tmp_path), "--json", str(advice)]) == 1
    said = capsys.readouterr().out
    assert "--model.quant_ignored_modules *lm_head *gate layers.2.proj" in said
    assert "layers.2.proj input: outliers" in said
    assert any("layers.2.proj" in item["value"] for item in json.loads(advice.read_text()))
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "quant_stats_steps" in capsys.readouterr().err


def test_tensorboard_stays_readable(tmp_path):
    train(outliers=2, folder=tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0, "tensors": 0}).Reload()
    scalars = events.Tags()["scalars"]
    assert len(scalars) == 3 * (4 + 1)  # of each tensor, the worst layer's four figures and one mean: not one a layer
    rows = [row for row in read_health(tmp_path) if row.tensor == "input" and row.step == 20]
    (event,) = [e for e in events.Scalars("quant_input_outlier_block_fraction_worst/proj") if e.step == 20]
    assert event.value == pytest.approx(max(row.outlier_block_fraction for row in rows))
    histogram = events.Histograms("quant_scale_exponents_input/proj")[-1].histogram_value
    assert sum(histogram.bucket) == sum(sum(row.exponents.values()) for row in rows)
    assert max(histogram.bucket_limit) == max(max(row.exponents) for row in rows) + 0.5
    table = events.Tensors("quant_worst_ten/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert len(table.splitlines()) == 2 + 10 and "layers.2.proj input" in table


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    train(folder=tmp_path)
    HealthLog(tmp_path, None, first_step=15)
    assert {row.step for row in read_health(tmp_path)} == {10}
