"""Write a text corpus that every machine already has: the running Python's own standard library (PSF licence), as
jsonl.

    python tools/build_corpus.py --output corpus.jsonl [--seed 1234]

Documents are the library's *.py files, without tests, idlelib and installed packages, and the topics of `pydoc_data`
(the language reference in plain text); about 11 MB. They are written in a seeded order, so that a split by position
(`--data.split 95,5,0`) is a random sample of files, and each text once: a file that exists twice would otherwise be
trained on and held out. The same Python and seed give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import sys
import sysconfig
import time
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp2.errors import ConfigurationError

LEFT_OUT = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# The topics below are the text of this very file: as a document of its own it would leak them across the split.
TOPICS_FILE = "pydoc_data/topics.py"


def library_files(stdlib: Path) -> list[tuple[str, Path]]:
    """(name relative to `stdlib` with /, path) of every source file that belongs to the corpus, sorted."""
    found = [(path.relative_to(stdlib), path) for path in stdlib.rglob("*.py")]
    kept = [(name.as_posix(), path) for name, path in found if not LEFT_OUT.intersection(name.parts)]
    return sorted((name, path) for name, path in kept if name != TOPICS_FILE)


def read_source(path: Path) -> str | None:
    """Text of a source file by its declared encoding; None where it isn't text in that encoding."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError, OSError):
        return None


def topics() -> list[tuple[str, str]]:
    """(name, text) of every topic of pydoc; none where the Python comes without them."""
    if importlib.util.find_spec("pydoc_data") is None:
        return []
    from pydoc_data.topics import topics as by_name

    return [(f"topic {name}", text) for name, text in sorted(by_name.items())]


def build(stdlib: Path, output: Path, seed: int, progress: bool | None = None) -> dict[str, int]:
    """Write the corpus to `output` (through a temporary name); returns counts: documents, bytes, duplicates, empty,
    unreadable.

    `progress`: True shows a bar, False doesn't, None shows it on a terminal.
    """
    from tqdm import tqdm

    files = library_files(stdlib)
    if not files:
        raise ConfigurationError(
            f"{stdlib}: no *.py files; this Python comes without its library's sources, so give a corpus of your own"
        )
    counts = dict.fromkeys(("documents", "bytes", "duplicates", "empty", "unreadable"), 0)
    sources = [
        (name, read_source(path)) for name, path in tqdm(files, desc="reading", unit="file", disable=_disable(progress))
    ]
    texts: dict[bytes, str] = {}
    for _, text in [*sources, *topics()]:
        if text is None:
            counts["unreadable"] += 1
        elif not text.strip():
            counts["empty"] += 1
        elif (digest := hashlib.sha256(text.encode()).digest()) in texts:
            counts["duplicates"] += 1
        else:
            texts[digest] = text
    documents = list(texts.values())
    random.Random(seed).shuffle(documents)
    partial = output.with_name(f"{output.name}.partial.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            for text in documents:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                counts["documents"] += 1
                counts["bytes"] += len(text.encode())
        os.replace(partial, output)
    except OSError as error:
        raise ConfigurationError(f"--output {output}: cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)
    return counts


def _disable(progress: bool | None) -> bool | None:
    return None if progress is None else not progress


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="jsonl file to write")
    parser.add_argument("--seed", type=int, default=1234, help="order of the documents (default 1234)")
    parser.add_argument(
        "--stdlib",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="folder of sources (default: this Python's library)",
    )
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        counts = build(args.stdlib, args.output, args.seed)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{args.output}: {counts['documents']:,} documents, {counts['bytes'] / 1e6:.2f} MB of text from {args.stdlib}"
        f" ({counts['duplicates']} duplicates, {counts['empty']} empty and {counts['unreadable']} unreadable files"
        " left out)"
        f" in {time.perf_counter() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
