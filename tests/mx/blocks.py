"""Blocks that are hard to quantise, and a scalar model of the rules in exact fractions.

The model shares nothing with the oracle, the torch arithmetic or the kernels: no floats beyond its inputs, no
bit tricks, no cast of torch.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from triton_ep.runtime.launch import INTERPRETING

DEVICE = "cpu" if INTERPRETING else "cuda"
"""Device on which the kernels of this process run."""

BLOCK = 32
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""Elements of MXFP8."""
NARROW = {"e2m3": "fp6_e2m3", "e3m2": "fp6_e3m2", "e2m1": "fp4_e2m1"}
"""The other MX elements, one per byte."""
PACKED = torch.float4_e2m1fn_x2
EVERY: dict[str, Any] = {**ELEMENTS, **NARROW, "e2m1_x2": PACKED}
"""All formats of MXTensor, by name."""
MODES = ("rceil", "floor", "ceil", "even")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Format:
    """A small binary float: mantissa bits, exponent of the smallest normal number, largest value, bits, its NaN."""

    mbits: int
    min_exponent: int
    largest: Fraction
    bits: int = 8
    nan: int = 0x7F


E4M3 = Format(3, -6, Fraction(448))
E5M2 = Format(2, -14, Fraction(57344))
FP32 = Format(23, -126, Fraction(2**24 - 1) * 2**104)
E2M1 = Format(1, 0, Fraction(6), 4, 0x7)
FORMATS = {
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e2m3": Format(3, 0, Fraction(15, 2), 6, 0x1F),
    "e3m2": Format(2, -2, Fraction(28), 6, 0x1F),
    "e2m1": E2M1,
    "e2m1_x2": E2M1,
}


def floor_log2(value: Fraction) -> int:
    """Largest p with 2**p <= value."""
    p = value.numerator.bit_length() - value.denominator.bit_length()
    while Fraction(2) ** p > value:
        p -= 1
    while Fraction(2) ** (p + 1) <= value:
        p += 1
    return p


def ceil_log2(value: Fraction) -> int:
    """Smallest p with 2**p >= value."""
    p = floor_log2(value)
    return p if Fraction(2) ** p == value else p + 1


def steps(value: Fraction, fmt: Format) -> tuple[int, int]:
    """(n, p): n * 2**p is the number of the format nearest to a value >= 0, ties to even; it may be too large."""
    if value == 0:
        return 0, fmt.min_exponent - fmt.mbits
    p = max(floor_log2(value), fmt.min_exponent) - fmt.mbits
    return round(value / Fraction(2) ** p), p  # Python rounds ties of a Fraction to even


def round_to(value: Fraction, fmt: Format) -> Fraction:
    """The nearest number of the format, as a fraction, without saturation."""
    n, p = steps(value, fmt)
    return n * Fraction(2) ** p


def element_bits(value: Fraction, negative: bool, fmt: Format) -> int:
    """Bits of the nearest element, saturating."""
    nearest = min(round_to(value, fmt), fmt.largest)
    n, p = steps(nearest, fmt)
    # Subnormal numbers have exponent field 0 and no leading 1; above them, bits count up with the value.
    field = (p + fmt.mbits - fmt.min_exponent + 1) if n >= 1 << fmt.mbits else 0
    mantissa = n - (1 << fmt.mbits) if field else n
    return negative << (fmt.bits - 1) | field << fmt.mbits | mantissa


def scale_byte(amax: Fraction, fmt: Format, mode: str) -> int:
    """Scale byte of a block of finite values."""
    top = floor_log2(fmt.largest)
    if mode == "rceil":
        quotient = round_to(amax * round_to(1 / fmt.largest, FP32), FP32)
        exponent = ceil_log2(quotient) if quotient else -127
    elif amax == 0:
        exponent = -127
    elif mode == "floor":
        exponent = floor_log2(amax) - top
    elif mode == "ceil":
        exponent = ceil_log2(amax) - top
    else:
        step = Fraction(2) ** (floor_log2(amax) - fmt.mbits)
        rounded = (amax / step + Fraction(1, 2)).__floor__() * step
        if rounded >= 2**128:
            return 255
        exponent = floor_log2(rounded) - top
    return max(exponent, -127) + 127


