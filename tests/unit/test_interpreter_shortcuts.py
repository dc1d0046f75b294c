"""What the interpreter does sooner must be what it did before: every operator on every pair of kinds of operands."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import triton

from triton_ep import interpreter

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are compiled in this process", allow_module_level=True)

interpreter.install()

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter as stock  # noqa: E402

from triton_ep.interpreter import shortcuts  # noqa: E402
from triton_ep.interpreter.narrow import FORMATS  # noqa: E402

DTYPES = (
    *(tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64),
    *(tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e4nv, tl.pointer_type(tl.int32)),
)
SHAPES = ((), (4,), (4, 1), (1, 2), (4, 2))
CONSTANTS = (
    0,
    1,
    -1,
    3,
    200,
    2**31 - 1,
    2**31,
    -(2**31),
    2**40,
    True,
    0.0,
    -0.0,
    0.5,
    float("inf"),
    float("nan"),
    1e-50,
)
VALUES = np.array([3, 1, 0, 7, 2, 5, 1, 6])
CALLS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor_", "shl", "lshr", "ashr", "less_than")
CALLS += ("equal", "greater_equal", "minimum", "maximum", "where")


def _value(dtype: Any, shape: tuple[int, ...]) -> Any:
    """A value as kernels have them, of small numbers that every dtype holds."""
    data = np.resize(VALUES, shape or (1,))
    if dtype.name in FORMATS:
        data = FORMATS[dtype.name].encode(data.astype(np.float32))
    data = data.astype(stock._get_np_dtype(dtype))
    return tl.tensor(stock.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def _call(name: str, left: Any, right: Any) -> Any:
    """What the operation gives: type, elements and their bits; or the kind of its error."""
    semantic = stock.interpreter_semantic
    rest: tuple[Any, ...] = (False,) if name in ("add", "sub", "mul") else ()
    if name in ("minimum", "maximum"):
        rest = (tl.PropagateNan.NONE,)
    try:
        if name == "where":
            condition = _value(tl.int1, SHAPES[-1])
            result = semantic.where(condition, left, right)
        else:
            result = getattr(semantic, name)(left, right, *rest)
    except Exception as error:
        return type(error).__name__
    data = result.handle.data
    bits = np.ascontiguousarray(data).tobytes()
    return str(result.type), str(result.handle.dtype), tuple(result.shape), data.shape, data.dtype.str, bits


def _kinds() -> Iterator[tuple[Any, Any]]:
    """Every dtype with every other one and every constant, on either side; shapes in turn, five of one pair."""
    pairs = product(range(len(DTYPES)), repeat=2)
    for number, (left, right) in enumerate(pairs):
        for turn in range(2):
            shapes = divmod((number * 7 + turn * 11) % 25, 5)
            yield _value(DTYPES[left], SHAPES[shapes[0]]), _value(DTYPES[right], SHAPES[shapes[1]])
    for number, (dtype, constant) in enumerate(product(DTYPES, CONSTANTS)):
        value = _value(dtype, SHAPES[number % 5])
        yield value, constant
        yield constant, value
    for shapes in product(SHAPES, repeat=2):
        yield _value(tl.int64, shapes[0]), _value(tl.int64, shapes[1])
        yield _value(tl.pointer_type(tl.int32), shapes[0]), _value(tl.int32, shapes[1])


@pytest.mark.parametrize("name", CALLS)
def test_every_pair_of_operands_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Type, shape and bits of the result, and the kind of the error, are those without any shortcut."""
    with np.errstate(all="ignore"):
        scope = stock._patch_lang(_kinds)
        try:
            seen = [_call(name, *pair) for pair in _kinds()]
            for (owner, attribute), old in shortcuts.REPLACED.items():
                monkeypatch.setattr(owner, attribute, old)
            expected = [_call(name, *pair) for pair in _kinds()]
        finally:
            scope.restore()
    wrong = [(pair, a, b) for pair, a, b in zip(_kinds(), seen, expected, strict=True) if a != b]
    assert wrong == []
    assert sum(isinstance(result, tuple) for result in seen) > 100
