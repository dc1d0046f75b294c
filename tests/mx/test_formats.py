"""fp6 and fp4, and every format in every block size: tables by hand, a model in fractions, the oracle, the kernels."""

import math

import pytest
import torch

from tests.combinations import combinations
from tests.mx.blocks import (
    DEVICE,
    DTYPES,
    ELEMENTS,
    EVERY,
    MODES,
    NARROW,
    PACKED,
    assert_same_bytes,
    code_values,
    codes_of,
    every_exponent,
    every_tie,
    in_every_lane,
    model_block,
    random_bits,
    special_values,
    structured,
)
from triton_ep import MXTensor
from triton_ep.errors import InputError
from triton_ep.mx import arithmetic
from triton_ep.mx.formats import ALL_FORMATS, ScalingMode, elem_format
from triton_ep.ops import mx_formats as ops
from triton_ep.reference import mxfp8 as reference

pytestmark = pytest.mark.plain

BLOCK_SIZES = (16, 32, 64, 128)

# Values of the codes without sign, from 0 up.
VALUES = {
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "e2m3": [
        *(0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875),
        *(1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875),
        *(2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75),
        *(4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5),
    ],
    "e3m2": [
        *(0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375),
        *(0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 1.75),
        *(2, 2.5, 3, 3.5, 4, 5, 6, 7),
        *(8, 10, 12, 14, 16, 20, 24, 28),
    ],
}

# A value halfway between two elements rounds to the even code; values above the largest round to the largest.
ROUNDED = {
    "e2m1": {0.25: 0, 0.2500001: 0.5, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4, 5.0000005: 6, 7: 6, 1e30: 6},
    "e2m3": {0.0625: 0, 0.1875: 0.25, 0.9375: 1, 1.0625: 1, 1.9375: 2, 2.125: 2, 4.25: 4, 4.75: 5, 7.25: 7, 9: 7.5},
    "e3m2": {0.03125: 0, 0.09375: 0.125, 0.21875: 0.25, 0.5625: 0.5, 3.75: 4, 9: 8, 11: 12, 26: 24, 26.000002: 28},
}