def model_block(values: torch.Tensor, elem: str, mode: str) -> tuple[int, list[int]]:
    """Scale byte and element bits of one block [n], by the rules."""
    fmt = FORMATS[elem]
    if not values.isfinite().all():
        return 255, [fmt.nan] * len(values)
    exact = [abs(Fraction(value)) for value in values.double().tolist()]
    negative = values.double().signbit().tolist()
    scale = scale_byte(max(exact), fmt, mode)
    if scale == 255:
        return 255, [fmt.nan] * len(values)
    factor = Fraction(2) ** (127 - scale)
    return scale, [element_bits(value * factor, sign, fmt) for value, sign in zip(exact, negative, strict=True)]


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Float32 of bit patterns given as int64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


# Float32 mantissas at which a rule's result changes, and their neighbours: powers of two, 1.75 (the largest elements of
# fp8 and e3m2), 1.875 (e2m3) and 1.5 (e2m1), the points from which EVEN rounds up to the next power of two, the middle
# of subnormal numbers.
_EDGES = (0, 0x400000, 0x600000, 0x780000, 0x700000, 0x7FFFFF)
_MANTISSAS = sorted({(edge + delta) & 0x7FFFFF for edge in _EDGES for delta in (-2, -1, 0, 1, 2)})
# The same for the dtypes of 16 bits, whose lowest bit is bit 16 (bf16) or 13 (fp16) of a float32.
_COARSE = {(edge + delta * unit) & 0x7FFFFF for edge in _EDGES for delta in (-1, 0, 1) for unit in (1 << 16, 1 << 13)}


def _with_tail(amax_bits: torch.Tensor) -> torch.Tensor:
    """[n, 32] float32: each block has its largest magnitude in a different lane, smaller values elsewhere."""
    generator = torch.Generator().manual_seed(len(amax_bits))
    n = len(amax_bits)
    drop = torch.randint(0, 24, (n, BLOCK), generator=generator) << 23
    # Few mantissa bits, so that many values are exactly between two elements.
    mantissa = torch.randint(0, 1 << 5, (n, BLOCK), generator=generator) << 18
    nudge = torch.randint(-1, 2, (n, BLOCK), generator=generator)
    smaller = ((amax_bits[:, None] & 0x7F800000) - drop + mantissa + nudge).clamp(min=0)
    smaller = torch.minimum(smaller, amax_bits[:, None])
    lane = torch.arange(n) % BLOCK
    smaller[torch.arange(n), lane] = amax_bits
    sign = torch.randint(0, 2, (n, BLOCK), generator=generator) << 31
    return from_bits(smaller | sign)


def every_exponent() -> torch.Tensor:
    """[n, 32] float32: largest magnitudes of every exponent, including subnormals, with every edge mantissa."""
    exponents = torch.arange(255, dtype=torch.int64) << 23
    mantissas = torch.tensor(sorted({*_MANTISSAS, *_COARSE}), dtype=torch.int64)
    return _with_tail((exponents[:, None] | mantissas[None, :]).flatten())


def code_values(elem: str) -> torch.Tensor:
    """[2**bits] float32 values of all codes of a format, by the definition of a small float; NaN if it has one."""
    fmt = FORMATS[elem]
    if fmt.bits == 8:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(ELEMENTS[elem]).float()
    positive = []
    for code in range(1 << (fmt.bits - 1)):
        field, mantissa = divmod(code, 1 << fmt.mbits)
        leading = Fraction(mantissa, 1 << fmt.mbits) + (field > 0)
        positive.append(float(leading * Fraction(2) ** (fmt.min_exponent + max(field - 1, 0))))
    return torch.tensor(positive + [-value for value in positive])


