"""Self-test of the fix-ups: interprets small programs and compares their results bit by bit.

Expected bits are written out, not computed, so that the test shares no code with the fix-ups.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from triton_ep.errors import EPError

_LANES = 32

# float32 -> bits: ties to even both ways, a carry into the exponent, subnormals, overflow, infinity, NaN.
_INF, _NAN = float("inf"), float("nan")
_TO_BF16 = {
    1.00390625: 0x3F80,
    1.01171875: 0x3F82,
    1.998046875: 0x4000,
    3.4e38: 0x7F80,
    -0.0: 0x8000,
    _NAN: 0x7FFF,
}
_TO_E4M3 = {127.6: 0x70, 17.0: 0x58, 19.0: 0x5A, 0.0029296875: 0x02, 500.0: 0x7E, -_INF: 0xFE, _NAN: 0x7F}
_TO_E5M2 = {1.125: 0x3C, 1.375: 0x3E, 7.9: 0x48, 2.2888184e-05: 0x02, 1e6: 0x7B, -_INF: 0xFB, _NAN: 0x7F}
# Bits of e4m3 -> is it NaN?
_E4M3_NANS = {0x7E: 0, 0x7F: 1, 0xFE: 0, 0xFF: 1, 0x00: 0}


# The interpreter's executor runs these programs without rewriting them, so assignments must have no plain numbers.
# Each program gets (values [32] float32, out [32] int32, three = 3) and writes all of `out`.


def _to_bf16(values: Any, out: Any, three: Any) -> None:
    i = tl.arange(0, 32)
    bits = tl.load(values + i).to(tl.bfloat16).to(tl.int16, bitcast=True)
    tl.store(out + i, bits.to(tl.int32) & 0xFFFF)


def _to_e4m3(values: Any, out: Any, three: Any) -> None:
    i = tl.arange(0, 32)
    bits = tl.load(values + i).to(tl.float8e4nv).to(tl.int8, bitcast=True)
    tl.store(out + i, bits.to(tl.int32) & 0xFF)


def _to_e5m2(values: Any, out: Any, three: Any) -> None:
    i = tl.arange(0, 32)
    bits = tl.load(values + i).to(tl.float8e5).to(tl.int8, bitcast=True)
    tl.store(out + i, bits.to(tl.int32) & 0xFF)


def _e4m3_nan(values: Any, out: Any, three: Any) -> None:
    i = tl.arange(0, 32)
    number = tl.load(values + i).to(tl.int32).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    tl.store(out + i, (number != number).to(tl.int32))


def _bf16_arithmetic(values: Any, out: Any, three: Any) -> None:
    one = tl.full([32], 1.0, tl.bfloat16)
    number = one + one + 1.0
    tl.store(out + tl.arange(0, 32), (number * number - one).to(tl.int32))


def _bf16_sum(values: Any, out: Any, three: Any) -> None:
    total = tl.sum(tl.full([32], 3.0, tl.bfloat16), 0)
    tl.store(out + tl.arange(0, 32), tl.zeros([32], tl.int32) + total.to(tl.int32))


def _bf16_dot(values: Any, out: Any, three: Any) -> None:
    square = tl.full([32, 32], 3.0, tl.bfloat16)
    tl.store(out + tl.arange(0, 32), tl.sum(tl.dot(square, square), 0).to(tl.int32))


def _dot_scaled(values: Any, out: Any, three: Any) -> None:
    square = tl.full([32, 32], 3.0, tl.float32).to(tl.float8e4nv)
    scale = tl.full([32, 1], 128, tl.uint8)
    product = tl.dot_scaled(square, scale, "e4m3", square, scale, "e4m3")
    tl.store(out + tl.arange(0, 32), tl.sum(product, 0).to(tl.int32))


def _range_of_tensor(values: Any, out: Any, three: Any) -> None:
    i = tl.arange(0, 32)
    tl.store(out + i, tl.zeros([32], tl.int32))
    for _ in range(three):
        tl.store(out + i, tl.load(out + i) + 1)


def _scalar_condition(values: Any, out: Any, three: Any) -> None:
    i = tl.arange(0, 32)
    tl.store(out + i, tl.zeros([32], tl.int32))
    tl.store(out + i, tl.full([32], 1, tl.int32), mask=(i < 32) & (tl.sum(i) > three))


# (fix-up, program, input -> expected). An empty input is zero.
_CHECKS: list[tuple[str, Callable[..., None], dict[float, int]]] = [
    ("float32 to bf16", _to_bf16, _TO_BF16),
    ("float32 to float8 e4m3", _to_e4m3, _TO_E4M3),
    ("float32 to float8 e5m2", _to_e5m2, _TO_E5M2),
    ("NaN of float8 e4m3", _e4m3_nan, {float(bits): is_nan for bits, is_nan in _E4M3_NANS.items()}),
    ("bf16 arithmetic", _bf16_arithmetic, {0.0: 3 * 3 - 1}),
    ("sum of bf16", _bf16_sum, {0.0: 3 * 32}),
    ("tl.dot of bf16", _bf16_dot, {0.0: 9 * 32 * 32}),
    ("tl.dot_scaled", _dot_scaled, {0.0: 6 * 6 * 32 * 32}),
    ("range() of a tensor", _range_of_tensor, {0.0: 3}),
    ("scalar condition in a mask", _scalar_condition, {0.0: 1}),
]


def run() -> None:
    """Interpret every program and compare; raise EPError with the names of all fix-ups that fail."""
    failures = [f"{name}: {text}" for name, program, table in _CHECKS if (text := _failure(program, table))]
    if failures:
        raise EPError(
            f"Triton {triton.__version__} with numpy {np.__version__}: the interpreter computes wrongly. "
            + "; ".join(failures)
            + ". Use Triton 3.6, 3.7 or 3.9 with numpy 1.26 to 2.5, or report this."
        )


def _failure(program: Callable[..., None], table: dict[float, int]) -> str:
    """The failure of one program as text; empty if it is right."""
    values = torch.zeros(_LANES)
    values[: len(table)] = torch.tensor(list(table))
    out = torch.full((_LANES,), -1, dtype=torch.int32)
    try:
        interpreter.GridExecutor(program, ["values", "out", "three"], (1,))(values, out, 3)
    except Exception as error:  # whatever an unknown version of the interpreter raises
        return f"{type(error).__name__}: {error}"
    expected, seen = list(table.values()), out[: len(table)].tolist()
    return "" if seen == expected else f"expected {expected}, seen {seen}"
