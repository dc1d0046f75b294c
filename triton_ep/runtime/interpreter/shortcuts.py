"""Shortcuts through the interpreter for operands that need no conversion: the same values, faster.

As shipped, an operation on two values makes some forty checks of their types before numpy computes it. In most cases
both operands have one type, or one of them is a small constant. The shortcuts recognise these two cases first; all
others take the stock path. A constant is created once per value and type.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

_INTEGERS = {"int32": -(2**31), "int64": -(2**31), "uint32": 0, "uint64": 0}  # least constant that surely fits
_FLOATS = ("fp32", "fp64")
_WHOLE_TYPES = frozenset((*_INTEGERS, *_FLOATS))  # any operation on two of one type keeps the type
_NARROW_TYPES = frozenset(("int1", "int8", "uint8", "int16", "uint16", "fp16", "bf16"))  # the same, except divisions
# numpy's letters of dtypes that are never narrow floats in disguise: see `_compute_at_once`.
_PLAIN = frozenset("ilqILQfd")
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
_MAX_CONSTANTS = 4096


REPLACED: dict[tuple[Any, str], Any] = {}
"""Originals of the functions that shortcuts replace, by class or module and name."""


def _replace(owner: Any, name: str, new: Callable[..., Any]) -> None:
    REPLACED[owner, name] = getattr(owner, name)
    setattr(owner, name, new)


def apply() -> None:
    """Change the interpreter's classes. Once per process, after the fix-ups."""
    _recognise_leaves()
    _make_handles_at_once()
    _compute_at_once()
    _convert_only_what_differs()
    _reduce_at_once()


