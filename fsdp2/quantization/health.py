"""Quantization health: what rounding to MX does to every quantized module's input, weight and gradient, measured.

On the steps that ask for it a `HealthCollector` takes a sample of each of the three tensors, quantizes it as the module
does (blocks along the forward GEMM's axis; the gradient along its last one) and compares. On all other steps there are
no hooks, so nothing is paid. What is counted, over the blocks that are not all zero:

    saturated        |x| above the block's largest number: the scale rule cut it off
    flushed          x is not zero, its quantized value is
    outlier block    its largest element is 64 times the root mean square of its others: they share a scale made for it
    SQNR             10 log10(sum x^2 / sum (x - Q(x))^2) decibels; E4M3 without accidents has about 31
    scale exponents  a histogram of the blocks' power-of-two scales
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2.quantization.formats import element_format
from fsdp2.quantization.grouped import MXGroupedLinear
from fsdp2.quantization.linear import MXLinear
from fsdp2.quantization.mx import quantize
from fsdp2.quantization.recipe import TensorRecipe

TENSORS = ("input", "weight", "gradient")
SAMPLE_ELEMENTS = 2**17  # of one tensor on one rank: 4,096 blocks of 32
OUTLIER_RATIO = 64.0
ROWS = 32  # samples are runs of 32 rows, so that 32 x 32 tiles stay whole
_SUMS = (
    "elements", "nonzero", "saturated", "flushed", "blocks", "saturated_blocks", "outlier_blocks", "signal", "noise",
    "noise_rceil",
)  # fmt: skip
_EXPONENT_BIAS = 127
# Squares of small gradients would leave fp32's range: powers are of values times this, which their ratio forgets.
_POWER_SCALE = 2.0**32


@dataclass(frozen=True)
class TensorHealth:
    """The health of one tensor of one module in one step, over all ranks.

    Attributes:
        module, tensor, kind: full name; "input", "weight" or "gradient"; the name without layer numbers.
        recipe, element_format, scale_rule: what it is quantized with.
        elements: how many were looked at.
        saturated_fraction, flushed_fraction: of the elements that are not zero.
        saturated_block_fraction, outlier_block_fraction: of the blocks that are not zero.
        sqnr_db, sqnr_db_rceil: decibels (inf for no error, nan for no signal); the second had the scale been rounded
            up so that nothing saturates.
        amax: largest magnitude.
        exponents: scale exponent -> number of blocks.
    """

    step: int
    module: str
    tensor: str
    kind: str
    recipe: str
    element_format: str
    scale_rule: str
    elements: int
    saturated_fraction: float
    saturated_block_fraction: float
    flushed_fraction: float
    outlier_block_fraction: float
    sqnr_db: float
    sqnr_db_rceil: float
    amax: float
    exponents: dict[int, int]

    def as_row(self) -> dict[str, Any]:
        """The object of a json lines file; exponents as text, which json makes of keys anyway."""
        row = asdict(self)
        row["exponents"] = {str(exponent): count for exponent, count in self.exponents.items()}
        return row

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> TensorHealth:
        """The opposite of `as_row`."""
        return cls(**{**row, "exponents": {int(exponent): count for exponent, count in row["exponents"].items()}})


def module_kind(name: str) -> str:
    """A module's name without what differs between layers: "model.layers.7.mlp.experts.down_proj" ->
    "mlp.experts.down_proj"; a name without a number stays."""
    return re.split(r"\.\d+\.", name)[-1]


def measure(
    x: Tensor, recipe: TensorRecipe, scale_rule: str, axis: int = -1, sample_elements: int = SAMPLE_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Compare a sample of `x` with what quantizing makes of it; no synchronization with the device.

    Args:
        x: [..., R, C], any float dtype; may be empty.
        recipe: a quantized one with E8M0 scales.
        axis: of the blocks, -1 or -2.

    Returns:
        fp32 [10 + 256], sums that may be added over ranks, and the largest magnitude, an fp32 scalar.
    """
    x_RC = _sampled(x.detach() if axis == -1 else x.detach().transpose(-1, -2), sample_elements)
    if x_RC.numel() == 0:
        return x_RC.new_zeros(len(_SUMS) + 256, dtype=torch.float32), x_RC.new_zeros((), dtype=torch.float32)
    x_RC = x_RC.to(torch.bfloat16)  # as the kernels read it
    fmt, block = element_format(recipe.element_format), recipe.block_shape
    options = {"element_format": fmt.name, "block_shape": block}
    quantized = quantize(x_RC, scale_rule=scale_rule, **options)
    exact = x_RC.float()
    scales = quantized.scales.reshape(-1)
    kept_Bn, exact_Bn = _blocks(quantized.dequantize(torch.float32), block), _blocks(exact, block)
    size_Bn = exact_Bn.abs()
    largest_B = size_Bn.amax(1)
    live_B = largest_B > 0
    saturated_Bn = size_Bn > (fmt.largest * torch.exp2(scales.float() - _EXPONENT_BIAS))[:, None]
    nonzero_Bn = exact_Bn != 0
    squares_B = exact_Bn.square().sum(1)
    others_B = ((squares_B - largest_B.square()) / (size_Bn.shape[1] - 1)).clamp(min=0)
    outlier_B = (others_B > 0) & (largest_B.square() > OUTLIER_RATIO**2 * others_B)
    noise = _power(exact_Bn - kept_Bn)
    if scale_rule == "rceil":
        noise_rceil = noise
    else:
        noise_rceil = _power(exact - quantize(x_RC, scale_rule="rceil", **options).dequantize(torch.float32))
    sums = torch.stack(
        [
            live_B.new_full((), exact.numel(), dtype=torch.float32),
            nonzero_Bn.sum().float(),
            saturated_Bn.sum().float(),
            (nonzero_Bn & (kept_Bn == 0)).sum().float(),
            live_B.sum().float(),
            saturated_Bn.any(1).sum().float(),
            outlier_B.sum().float(),
            _power(exact),
            noise,
            noise_rceil,
        ]
    )
    # Blocks of zeros count with weight zero: masking them out would wait for the device.
    histogram = torch.zeros(256, device=x.device).index_add_(0, scales.long(), live_B.float())
    return torch.cat([sums, histogram]), largest_B.amax()