@pytest.mark.parametrize("elem", VALUES)
def test_values_of_every_code(elem: str) -> None:
    """Tables by hand equal the definition of a small float, the oracle, torch arithmetic and the kernel."""
    expected = [*VALUES[elem], *(-float(value) for value in VALUES[elem])]
    assert code_values(elem).tolist() == expected
    assert reference.positive_values(NARROW[elem]) == VALUES[elem]
    fmt = elem_format(NARROW[elem])
    codes = torch.arange(len(expected), dtype=torch.int32).to(torch.uint8)
    assert arithmetic.decode(codes, fmt).tolist() == expected
    padded = codes.repeat(16)[: 16 * len(expected)].view(-1, 16).to(DEVICE)
    one = torch.full((len(padded), 1), 127, dtype=torch.uint8, device=DEVICE)
    values = ops.dequantize(padded, one, NARROW[elem], torch.float32, block_size=16)
    assert values.flatten().tolist()[: len(expected)] == expected
    assert [math.copysign(1, value) for value in values.flatten().tolist()[: len(expected)]] == [
        math.copysign(1, value) for value in expected
    ]
    largest, bits = expected[len(expected) // 2 - 1], (len(expected) - 1).bit_length()
    assert (fmt.max_pos, fmt.bits, 2**fmt.max_pow2 <= largest < 2 ** (fmt.max_pow2 + 1)) == (largest, bits, True)


@pytest.mark.parametrize("elem", ROUNDED)
def test_ties_go_to_the_even_code(elem: str) -> None:
    """At scale 1, which the largest element of the block sets; -0 keeps its sign."""
    fmt, table = elem_format(NARROW[elem]), ROUNDED[elem]
    given = torch.tensor([*table, *(-value for value in table), -0.0])
    wanted = [*table.values(), *(-value for value in table.values()), -0.0]
    codes = arithmetic.encode(given, fmt)
    assert arithmetic.decode(codes, fmt).tolist() == wanted
    assert codes[-1] == 1 << (fmt.bits - 1)
    inside = given[given.abs() <= fmt.max_pos]
    block = torch.nn.functional.pad(torch.cat([torch.tensor([fmt.max_pos]), inside]), (0, 31 - len(inside)))
    by_kernel, scale = ops.quantize(block[None].to(DEVICE), NARROW[elem])
    assert scale.item() == 127
    assert torch.equal(by_kernel[0, 1 : len(inside) + 1].cpu(), arithmetic.encode(inside, fmt))


# (format, mode, the only non-zero value of the block, its scale byte, its code)
BIGGEST = (2 - 2**-23) * 2.0**127
TABLE = [
    ("e2m1", "rceil", 0.0, 0, 0x0),
    ("e2m1", "rceil", -0.0, 0, 0x8),
    ("e2m1", "rceil", 1.0, 125, 0x6),  # 1 / 6 is above 2**-3: 2**-2, 4
    ("e2m1", "rceil", 6.0, 127, 0x7),
    ("e2m1", "rceil", 6.0000005, 128, 0x5),  # one float32 above: the next scale, 3
    ("e2m1", "rceil", -7.0, 128, 0xE),  # 3.5: a tie of 3 and 4
    ("e2m1", "floor", 1.0, 125, 0x6),
    ("e2m1", "floor", 7.9, 127, 0x7),  # saturates
    ("e2m1", "ceil", 5.0, 128, 0x4),  # 2.5: a tie of 2 and 3
    ("e2m1", "even", 1.75, 126, 0x6),  # rounds up to 2
    ("e2m1", "even", 1.7499999, 125, 0x7),
    ("e2m1", "even", BIGGEST, 255, 0x7),
    ("e2m1", "floor", BIGGEST, 252, 0x7),
    ("e2m1", "rceil", 2.0**-149, 0, 0x0),
    ("e2m1", "rceil", math.inf, 255, 0x7),
    ("e2m1", "ceil", math.nan, 255, 0x7),
    ("e2m3", "rceil", 7.5, 127, 0x1F),
    ("e2m3", "rceil", 1.0, 125, 0x18),  # 1 / 7.5 is above 2**-3: 2**-2, 4
    ("e2m3", "floor", -7.9, 127, 0x3F),
    ("e2m3", "ceil", 7.5, 128, 0x17),  # 3.75
    ("e2m3", "even", 1.9375, 126, 0x18),
    ("e2m3", "even", 1.9374999, 125, 0x1F),
    ("e2m3", "floor", -math.inf, 255, 0x1F),
    ("e3m2", "rceil", 28.0, 127, 0x1F),
    ("e3m2", "rceil", 28.000002, 128, 0x1B),  # 14
    ("e3m2", "floor", 31.0, 127, 0x1F),
    ("e3m2", "ceil", 20.0, 128, 0x19),  # 10
    ("e3m2", "even", 1.875, 124, 0x1C),
    ("e3m2", "even", 1.8749999, 123, 0x1F),
    ("e3m2", "even", math.nan, 255, 0x1F),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("elem", NARROW)
def test_scales_worked_out_by_hand(elem: str, mode: str) -> None:
    """Oracle, torch arithmetic and kernel agree; a NaN or an infinity makes the whole block NaN."""
    rows = [row[2:] for row in TABLE if row[:2] == (elem, mode)]
    x, fmt = torch.cat([in_every_lane(value) for value, _, _ in rows]), elem_format(NARROW[elem])
    results = (
        reference.quantize(x, NARROW[elem], mode),
        arithmetic.quantize(x, fmt, ScalingMode(mode), 32),
        ops.quantize(x.to(DEVICE), NARROW[elem], mode),
    )
    for codes, scales in results:
        for (value, scale, code), got, got_scales in zip(rows, codes.split(32), scales.split(32), strict=True):
            assert got_scales.flatten().tolist() == [scale] * 32, value
            assert got.diagonal().tolist() == [code] * 32, value
    values = MXTensor.to_mx(x.to(DEVICE), NARROW[elem], scaling_mode=mode).dequantize()
    for (value, scale, _), got in zip(rows, values.split(32), strict=True):
        assert got.isnan().all() == (scale == 255), value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("elem", NARROW)
def test_reference_is_the_model_in_fractions(elem: str, mode: str) -> None:
    """Special values, ties, exponents and random bits, a few dozen blocks of each."""
    dtype = DTYPES[("bf16", "fp16", "fp32")[MODES.index(mode) % 3]]
    edges = every_exponent()
    x = torch.cat([special_values(), every_tie(elem), edges[:: len(edges) // 75], random_bits(1024, dtype, 3)])
    x = x.to(dtype)
    codes, scales = reference.quantize(x, NARROW[elem], mode)
    for block, got_codes, got_scale in zip(x, codes.tolist(), scales.tolist(), strict=True):
        scale, bits = model_block(block, elem, mode)
        assert (got_scale, got_codes) == ([scale], bits), block


def _in_float32_and_another(elem: str, mode: str, dtype: torch.dtype) -> bool:
    """For CPUs: every format and mode in float32 and one of the 16-bit dtypes, each of which meets every mode."""
    turn = list(NARROW).index(elem) + MODES.index(mode)
    return dtype in (torch.float32, (torch.bfloat16, torch.float16)[turn % 2])


@pytest.mark.parametrize(
    ("elem", "mode", "dtype"),
    combinations(list(NARROW), MODES, list(DTYPES.values()), on_cpu=_in_float32_and_another),
)
def test_torch_arithmetic_is_the_reference(elem: str, mode: str, dtype: torch.dtype) -> None:
    """Every structured block and 2**15 random values, quantised and dequantised. A million blocks on a GPU: below."""
    x = torch.cat([structured(elem, dtype), random_bits(1 << 15, dtype, seed=1)])
    codes, scale = reference.quantize(x, NARROW[elem], mode)
    fmt = elem_format(NARROW[elem])
    got_codes, got_scale = arithmetic.quantize(x, fmt, ScalingMode(mode), 32)
    assert_same_bytes(got_scale, scale, "scales")
    assert_same_bytes(got_codes, codes, "elements")
    back = arithmetic.dequantize(codes, scale, dtype, fmt)
    expected = reference.dequantize(codes, scale, dtype, NARROW[elem])
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("elem", EVERY)
def test_kernels_are_the_torch_arithmetic(elem: str, block_size: int) -> None:
    """Rows and columns, quantised and dequantised, in every format and block size; modes and dtypes rotate."""
    fmt, turn = elem_format(EVERY[elem]), list(EVERY).index(elem) + BLOCK_SIZES.index(block_size)
    edges = every_exponent()
    for step in range(2):
        mode = MODES[(turn + 2 * step) % 4]
        dtype = list(DTYPES.values())[(turn + step) % 3]
        x = torch.cat(
            [special_values(), every_tie(elem), edges[turn :: len(edges) // 100], random_bits(2048, dtype, turn)]
        )
        x = x[: len(x) // 12 * 12].reshape(-1, 3 * 128).to(dtype)
        codes, scale = arithmetic.quantize(x, fmt, ScalingMode(mode), block_size)
        values = arithmetic.dequantize(codes, scale, dtype, fmt)
        form = {"block_size": block_size}
        by_rows = ops.quantize(x.to(DEVICE), EVERY[elem], mode, **form)
        by_columns = ops.quantize(x.t().contiguous().to(DEVICE), EVERY[elem], mode, dim=-2, **form)
        for got_codes, got_scale in (by_rows, tuple(part.view(torch.uint8).t().contiguous() for part in by_columns)):
            assert_same_bytes(got_scale.cpu(), scale, f"scales, {mode} {dtype}")
            assert_same_bytes(got_codes.view(fmt.storage).cpu(), codes, f"elements, {mode} {dtype}")
        back = ops.dequantize(*by_rows, EVERY[elem], dtype, **form)
        back_by_columns = ops.dequantize(*by_columns, EVERY[elem], dtype, dim=-2, **form)
        for got in (back, back_by_columns.t()):
            torch.testing.assert_close(got.cpu(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("elem", [*NARROW, "e2m1_x2"])
def test_every_scale_and_code_is_dequantised(elem: str) -> None:
    """All 256 scales times all codes, in every dtype, by oracle, torch arithmetic and kernels; 255 is NaN."""
    fmt, codes = elem_format(EVERY[elem]), torch.arange(256, dtype=torch.int32).to(torch.uint8)
    if elem != "e2m1_x2":
        codes = (codes % (1 << fmt.bits)).unique().repeat(256 >> fmt.bits)
    qdata, scale = codes.repeat(256, 1), torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None]
    exact = code_values(elem).double()[codes_of(qdata, elem).long()]
    scale = scale.expand(256, exact.shape[1] // 32).contiguous()
    powers = torch.tensor([2.0 ** (s - 127) for s in range(255)] + [math.nan], dtype=torch.float64)
    for dtype in DTYPES.values():
        expected = (powers[:, None] * exact).float().to(dtype)
        by_columns = ops.dequantize(qdata.t().contiguous().to(DEVICE), scale.t().to(DEVICE), EVERY[elem], dtype, dim=-2)
        for got in (
            reference.dequantize(qdata, scale, dtype, EVERY[elem]),
            arithmetic.dequantize(qdata, scale, dtype, fmt),
            ops.dequantize(qdata.to(DEVICE), scale.to(DEVICE), EVERY[elem], dtype).cpu(),
            by_columns.t().cpu(),
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_size", [1, 4, *BLOCK_SIZES])
def test_signal_to_noise(block_size: int) -> None:
    """Normally distributed values: 18 dB in e4m3, 13 dB in every other format, in every mode."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16).to(DEVICE)
    for elem, elem_dtype in EVERY.items():
        for mode in MODES if block_size % 2 == 0 or elem != "e2m1_x2" else ():
            mx = MXTensor.to_mx(x, elem_dtype, block_size, mode)
            error = mx.dequantize(torch.float32) - x.float()
            least = 18 if elem == "e4m3" else 13
            assert 20 * torch.log10(x.float().norm() / error.norm()) >= least, (elem, mode)


def test_packed_elements_are_pairs() -> None:
    """The even element is in the low half of a byte; pairs lie along the blocks, whatever their dimension."""
    x = torch.tensor([1.0, -2.0, 3.0, 6.0] * 8)
    for shape, dim in (((32,), -1), ((2, 32), -1), ((32, 3), 0), ((32, 2, 2), -3)):
        value = x.view([32 if d == dim % len(shape) else 1 for d in range(len(shape))]).expand(shape).to(DEVICE)
        mx = MXTensor.to_mx(value, PACKED, block_dim=dim)
        pairs = mx.qdata.movedim(dim, -1)
        assert (mx.shape, pairs.shape[-1]) == (shape, 16)
        assert pairs.reshape(-1, 2)[0].tolist() == [0xC2, 0x75]
        assert torch.equal(mx.dequantize(), value)
        single = MXTensor.to_mx(value, "fp4_e2m1", block_dim=dim)
        assert single.qdata.movedim(dim, -1).reshape(-1, 4)[0].tolist() == [0x2, 0xC, 0x5, 0x7]
        assert torch.equal(single, mx)
    typed = mx.qdata.view(PACKED)
    assert torch.equal(MXTensor.from_qdata_and_scales(typed, mx.scale, mx.dtype, block_dim=-3), mx)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 64), (64, 0)])
@pytest.mark.parametrize("dim", [-1, -2])
def test_nothing(shape: tuple[int, ...], dim: int) -> None:
    """Empty tensors give empty tensors."""
    x = torch.empty(shape, device=DEVICE)
    if shape[dim] % 32 == 0:
        mx = MXTensor.to_mx(x, PACKED, block_dim=dim)
        codes, scale = ops.quantize(x, PACKED, dim=dim)
        assert (mx.shape, mx.dequantize().shape) == (shape, shape)
        assert ops.dequantize(codes, scale, PACKED, dim=dim).shape == shape
        assert (codes.shape, scale.shape) == (mx.qdata.shape, mx.scale.shape)


def test_formats_by_any_name() -> None:
    """torch's dtype, its name, or the specification's name; the table has one entry per format."""
    assert [elem_format(fmt.dtype) for fmt in ALL_FORMATS] == list(ALL_FORMATS)
    for name in ("e2m3", "fp6_e2m3"):
        assert elem_format(name).dtype == "fp6_e2m3"
    assert elem_format("e4m3") is elem_format("fp8_e4m3") is elem_format("torch.float8_e4m3fn")
    assert elem_format("torch.float4_e2m1fn_x2").per_byte == 2
    assert [fmt.name for fmt in ALL_FORMATS] == list(EVERY)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: ops.quantize(x, "fp6"), "elem_dtype is fp6; choose one of.*'fp6_e2m3'"),
        (lambda x: ops.quantize(x, PACKED, block_size=8), "block_size is 8; the kernels know 16, 32, 64, 128"),
        (
            lambda x: ops.quantize(x, PACKED, block_size=128),
            r"\[32, 64\]; its dimension -1 must be a multiple of.* 128",
        ),
        (lambda x: ops.quantize(x, PACKED, dim=0), "dimension 0"),
        (lambda x: ops.quantize(x.double(), PACKED), "float64"),
        (lambda x: ops.quantize(x, PACKED, "nearest"), "nearest"),
        (lambda x: ops.dequantize(x, x, PACKED), "must be torch.uint8"),
        (lambda x: ops.dequantize(*ops.quantize(x, PACKED), PACKED, block_size=16), r"it must be \[32, 4\]"),
        (lambda x: ops.dequantize(*ops.quantize(x, PACKED), PACKED, torch.int8), "int8"),
        (lambda x: MXTensor.to_mx(x, PACKED, 1), "an even number"),
        (lambda x: MXTensor.from_qdata_and_scales(x.byte(), x.byte(), x.dtype), "elem_dtype is torch.uint8"),
        (
            lambda x: MXTensor.from_qdata_and_scales(x.byte(), x.byte(), x.dtype, elem_dtype=PACKED),
            "2 elements per byte",
        ),
    ],
)
def test_mistakes_are_named(call, text: str) -> None:
    """Invalid formats, block sizes, shapes and dtypes."""
    with pytest.raises(InputError, match=text):
        call(torch.zeros(32, 64, device=DEVICE))


# --- a million blocks -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("elem", EVERY)
def test_a_million_random_blocks_per_mode_on_a_gpu(elem: str, dtype: torch.dtype) -> None:
    """2**20 random and all structured blocks of 32: torch arithmetic and kernels give the oracle's bytes and values."""
    blocks = [random_bits(1 << 25, dtype, seed=29, device="cuda"), structured(elem, dtype).cuda()]
    x = torch.cat(blocks)
    x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 128))
    fmt = elem_format(EVERY[elem])
    for mode in MODES:
        codes, scale = reference.quantize(x, EVERY[elem], mode)
        by_torch = arithmetic.quantize(x, fmt, ScalingMode(mode), 32)
        by_kernel = ops.quantize(x, EVERY[elem], mode)
        for name, (got_codes, got_scale) in (("torch", by_torch), ("kernel", by_kernel)):
            assert_same_bytes(got_scale, scale, f"scales of {name}, {mode}")
            assert_same_bytes(got_codes, codes, f"elements of {name}, {mode}")
    expected = reference.dequantize(codes, scale, dtype, EVERY[elem])
    for values in (arithmetic.dequantize(codes, scale, dtype, fmt), ops.dequantize(codes, scale, EVERY[elem], dtype)):
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("elem", EVERY)
def test_a_million_random_blocks_of_columns_on_a_gpu(elem: str) -> None:
    """Blocks of 32 rows, and of 16, 64 and 128 in both directions, each in a different mode and dtype."""
    fmt = elem_format(EVERY[elem])
    for turn, block_size in enumerate(BLOCK_SIZES):
        dtype, mode = list(DTYPES.values())[turn % 3], MODES[turn]
        x = random_bits(1 << 25, dtype, seed=turn, device="cuda").view(-1, 4096)
        codes, scale = reference.quantize(x, EVERY[elem], mode, block_size)
        by_rows = ops.quantize(x, EVERY[elem], mode, block_size=block_size)
        by_columns = ops.quantize(x.t().contiguous(), EVERY[elem], mode, block_size=block_size, dim=-2)
        for name, got in (
            ("rows", by_rows),
            ("columns", [part.view(torch.uint8).t().contiguous() for part in by_columns]),
        ):
            assert_same_bytes(got[1], scale, f"scales of {name}, {mode}")
            assert_same_bytes(got[0].view(fmt.storage), codes, f"elements of {name}, {mode}")
        values = ops.dequantize(*by_columns, EVERY[elem], dtype, block_size=block_size, dim=-2)
        expected = reference.dequantize(codes, scale, dtype, EVERY[elem])
        torch.testing.assert_close(values.t(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts() -> None:
    """The last blocks of 2**31 + 2**21 elements are quantised correctly, along rows and columns."""
    x = torch.zeros((2**31 + 2**21) // 4096, 4096, dtype=torch.bfloat16, device="cuda")
    x[-64:] = torch.randn(64, 4096, device="cuda")
    for dim in (-1, -2):
        tail = x[-64:] if dim == -1 else x[-64:].t().contiguous()
        codes, scale = reference.quantize(tail, PACKED)
        codes, scale = (codes, scale) if dim == -1 else (codes.t().contiguous(), scale.t().contiguous())
        got_codes, got_scale = ops.quantize(x, PACKED, dim=dim)
        assert_same_bytes(got_codes[-len(codes) :], codes, f"elements along {dim}")
        assert_same_bytes(got_scale[-len(scale) :], scale, f"scales along {dim}")
        values = ops.dequantize(got_codes, got_scale, PACKED, dim=dim)
        assert torch.equal(values[-64:], ops.dequantize(codes, scale, PACKED, dim=dim))


def test_mxfp8_kernels_agree() -> None:
    """The kernels for any format give the same bytes as the MXFP8 kernels."""
    from triton_ep.ops import mxfp8

    x = torch.cat([special_values(), random_bits(2048, torch.float32, 5)]).to(DEVICE)
    for elem_dtype in ELEMENTS.values():
        for got, want in zip(ops.quantize(x, elem_dtype), mxfp8.quantize_rows(x, elem_dtype), strict=True):
            assert_same_bytes(got, want, str(elem_dtype))
