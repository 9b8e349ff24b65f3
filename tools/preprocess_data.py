"""Tokenize a text corpus into Megatron's `.bin/.idx`, with the flags Megatron users know.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-name-or-path tokenizer/ --append-eod --workers 8

Input: jsonl, json, txt (these three also .gz) and parquet files, folders of them, or patterns. Output, for each of
--json-keys: `PREFIX_KEY_document.bin` and `.idx`, which is what `--data.dataset PREFIX_KEY_document` takes. Empty
documents are skipped and counted. A broken record ends the run with its file and line (exit status 2), and nothing is
written then.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp2.errors import ConfigurationError, nearest
from mindspeed_llm.data.documents import TXT_DOCUMENTS
from mindspeed_llm.data.preprocessing import preprocess


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, help="files, folders or patterns of raw text")
    parser.add_argument("--output-prefix", required=True, help="path of the result, without _KEY_document.bin")
    parser.add_argument(
        "--tokenizer-name-or-path", "--tokenizer-model", required=True, metavar="PATH",
        help="sentencepiece .model, tokenizer.json, or a folder with either",
    )  # fmt: skip
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys (columns) to tokenize (default text)")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the tokenizer's eos token")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize (default 1)")
    parser.add_argument(
        "--txt-document", choices=TXT_DOCUMENTS, default="line",
        help="what a document is in a .txt file (default line; paragraphs are parted by an empty line)",
    )  # fmt: skip
    parser.add_argument("--tokenizer-type", help="no effect: the kind is seen from the file")
    parser.add_argument("--log-interval", type=int, help="no effect: there is a progress bar")
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Arguments of the command line; wrong usage ends the program with one message and exit status 2."""
    known = parser()
    args, unknown = known.parse_known_args(argv)
    if unknown:
        flags = [flag for action in known._actions for flag in action.option_strings]
        known.error(f"unknown argument {unknown[0]}{nearest(unknown[0], flags)}")
    if args.workers < 1:
        known.error(f"--workers {args.workers}: want 1 or more")
    if len(set(args.json_keys)) != len(args.json_keys):
        known.error(f"--json-keys {' '.join(args.json_keys)}: a key is named twice")
    for name in ("tokenizer_type", "log_interval"):
        if getattr(args, name) is not None:
            print(f"warning: --{name.replace('_', '-')} has no effect", file=sys.stderr)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    # One tokenizing thread a process: the processes are what is counted by --workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        written, speed = preprocess(
            args.input,
            args.output_prefix,
            args.tokenizer_name_or_path,
            keys=args.json_keys,
            append_eod=args.append_eod,
            workers=args.workers,
            txt_document=args.txt_document,
        )
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for entry in written:
        print(
            f"{entry.prefix}: {entry.documents:,} documents, {entry.tokens:,} tokens,"
            f" {entry.text_bytes / entry.tokens:.2f} bytes a token, {entry.skipped:,} empty documents skipped"
        )
    print(f"{speed:.1f} MB/s with {args.workers} worker{'s' if args.workers > 1 else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