def _power(x: Tensor) -> Tensor:
    return (x * _POWER_SCALE).square().sum()


def _sampled(x: Tensor, limit: int) -> Tensor:
    """About `limit` elements of `x` [..., R, C] as [rows, C]: runs of 32 rows, evenly spread over all of them."""
    if x.ndim == 3 and x.numel() > limit:
        x = x[:: max(1, x.shape[0] // 8)]  # some experts, before their rows are laid out for the choice of runs
    x_RC = x.reshape(-1, x.shape[-1])
    runs = x_RC.shape[0] // ROWS
    wanted = max(1, limit // (ROWS * x_RC.shape[1]))
    if x_RC.numel() <= limit or runs <= wanted:
        return x_RC
    return x_RC[: runs * ROWS].view(runs, ROWS, -1)[:: runs // wanted][:wanted].reshape(-1, x_RC.shape[1])


def _blocks(x_RC: Tensor, block: tuple[int, int]) -> Tensor:
    """[R, C] -> [blocks, elements of a block] in the order of the scales; zeros where a block reaches past the end."""
    rows, columns = block
    x_RC = nn.functional.pad(x_RC, (0, -x_RC.shape[1] % columns, 0, -x_RC.shape[0] % rows))
    if rows == 1:
        return x_RC.reshape(-1, columns)
    tiles = x_RC.view(x_RC.shape[0] // rows, rows, x_RC.shape[1] // columns, columns)
    return tiles.transpose(1, 2).reshape(-1, rows * columns)


class HealthCollector:
    """Measures one step of a converted and sharded model: `start`, forward and backward, `finish`.

    Inputs and gradients are those of the first micro-batch, weights those of this rank's shards before the step.
    Tensors that the recipe leaves in bf16, or gives fp32 scales, are not measured.
    """

    def __init__(self, model: nn.Module, sample_elements: int = SAMPLE_ELEMENTS):
        self._modules = {n: m for n, m in model.named_modules() if isinstance(m, (MXLinear, MXGroupedLinear))}
        self._keys = [
            (name, tensor)
            for name, module in self._modules.items()
            for tensor in TENSORS
            if self._recipe(module, tensor).scale_format == "E8M0"
        ]
        self._sample_elements = sample_elements
        self._found: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._handles: list[Any] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to measure."""
        return not self._keys

    @staticmethod
    def _recipe(module: MXLinear | MXGroupedLinear, tensor: str) -> TensorRecipe:
        return getattr(module.recipe, {"input": "inputs", "weight": "weight", "gradient": "grads"}[tensor])

    def start(self) -> None:
        """Measure weights, and watch the modules until `finish`."""
        self._found = {}
        with torch.no_grad():
            for name, module in self._modules.items():
                weight = module.weight.detach()
                local = weight.to_local() if hasattr(weight, "to_local") else weight
                self._note(name, "weight", local, -1 if isinstance(module, MXLinear) else -2)
        self._handles = [m.register_forward_hook(self._hook(name)) for name, m in self._modules.items()]

    def _hook(self, name: str):
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            if (name, "input") in self._found or (name, "gradient") in self._found:
                return  # a later micro-batch, or a forward run again in backward
            self._note(name, "input", inputs[0])
            if output.requires_grad:
                output.register_hook(lambda gradient: self._note(name, "gradient", gradient))

        return hook

    def _note(self, name: str, tensor: str, x: Tensor, axis: int = -1) -> None:
        if (name, tensor) not in self._keys or (name, tensor) in self._found:
            return
        module = self._modules[name]
        with torch.no_grad():
            self._found[name, tensor] = measure(
                x, self._recipe(module, tensor), module.recipe.scale_rule, axis, self._sample_elements
            )

    def finish(self, step: int) -> list[TensorHealth]:
        """Stop watching and return what all ranks saw together, in the model's order. Collective."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.is_empty:
            return []
        device = next(iter(self._found.values()))[0].device
        nothing = torch.zeros(len(_SUMS) + 256, device=device), torch.zeros((), device=device)
        found = [self._found.get(key, nothing) for key in self._keys]
        self._found = {}
        sums, largest = torch.stack([f[0] for f in found]), torch.stack([f[1] for f in found])
        if dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        rows = zip(self._keys, sums.cpu().tolist(), largest.cpu().tolist())
        return [self._health(step, *key, values, amax) for key, values, amax in rows]

    def _health(self, step: int, name: str, tensor: str, values: list[float], amax: float) -> TensorHealth:
        recipe = self._modules[name].recipe
        of = dict(zip(_SUMS, values))
        counts = {index - _EXPONENT_BIAS: round(n) for index, n in enumerate(values[len(_SUMS) :]) if n}
        return TensorHealth(
            step=step,
            module=name,
            tensor=tensor,
            kind=module_kind(name),
            recipe=recipe.name,
            element_format=self._recipe(self._modules[name], tensor).element_format,
            scale_rule=recipe.scale_rule,
            elements=round(of["elements"]),
            saturated_fraction=of["saturated"] / max(of["nonzero"], 1.0),
            saturated_block_fraction=of["saturated_blocks"] / max(of["blocks"], 1.0),
            flushed_fraction=of["flushed"] / max(of["nonzero"], 1.0),
            outlier_block_fraction=of["outlier_blocks"] / max(of["blocks"], 1.0),
            sqnr_db=_decibels(of["signal"], of["noise"]),
            sqnr_db_rceil=_decibels(of["signal"], of["noise_rceil"]),
            amax=amax,
            exponents=counts,
        )


def _decibels(signal: float, noise: float) -> float:
    if not signal > 0:
        return math.nan
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf
