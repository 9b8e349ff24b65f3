"""What whole training runs must show: the same numbers in every layout, and the promised bytes on the wire."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import yaml

from tests.system.tiny import MICRO_BATCHES, SEQUENCE_LENGTH, SEQUENCES_PER_STEP, losses, rows

MX_BYTES = 1.03125  # of an element: one code, and a scale for every 32
LINE = re.compile(
    r"INFO \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] >>  iteration        1/      20 \| consumed samples:          8 \| "
    r"consumed tokens:        512 \| elapsed time per iteration \(ms\): \d+\.\d\d \| learning rate: 1\.000000E-03 \| "
    r"global batch size:     8 \| lm loss: \d\.\d{6}E\+00 \| grad norm: \d+\.\d{3} \| "
    r"max_memory_allocated\(GB\): \d+\.\d\d \| max_memory_reserved\(GB\): \d+\.\d\d \|"
)


def test_it_learns_and_reports(runs_on_2):
    report = json.loads((runs_on_2 / "mx" / "report.json").read_text())
    assert report["steps"] == 20
    assert report["loss_last"] < report["loss_first"] - 0.5
    assert report["eval_loss"] < report["loss_first"] - 0.5
    assert 1.0 < report["eval_bits_per_byte"] < 8.0
    assert report["tokens_per_second"] > 0 and report["wall_s"] > 0
    text = (runs_on_2 / "mx" / "report.md").read_text()
    assert text in (runs_on_2 / "console.txt").read_text()
    for place in ("tensorboard", "checkpoints/step_00000020", "hf"):
        assert str(runs_on_2 / "mx" / place) in text and (runs_on_2 / "mx" / place).is_dir()


def test_console_line(runs_on_2):
    assert len(LINE.findall((runs_on_2 / "console.txt").read_text())) == 5  # every run of 20 steps but the resumed one


def test_metrics_rows(runs_on_2):
    for run in ("mx", "bf16"):
        found = rows(runs_on_2 / run)
        assert [row["step"] for row in found] == list(range(1, 21))
        assert [row["tokens"] for row in found] == [s * SEQUENCES_PER_STEP * SEQUENCE_LENGTH for s in range(1, 21)]
        wanted = (
            "grad_norm lr tokens_per_second step_time_s all_gather_bytes_forward all_gather_bytes_backward "
            "reduce_scatter_bytes unsharded_bytes_peak memory_peak_bytes router_aux_loss"
        )
        assert all(row[key] > 0 for row in found for key in wanted.split())
        assert "eval_bits_per_byte" in found[-1] and "eval_loss" not in found[-2]


def test_mx_gathers_send_1_03125_bytes_where_bf16_sends_2(runs_on_2):
    mx, bf16 = rows(runs_on_2 / "mx"), rows(runs_on_2 / "bf16")
    for row, plain in zip(mx, bf16):
        for phase in ("forward", "backward"):
            quantized = row[f"all_gather_bytes_{phase}_quantized"]
            unquantized = row[f"all_gather_bytes_{phase}"] - quantized
            in_bf16 = plain[f"all_gather_bytes_{phase}"] - unquantized
            assert quantized > 0 and quantized / in_bf16 == MX_BYTES / 2
        assert row["all_gather_bytes_if_bf16"] == (
            plain["all_gather_bytes_forward"] + plain["all_gather_bytes_backward"]
        )
    report = json.loads((runs_on_2 / "mx" / "report.json").read_text())
    assert report["gather_bytes_vs_bf16_quantized"] == MX_BYTES / 2
    assert json.loads((runs_on_2 / "bf16" / "report.json").read_text())["gather_bytes_vs_bf16"] == 1.0


def test_recompute_changes_bytes_and_no_number(runs_on_2):
    plain, recompute = rows(runs_on_2 / "mx"), rows(runs_on_2 / "recompute")
    assert losses(runs_on_2 / "recompute") == losses(runs_on_2 / "mx")
    for a, b in zip(plain, recompute):
        assert a["grad_norm"] == b["grad_norm"]
        one_plane = a["all_gather_bytes_forward_quantized"]
        assert a["all_gather_bytes_backward_quantized"] == one_plane
        assert b["all_gather_bytes_forward_quantized"] == one_plane
        assert b["all_gather_bytes_backward_quantized"] == 2 * one_plane


def test_gathering_both_planes_always_changes_bytes_and_no_number(runs_on_2):
    assert losses(runs_on_2 / "all") == losses(runs_on_2 / "mx")
    for a, b in zip(rows(runs_on_2 / "mx"), rows(runs_on_2 / "all")):
        for phase in ("forward", "backward"):
            key = f"all_gather_bytes_{phase}_quantized"
            assert b[key] == 2 * a[key]


def test_quantizing_before_the_gather_equals_quantizing_after(runs_on_2):
    assert losses(runs_on_2 / "after") == losses(runs_on_2 / "mx")
    norms = [[row["grad_norm"] for row in rows(runs_on_2 / run)] for run in ("mx", "after")]
    assert norms[0] == norms[1]


def test_mxfp8_and_bf16_train_alike(runs_on_2):
    np.testing.assert_allclose(losses(runs_on_2 / "mx"), losses(runs_on_2 / "bf16"), rtol=0.02)
    assert losses(runs_on_2 / "mx") != losses(runs_on_2 / "bf16")


def test_layouts_agree(runs_on_1, runs_on_2, runs_on_4):
    """The same sequences, cut into other micro-batches: products of other shapes round otherwise."""
    on_2 = losses(runs_on_2 / "mx")
    for other in (runs_on_1, runs_on_4):
        np.testing.assert_allclose(losses(other / "mx"), on_2, rtol=1e-3)
        found = [rows(run / "mx")[-1]["eval_bits_per_byte"] for run in (other, runs_on_2)]
        assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_layouts_agree_to_the_last_bit_of_a_product(runs_on_1, runs_on_2, runs_on_4):
    """The same micro-batches, spread otherwise: only fp32 sums of losses may round otherwise."""
    on_2 = rows(runs_on_2 / "one_by_one")
    for other in (runs_on_1, runs_on_4):
        for a, b in zip(rows(other / "one_by_one"), on_2, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=2e-6)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)


def test_resume_is_exact(runs_on_2):
    whole, resumed = rows(runs_on_2 / "mx"), rows(runs_on_2 / "resumed")
    assert [row["step"] for row in resumed] == list(range(11, 21))
    exact = ("loss", "grad_norm", "lr", "tokens", "samples", "router_aux_loss")
    for a, b in zip(whole[10:], resumed):
        assert [a[key] for key in exact] == [b[key] for key in exact]
    assert whole[-1]["eval_bits_per_byte"] == resumed[-1]["eval_bits_per_byte"]
    console = (runs_on_2 / "console.txt").read_text()
    assert "step_00000010: step 10, 5,120 tokens" in console
    assert "changed since" not in console


def test_resume_on_more_processes_with_replicas(runs_on_2, runs_on_4):
    resumed = rows(runs_on_4 / "resumed")
    assert [row["step"] for row in resumed] == list(range(11, 21))
    np.testing.assert_allclose(losses(runs_on_4 / "resumed"), losses(runs_on_2 / "mx")[10:], rtol=1e-3)


def test_output_folder(runs_on_2, material):
    run = runs_on_2 / "mx"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000010", "step_00000020"]
    plan = {row["module"]: row for row in json.loads((run / "quantization_plan.json").read_text())}
    assert plan["model.layers.0.self_attn.q_proj"]["recipe"] == "mxfp8"
    assert plan["model.layers.1.mlp.experts.down_proj"]["recipe"] == "mxfp8"
    assert plan["lm_head"]["recipe"] is None and plan["lm_head"]["reason"]
    planned = sum(row["gather_bytes_forward"] for row in plan.values() if row["recipe"])
    assert planned * MICRO_BATCHES == rows(run)[0]["all_gather_bytes_forward_quantized"]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["training"]["max_steps"] == 20 and config["model"]["quant_recipe_name"] == "mxfp8"
    assert any((run / "tensorboard").glob("events.out.tfevents.*"))
    assert {"config.json", "tokenizer.model"} <= {path.name for path in (run / "hf").iterdir()}


def test_saved_weights_have_the_loss_the_run_reported(runs_on_2, material):
    """The HF folder, read by transformers, predicts the corpus as well as the run's held-out evaluation says."""
    import torch
    from transformers import AutoModelForCausalLM

    from mindspeed_llm.data import EvaluationLoader, build_pretraining_datasets

    _, valid, _ = build_pretraining_datasets(
        str(material.dataset), split="90,10,0", sequence_length=SEQUENCE_LENGTH, seed=42, train_samples=8
    )
    model = AutoModelForCausalLM.from_pretrained(runs_on_2 / "bf16" / "hf", dtype=torch.float32)
    nats = tokens = 0.0
    for batch in EvaluationLoader(valid, micro_batch_size=4, dp_rank=0, dp_size=1, batches=2):
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits
        nats += torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        tokens += batch["labels"].numel()
    reported = json.loads((runs_on_2 / "bf16" / "report.json").read_text())["eval_loss"]
    assert math.isclose(nats / tokens, reported, rel_tol=2e-3)
