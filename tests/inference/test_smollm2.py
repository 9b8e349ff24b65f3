"""Real weights: SmolLM2-135M loads, its logits equal transformers', and the program answers what the capital of France
is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from mindspeed_llm.data import load_tokenizer
from mindspeed_llm.models import build_model, load_hf_weights
from tests.material import smollm2_folder

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = "The river rises in the mountains, and by the time it reaches the plain it carries more sand than water."


@pytest.fixture(scope="module")
def folder():
    return smollm2_folder()


@torch.no_grad()
def test_logits_equal_transformers(folder):
    ids = torch.tensor([load_tokenizer(folder).encode(TEXT)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = build_model(folder, device="cpu")
    load_hf_weights(ours, folder)
    expected = theirs(ids).logits
    got = ours(ids).logits
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


def run_program(*words: str, prompt: str = "") -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(REPOSITORY / "inference_fsdp2.py"), *words]
    return subprocess.run(command, input=prompt, capture_output=True, text=True, timeout=120, env=environment)


def test_the_capital_of_france_is_paris(folder):
    done = run_program(
        *("--model.model_name_or_path", str(folder), "--inference.max_new_tokens", "6"),
        prompt="The capital of France is\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris")


def test_mistakes_are_one_message_and_status_2(folder, tmp_path):
    for words, expected in (
        (["--model.model_name_or_path", str(tmp_path / "nowhere")], "nowhere"),
        (["--inference.max_new_token", "3"], "max_new_tokens"),
        (["--model.model_name_or_path", str(folder)], "the prompt is empty"),
    ):
        done = run_program(*words)
        assert done.returncode == 2
        assert expected in done.stderr and "Traceback" not in done.stderr
