"""One interface over the two tokenizer files people have: a sentencepiece `.model` and a Hugging Face `tokenizer.json`.

Training needs four things of a tokenizer: ids for text, text for ids, the id that ends a document, and how many bytes
of text a token stands for. The last one turns a loss into bits per byte, which compares models whose vocabularies
differ: bits_per_byte = (sum of token losses in nats) / ln 2 / (sum of the tokens' byte lengths). The files are read
with their own libraries (`sentencepiece`, `tokenizers`); transformers is not needed.
"""

from __future__ import annotations

import functools
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fsdp2.errors import ConfigurationError

from .sentencepiece_export import SPACE, is_convertible, to_tokenizer_json

# Files of a Hugging Face tokenizer that go along with tokenizer.json when it is saved.
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# Where nothing says which token ends a text, a special token of one of these names does.
_USUAL_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>")
_USUAL_EOS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>")


class Tokenizer(ABC):
    """`vocab_size`: largest id + 1. `bos_id`, `eos_id`: None when the tokenizer has none. `path`: the file it was
    read from."""

    path: Path
    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with no bos or eos added."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens (bos, eos, padding) give no text."""

    @abstractmethod
    def token_byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]: utf-8 bytes a token stands for, 0 for special tokens.

        Summed over a text's tokens this is exactly the text's utf-8 length for byte-level BPE and for sentencepiece BPE
        with byte fallback, as long as the tokenizer takes the text as it is. What some do changes it, and then the text
        after the change is counted: a normalizer (Qwen's NFC), a dummy prefix (Llama 2: one space more), a literal
        U+2581, which sentencepiece takes for a space, and special tokens written out in a text ("<|im_end|>"), which a
        tokenizer.json recognizes.
        """

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into `folder`; `load_tokenizer(folder)` gives the same ids for the same text."""


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model` of any kind (BPE, unigram)."""

    def __init__(self, path: str | Path) -> None:
        import sentencepiece

        self.path = Path(path)
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(self.path))
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(f"tokenizer {self.path}: not a readable sentencepiece model ({error})") from None
        self.vocab_size = self.processor.get_piece_size()
        self.bos_id = _present(self.processor.bos_id())
        self.eos_id = _present(self.processor.eos_id())

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text, out_type=int)

    def decode(self, ids: Sequence[int]) -> str:
        return self.processor.decode([int(i) for i in ids])

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for i in range(self.vocab_size):
            if self.processor.is_byte(i):
                lengths[i] = 1
            elif not (self.processor.is_control(i) or self.processor.is_unknown(i) or self.processor.is_unused(i)):
                lengths[i] = len(self.processor.id_to_piece(i).replace(SPACE, " ").encode())
        return lengths

    def token_byte_lengths(self) -> np.ndarray:
        return self._lengths.copy()

    def save(self, folder: str | Path) -> None:
        _copy(self.path, Path(folder) / "tokenizer.model")
        if is_convertible(self.processor):  # then transformers reads the folder too
            to_tokenizer_json(self.processor, Path(folder))


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; bos and eos come from the `tokenizer_config.json` beside it, else from the usual special
    tokens' names."""

    def __init__(self, path: str | Path) -> None:
        import tokenizers

        self.path = Path(path)
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ConfigurationError(f"tokenizer {self.path}: not a readable tokenizer.json ({error})") from None
        self.backend.no_truncation()  # some files ask for both: neither belongs to a corpus
        self.backend.no_padding()
        self.added = self.backend.get_added_tokens_decoder()  # id -> token matched in the text before anything else
        self.vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocabulary.values()) + 1  # ids can have gaps
        self.bos_id = self._special_id("bos_token", _USUAL_BOS)
        self.eos_id = self._special_id("eos_token", _USUAL_EOS)

    def _special_id(self, role: str, usual: Sequence[str]) -> int | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            file = self.path.with_name(name)
            if file.is_file():
                try:
                    settings = json.loads(file.read_text(encoding="utf-8"))
                except ValueError as error:
                    raise ConfigurationError(f"tokenizer {file}: not valid JSON ({error})") from None
                if role in settings:
                    token = settings[role]
                    token = token.get("content") if isinstance(token, dict) else token
                    if token is not None and token not in self.vocabulary:
                        raise ConfigurationError(
                            f"tokenizer {file}: {role} {token!r} is not in the vocabulary of {self.path.name}"
                        )
                    return None if token is None else self.vocabulary[token]
        specials = {token.content for token in self.added.values() if token.special}
        return next((self.vocabulary[token] for token in usual if token in specials), None)

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        definition = json.loads(self.backend.to_str())
        steps = _step_types(definition.get("pre_tokenizer")) | _step_types(definition.get("decoder"))
        byte_level = "ByteLevel" in steps
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for token, i in self.vocabulary.items():
            if i in self.added:  # written as it stands in the text, not in the alphabet below
                lengths[i] = 0 if self.added[i].special else len(token.encode())
            elif byte_level:
                lengths[i] = len(token)  # in the byte-level alphabet a character is a byte
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                lengths[i] = 1
            else:
                lengths[i] = len(token.replace(SPACE, " ").encode())
        return lengths

    def token_byte_lengths(self) -> np.ndarray:
        return self._lengths.copy()

    def save(self, folder: str | Path) -> None:
        _copy(self.path, Path(folder) / "tokenizer.json")
        for name in _COMPANIONS:
            if self.path.with_name(name).is_file():
                _copy(self.path.with_name(name), Path(folder) / name)


def load_tokenizer(path: str | Path, flag: str = "--model.tokenizer_name_or_path") -> Tokenizer:
    """Read a sentencepiece `.model`, a `tokenizer.json`, or a folder that holds either (`tokenizer.json` wins, as in
    transformers). `flag` is how the user gave the path, for messages."""
    path = Path(path)
    file = _file_in(path, flag) if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(
            f"{flag} {path}: no such file or folder; give a sentencepiece .model, a tokenizer.json, or a folder with"
            " either (names of a model hub are not downloaded)"
        )
    if file.suffix == ".json":
        return HuggingFaceTokenizer(file)
    if file.suffix == ".model":
        return SentencePieceTokenizer(file)
    raise ConfigurationError(f"{flag} {path}: want a sentencepiece .model or a Hugging Face tokenizer.json")


def _file_in(folder: Path, flag: str) -> Path:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    models = sorted(folder.glob("*.model"))
    if len(models) == 1:
        return models[0]
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise ConfigurationError(
        f"{flag} {folder}: the folder holds no tokenizer.json and no tokenizer.model (it holds: {found})"
    )


def _step_types(step: dict | None) -> set[str]:
    """Types of a pre-tokenizer or decoder and of the steps nested in it."""
    if not step:
        return set()
    nested = [*step.get("pretokenizers", []), *step.get("decoders", [])]
    return {step["type"]}.union(*map(_step_types, nested))


def _present(sentencepiece_id: int) -> int | None:
    return None if sentencepiece_id < 0 else sentencepiece_id


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.resolve() != target.resolve():
        shutil.copyfile(source, target)
