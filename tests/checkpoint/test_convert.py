"""Hugging Face -> checkpoint -> Hugging Face gives the same tensors; MXFP8 folders say what they are and read back."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import convert_checkpoint

from fsdp2.errors import ConfigurationError
from fsdp2.quantization import quantize
from mindspeed_llm.models import build_model, initialize_weights, load_hf_weights, save_hf_weights
from tests.material import smollm2_folder
from tests.models.families import save_reference, tiny_config
from tests.processes import run_processes
from tests.training.test_checkpoint import save_run

IDS = torch.arange(24).view(1, 24)


def converted(*words: object) -> None:
    assert convert_checkpoint.main([str(word) for word in words]) == 0


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def test_smollm2_there_and_back_and_the_logits_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    source = smollm2_folder()
    converted(source, tmp_path / "dcp")
    converted(tmp_path / "dcp", tmp_path / "hf", "--max-shard-bytes", 100_000_000)
    before, after = all_tensors(source), all_tensors(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) >= 3
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == (source / "chat_template.jinja").read_text()
    ours = build_model(tmp_path / "hf", device="cpu")
    load_hf_weights(ours, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=0, atol=1e-3)


def test_experts_and_a_checkpoint_of_two_ranks(tmp_path):
    """A sharded checkpoint with an optimizer gives what its ranks held, experts split as Hugging Face has them."""
    from tests.training.test_checkpoint import CONFIG

    (saved, _), _ = run_processes(save_run, 2, tmp_path / "run")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    converted(tmp_path / "run", tmp_path / "hf", "--dtype", "fp32", "--model", tmp_path / "config.json")
    tensors = all_tensors(tmp_path / "hf")
    experts = saved["model.layers.0.mlp.experts.gate_up_proj.weight"]
    assert torch.equal(tensors["model.layers.0.mlp.experts.3.up_proj.weight"], experts[3, :, 32:].t())
    converted(tmp_path / "hf", tmp_path / "again")
    converted(tmp_path / "again", tmp_path / "hf2", "--dtype", "fp32")
    again = all_tensors(tmp_path / "hf2")
    assert tensors.keys() == again.keys() and all(torch.equal(tensors[name], again[name]) for name in tensors)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_mxfp8_says_what_it_is_and_reads_back(tmp_path, max_shard_bytes):
    model = build_model(tiny_config("qwen3_moe"), device="cpu")
    initialize_weights(model, seed=1)
    save_hf_weights(model, tmp_path, dtype="mxfp8", max_shard_bytes=max_shard_bytes)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp8" and "lm_head" in config["modules_to_not_convert"]
    tensors = all_tensors(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = model.get_parameter(name).detach()
    quantized = quantize(weight)
    assert tensors[name].dtype == torch.float8_e4m3fn
    assert torch.equal(tensors[name].view(torch.uint8), quantized.codes)
    assert torch.equal(tensors[name + "_scale_inv"], quantized.scales)
    again = build_model(tmp_path, device="cpu")
    load_hf_weights(again, tmp_path)
    assert torch.equal(again.get_parameter(name), quantized.dequantize(torch.float32))
    expert = "model.layers.1.mlp.experts.down_proj.weight"
    wanted = quantize(model.get_parameter(expert).detach()[2].t().contiguous()).dequantize(torch.float32).t()
    assert torch.equal(again.get_parameter(expert)[2], wanted)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.bfloat16().float())
    save_hf_weights(again, tmp_path, dtype="mxfp8")  # quantizing what was dequantized changes nothing
    for name, tensor in all_tensors(tmp_path).items():
        assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8))
    save_hf_weights(again, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_files_of_strangers(tmp_path):
    save_reference("qwen3", tmp_path / "good")
    model = build_model(tmp_path / "good", device="cpu")
    file = tmp_path / "good" / "model.safetensors"
    bytes_before = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 2**40) + bytes_before[8:])
    with pytest.raises(ConfigurationError, match=r"claims a header of 1,099,511,627,776 bytes"):
        load_hf_weights(model, tmp_path / "good")
    (tmp_path / "elsewhere.safetensors").write_bytes(bytes_before)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ConfigurationError, match=r"is a link to .*elsewhere\.safetensors, outside of"):
        load_hf_weights(model, tmp_path / "good")
    file.unlink()
    index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    index["weight_map"] |= dict.fromkeys(load_file(tmp_path / "elsewhere.safetensors"), "../elsewhere.safetensors")
    (tmp_path / "good" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match="is outside of"):
        load_hf_weights(model, tmp_path / "good")


def test_mistakes_are_said_in_one_line(tmp_path, capsys):
    assert convert_checkpoint.main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "does not exist; wanted is a checkpoint" in capsys.readouterr().err
