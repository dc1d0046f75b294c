"""Fast paths for operators on common operands, with the same results as the interpreter's five functions.

`a + b` goes through the operator, a function of the language, a method of the semantics, its type check and a method of
the builder, which repeat each other's checks. The fast path checks once. It serves two integers of one type (or int32
and int64), two floats of one type of 32 or 64 bits, two truth values, a pointer and an integer, and one operand with a
small constant. All other operands take the stock path.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Value = tl.tensor
Operator = Callable[..., Any]

INTEGERS = {"int32": -(2**31), "int64": -(2**31), "uint32": 0, "uint64": 0}
"""Integer types that an operation on two of the same type keeps, and the least constant that surely fits each."""
BEYOND = 2**31
FLOATS = frozenset(("fp32", "fp64"))
_NUMBERS = FLOATS | INTEGERS.keys()
_BITS = frozenset((*INTEGERS, "int1"))
_SIGNED = frozenset(("int32", "int64"))
_LETTERS = frozenset("ilqILQfd")  # numpy's letters of dtypes that are never narrow floats in disguise
_MAX_KEPT = 4096
_new = object.__new__
_block, _pointer, _constexpr = tl.block_type, tl.pointer_type, tl.constexpr


def _divide(left: Any, right: Any) -> Any:
    """Division that rounds towards zero, like the interpreter's."""
    return (left - np.fmod(left, right)) // right


# By name of an operator: function that computes it, types it is for, whether it returns truth values.
OPERATORS: dict[str, tuple[Callable[..., Any], frozenset[str], bool]] = {
    "__add__": (np.add, _NUMBERS, False),
    "__sub__": (np.subtract, _NUMBERS, False),
    "__mul__": (np.multiply, _NUMBERS, False),
    "__floordiv__": (_divide, frozenset(INTEGERS), False),
    "__mod__": (np.fmod, frozenset(INTEGERS), False),
    "__and__": (np.bitwise_and, _BITS, False),
    "__or__": (np.bitwise_or, _BITS, False),
    "__xor__": (np.bitwise_xor, _BITS, False),
    "__lshift__": (np.left_shift, frozenset(INTEGERS), False),
    "__rshift__": (np.right_shift, frozenset(INTEGERS), False),
    "__lt__": (np.less, _NUMBERS, True),
    "__le__": (np.less_equal, _NUMBERS, True),
    "__gt__": (np.greater, _NUMBERS, True),
    "__ge__": (np.greater_equal, _NUMBERS, True),
    "__eq__": (np.equal, _NUMBERS, True),
    "__ne__": (np.not_equal, _NUMBERS, True),
}
OF_CONSTANTS = {"__radd__": np.add, "__rsub__": np.subtract, "__rmul__": np.multiply}


def quick(name: str, stock: Operator) -> Operator:
    """A member of `tl.tensor` that tries the fast path first; `stock` itself if there is none."""
    if name in OPERATORS:
        compute, types, is_truth = OPERATORS[name]
        limits = _SHIFT_LIMITS if name.endswith("shift__") else _LIMITS
        return _binary(compute, types, is_truth, limits, _offset(stock) if name == "__add__" else stock)
    if name in OF_CONSTANTS:
        return _constant_first(OF_CONSTANTS[name], stock)
    if name == "__getitem__":
        return _with_axes(stock)
    return converted(stock) if name == "to" else stock


# --- types of results ---------------------------------------------------------------------------------------

_kept_types: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def like_of(dtype: Any, shape: Any) -> Any:
    """A value without a handle, of this dtype and shape (None: a scalar), which only supplies a type."""
    key = (id(dtype), id(shape))
    kept = _kept_types.get(key)
    if kept is None:
        kept = (dtype, shape, Value(None, dtype if shape is None else _block(dtype, shape)))
        keep(_kept_types, key, kept)  # `kept` refers to the objects whose ids are the key
    return kept[2]


def keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Remember a value; forget all values once there are too many."""
    if len(kept) >= _MAX_KEPT:
        kept.clear()
    kept[key] = value


_kept_shapes: dict[tuple[int, int], tuple[Any, Any, Any]] = {}


def _common(left: Any, right: Any) -> Any:
    """The broadcast shape of both, None = a scalar; NotImplemented: the stock path broadcasts, or raises."""
    first, second = left.type, right.type
    if type(second) is not _block:
        return first.shape if type(first) is _block else None
    if type(first) is not _block or first.shape is second.shape:
        return second.shape
    return broadcast_shape(first.shape, second.shape)


def broadcast_shape(first: Any, second: Any) -> Any:
    """The broadcast shape of two shapes of blocks; NotImplemented: the stock path broadcasts, or raises."""
    key = (id(first), id(second))
    kept = _kept_shapes.get(key)
    if kept is None:
        kept = (first, second, _broadcast(first, second))
        keep(_kept_shapes, key, kept)
    return kept[2]


def _broadcast(first: Any, second: Any) -> Any:
    pairs = list(zip(first, second, strict=False))
    if len(first) != len(second) or any(m != n and 1 not in (m, n) for m, n in pairs):
        return NotImplemented
    return _block(tl.int1, [n if m == 1 else m for m, n in pairs]).shape


def made(like: Any, data: Any, dtype: Any) -> Any:
    """A value with these data and the type of `like`; dtype: dtype of its handle."""
    handle = _new(Handle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    return named(handle, like)


def named(handle: Any, like: Any) -> Any:
    """A value with this handle and the type of `like`."""
    value = _new(Value)
    value.handle, value.type, value.dtype = handle, like.type, like.dtype
    value.shape, value.numel = like.shape, like.numel
    return value


# --- operators ----------------------------------------------------------------------------------------------


def _binary(
    compute: Callable[..., Any],
    types: frozenset[str],
    is_truth: bool,
    limits: dict[str, tuple[int, int]],
    stock: Operator,
) -> Operator:
    """Operator on two operands. compute: works on numpy arrays. limits: of constants on the fast path, by type."""

    def call(self: Any, other: Any, _semantic: Any = None) -> Any:
        name, second, own = self.dtype.name, other, self.type
        if name not in types:
            return stock(self, other)
        left, like = self.handle, self
        data, dtype = left.data, left.dtype
        kind = type(second)
        if kind is _constexpr:
            second = second.value
            kind = type(second)
        if kind is Value:
            right = second.handle.data
            if second.type is not own:
                shape, element = _common(self, second), self.dtype
                if second.dtype.name != name:
                    if name not in _SIGNED or second.dtype.name not in _SIGNED:
                        return stock(self, other)
                    data, right, dtype, element = data.astype(np.int64), right.astype(np.int64), tl.int64, tl.int64
                if shape is NotImplemented or (name == "int1" and (shape is None) is (type(own) is _block)):
                    return stock(self, other)
                like = like_of(element, shape)
        elif kind is int and name in limits and limits[name][0] <= second < limits[name][1]:
            right = constant(second, self.dtype).data
        elif kind is bool and name == "int1":
            right = _TRUTHS[second]
        else:
            return stock(self, other)
        letter = data.dtype.char
        if letter != right.dtype.char or type(dtype) is not tl.dtype or (letter not in _LETTERS and letter != "?"):
            return stock(self, other)
        if is_truth:  # the handle of a truth value has the type of the compared operands
            like = like_of(tl.int1, like.type.shape if type(like.type) is _block else None)
        return made(like, compute(data, right), dtype)

    return call


def extreme(compute: Callable[..., Any], stock: Operator) -> Operator:
    """The smaller or larger of two integers."""
    fast = _binary(compute, frozenset(INTEGERS), False, _LIMITS, stock)

    def call(x: Any, y: Any, *rest: Any, **options: Any) -> Any:
        if rest or options or type(x) is not Value:
            return stock(x, y, *rest, **options)
        return fast(x, y)

    return call


def _constant_first(compute: Callable[..., Any], stock: Operator) -> Operator:
    def call(self: Any, other: Any, _semantic: Any = None) -> Any:
        first = other.value if type(other) is _constexpr else other
        name = self.dtype.name
        if type(first) is int and name in INTEGERS and INTEGERS[name] <= first < BEYOND:
            left, right = constant(first, self.dtype), self.handle.data
            if left.data.dtype.char == right.dtype.char:
                return made(self, compute(left.data, right), left.dtype)
        return stock(self, other)

    return call


def _offset(stock: Operator) -> Operator:
    """A pointer plus an integer; `stock` for other operands."""

    def call(self: Any, other: Any, _semantic: Any = None) -> Any:
        second = other.value if type(other) is _constexpr else other
        kind, left = type(second), self.handle
        if type(self.dtype) is _pointer and type(left.dtype) is _pointer:
            if kind is Value and second.dtype.name in _SIGNED and second.handle.data.dtype.char in _LETTERS:
                shape = _common(self, second)
                if shape is not NotImplemented:
                    data = left.data + _width(left) * second.handle.data.astype(np.uint64)
                    return made(like_of(self.dtype, shape), data, left.dtype)
            elif kind is int and 0 <= second < BEYOND:
                return made(self, left.data + np.uint64(_width(left) * second), left.dtype)
        return stock(self, other)

    return call


_TRUTHS = (np.array([False]), np.array([True]))
_LIMITS = {name: (least, BEYOND) for name, least in INTEGERS.items()}
_SHIFT_LIMITS = {"int32": (0, 32), "uint32": (0, 32), "int64": (0, 64), "uint64": (0, 64)}

_kept_constants: dict[tuple[int, str], Any] = {}
_kept_widths: dict[str, int] = {}


def constant(value: int, dtype: Any) -> Any:
    """The read-only handle of a constant."""
    known = _kept_constants.get((value, dtype.name))
    if known is None:
        known = interpreter.interpreter_semantic.scalar_constant(value, dtype).handle
        keep(_kept_constants, (value, dtype.name), known)
    return known


def _width(pointer: Any) -> int:
    """Bytes of the elements that the pointers of a handle point to."""
    known = _kept_widths.get(pointer.dtype.name)
    if known is None:
        known = _kept_widths[pointer.dtype.name] = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
    return known


# --- other members ------------------------------------------------------------------------------------------

_ALL = slice(None)


def _with_axes(stock: Operator) -> Operator:
    """x[:, None] and the like."""
    shapes: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def call(self: Any, slices: Any, _semantic: Any = None) -> Any:
        kind, data = self.type, self.handle.data
        if type(slices) is not tuple or type(kind) is not _block or data.ndim != len(kind.shape):
            return stock(self, slices)
        key = (id(kind.shape), *[each is None for each in slices])
        kept = shapes.get(key)
        if kept is None or any(each is not None and each != _ALL for each in slices):
            if any(each is not None and each != _ALL for each in slices) or key.count(False) > data.ndim:
                return stock(self, slices)
            kept = (kind.shape, stock(self, slices).type.shape)
            keep(shapes, key, kept)
        return made(like_of(self.dtype, kept[1]), data[slices], self.handle.dtype.scalar)

    return call


_NUMPYS = {"int32": np.int32, "int64": np.int64, "uint32": np.uint32, "uint64": np.uint64}


def converted(stock: Operator) -> Operator:
    """x.to(dtype) between integers, from truth values to integers, and between addresses and pointers."""

    def call(self: Any, dtype: Any, *rest: Any, _semantic: Any = None, **options: Any) -> Any:
        if not rest and not options and type(self) is Value:
            data, shape = self.handle.data, self.type.shape if type(self.type) is _block else None
            if type(dtype) is tl.dtype:
                name, target = self.dtype.name, dtype.name
                if name == target:
                    return self
                if name in _BITS and target in _NUMPYS and (data.dtype.char in _LETTERS or data.dtype.char == "?"):
                    return made(like_of(dtype, shape), data.astype(_NUMPYS[target]), dtype)
                if target == "int64" and type(self.dtype) is _pointer:
                    return made(like_of(dtype, shape), data.view(np.int64), dtype)
            elif type(dtype) is _pointer and self.dtype.name == "int64":
                return made(like_of(dtype, shape), data.view(np.uint64), dtype)
        return stock(self, dtype, *rest, **options)

    return call
