"""A rank killed in the middle of its gathers: the others stop, soon, and name it."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fsdp2
from fsdp2.communication import CountedAllGather
from fsdp2.peers import PeerLostError, naming_lost_peers
from tests.fsdp2.gather_model import HIDDEN, Model, plan_of
from tests.processes import free_port


class DiesInItsThirdGather(CountedAllGather):
    def __call__(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(*args, **kwargs)


def rank_main(rank: int, world: int, port: int, victim: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    # As under torchrun, the store outlives any rank: the test's own process hosts it.
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = fsdp2.parallelize(Model(), plan_of(world))
    if rank == victim:
        layer = model.layers[1]
        (group,) = layer._get_fsdp_state()._fsdp_param_groups
        layer.set_custom_all_gather(DiesInItsThirdGather(model.communication_counters, group))
    try:
        with naming_lost_peers(grace_s=5):
            for _ in range(4):
                model(torch.randn(2, 8, HIDDEN)).square().mean().backward()
        outcome = "finished"
    except PeerLostError as error:
        outcome = f"{error.ranks} {error}"
    Path(folder, str(rank)).write_text(outcome)
    os._exit(0)


@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_stop_and_name_it(victim):
    world, port = 3, free_port()
    store = dist.TCPStore("127.0.0.1", port, world, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        ranks = [context.Process(target=rank_main, args=(r, world, port, victim, folder)) for r in range(world)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 120
        for process in ranks:
            process.join(max(1, deadline - time.monotonic()))
        alive = [process.is_alive() for process in ranks]
        for process in ranks:
            process.kill()
        assert alive == [False] * world
        assert ranks[victim].exitcode == -signal.SIGKILL
        for rank in set(range(world)) - {victim}:
            outcome = Path(folder, str(rank)).read_text()
            assert outcome.startswith(f"[{victim}]") and f"rank {victim} no longer answers" in outcome
    del store


def test_other_errors_pass_through():
    with pytest.raises(RuntimeError, match="shapes"), naming_lost_peers():
        raise RuntimeError("shapes do not match")
