"""Which process this is, on which device, and the start and end of torch.distributed.

Ranks come from the environment that torchrun sets; without torchrun a run is one process, and torch.distributed still
starts, so that there is one code path. The device is an NPU where torch_npu works, else a CUDA GPU, else the CPU with
gloo. CPU tensors travel by gloo beside NCCL or HCCL.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from fsdp2.errors import ConfigurationError

if TYPE_CHECKING:
    from mindspeed_llm.arguments import Arguments

BACKENDS = {"npu": "cpu:gloo,npu:hccl", "cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
TIMEOUT = timedelta(minutes=30)  # rank 0 may build dataset indices or write weights while the others wait


@dataclass(frozen=True)
class Launch:
    """This process among all: what torchrun put into the environment, or one process alone."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Launch:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=world_size,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        )


def device_type() -> str:
    """Return `npu`, `cuda` or `cpu`: the first that works here. Imports torch, and torch_npu where it is installed."""
    import torch

    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401  (registers torch.npu and the hccl backend)

        if torch.npu.is_available():
            return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(kind: str, index: int) -> str:
    """What accelerator `index` calls itself, for example Ascend910B2 or NVIDIA H100; "" for the CPU."""
    import torch

    return "" if kind == "cpu" else torch.get_device_module(kind).get_device_name(index)


def check_mx_units(arguments: Arguments, chip: str) -> None:
    """Refuse an MX recipe on an Ascend chip without MX units, where it would be emulated and nobody asked for that.

    `chip`: what `device_name` returns.

    Raises:
        ConfigurationError: names the chip, and the flag that emulates.
    """
    from fsdp2.quantization.kernels.npu import mx_hardware_reason

    recipe = arguments.model.quant_recipe_name
    reason = mx_hardware_reason(chip)
    if recipe is not None and reason is not None and not arguments.model.quant_emulate:
        raise ConfigurationError(
            f"--model.quant_recipe_name {recipe}: {reason}; --model.quant_recipe_name None trains in bf16, and "
            "--model.quant_emulate computes the same numbers by torch operations, slower than bf16"
        )


def device_count() -> tuple[str, int]:
    """Return the device type and how many of it this machine has; of a CPU, the cores that this process may use."""
    import torch

    kind = device_type()
    if kind == "cpu":
        return kind, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return kind, torch.get_device_module(kind).device_count()


def start(launch: Launch, device: str):
    """Start torch.distributed for `device` (npu, cuda, cpu) and return this process's `torch.device`."""
    import torch
    import torch.distributed as dist

    if launch.local_world_size == launch.world_size:
        _let_gloo_find_an_interface()
    if device == "cpu":
        this_device = torch.device("cpu")
    else:
        this_device = torch.device(device, launch.local_rank)
        torch.get_device_module(device).set_device(this_device)
    if "MASTER_ADDR" in os.environ:
        # torchrun's restarts share one store: without a prefix of its own, an attempt finds the addresses of processes
        # that are dead and waits for them.
        store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=TIMEOUT))
        dist.init_process_group(
            BACKENDS[device],
            store=dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=TIMEOUT,
            device_id=None if device == "cpu" else this_device,
        )
    else:
        dist.init_process_group(BACKENDS[device], store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    return this_device


def stop() -> None:
    """End torch.distributed; harmless when it never started."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _let_gloo_find_an_interface() -> None:
    """On one host whose own name does not resolve, gloo finds no address to bind to: give it the loopback interface."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]


def make_deterministic(seed: int, deterministic: bool) -> None:
    """Seed every generator of this process; with `deterministic`, choose algorithms that repeat their results.

    An operation without a deterministic form warns instead of stopping the run.
    """
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling is a debugging aid: it would write every torch.empty, gather buffers included.
        torch.utils.deterministic.fill_uninitialized_memory = False
