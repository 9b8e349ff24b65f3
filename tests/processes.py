"""Run a function in real processes joined by gloo, and get what each rank returns.

The function is a module-level one (it is pickled by name); each process has one thread. An exception in one rank fails
the test with that rank's traceback; the others are stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, by the server that all ranks fork from: importing torch takes longer than most of what they do.
PRELOADED = ["torch.distributed.fsdp", "fsdp2.engine", "fsdp2.quantization.weights", "fsdp2.quantization.converters"]


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(rank: int, world_size: int, port: int, folder: str, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        GLOO_SOCKET_IFNAME="lo",
    )
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        result = function(*arguments)
        torch.save(result, Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def run_processes(function: Callable, world_size: int, *arguments: Any) -> list[Any]:
    """`function(*arguments)` on `world_size` gloo ranks; returns the ranks' results in order."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank_main,
            (world_size, free_port(), folder, function, arguments),
            nprocs=world_size,
            start_method="forkserver",
        )
        return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]