def every_tie(elem: str) -> torch.Tensor:
    """[n, 32] float32: every element of a format, the midpoint to the next one, and the neighbours of both.

    One value of each block is the largest element, so that the scale is 1 (CEIL: 1 or 2).
    """
    values = code_values(elem)
    values = values[values.isfinite()].unique()  # sorted
    points = torch.cat([values, (values[:-1] + values[1:]) / 2])
    points = torch.cat([points, points.nextafter(torch.tensor(torch.inf)), points.nextafter(torch.tensor(-torch.inf))])
    points = points[points.abs() <= float(FORMATS[elem].largest)]
    points = torch.nn.functional.pad(points, (0, -len(points) % (BLOCK - 1))).view(-1, BLOCK - 1)
    return torch.cat([torch.full((len(points), 1), float(FORMATS[elem].largest)), points], dim=1)


def special_values() -> torch.Tensor:
    """[n, 32] float32: zeros of both signs, subnormals alone and next to others, many NaN bit patterns, infinities."""
    ordinary = torch.linspace(-3, 3, BLOCK)
    tiny = 2.0**-149
    blocks = [torch.zeros(BLOCK), -torch.zeros(BLOCK), ordinary, torch.full((BLOCK,), tiny), ordinary * 2.0**-126]
    for bits in (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F810000, 0x7FFFFFFF, 0xFFFFFFFF):
        for lane in (0, 13, BLOCK - 1):
            block = ordinary.clone()
            block[lane] = from_bits(torch.tensor([bits]))
            blocks.append(block)
        blocks.append(from_bits(torch.full((BLOCK,), bits)))
    for magnitude in (tiny, 2.0**-127, 2.0**-126, 1.1754942e-38, 65504.0, 3.4028234e38, 3.3895314e38):
        block = torch.zeros(BLOCK)
        block[5], block[6] = magnitude, -magnitude
        blocks.append(block)
    both = ordinary.clone()
    both[3], both[4] = torch.inf, torch.nan
    return torch.stack([*blocks, both])


def in_every_lane(value: float) -> torch.Tensor:
    """[32, 32] float32: the value in a different lane of each block among zeros; a zero in all lanes, with its sign."""
    return torch.diag(torch.full((BLOCK,), value)) if value != 0 else torch.full((BLOCK, BLOCK), value)


def structured(elem: str, dtype: torch.dtype) -> torch.Tensor:
    """[n, 32] of a dtype: all structured blocks above."""
    return torch.cat([special_values(), every_tie(elem), every_exponent()]).to(dtype)


def random_bits(count: int, dtype: torch.dtype, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[count / 32, 32]: half random bits, half numbers within a block's range of each other."""
    generator = torch.Generator(device).manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    half = count // BLOCK // 2
    wild = from_bits(integers(0, 1 << 32, half, BLOCK))
    exponent = (integers(0, 255, half, 1) - integers(0, 20, half, BLOCK)).clamp(min=0)
    tame = from_bits(integers(0, 2, half, BLOCK) << 31 | exponent << 23 | integers(0, 1 << 23, half, BLOCK))
    return torch.cat([wild, tame]).to(dtype)


def codes_of(qdata: torch.Tensor, elem: str) -> torch.Tensor:
    """Codes, uint8, one per byte, of stored elements."""
    stored = qdata.view(torch.uint8)
    return torch.stack((stored % 16, stored // 16), -1).flatten(-2) if elem == "e2m1_x2" else stored


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal shapes, dtypes and bytes; the message names the first difference."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    got, want = got.view(torch.uint8), want.view(torch.uint8).to(got.device)
    if not torch.equal(got, want):
        wrong = (got != want).nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} differ, first at {first}: {got[first].item():#x}, not {want[first].item():#x}"
        )
