"""Tokenizers against their own libraries and known ids; above all, that byte lengths are exact."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from fsdp2.errors import ConfigurationError
from mindspeed_llm.data import load_tokenizer, tokenizer_checks
from mindspeed_llm.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from tests.material import mistral_sentencepiece, qwen3_tokenizer

NASTY = [
    " leading and trailing ",
    "\n\n\t  \r\n",
    "    def f(self):\n        return None\n",
    "naïve café, Ünïcödé, Ελληνικά, 中文字符，日本語、한국어",
    "👩‍👩‍👧‍👦 🇩🇪 ✊🏿 \u200b\u00ad\ufeff",
    "a\x00b\x7f\u0085\u2028",
    "1234567890" * 7,
    "\U0010ffff\ue000",
    "<s></s><unk><0x0A>",
]


def assert_bytes_add_up(tokenizer: Tokenizer, text: str, extra: int = 0) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.token_byte_lengths()[ids].sum() == len(text.encode()) + extra, text[:80]


def test_main_jobs_tokenizer_loses_nothing(tokenizer_folder, texts):
    tokenizer = load_tokenizer(tokenizer_folder)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (8192, 1, 2)
    lengths = tokenizer.token_byte_lengths()
    assert lengths.dtype == np.int32 and lengths.shape == (8192,)
    assert lengths[:4].tolist() == [0, 0, 0, 0] and (lengths[4:260] == 1).all() and (lengths[4:] > 0).all()
    for text in texts[::8] + NASTY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert_bytes_add_up(tokenizer, text)


def test_main_jobs_tokenizer_is_dense(tokenizer_folder, texts):
    tokenizer = load_tokenizer(tokenizer_folder)
    some = texts[::8]
    assert sum(map(len, some)) / sum(len(tokenizer.encode(text)) for text in some) > 3.4


def test_qwen3_byte_level(texts):
    tokenizer = load_tokenizer(qwen3_tokenizer())
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (151669, None, 151645)
    assert tokenizer.encode("Hello, world!") == [9707, 11, 1879, 0]
    assert tokenizer.decode([9707, 11, 1879, 0, 151645]) == "Hello, world!"
    lengths = tokenizer.token_byte_lengths()
    assert lengths[151643] == lengths[151645] == 0  # <|endoftext|>, <|im_end|>
    assert lengths[151657] == len("<tool_call>")  # added, but text as any other
    assert (lengths[:151643] > 0).all()
    for text in texts[::40] + NASTY:
        assert_bytes_add_up(tokenizer, unicodedata.normalize("NFC", text))


def test_mistral_sentencepiece(texts):
    tokenizer = load_tokenizer(mistral_sentencepiece())
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (32000, 1, 2)
    assert tokenizer.encode("Hello world") == [22557, 1526]
    for text in texts[::40] + NASTY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert_bytes_add_up(tokenizer, text, extra=1)  # the space that this tokenizer puts before every text


SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")


@pytest.fixture(scope="module")
def exported(tokenizer_folder, tmp_path_factory) -> Path:
    """The main job's tokenizer as it is exported for transformers, without the sentencepiece model."""
    folder = tmp_path_factory.mktemp("exported")
    load_tokenizer(tokenizer_folder).save(folder)
    (folder / "tokenizer.model").unlink()
    return folder


def test_exported_sentencepiece_gives_the_same_ids(tokenizer_folder, exported, texts):
    ours, export = load_tokenizer(tokenizer_folder), load_tokenizer(exported)
    assert isinstance(export, HuggingFaceTokenizer)
    assert (export.vocab_size, export.bos_id, export.eos_id) == (8192, 1, 2)
    assert (export.token_byte_lengths() == ours.token_byte_lengths()).all()
    for text in texts[::8] + NASTY:
        if not any(special in text for special in SPECIAL):
            ids = export.encode(text)
            assert ids == ours.encode(text) and export.decode(ids) == text
            assert_bytes_add_up(export, text)


def test_transformers_reads_the_export(tokenizer_folder, exported, texts):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ours = load_tokenizer(tokenizer_folder)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (1, 2, 3, 0)
    for text in texts[:3] + NASTY[:-1]:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text


@pytest.mark.parametrize("material", [qwen3_tokenizer, mistral_sentencepiece])
def test_saved_tokenizer_is_the_same(material, tmp_path):
    tokenizer = load_tokenizer(material())
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.vocab_size, again.bos_id, again.eos_id) == (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    assert again.encode("".join(NASTY)) == tokenizer.encode("".join(NASTY))
    again.save(tmp_path)  # onto itself


def test_vocabulary_beyond_the_models(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer_checks(tokenizer, 8192)
    with pytest.raises(ConfigurationError, match=r"8,192 exceeds the model's vocab_size of 8,160"):
        tokenizer_checks(tokenizer, 8160)


def test_bad_paths(tmp_path, tokenizer_folder):
    with pytest.raises(ConfigurationError, match=r"tokenizer_name_or_path Qwen/Qwen3-8B: no such file or folder"):
        load_tokenizer("Qwen/Qwen3-8B")
    with pytest.raises(ConfigurationError, match=r"holds no tokenizer.json and no tokenizer.model \(it holds: nothing"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(ConfigurationError, match=r"it holds: vocab\.txt"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigurationError, match=r"vocab.txt: want a sentencepiece .model or"):
        load_tokenizer(tmp_path / "vocab.txt")
    (tmp_path / "broken.model").write_bytes((tokenizer_folder / "tokenizer.model").read_bytes()[:5000])
    with pytest.raises(ConfigurationError, match=r"broken.model: not a readable sentencepiece model"):
        load_tokenizer(tmp_path / "broken.model")
    (tmp_path / "tokenizer.json").write_text('{"model": {}')
    with pytest.raises(ConfigurationError, match=r"tokenizer.json: not a readable tokenizer.json"):
        load_tokenizer(tmp_path)


def test_what_the_files_beside_a_tokenizer_json_say(exported, tmp_path):
    shutil.copyfile(exported / "tokenizer.json", tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path).eos_id == 2  # nothing says which, so the usual name does
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<pad>"}, "bos_token": None}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 3)
    config.write_text(json.dumps({"eos_token": "<|nowhere|>"}))
    with pytest.raises(ConfigurationError, match=r"eos_token '<\|nowhere\|>' is not in the vocabulary"):
        load_tokenizer(tmp_path)
    config.write_text("{")
    with pytest.raises(ConfigurationError, match=r"tokenizer_config.json: not valid JSON"):
        load_tokenizer(tmp_path)
