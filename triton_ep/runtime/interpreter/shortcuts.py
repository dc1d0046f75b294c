"""Shortcuts through the interpreter for operands that need no conversion: the same values, sooner.

As shipped, an operation on two values asks some forty questions about their types before numpy computes it, and
most of them have one answer: both operands are of one type, or one of them is a small constant. Here these two
kinds are recognised first, and everything else takes the stock path. A constant is made once per value and type.
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
_WHOLE_TYPES = frozenset((*_INTEGERS, *_FLOATS))  # keep their type in every operation with their like,
_NARROW_TYPES = frozenset(("int1", "int8", "uint8", "int16", "uint16", "fp16", "bf16"))  # unless it is a division
# numpy's letters of dtypes that are never narrow floats in disguise, and of bool: see `_compute_at_once`.
_PLAIN = frozenset("ilqILQfd")
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
_MAX_CONSTANTS = 4096


REPLACED: dict[tuple[Any, str], Any] = {}
"""What stood where a shortcut is now, by class or module and name."""


def _replace(owner: Any, name: str, new: Callable[..., Any]) -> None:
    REPLACED[owner, name] = getattr(owner, name)
    setattr(owner, name, new)


def apply() -> None:
    """Change the interpreter's classes. Once per process, after the fix-ups."""
    _recognise_leaves()
    _make_handles_at_once()
    _compute_at_once()
    _convert_only_what_differs()


def direct(member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """What the interpreter puts in the place of a builtin of the language, without the check of `_semantic`."""
    inner = getattr(member, "__wrapped__", None)
    if inner is None or getattr(member, "__code__", None) is not _CHECK:
        inner = member

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return inner(*args, **kwargs, _semantic=semantic)

    return call


_CHECK = tl.core.builtin(lambda _semantic=None: None).__code__


def _recognise_leaves() -> None:
    """Values that hold no other ones are not searched for constexprs; a dtype equals itself."""
    stock_unwrap, stock_equal = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    leaves = frozenset((int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.pointer_type, tl.block_type))

    def unwrap(value: Any) -> Any:
        return value if type(value) in leaves else stock_unwrap(value)

    def equal(self: Any, other: Any) -> Any:
        return True if self is other else stock_equal(self, other)

    _replace(tl.core, "_unwrap_if_constexpr", unwrap)
    _replace(tl.dtype, "__eq__", equal)  # the subclasses have their own


def _make_handles_at_once() -> None:
    """Whether numpy's elements fit the dtype is asked once per pair of both."""
    fits: dict[tuple[int, str], bool] = {}

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr
        if not fits.get((data.itemsize, dtype.name)):
            self.__post_init__()  # raises where they do not
            fits[data.itemsize, dtype.name] = True

    _replace(Handle, "__init__", init)


def _compute_at_once() -> None:
    """Numbers that numpy has, too, need no look at what the fix-ups mend."""
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
    """Operands of one type stay as they are, and so does the type of what meets a constant that fits it."""
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
        """A scalar as a block of this type's shape; numpy repeats its one element by itself."""
        handle = scalar.handle
        dtype = tl.int1 if handle.data.dtype.char == "?" else handle.dtype.scalar
        return tensor(Handle(handle.data, dtype), block.with_element_ty(scalar.dtype))

    def widened(value: Any, lengths: list[int]) -> Any:
        """A block as one of these lengths; numpy repeats what it has along those that are 1."""
        return tensor(value.handle, block_type(value.dtype, lengths))

    def meet(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Both as blocks of one shape, for an operation whose result numpy gives that shape."""
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
