"""Generation: the cache changes nothing, greedy equals transformers' generate, sampling follows its settings."""

from __future__ import annotations

import pytest
import torch

from fsdp2.errors import ConfigurationError
from mindspeed_llm.inference import Sampling, generate, stream_tokens
from mindspeed_llm.models import KeyValueCache, build_model, load_hf_weights
from tests.models.families import save_reference

PROMPT = torch.randint(0, 160, (2, 7), generator=torch.Generator().manual_seed(4))
FAMILIES = ["llama-tied-biased", "llama-rope-dynamic", "qwen3-tied-yarn", "qwen3_moe"]


def loaded(variant, folder):
    theirs = save_reference(variant, folder).eval()
    ours = build_model(folder, device="cpu")
    load_hf_weights(ours, folder)
    return ours, theirs


@pytest.mark.parametrize("variant", ["llama", "qwen3-tied-yarn", "qwen3_moe"])
@torch.no_grad()
def test_pieces_through_the_cache_give_the_logits_of_the_whole(variant, tmp_path):
    model, _ = loaded(variant, tmp_path)
    ids = torch.randint(0, 160, (2, 20), generator=torch.Generator().manual_seed(6))
    whole, cache, pieces = model(ids).logits, KeyValueCache(20), []
    for begin, end in ((0, 9), (9, 10), (10, 17), (17, 20)):  # a prompt, a token, two continued chunks
        pieces.append(model(ids[:, begin:end], cache=cache).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)
    assert cache.length == 20
    with pytest.raises(ValueError, match="holds 20 positions, 21 are needed"):
        model(ids[:, :1], cache=cache)


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_equals_transformers(variant, tmp_path):
    ours, theirs = loaded(variant, tmp_path)
    expected = theirs.generate(PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(ours, PROMPT, 12), expected)


def test_an_ended_sequence_stays_ended_and_all_ended_stops(tmp_path):
    model, _ = loaded("llama", tmp_path)
    free = generate(model, PROMPT, 10)[:, 7:]
    first_end, second_end = int(free[0, 2]), int(free[1, 5])
    got = generate(model, PROMPT, 10, eos_ids=(first_end, second_end))[:, 7:]
    steps = [next(i for i, t in enumerate(row.tolist()) if t in (first_end, second_end)) for row in free]
    assert got.shape[1] == max(steps) + 1
    for row, expected, step in zip(got, free, steps):
        assert torch.equal(row[: step + 1], expected[: step + 1])
        assert (row[step + 1 :] == first_end).all()


def test_the_context_window_ends_generation_or_refuses_the_prompt(tmp_path):
    model, _ = loaded("llama", tmp_path)  # 64 positions
    assert generate(model, PROMPT, 1000).shape[1] == 64
    with pytest.raises(ConfigurationError, match="the prompt has 64 tokens, the model's max_position_embeddings is 64"):
        generate(model, torch.zeros(1, 64, dtype=torch.int64), 1)
    with pytest.raises(ConfigurationError, match="the prompt is empty"):
        generate(model, torch.zeros(1, 0, dtype=torch.int64), 1)


def test_sampling_is_reproducible_and_cut_by_top_k_and_top_p(tmp_path):
    model, _ = loaded("qwen3", tmp_path)
    drawn = [generate(model, PROMPT, 12, sampling=Sampling(), seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    for narrow in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-4)):
        assert torch.equal(generate(model, PROMPT, 12, sampling=narrow), generate(model, PROMPT, 12))

    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]])).expand(20000, 4)
    generator = torch.Generator().manual_seed(0)
    for sampling, expected in (
        (Sampling(), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ):
        shares = torch.bincount(sampling.draw(logits, generator), minlength=4) / 20000
        torch.testing.assert_close(shares, torch.tensor(expected), rtol=0, atol=0.015)


def test_streaming_is_lazy(tmp_path):
    model, _ = loaded("qwen3", tmp_path)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    stream = stream_tokens(model, PROMPT, 50)
    next(stream)
    assert len(calls) == 1
