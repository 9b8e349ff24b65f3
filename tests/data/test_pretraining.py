"""Packing, epochs, splits and blends, on corpora whose every token says where it is from."""

from __future__ import annotations

import numpy as np
import pytest
from corpora import document_lengths, write_numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2.errors import ConfigurationError
from mindspeed_llm.data.blend import Blend
from mindspeed_llm.data.indexed_dataset import IndexedDataset
from mindspeed_llm.data.pretraining import PackedDataset, build_pretraining_datasets
from mindspeed_llm.data.split import parse_split, split_bounds


def build(dataset, split="100,0,0", sequence_length=8, seed=1, train_samples=100, **options):
    return build_pretraining_datasets(
        dataset, split=split, sequence_length=sequence_length, seed=seed, train_samples=train_samples, **options
    )


def inputs(dataset) -> np.ndarray:
    return np.stack([dataset[i]["input_ids"] for i in range(len(dataset))])


def stream_of(samples: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Chain samples (of unique tokens) into the stream they were cut from: one's last label is the next one's first."""
    by_first = {int(sample["input_ids"][0]): sample for sample in samples}
    followers = {int(sample["labels"][-1]) for sample in samples}
    (first,) = set(by_first) - followers
    chain = []
    while first in by_first:
        chain.append(by_first.pop(first))
        first = int(chain[-1]["labels"][-1])
    assert not by_first
    return np.concatenate([*(sample["input_ids"] for sample in chain), chain[-1]["labels"][-1:]])


def test_items_are_what_the_model_takes(tmp_path):
    write_numbered(tmp_path / "d", [100])
    train, valid, test = build(str(tmp_path / "d"))
    item = train[0]
    assert item["input_ids"].dtype == item["labels"].dtype == np.int64
    assert item["input_ids"].shape == item["labels"].shape == (8,)
    assert (item["input_ids"][1:] == item["labels"][:-1]).all()
    assert len(train) == 100 and valid is None and test is None
    for index in (-1, 100):
        with pytest.raises(IndexError):
            train[index]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 6),
    sequence_length=st.integers(1, 6),
)
def test_without_shuffling_it_is_the_file_over_and_over(tmp_path_factory, lengths, sequence_length):
    prefix = tmp_path_factory.mktemp("d") / "d"
    tokens = write_numbered(prefix, lengths)
    train, _, _ = build(str(prefix), sequence_length=sequence_length, train_samples=50, shuffle=False)
    forever = np.tile(tokens, 50 * sequence_length // len(tokens) + 2)
    for i in range(50):
        start = i * sequence_length
        assert train[i]["input_ids"].tolist() == forever[start : start + sequence_length].tolist()
        assert train[i]["labels"].tolist() == forever[start + 1 : start + sequence_length + 1].tolist()


def test_an_epoch_is_a_permutation_of_whole_documents(tmp_path):
    lengths = document_lengths(200, mean=20)
    tokens = write_numbered(tmp_path / "d", lengths)
    train, _, _ = build(str(tmp_path / "d"), train_samples=None)
    assert len(train) == (len(tokens) - 1) // 8
    stream = stream_of([train[i] for i in range(len(train))])
    assert len(set(stream.tolist())) == len(stream) > len(tokens) - 8
    jumps = np.flatnonzero(np.diff(stream) != 1) + 1  # where a document doesn't follow its neighbour of the file
    starts = np.cumsum(lengths) - lengths
    assert set(stream[jumps]) <= set(starts[lengths > 0])
    assert len(jumps) > 150  # documents are shuffled
    first_inputs = [int(train[i]["input_ids"][0]) for i in range(len(train))]
    in_stream = [int(np.flatnonzero(stream == token)[0]) for token in first_inputs]
    assert np.abs(np.corrcoef(in_stream, range(len(train)))[0, 1]) < 0.3  # and so are the samples


def test_every_epoch_has_every_token_once(tmp_path):
    """T samples of S tokens are exactly S epochs of T tokens: every token is an input S times, and once an epoch."""
    tokens = write_numbered(tmp_path / "d", document_lengths(30, mean=9))
    train, _, _ = build(str(tmp_path / "d"), train_samples=len(tokens))
    seen = inputs(train)
    assert (np.bincount(seen.ravel(), minlength=len(tokens)) == 8).all()
    for epoch in range(7):
        begins = -(-epoch * len(tokens) // 8), -(-(epoch + 1) * len(tokens) // 8)
        counts = np.bincount(seen[begins[0] : begins[1]].ravel(), minlength=len(tokens))
        # A sample across the border brings up to 7 tokens of the next epoch and lacks up to 7 of this one.
        assert counts.max() <= 2 and (counts != 1).sum() <= 14


def test_epochs_differ_and_a_longer_run_begins_like_a_shorter_one(tmp_path):
    lengths = document_lengths(50, mean=16)
    lengths[0] += -lengths.sum() % 8  # an epoch begins where a sample does: the same order would give the same samples
    tokens = write_numbered(tmp_path / "d", lengths)
    per_epoch = len(tokens) // 8
    short, _, _ = build(str(tmp_path / "d"), train_samples=per_epoch // 2)
    long, _, _ = build(str(tmp_path / "d"), train_samples=per_epoch * 3)
    assert (inputs(long)[: len(short)] == inputs(short)).all()
    assert (inputs(long)[:per_epoch] != inputs(long)[per_epoch : 2 * per_epoch]).mean() > 0.9


def test_the_seed_decides(tmp_path):
    write_numbered(tmp_path / "d", document_lengths(50, mean=16))
    one, again, other = (inputs(build(str(tmp_path / "d"), seed=seed)[0]) for seed in (1, 1, 2))
    assert (one == again).all() and (one != other).any()


def test_reading_out_of_order_changes_nothing(tmp_path):
    tokens = write_numbered(tmp_path / "d", document_lengths(20, mean=9))
    train, _, _ = build(str(tmp_path / "d"), train_samples=len(tokens))
    in_order = inputs(train)
    fresh, _, _ = build(str(tmp_path / "d"), train_samples=len(tokens))
    for i in np.random.default_rng(0).permutation(len(tokens)).astype(np.int32):
        assert (fresh[i]["input_ids"] == in_order[i]).all()


def test_samples_beyond_int32(tmp_path):
    """Sample 3e9 of 2048 tokens begins at token 6.1e12; numpy's int32 and int64 scalars must not wrap on the way."""
    tokens = write_numbered(tmp_path / "d", [5000, 300, 4000])
    train, _, _ = build(str(tmp_path / "d"), sequence_length=2048, train_samples=4_000_000_000, shuffle=False)
    start = 3_000_000_000 * 2048 % len(tokens)
    expected = np.tile(tokens, 2)[start : start + 2048]
    assert (train[np.uint32(3_000_000_000)]["input_ids"] == expected).all()


def test_held_out_documents_are_never_trained_on(tmp_path):
    lengths = document_lengths(300, mean=30)
    tokens = write_numbered(tmp_path / "d", lengths)
    train, valid, test = build(str(tmp_path / "d"), split="90,7,3", train_samples=len(tokens))
    trained, validated, tested = (set(inputs(part).ravel()) for part in (train, valid, test))
    border, last = int(lengths[:270].sum()), int(lengths[:291].sum())
    assert max(trained) == border - 1 and len(trained) == border
    assert validated <= set(range(border, last)) and tested <= set(range(last, len(tokens)))
    assert inputs(valid).size == len(validated) > last - border - 9  # each once, but for a rest that fills no sequence
    for options in ({"seed": 9}, {"shuffle": False}):
        assert (inputs(build(str(tmp_path / "d"), split="90,7,3", **options)[1]) == inputs(valid)).all()


@pytest.mark.parametrize("split", ["969,30,1", "98,2,0", "100", "1,1,1", "0,100,0", "0.5,0.25,0.25"])
def test_split_is_megatrons(split):
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    ours = split_bounds(split, 1503)
    theirs = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    for (first, end), pair in zip(ours, theirs):
        if pair is None:
            assert first == end
        else:
            assert (first, end) == tuple(round(share * 1503) for share in pair)


@pytest.mark.parametrize("split", ["", "a,b", "90,-10,20", "0,0,0", "nan,1,1", "1,1,1,1"])
def test_bad_splits(split):
    with pytest.raises(ConfigurationError, match=f"--data.split {split}: want up to three numbers"):
        parse_split(split)


def test_a_share_without_a_document():
    with pytest.raises(ConfigurationError, match=r"split 99,1,0: 1.00% of the 10 documents .* none for validation"):
        split_bounds("99,1,0", 10)


@pytest.mark.parametrize("weights", [[0.3, 0.7], [1, 1, 1], [5, 0.01, 2.5], [1e-4, 1]])
def test_a_blend_hits_its_weights_and_skips_nothing(weights):
    blend = Blend(weights, seed=3)
    samples = 3 * blend.block
    dealt = [blend[i] for i in range(samples)] if samples < 10_000 else None
    shares = np.array(weights) / sum(weights)
    for end in (blend.block, 2 * blend.block, samples):
        assert (np.abs(blend.counts(end) - shares * end) <= 1).all() and blend.counts(end).sum() == end
    if dealt is None:
        which, inner = map(np.concatenate, zip(*(blend._blocks[b] for b in range(3))))
    else:
        which, inner = map(np.array, zip(*dealt))
    for k in range(len(weights)):
        mine = np.sort(inner[which == k])
        assert (mine == np.arange(blend.counts(samples)[k])).all()
    longest = max(len(run) for run in "".join("01"[int(k == np.argmax(weights))] for k in which[:1000]).split("1"))
    assert longest < 30  # mixed, not one after another


def test_blended_samples_come_from_their_datasets(tmp_path):
    for name, first in (("a", 0), ("b", 100_000)):
        write_numbered(tmp_path / name, document_lengths(40, mean=50), first)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    train, valid, _ = build(f"0.3 {a} 0.7 {b}", split="90,10,0", train_samples=2048)
    assert (inputs(train)[:, 0] >= 100_000).mean() == pytest.approx(0.7, abs=0.001)
    held_out = inputs(valid)
    assert len(set(held_out.ravel())) == held_out.size  # nothing twice
    assert (held_out[:, 0] >= 100_000).mean() == pytest.approx(0.7, abs=0.1)
    for same in ([0.3, a, 0.7, b], {a: 0.3, b: 0.7}, [0.3, a + ".bin", 0.7, b + ".idx"]):
        assert (inputs(build(same, split="90,10,0", train_samples=50)[0]) == inputs(train)[:50]).all()
    by_size, _, _ = build([a, b], train_samples=2048)
    assert (inputs(by_size)[:, 0] >= 100_000).mean() == pytest.approx(0.5, abs=0.002)


def test_the_datasets_of_a_blend_have_orders_of_their_own(tmp_path):
    write_numbered(tmp_path / "d", document_lengths(40, mean=50))
    data = IndexedDataset(tmp_path / "d")
    one, two = (PackedDataset(data, (0, 40), sequence_length=8, seed=1, stream=stream) for stream in (0, 1))
    assert (inputs(one) != inputs(two)).mean() > 0.9


def test_a_path_with_spaces(tmp_path):
    write_numbered(tmp_path / "my data", [100])
    assert len(build(str(tmp_path / "my data"))[0]) == 100


BAD_DATASETS = {
    "nothing": ("", "--data.dataset: it is empty"),
    "weight last": ("DIR/d 0.3", "a blend is either prefixes alone or a weight before each prefix"),
    "weight missing": ("0.3 DIR/d DIR/d", "a weight before each prefix"),
    "negative weight": ("-0.3 DIR/d 0.7 DIR/d", "weight -0.3 of .*d must be a positive number"),
    "no number": ("nan DIR/d 0.7 DIR/d", "weight nan of .* must be a positive number"),
    "vanishing weight": ("1e-9 DIR/d 0.7 DIR/d", "weight 1e-09 of .* is a share below 1e-06"),
    "open quote": ("'DIR/d", "No closing quotation"),
    "missing": ("DIR/e", r"e\.idx does not exist"),
}


@pytest.mark.parametrize("bad", BAD_DATASETS)
def test_bad_datasets(tmp_path, bad):
    write_numbered(tmp_path / "d", [100])
    dataset, message = BAD_DATASETS[bad]
    with pytest.raises(ConfigurationError, match=message):
        build(dataset.replace("DIR", str(tmp_path)))


def test_a_corpus_shorter_than_one_sequence(tmp_path):
    write_numbered(tmp_path / "d", [3, 5])
    with pytest.raises(ConfigurationError, match=r"2 training documents hold 8 tokens, but one sequence takes 9"):
        build(str(tmp_path / "d"))
    write_numbered(tmp_path / "d", [3, 6])  # exactly one
    assert len(build(str(tmp_path / "d"), train_samples=None)[0]) == 1
    write_numbered(tmp_path / "d", [500, 5])
    with pytest.raises(ConfigurationError, match=r"1 validation documents hold 5 tokens"):
        build(str(tmp_path / "d"), split="50,50,0")


def test_tokens_beyond_the_models_vocabulary(tmp_path):
    write_numbered(tmp_path / "d", [100])
    with pytest.raises(ConfigurationError, match=r"it holds token \d+, but the model's vocabulary ends at 63"):
        inputs(build(str(tmp_path / "d"), vocab_size=64)[0])
    inputs(build(str(tmp_path / "d"), vocab_size=100)[0])


def test_a_negative_seed(tmp_path):
    with pytest.raises(ConfigurationError, match=r"--training.seed -1"):
        build(str(tmp_path / "d"), seed=-1)


def test_one_epoch_ends(tmp_path):
    write_numbered(tmp_path / "d", [100])
    dataset = PackedDataset(IndexedDataset(tmp_path / "d"), (0, 1), sequence_length=8, seed=0)
    with pytest.raises(ValueError):
        dataset.of_length(13)
