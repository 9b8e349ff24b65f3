"""In every sharded layout: the same initial weights as in one process, the same loaded weights, the same saved files.
Real gloo processes.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_llm.models import build_model, initialize_weights, load_hf_weights
from tests.models import sharded_worker
from tests.models.families import save_reference
from tests.processes import run_processes

WORLD = 4


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Results of all layouts. 162 vocabulary rows and 6 experts do not divide by 4: uneven shards, and a rank without
    any.
    """
    folder = tmp_path_factory.mktemp("sharded")
    save_reference("qwen3_moe", folder / "hf", num_experts=6, vocab_size=162, num_hidden_layers=2)
    results = run_processes(sharded_worker.run, WORLD, str(folder))
    return folder, results


def single_process(folder, fill):
    model = build_model(folder / "hf", device="cpu")
    fill(model)
    logits = model(torch.arange(24).view(2, 12)).logits.detach()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, logits


@pytest.mark.parametrize("layout", sharded_worker.LAYOUTS)
@pytest.mark.parametrize("kind", ["initial", "loaded"])
def test_weights_do_not_depend_on_the_layout(job, layout, kind):
    folder, results = job
    fill = {
        "initial": lambda model: initialize_weights(model, seed=7),
        "loaded": lambda model: load_hf_weights(model, folder / "hf"),
    }[kind]
    expected, logits = single_process(folder, fill)
    for ranks_result in results:
        result = ranks_result[layout]
        assert result[kind].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(result[kind][name], value), name
        torch.testing.assert_close(result[f"{kind}_logits"], logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", sharded_worker.LAYOUTS)
def test_sharded_saving_gives_back_the_same_tensors(job, layout):
    folder, _ = job
    original = load_file(folder / "hf" / "model.safetensors")
    files = sorted((folder / f"saved-{layout}").glob("model-*.safetensors"))
    assert len(files) > 3 and (folder / f"saved-{layout}" / "model.safetensors.index.json").is_file()
    saved = {name: value for file in files for name, value in load_file(file).items()}
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)
