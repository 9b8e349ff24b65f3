"""The folder we write is one that transformers loads, with equal logits; the folders it writes load here; folders that
do not fit are refused.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fsdp2.errors import ConfigurationError
from mindspeed_llm.models import build_model, initialize_weights, load_hf_weights, save_hf_weights
from tests.models.families import VARIANTS, save_reference, tiny_config

IDS = torch.randint(0, 160, (2, 20), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 50_000])
def test_transformers_loads_what_we_save(variant, max_shard_bytes, tmp_path):
    model = build_model(tiny_config(variant), device="cpu")
    initialize_weights(model, seed=1)
    save_hf_weights(model, tmp_path, dtype="fp32", max_shard_bytes=max_shard_bytes)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 10**9)
    assert all(file.stat().st_size <= max_shard_bytes + 20_000 for file in files)
    assert len(list(tmp_path.iterdir())) == len(files) + 1 + (len(files) > 1)  # config, index: and nothing else

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-5)

    again = build_model(tmp_path, device="cpu")
    load_hf_weights(again, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))


def test_bf16_is_the_default_on_disk_and_masters_are_kept_in_fp32(tmp_path):
    model = build_model(tiny_config("qwen3"), device="cpu")
    initialize_weights(model, seed=1)
    save_hf_weights(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    load_hf_weights(model, tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"].float())


def test_saving_again_replaces_the_earlier_weights(tmp_path):
    model = build_model(tiny_config("qwen3"), device="cpu")
    for seed, max_shard_bytes in ((1, 50_000), (2, 10**9), (3, 100_000), (4, 50_000)):
        initialize_weights(model, seed)
        save_hf_weights(model, tmp_path, dtype="fp32", max_shard_bytes=max_shard_bytes)
        again = build_model(tmp_path, device="cpu")
        load_hf_weights(again, tmp_path)
        assert torch.equal(again.lm_head.weight, model.lm_head.weight)
        on_disk = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
        assert len(on_disk) == sum(len(load_file(file)) for file in tmp_path.glob("*.safetensors"))


def test_a_sharded_folder_of_transformers_loads(tmp_path):
    theirs = save_reference("qwen3_moe", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = build_model(tmp_path, device="cpu")
    load_hf_weights(ours, tmp_path)
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-5)


def test_leftovers_of_old_releases_are_ignored(tmp_path):
    save_reference("llama-tied-biased", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    load_hf_weights(build_model(tmp_path, device="cpu"), tmp_path)


def _drop(tensors):
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]


def _rename(tensors):
    tensors["model.layers.1.input_norm.weight"] = tensors.pop("model.layers.1.input_layernorm.weight")


def _transpose(tensors):
    name = "model.layers.2.mlp.experts.0.down_proj.weight"
    tensors[name] = tensors[name].t()[:, :-1].contiguous()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_drop, ["1 tensors of the model are missing", "layers.1.mlp.experts.5.up_proj.weight"]),
        (_rename, ["missing", "did you mean 'model.layers.1.input_norm.weight'", "1 tensors belong to nothing"]),
        (_transpose, ["layers.2.mlp.experts.0.down_proj.weight has shape [32, 63]", "asks for [64, 32]"]),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(damage, words, tmp_path):
    save_reference("qwen3_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    model = build_model(tmp_path, device="cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigurationError) as error:
        load_hf_weights(model, tmp_path)
    assert all(word in str(error.value) for word in [str(tmp_path), *words]), error.value
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_broken_folders_are_refused_by_name(tmp_path):
    save_reference("qwen3", tmp_path / "good")
    model = build_model(tmp_path / "good", device="cpu")
    with pytest.raises(ConfigurationError, match="holds neither"):
        load_hf_weights(model, tmp_path)

    truncated = shutil.copytree(tmp_path / "good", tmp_path / "truncated")
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match=r"truncated/model\.safetensors: cannot be read"):
        load_hf_weights(model, truncated)

    indexed = shutil.copytree(tmp_path / "good", tmp_path / "indexed")
    (indexed / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="is not an index"):
        load_hf_weights(model, indexed)
    names = list(load_file(file.parent.parent / "good" / "model.safetensors"))
    weight_map = dict.fromkeys(names, "model-00002-of-00002.safetensors")
    (indexed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigurationError, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        load_hf_weights(model, indexed)
    with pytest.raises(ConfigurationError, match=r"dtype 'bf61' is not one of bf16, .*, mxfp8; did you mean 'bf16'"):
        save_hf_weights(model, tmp_path / "out", dtype="bf61")
