"""Run compiled loops on the very threads that torch's own operators run on.

torch's OpenMP threads wait for their next work by spinning. Threads of another pool would fight them for the same
cores, and waking one up costs more than quantizing a small tensor: on two cores, a pool of Python threads quantized no
faster than one thread. So a loop is handed to `GOMP_parallel`, the entry point by which gcc-compiled code, torch's
included, starts a parallel region in GNU's OpenMP. Where torch brings another library, Python threads do it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch


def run_on_threads(loop, threads: int, *words: int) -> None:
    """Call `loop` with the address of `words` (int64) on as many threads at once, and wait for all of them.

    Args:
        loop: a numba cfunc, `void(int64 *words)`, that shares the work by counting in `words`.
        threads: `torch.get_num_threads()`, or 1 for this thread alone.
    """
    shared = (ctypes.c_int64 * len(words))(*words)
    if threads == 1:
        loop.ctypes(shared)
        return
    start = openmp_start()
    if start is not None:
        start(loop.address, shared, threads, 0)
    else:
        run_on_python_threads(loop, threads, shared)


def run_on_python_threads(loop, threads: int, shared: ctypes.Array) -> None:
    """As `run_on_threads`, on a pool of Python threads beside this one; the loop does not hold the interpreter lock."""
    pending = [_pool(os.getpid(), threads).submit(loop.ctypes, shared) for _ in range(threads - 1)]
    loop.ctypes(shared)
    for other in pending:
        other.result()


@functools.cache
def openmp_start():
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP library that torch runs on; None without it."""
    libraries = Path(torch.__file__).parent / "lib"
    try:
        start = ctypes.CDLL(str(libraries / "libtorch_cpu.so")).GOMP_parallel  # found in what it is linked to
    except (OSError, AttributeError):
        return None
    start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    return start


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Worker threads of this process (a forked child has none of its parent's)."""
    return ThreadPoolExecutor(max_workers=threads - 1, thread_name_prefix="mx-quantize")
