"""Name the rank that is gone. When a process dies, the others see a broken connection inside whatever collective they
are in; `naming_lost_peers` turns that into an error that says which ranks no longer answer.

The ranks that are left answer a roll call in the process group's key-value store, which does not need the broken
connections: under torchrun it lives in the launcher, not in a rank. Who has not answered within `grace_s` is lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fsdp2 import torch_private

# What gloo, NCCL and HCCL say when a connection breaks or a collective waits for longer than its timeout.
_SYMPTOMS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process exited",
)


class PeerLostError(RuntimeError):
    """A collective failed because other ranks are gone.

    Attributes:
        ranks: the ranks that did not answer; empty when all did (a network fault between living ranks).
    """

    def __init__(self, message: str, ranks: list[int]):
        super().__init__(message)
        self.ranks = ranks


@contextmanager
def naming_lost_peers(grace_s: float = 10.0) -> Iterator[None]:
    """Run collectives; when one fails for a broken connection or a timeout, find out whom it waited for.

    Args:
        grace_s: seconds that the other ranks get to answer: they may notice the failure later than this one.

    Raises:
        PeerLostError: names the ranks that did not answer, from the original error.
    """
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized() or not any(symptom in str(error).lower() for symptom in _SYMPTOMS):
            raise
        lost, rank = _roll_call(grace_s), dist.get_rank()
        who = (
            f"rank {', '.join(map(str, lost))} no longer answers"
            if lost
            else "all ranks still answer: look at the network"
        )
        raise PeerLostError(f"rank {rank} of {dist.get_world_size()} stopped in a collective: {who}", lost) from error


def _roll_call(grace_s: float) -> list[int]:
    """The ranks that have not signed in `grace_s` seconds after this one; the store's host counts as lost when the
    store is gone."""
    ranks, deadline = range(dist.get_world_size()), time.monotonic() + grace_s
    try:
        store = torch_private.process_group_store()
        store.set(f"fsdp2/roll_call/{dist.get_rank()}", "here")
        while True:
            missing = [rank for rank in ranks if not store.check([f"fsdp2/roll_call/{rank}"])]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.1)
    except RuntimeError:
        return [0]  # rank 0, or torchrun on its node, hosts the store
