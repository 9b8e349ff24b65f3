"""Peak arithmetic of a device, and model FLOPs utilization (MFU): the share of it that a model's own FLOPs reach.

MFU = FLOPs of forward and backward a token (`model_flops_per_token`) x tokens per second and device / peak FLOP/s
(PaLM, arXiv:2204.02311, appendix B). The peak is that of dense bf16 whatever the run computes in, so that a quantized
run's MFU tells how much faster it is; `--training.peak_tflops` sets another. A CPU has no data sheet that its clock
holds to: its peak is what an fp32 GEMM reaches here, on the threads of this process.
"""

from __future__ import annotations

import re
import time

import torch

# Device name (regular expression, any case) -> dense bf16 TFLOP/s of what one process drives. Sources: NVIDIA's data
# sheets of H100 SXM, H200 and B200 without sparsity; Huawei's of Atlas 800T A2 (910B1 to B4; fp16 and bf16 alike), of
# CloudMatrix 384 (A3: two dies of 376, a process drives one), and its announcement of the Ascend 950 (1 PFLOP/s FP8,
# half of it in bf16).
PEAK_BF16_TFLOPS = (
    (r"ascend\s*950", 500.0),
    (r"ascend\s*910_?93|ascend\s*910c", 376.0),
    (r"ascend\s*910b1", 414.0),
    (r"ascend\s*910b2", 376.0),
    (r"ascend\s*910b3", 313.0),
    (r"ascend\s*910b", 280.0),
    (r"\bb200\b", 2250.0),
    (r"\bh200\b", 989.4),
    (r"\bh100\b.*pcie", 756.0),
    (r"\bh100\b", 989.4),
)
GEMM_SIZE = 768
GEMM_RUNS = 4


def peak_tflops(device: torch.device, override: float | None = None) -> float | None:
    """Peak TFLOP/s of `device`: `override`, a data sheet's, or on a CPU a measured one (a tenth of a second); None for
    a device that the table does not know.
    """
    if override is not None:
        return override
    if device.type == "cpu":
        return measured_tflops(device)
    return table_tflops(torch.get_device_module(device).get_device_name(device))


def table_tflops(device_name: str) -> float | None:
    """The table's peak for a device name such as "NVIDIA H200" or "Ascend910B3"."""
    for pattern, tflops in PEAK_BF16_TFLOPS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return tflops
    return None


def measured_tflops(device: torch.device, size: int = GEMM_SIZE) -> float:
    """TFLOP/s of the fastest of a few fp32 products of `size` x `size` matrices."""
    a, b = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    torch.mm(a, b)  # the first call sets the library up
    best = float("inf")
    for _ in range(GEMM_RUNS):
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best / 1e12