def direct(member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """The interpreter's replacement of a builtin of the language, without the check of `_semantic`."""
    inner = getattr(member, "__wrapped__", None)
    if inner is None or getattr(member, "__code__", None) is not _CHECK:
        inner = member

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return inner(*args, **kwargs, _semantic=semantic)

    return call


_CHECK = tl.core.builtin(lambda _semantic=None: None).__code__


def _recognise_leaves() -> None:
    """Skip the search for constexprs in values that contain no others; compare a dtype with itself by identity."""
    stock_unwrap, stock_equal = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    leaves = frozenset((int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.pointer_type, tl.block_type))

    def unwrap(value: Any) -> Any:
        return value if type(value) in leaves else stock_unwrap(value)

    def equal(self: Any, other: Any) -> Any:
        return True if self is other else stock_equal(self, other)

    _replace(tl.core, "_unwrap_if_constexpr", unwrap)
    _replace(tl.dtype, "__eq__", equal)  # the subclasses have their own


def _make_handles_at_once() -> None:
    """Check only once per pair that numpy's element size fits the dtype."""
    fits: dict[tuple[int, str], bool] = {}

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr
        if not fits.get((data.itemsize, dtype.name)):
            self.__post_init__()  # raises if they do not fit
            fits[data.itemsize, dtype.name] = True

    _replace(Handle, "__init__", init)


def _compute_at_once() -> None:
    """Let numpy compute on its own number types without the checks of the fix-ups."""
    mended = Builder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        left, right = lhs.data, rhs.data
        letter = left.dtype.char
        if letter == right.dtype.char and (letter in _PLAIN or (letter == "?" and op in _BITWISE)):
            output = op(left, right)
            dtype = lhs.dtype
            if output.dtype.char in (letter, "?") and type(dtype) is tl.dtype:
                return Handle(output, dtype)
        return mended(self, lhs, rhs, op)

    _replace(Builder, "binary_op", binary_op)


def _convert_only_what_differs() -> None:
    """Keep two operands of one type unchanged, and the type of an operand that meets a constant which fits it."""
    stock_check, stock_constant = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant
    stock_broadcast = TritonSemantic.broadcast_impl_value
    constants: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    tensor, block_type = tl.tensor, tl.block_type

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (type(value), value, dtype.name)
        known = constants.get(key)
        if known is None:
            handle = stock_constant(self, value, dtype).handle
            handle.data.flags.writeable = False
            if len(constants) >= _MAX_CONSTANTS:
                constants.clear()
            known = constants[key] = handle.data, handle.dtype
        return tensor(Handle(*known), dtype)

    def fits(value: Any, name: str) -> bool:
        kind = type(value)
        if kind is int and name in _INTEGERS:
            return bool(_INTEGERS[name] <= value < 2**31)
        return kind is float and name in _FLOATS and value == value and str(value) != "-0.0"

    def spread(scalar: Any, block: Any) -> Any:
        """A scalar as a block of this type's shape; numpy broadcasts its one element."""
        handle = scalar.handle
        dtype = tl.int1 if handle.data.dtype.char == "?" else handle.dtype.scalar
        return tensor(Handle(handle.data, dtype), block.with_element_ty(scalar.dtype))

    def widened(value: Any, lengths: list[int]) -> Any:
        """A block with these lengths; numpy broadcasts its axes of length 1."""
        return tensor(value.handle, block_type(value.dtype, lengths))

    def meet(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Both operands as blocks of one shape, which numpy also gives the result."""
        left, right = lhs.type, rhs.type
        if type(left) is not block_type:
            return (spread(lhs, right), rhs) if type(right) is block_type else (lhs, rhs)
        if type(right) is not block_type:
            return lhs, spread(rhs, left)
        if left.shape is right.shape:
            return lhs, rhs
        pairs = list(zip(left.shape, right.shape, strict=False))
        if len(left.shape) != len(right.shape) or any(m != n and 1 not in (m, n) for m, n in pairs):
            return self.broadcast_impl_value(lhs, rhs)  # adds leading axes, or raises
        lengths = [n if m == 1 else m for m, n in pairs]
        return widened(lhs, lengths), widened(rhs, lengths)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        blocks = (type(left) is block_type) + (type(right) is block_type)
        if blocks == 0 or (blocks == 2 and left.shape is right.shape):
            return lhs, rhs
        return stock_broadcast(self, lhs, rhs)

    def check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if type(lhs) is tensor:
            name = lhs.dtype.name
            if type(rhs) is tensor:
                if rhs.dtype.name == name and (name in _WHOLE_TYPES or (name in _NARROW_TYPES and not div_or_mod)):
                    return meet(self, lhs, rhs)
                if allow_lhs_ptr and type(lhs.dtype) is tl.pointer_type and rhs.dtype.name in _INTEGERS:
                    return meet(self, lhs, rhs)
            elif arithmetic_check and fits(rhs, name):
                return meet(self, lhs, constant(self, rhs, lhs.dtype))
        elif arithmetic_check and type(rhs) is tensor and fits(lhs, rhs.dtype.name):
            return meet(self, constant(self, lhs, rhs.dtype), rhs)
        return stock_check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    _replace(TritonSemantic, "binary_op_type_checking_impl", check)
    _replace(TritonSemantic, "broadcast_impl_value", broadcast)


def _reduce_at_once() -> None:
    """Let numpy compute sums, maxima and minima of integers along one axis, or of all, in one step."""
    for name, compute in (("sum", np.add.reduce), ("max", np.maximum.reduce), ("min", np.minimum.reduce)):
        _replace(tl, name, _reduction(compute, getattr(tl, name)))


def _reduction(compute: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    shapes: dict[tuple[int, int], tuple[Any, Any]] = {}
    tensor, block_type = tl.tensor, tl.block_type

    def call(input: Any, axis: Any = None, **options: Any) -> Any:
        kind: Any = getattr(input, "type", None)
        number = axis.value if type(axis) is tl.constexpr else axis
        if options or type(kind) is not block_type or input.dtype.name not in _INTEGERS:
            return stock(input, axis, **options)
        data, element = input.handle.data, input.dtype
        if data.dtype.char not in _PLAIN or data.size != kind.numel or data.ndim != len(kind.shape):
            return stock(input, axis)
        if number is None or (number == 0 and data.ndim == 1):
            try:
                found = np.array([compute(data, axis=None)], dtype=data.dtype)
            except OverflowError:
                return stock(input, axis)  # which says where
            return tensor(Handle(found, element), element)
        if type(number) is not int or not 0 <= number < data.ndim:
            return stock(input, axis)
        found = compute(data, axis=number, dtype=data.dtype)
        kept = shapes.get((id(kind.shape), number))
        if kept is None:
            if len(shapes) >= _MAX_CONSTANTS:
                shapes.clear()
            # It refers to the shape whose id is in the key.
            kept = shapes[id(kind.shape), number] = kind.shape, block_type(element, list(found.shape)).shape
        return tensor(Handle(found, element), block_type(element, kept[1]))

    return call
