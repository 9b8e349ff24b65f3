"""Every backend against the integer rule and against the reference, byte for byte.

The integer rule here is written with Python integers and numpy, from the OCP specification's words, and shares no code
with the package: all 65,536 bf16 bit patterns pass through it as the largest number of a block and as an ordinary
element.
"""

import ctypes
import functools
import itertools
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2.errors import ConfigurationError
from fsdp2.quantization import MXTensor, quantize, quantize_dual_axis
from fsdp2.quantization.formats import ELEMENT_FORMATS, SCALE_FORMATS, SCALE_RULES
from fsdp2.quantization.kernels import backend_module, runnable_backends

BACKENDS = runnable_backends("cpu")


@pytest.fixture(scope="module")
def all_bf16() -> torch.Tensor:
    """[65536, 1]: every bit pattern."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(-1, 1)


def same_bytes(a: MXTensor, b: MXTensor) -> None:
    assert a.codes.shape == b.codes.shape and a.scales.shape == b.scales.shape
    assert torch.equal(a.codes, b.codes)
    if a.scales.dtype == torch.float32:
        same_numbers(a.scales, b.scales)
    else:
        assert torch.equal(a.scales, b.scales)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal bit for bit where finite (so -0 is not 0), NaN where NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[a.dtype]
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(nan=0.0).view(bits), b.nan_to_num(nan=0.0).view(bits))


def scale_by_integers(pattern: int, name: str, rule: str) -> int:
    """The scale byte of a block whose largest magnitude has the bf16 bits `pattern`, from the specification's words."""
    emax = {"E4M3": 8, "E5M2": 15, "E3M2": 4, "E2M3": 2, "E2M1": 2}[name]
    mantissa_bits = int(name[3])
    largest_mantissa = {"E4M3": 96, "E5M2": 96, "E3M2": 96, "E2M3": 112, "E2M1": 64}[name]  # of 128
    exponent, mantissa = pattern >> 7, pattern & 127
    if exponent == 255:
        return 255
    if rule == "even":
        step = 1 << (7 - mantissa_bits)
        mantissa = (mantissa + step // 2) // step * step
        exponent, mantissa = exponent + mantissa // 128, mantissa % 128
    up = {"floor": 0, "ceil": mantissa != 0, "rceil": mantissa > largest_mantissa, "even": 0}[rule]
    return max(exponent - emax + int(up), 0)


@functools.cache
def scales_by_integers(name: str, rule: str) -> list[int]:
    return [scale_by_integers(pattern, name, rule) for pattern in range(32768)]


LARGEST_CASES = [(n, b) for b in BACKENDS for n in ELEMENT_FORMATS if b != "cuda" or n == "E4M3"]  # interpreted: slow


@pytest.mark.parametrize(("name", "backend"), LARGEST_CASES)
def test_every_bf16_as_the_largest_of_its_block(all_bf16, name, backend):
    for rule in SCALE_RULES:
        expected = scales_by_integers(name, rule)
        for axis in (-1, -2) if backend != "cuda" else (-2,):
            x = all_bf16 if backend != "cuda" else all_bf16[: len(expected)]  # the sign does not matter
            x = x if axis == -1 else x.t()
            scales = quantize(x, element_format=name, axis=axis, scale_rule=rule, backend=backend).scales
            assert scales.flatten().tolist() == expected * (x.numel() // len(expected)), (rule, axis)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ELEMENT_FORMATS)
def test_every_bf16_as_an_element(all_bf16, name, backend):
    """Under the scales of a few leaders, each pattern becomes the nearest value of the format; ties go to the even
    code.
    """
    fmt = ELEMENT_FORMATS[name]
    values = [fmt.value_of(code) for code in range(fmt.largest_code + 1)]  # ascending
    edges = np.array([(a + b) / 2 for a, b in itertools.pairwise(values)])  # exact in fp64
    finite = all_bf16[all_bf16.float().isfinite()].float()
    for leader in (fmt.largest, 2.0**-120, 1.5 * 2.0**-126, 2.0**-133, 2.0**100):
        x = finite[finite.abs() <= leader]
        x = torch.nn.functional.pad(x, (0, -len(x) % 31)).reshape(-1, 31)
        x = torch.cat([torch.full((len(x), 1), leader), x], 1)
        q = quantize(x, element_format=name, backend=backend)
        assert len(q.scales.unique()) == 1
        scaled = x.double().numpy() * 2.0 ** (127 - int(q.scales[0, 0]))
        below, above = np.searchsorted(edges, np.abs(scaled), "left"), np.searchsorted(edges, np.abs(scaled), "right")
        code = np.where(below % 2 == 0, below, above)  # they differ only on an edge
        code = code + (np.signbit(scaled) * 2 ** (fmt.bits - 1))
        codes = q.codes if fmt.codes_per_byte == 1 else torch.stack((q.codes & 15, q.codes >> 4), -1).flatten(-2)
        np.testing.assert_array_equal(codes.numpy(), code)


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
def test_reference_rounds_as_torch_casts(all_bf16, name):
    """The generic rounding of the reference equals torch's own float8 cast on every pattern that does not saturate."""
    dtype = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[name]
    fmt = ELEMENT_FORMATS[name]
    reference = backend_module("reference", "cpu")
    x = all_bf16.float().nan_to_num(nan=0.0).clamp(-fmt.largest, fmt.largest)
    assert torch.equal(reference.encode(x, fmt), x.to(dtype).view(torch.uint8))
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(torch.tensor(fmt.values()).nan_to_num(), codes.view(dtype).float().nan_to_num())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ELEMENT_FORMATS)
def test_every_code_under_every_scale_dequantizes_exactly(name, backend):
    """Byte 0 is 2**-127 (not 0), byte 255 is NaN (not Inf), products are exact in fp32 and rounded once to bf16."""
    fmt = ELEMENT_FORMATS[name]
    if fmt.codes_per_byte == 2:
        codes = torch.tensor([[(2 * i) % 16 + 16 * ((2 * i + 1) % 16) for i in range(16)]], dtype=torch.uint8)
    else:
        codes = torch.tensor([[i % 2**fmt.bits for i in range(max(32, 2**fmt.bits))]], dtype=torch.uint8)
    codes, columns = codes.expand(256, -1), codes.shape[1] * fmt.codes_per_byte
    scales = torch.arange(256, dtype=torch.uint8).reshape(-1, 1).expand(-1, columns // 32)
    q = MXTensor(codes, scales, name, (1, 32), -1, torch.Size([256, columns]))
    powers = np.array([[2.0 ** (b - 127) if b != 255 else math.nan] for b in range(256)])
    with np.errstate(over="ignore"):
        exact = np.array([fmt.values() * (columns // 2**fmt.bits)]) * powers  # fp64
        expected = torch.from_numpy(exact.astype(np.float32))
    same_numbers(q.dequantize(torch.float32, backend=backend), expected)
    same_numbers(q.dequantize(torch.bfloat16, backend=backend), expected.to(torch.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_shape", [(1, 32), (32, 32)])
def test_zero_nan_and_infinite_blocks(block_shape, backend):
    x = torch.zeros(64, 96)
    x[0, 5], x[3, 40], x[33, 70] = math.nan, math.inf, -math.inf
    x[32:, :32] = 1.0
    for axis in (-1, -2) if block_shape[0] == 1 else (-1,):
        q = quantize(x, block_shape=block_shape, axis=axis, backend=backend)
        same_bytes(q, quantize(x, block_shape=block_shape, axis=axis, backend="reference"))
        y = q.dequantize(torch.float32, backend=backend)
        bad = q.scales == 255
        assert int(bad.sum()) == 3 and int((q.scales == 0).sum()) > 0
        lengths = [32 if axis == -2 or block_shape[0] == 32 else 1, 32 if axis == -1 else 1]
        spread = bad.repeat_interleave(lengths[0], 0).repeat_interleave(lengths[1], 1)
        assert torch.equal(y.isnan(), spread) and torch.equal(y[~spread], x[~spread])
        assert (q.codes[spread] == 0x7F).all()


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
@settings(max_examples=40 if os.environ.get("TRITON_INTERPRET") else 120, deadline=None, database=None)
@given(data=st.data())
def test_shapes_strides_axes_and_formats_equal_the_reference(backend, data):
    sizes = st.lists(st.integers(0, 70), min_size=1, max_size=4)
    shape = data.draw(sizes.filter(lambda sizes: math.prod(sizes) < 30000), "shape")
    name = data.draw(st.sampled_from(list(ELEMENT_FORMATS)), "format")
    blocks = [b for b, scale in SCALE_FORMATS.items() if scale == "E8M0" or ELEMENT_FORMATS[name].bits == 8]
    block_shape = data.draw(st.sampled_from([b for b in blocks if len(shape) > 1 or b[0] == 1]), "block")
    axis = data.draw(st.integers(-len(shape), len(shape) - 1), "axis")
    rule = data.draw(st.sampled_from(SCALE_RULES), "rule")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float16]), "dtype")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), "seed"))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-30, 10, shape, generator=generator).float())
    special = data.draw(st.sampled_from([0.0, math.nan, math.inf]), "special")
    x = x.masked_fill(torch.rand(shape, generator=generator) < 0.02, special)
    x = x.to(dtype).permute(data.draw(st.permutations(range(len(shape))), "permutation"))
    if data.draw(st.booleans(), "every second"):
        x = x[..., ::2]

    options = {"element_format": name, "block_shape": block_shape, "scale_rule": rule}
    q, expected = (quantize(x, axis=axis, **options, backend=b) for b in (backend, "reference"))
    same_bytes(q, expected)
    for out in (torch.float32, torch.bfloat16):
        same_numbers(q.dequantize(out, backend=backend), expected.dequantize(out, backend="reference"))
    if x.ndim > 1:
        both = quantize_dual_axis(x, **options, backend=backend)
        for one, along in zip(both, (-1, -2)):
            same_bytes(one, quantize(x, axis=along, **options, backend="reference"))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bytes(threads):
    if "cpu" not in BACKENDS:
        pytest.skip("the cpu backend cannot run here")
    x = torch.randn(5, 170, 1100, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        rows, columns = quantize_dual_axis(x, backend="cpu")
        y = columns.dequantize(torch.float32, backend="cpu")
    finally:
        torch.set_num_threads(before)
    same_bytes(rows, quantize(x, backend="reference"))
    same_bytes(columns, quantize(x, axis=-2, backend="reference"))
    same_numbers(y, columns.dequantize(torch.float32, backend="reference"))


def test_python_threads_share_a_loop_too():
    """Where torch's own OpenMP threads cannot be had; each counts chunks of 3 until none is left."""
    if "cpu" not in BACKENDS:
        pytest.skip("the cpu backend cannot run here")
    from fsdp2.quantization.kernels import cpu_numba, cpu_threads

    codes = torch.arange(256, dtype=torch.uint8).repeat(1000, 1)
    scales = torch.randint(100, 150, (1000, 8), dtype=torch.uint8)
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    loop = cpu_numba.dequantize_loop(np.uint8, np.uint16)
    addresses = codes.data_ptr(), scales.data_ptr(), out.data_ptr()
    words = 0, 3, 32, *addresses, 1, 1000, 256, 1, 32, 3, 7, 8, 0x7E  # 32 units of 32 rows; E4M3
    cpu_threads.run_on_python_threads(loop, 3, (ctypes.c_int64 * len(words))(*words))
    q = MXTensor(codes, scales, "E4M3", (1, 32), -1, codes.shape)
    same_numbers(out, q.dequantize(torch.bfloat16, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_is_rounded_to_bf16_first(backend):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    same_bytes(quantize(x, backend=backend), quantize(x.to(torch.bfloat16), backend=backend))


def test_wrapped_planes_are_not_copied():
    q = quantize(torch.randn(32, 64))
    wrapped = MXTensor(q.codes, q.scales, q.element_format, q.block_shape, q.axis, q.shape)
    assert wrapped.codes.data_ptr() == q.codes.data_ptr() and q.nbytes == 32 * 64 + 64
    same_numbers(wrapped.dequantize(torch.bfloat16), q.dequantize(torch.bfloat16))


def test_storage_of_quantized_tensors_can_be_resized():
    """FSDP2 frees gathered weights by resizing their storage to nothing; a numpy view would forbid it."""
    x = torch.randn(32, 64)
    q = quantize(x, backend="cpu") if "cpu" in BACKENDS else quantize(x)
    y = q.dequantize(torch.float32)
    for tensor in (x, q.codes, q.scales, y):
        tensor.untyped_storage().resize_(0)


def test_misuse_says_what_can_be():
    x = torch.randn(32, 32)
    for wrong, words in [
        ({"element_format": "E4M4"}, "did you mean 'E4M3'"),
        ({"element_format": "hif8"}, "HiFloat8"),
        ({"scale_rule": "flor"}, "did you mean 'floor'"),
        ({"block_shape": (1, 16)}, "(1, 32)"),
        ({"backend": "cup"}, "did you mean 'cpu'"),
    ]:
        with pytest.raises(ConfigurationError) as refusal:
            quantize(x, **wrong)
        assert words in str(refusal.value)
    with pytest.raises(ConfigurationError, match="'npu' cannot run here: it takes NPU tensors, this one is on cpu"):
        quantize(x, backend="npu")
    with pytest.raises(ConfigurationError, match=r"'cpu' cannot run here: .*on meta"):
        quantize(x.to("meta"), backend="cpu")
    assert quantize(x.to("meta")).scales.shape == (32, 1)  # the reference takes any device
    with pytest.raises(TypeError, match="int64"):
        quantize(torch.ones(32, dtype=torch.int64))
    with pytest.raises(IndexError, match="axis 2"):
        quantize(x, axis=2)
