"""Train a sentencepiece BPE tokenizer on a corpus, in seconds, the same bytes every time.

    python tools/train_tokenizer.py --input corpus.jsonl --output-folder tokenizer [--vocab-size 8192] [--split 95,5,0]

The settings lose nothing of the text: identity normalization, no dummy prefix, no whitespace removed, runs of spaces
as pieces of their own (source code is full of them), and bytes for characters that are no piece. So
decode(encode(text)) is the text, and the byte lengths of its tokens add up to its utf-8 length. With --split only the
training share of the documents is read: held-out text stays unseen by the tokenizer too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp2.errors import ConfigurationError
from mindspeed_llm.data.documents import find_files, parse, read_batches
from mindspeed_llm.data.split import split_bounds

UNK, BOS, EOS, PAD = 0, 1, 2, 3
_CHUNK_BYTES = 4000  # the trainer skips "sentences" that are longer than its limit of 4,192 bytes


def documents(inputs: list[str], key: str, split: str | None) -> list[str]:
    """The texts to learn from: all that aren't empty, or the training share of them."""
    batches = (batch for path in find_files(inputs) for batch in read_batches(path, [key]))
    texts = [text for batch in batches for (text,) in parse(batch, [key]) if text]
    return texts if split is None else texts[: split_bounds(split, len(texts))[0][1]]


def chunks(texts: list[str]) -> Iterator[str]:
    """The texts in pieces the trainer accepts, cut behind a line's end where there is one."""
    for text in texts:
        piece, size = [], 0
        for line in text.splitlines(keepends=True):
            for start in range(0, len(line), _CHUNK_BYTES // 4):  # a character has at most 4 bytes
                part = line[start : start + _CHUNK_BYTES // 4]
                length = len(part.encode())
                if size + length > _CHUNK_BYTES:
                    yield "".join(piece)
                    piece, size = [], 0
                piece.append(part)
                size += length
        if piece:
            yield "".join(piece)


def train(texts: list[str], folder: Path, vocab_size: int, model_type: str = "bpe") -> Path:
    """Train on `texts` and write `folder/tokenizer.model` (through a temporary name); returns its path."""
    import sentencepiece

    target = folder / "tokenizer.model"
    partial = folder / f".tokenizer.partial.{os.getpid()}"
    if not texts:
        raise ConfigurationError("--input: there is no text to learn from; every document is empty or held out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=chunks(texts),
                model_writer=file,
                model_type=model_type,
                vocab_size=vocab_size,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                byte_fallback=True,
                character_coverage=0.9999,
                unk_id=UNK,
                bos_id=BOS,
                eos_id=EOS,
                pad_id=PAD,
                num_threads=1,  # with more, ties can fall differently from run to run
                minloglevel=2,
            )
        os.replace(partial, target)
    except OSError as error:
        raise ConfigurationError(f"--output-folder {folder}: cannot be written ({error})") from None
    except RuntimeError as error:  # how sentencepiece refuses
        size = sum(len(text.encode()) for text in texts)
        raise ConfigurationError(
            f"--vocab-size {vocab_size}: sentencepiece cannot train it on {len(texts):,} documents ({size:,} bytes):"
            f" {error}"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return target


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--input", nargs="+", required=True, help="jsonl, json, txt or parquet files, folders, patterns"
    )
    parser.add_argument("--output-folder", type=Path, required=True, help="where tokenizer.model goes")
    parser.add_argument("--vocab-size", type=int, default=8192, help="number of pieces (default 8192)")
    parser.add_argument("--json-key", default="text", help="key of the text in json, jsonl, parquet (default text)")
    parser.add_argument("--split", help="as --data.split, e.g. 95,5,0: learn from the training share only")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        texts = documents(args.input, args.json_key, args.split)
        path = train(texts, args.output_folder, args.vocab_size)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = sum(len(text.encode()) for text in texts)
    print(
        f"{path}: {args.vocab_size:,} pieces from {len(texts):,} documents ({size / 1e6:.2f} MB)"
        f" in {time.perf_counter() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
