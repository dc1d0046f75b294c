"""The interpreter's shortcuts give the stock interpreter's results, for every operator and pair of operand kinds."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import triton

from triton_ep.runtime import interpreter

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are compiled in this process", allow_module_level=True)

interpreter.install()

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter as stock  # noqa: E402

from triton_ep.runtime.interpreter import operators, shortcuts, speed  # noqa: E402
from triton_ep.runtime.interpreter.narrow import FORMATS  # noqa: E402

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
    """A kernel value of small numbers that every dtype can represent."""
    data = np.resize(VALUES, shape or (1,))
    if dtype.name in FORMATS:
        data = FORMATS[dtype.name].encode(data.astype(np.float32))
    data = data.astype(stock._get_np_dtype(dtype))
    return tl.tensor(stock.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def _call(name: str, left: Any, right: Any) -> Any:
    """Result of the operation: type, elements and their bits; or the type of its error."""
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
    return _outcome(result)


def _outcome(result: Any) -> Any:
    if result.handle is None:  # the result of a store
        return str(result.type)
    data = result.handle.data
    bits = np.ascontiguousarray(data).tobytes()
    return str(result.type), str(result.handle.dtype), tuple(result.shape), data.shape, data.dtype.str, bits


@cache
def _kinds() -> list[tuple[Any, Any]]:
    """All pairs of operands. No operation changes its operands, so all tests share them."""
    return list(_made_kinds())


def _made_kinds() -> Iterator[tuple[Any, Any]]:
    """Every dtype with every dtype and constant, on either side; shapes in turn, all pairs of shapes for two dtypes."""
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
    """Type, shape and bits of the result, or the type of the error, equal those without any shortcut."""
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


# --- what the language's functions do in one step -----------------------------------------------------------


def _stepwise() -> dict[tuple[Any, str], Any]:
    """The language's functions as kernels see them, without shortcuts, by owner and name."""
    patch = speed.LanguagePatch(stock._patch_lang._stock, lambda _owner, _name, same: same)
    return {(owner, name): new for owner, name, _, new in patch.find_changes()}


def _differences(owner: Any, name: str, calls: Iterator[tuple[Any, ...]], minimum: int) -> list[Any]:
    """Calls of a function of the language whose outcome differs from that without its shortcut.

    minimum: fewest calls that must give a result, so that the comparison is meaningful.
    """
    stepwise = _stepwise()[owner, name]
    with np.errstate(all="ignore"):
        scope = stock._patch_lang(_kinds)
        try:
            ways = getattr(owner, name), stepwise
            assert ways[0] is not stepwise
            outcomes = []
            for arguments in calls:
                pair = []
                for way in ways:
                    try:
                        pair.append(_outcome(way(*arguments)))
                    except Exception as error:
                        pair.append(type(error).__name__)
                outcomes.append((arguments, pair))
        finally:
            scope.restore()
    assert sum(isinstance(pair[1], tuple) or pair[1] == "void" for _, pair in outcomes) >= minimum
    return [(arguments, pair) for arguments, pair in outcomes if pair[0] != pair[1]]


def _compared(shape: tuple[int, ...]) -> Any:
    """Truth values as comparisons return them: their handle has the type of the compared values."""
    data = np.resize(VALUES, shape or (1,)) < 3
    return tl.tensor(stock.TensorHandle(data, tl.int32), tl.block_type(tl.int1, list(shape)) if shape else tl.int1)


def _pairs_of_a_value() -> Iterator[tuple[Any, Any]]:
    for left, right in _kinds():
        if isinstance(left, tl.tensor):
            yield left, right
            if not isinstance(right, tl.tensor):
                yield left, tl.constexpr(right)
    for left, right in product((tl.int32, tl.int64, tl.int1, tl.pointer_type(tl.int64)), repeat=2):
        for shapes in product((*SHAPES, (1, 4, 2)), repeat=2):
            yield _value(left, shapes[0]), _value(right, shapes[1])
    for shapes in product(SHAPES, repeat=2):
        yield _compared(shapes[0]), _compared(shapes[1])
        yield _compared(shapes[0]), _value(tl.int1, shapes[1])
        yield _value(tl.int32, shapes[0]), _compared(shapes[1])


@pytest.mark.filterwarnings("ignore:Value .* exceeds the maximum bitwidth")
@pytest.mark.parametrize("name", [*operators.OPERATORS, *operators.OF_CONSTANTS])
def test_operators_in_one_step(name: str) -> None:
    """Values, constants and constexprs of all kinds and shapes give the same type, shape and bits, or error type."""
    assert _differences(tl.tensor, name, _pairs_of_a_value(), 150) == []


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_extremes_in_one_step(name: str) -> None:
    """Of values, constants and constexprs on either side, with and without propagation of NaN."""

    def calls() -> Iterator[tuple[Any, ...]]:
        for left, right in _pairs_of_a_value():
            yield left, right
            yield right, left
            yield left, right, tl.PropagateNan.ALL

    assert _differences(tl, name, calls(), 500) == []


def _every_value() -> Iterator[Any]:
    for dtype, shape in product(DTYPES, SHAPES):
        yield _value(dtype, shape)
    yield from map(_compared, SHAPES)


def test_other_members_in_one_step() -> None:
    """Indexing by axes, and conversions, give the same results."""
    axes = [(None, slice(None)), (slice(None), None), (slice(None), None, slice(None)), (None,), (slice(1, None), None)]
    axes += [(slice(None), slice(None)), (slice(None),) * 3, (None, slice(None), None), None]
    assert _differences(tl.tensor, "__getitem__", product(_every_value(), axes), 200) == []
    targets = (*DTYPES, tl.pointer_type(tl.int64))
    for owner, name in ((tl.tensor, "to"), (tl, "cast")):
        assert _differences(owner, name, product(_every_value(), targets), 500) == []


