"""Cut a corpus into training, validation and test by whole documents.

The rule is Megatron's, so a split means the same documents there and here: the shares are normalized and cumulated,
and each boundary is rounded to a document. Held-out text is only honest when whole documents are held out, the same
ones in every run; so the split doesn't depend on the training seed, and what a corpus is ordered by matters: shuffle it
when it is written (tools/build_corpus.py does).
"""

from __future__ import annotations

import itertools
import math

from fsdp2.errors import ConfigurationError

NAMES = ("training", "validation", "test")


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares (training, validation, test), summing to 1, of "969,30,1", "95,5" or "100"."""
    try:
        shares = [float(word) for word in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(math.isfinite(s) and s >= 0 for s in shares) or sum(shares) <= 0:
        raise ConfigurationError(
            f"--data.split {split}: want up to three numbers, not negative and not all 0,"
            " for training, validation and test, for example 95,5,0"
        )
    shares += [0.0] * (3 - len(shares))
    return tuple(share / sum(shares) for share in shares)


def split_bounds(split: str, documents: int, name: str = "the corpus") -> list[tuple[int, int]]:
    """[(first, end)] document numbers of training, validation and test; raises where a share > 0 gets no document."""
    shares = parse_split(split)
    ends = [round(total * documents) for total in itertools.accumulate(shares)]
    bounds = list(zip([0, *ends[:2]], ends))
    for what, share, (first, end) in zip(NAMES, shares, bounds):
        if share > 0 and end == first:
            raise ConfigurationError(
                f"--data.split {split}: {share:.2%} of the {documents:,} documents in {name} leave none for {what};"
                f" give it a larger share or 0"
            )
    return bounds