MEMORY = np.zeros(64, dtype=np.uint64)


def _pointers(dtype: Any, shape: tuple[int, ...]) -> Any:
    kind = tl.pointer_type(dtype)
    places = np.arange(np.prod(shape, dtype=int) if shape else 1) * 8 + MEMORY.ctypes.data
    data = places.astype(np.uint64).reshape(shape or (1,))
    return tl.tensor(stock.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def _masks(shape: tuple[int, ...]) -> Iterator[Any]:
    yield None
    yield _value(tl.int1, shape)
    yield _value(tl.int1, ())
    yield _compared(shape)


def test_loads_in_one_step() -> None:
    """Loads of every type and shape, with and without `mask` and `other`, give the same results."""
    MEMORY[:] = np.random.default_rng(0).integers(0, 2**62, MEMORY.shape)

    def calls() -> Iterator[tuple[Any, ...]]:
        for dtype, shape in product(DTYPES, SHAPES):
            for mask in _masks(shape):
                for other in (None, 0, -1, 3, 0.0, -0.0, 1.5, 2**40, _value(dtype, shape), _value(tl.int32, ())):
                    yield _pointers(dtype, shape), mask, other

    assert _differences(tl, "load", calls(), 800) == []
    assert _differences(tl.core, "load", calls(), 800) == []


def test_stores_in_one_step() -> None:
    """Stores leave the same memory contents."""
    seen: list[bytes] = []
    stepwise = _stepwise()[tl, "store"]

    def calls() -> Iterator[tuple[Any, ...]]:
        for dtype, shape in product(DTYPES, SHAPES):
            for mask in _masks(shape):
                for value in (_value(dtype, shape), _value(dtype, ()), _value(tl.int32, shape), 0, 3, 0.5, False):
                    yield _pointers(dtype, shape), value, mask

    with np.errstate(all="ignore"):
        scope = stock._patch_lang(_kinds)
        try:
            for way in (tl.store, stepwise):
                for number, arguments in enumerate(calls()):
                    MEMORY[:] = number
                    try:
                        assert str(way(*arguments).type) == "void"
                    except Exception as error:
                        seen.append(type(error).__name__.encode())
                    seen.append(MEMORY.tobytes())
        finally:
            scope.restore()
    half = len(seen) // 2
    assert seen[:half] == seen[half:] and half > 1000
    assert len(set(seen[:half])) > 900


def test_choices_and_blocks_in_one_step() -> None:
    """`where` of values and constants by conditions of several shapes; `arange` and `full`, twice each."""

    def choices() -> Iterator[tuple[Any, ...]]:
        for condition in (
            _value(tl.int1, (4,)),
            _compared((4,)),
            _value(tl.int1, (4, 2)),
            _compared(()),
        ):
            sides = [_value(dtype, shape) for dtype, shape in product(DTYPES, ((), (4,), (4, 2), (4, 1), (1, 2)))]
            for side in sides:
                blocks = [_value(side.dtype, shape) for shape in ((), (4,), (1, 2))]
                for other in (*CONSTANTS, tl.constexpr(3), sides[17], *blocks):
                    yield condition, side, other
                    yield condition, other, side
            yield from ((condition, x, y) for x, y in product((0, 1, -5, 0.5, True, 2**40), repeat=2))

    assert _differences(tl, "where", choices(), 3000) == []
    assert _differences(tl, "arange", iter([(0, 8), (0, tl.constexpr(8)), (0, 8), (8, 16), (0, 3)] * 2), 8) == []
    blocks = [([8], 0, tl.int32), ((4, 2), 1.0, tl.float32), ([tl.constexpr(8)], 0, tl.bfloat16), ([8], 0.0, tl.int32)]
    blocks += [
        ([8], True, tl.int1),
        ([8], 1, tl.int1),
        ([8], -0.0, tl.float32),
        ([8], 0.0, tl.float32),
        ([], 0, tl.int32),
    ]
    assert _differences(tl, "full", iter([*blocks, ([8], _value(tl.int32, ()), tl.int32)] * 2), 18) == []


@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_reductions_in_one_step(name: str) -> None:
    """Along every axis, and of all elements; sums that overflow, too."""
    large = _value(tl.int32, (4, 2))
    large.handle.data[:] = 2**31 - 1
    ways = getattr(tl, name), shortcuts.REPLACED[tl, name]
    outcomes = []
    with np.errstate(all="ignore"):
        scope = stock._patch_lang(_kinds)
        try:
            for value, axis in product((*_every_value(), large), (None, 0, 1, 2, -1, tl.constexpr(0))):
                for options in ({}, {"keep_dims": True}):
                    pair = []
                    for way in ways:
                        try:
                            pair.append(_outcome(way(value, axis, **options)))
                        except Exception as error:
                            pair.append(type(error).__name__)
                    outcomes.append((value.type, axis, options, pair))
        finally:
            scope.restore()
    assert [each for each in outcomes if each[-1][0] != each[-1][1]] == []
    assert sum(isinstance(pair[0], tuple) for *_, pair in outcomes) > 300


def test_integer_arguments_are_converted_once() -> None:
    """The second time with the same result as the first; truth values, which equal integers, are refused as before."""
    numbers = (0, 1, -1, 16, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**32, 2**63 - 1)
    first, second = [[_outcome(stock._implicit_cvt(number)) for number in numbers] for _ in range(2)]
    assert first == second
    assert [kind for kind, *_ in first] == ["int32"] * 6 + ["int64"] * 4
    with pytest.raises(ValueError, match="exceeds dtype"):
        stock._implicit_cvt(True)
