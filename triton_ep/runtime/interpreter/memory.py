"""Fast paths for loads, stores and `where` whose operands need no conversion; all others take the stock path.

Most pointers, masks and values of the kernels are blocks of one shape, or scalars. The stock path checks them in vain
for broadcasts, conversions and errors. Like operators.py, this changes no value.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from .operators import (
    BEYOND,
    FLOATS,
    INTEGERS,
    Operator,
    Value,
    broadcast_shape,
    constant,
    converted,
    extreme,
    keep,
    like_of,
    made,
    named,
)

Handle = interpreter.TensorHandle
_block, _pointer, _constexpr = tl.block_type, tl.pointer_type, tl.constexpr
_WORDS = FLOATS | INTEGERS.keys()


def quick(name: str, stock: Operator) -> Operator:
    """A function of the language that tries the fast path first; `stock` itself if there is none."""
    ways: dict[str, Callable[[Operator], Operator]] = {
        "load": _load,
        "store": _store,
        "where": _where,
        "minimum": partial(extreme, np.minimum),
        "maximum": partial(extreme, np.maximum),
        "cast": converted,
        "arange": _same_again,
        "full": _same_again,
    }
    return ways[name](stock) if name in ways else stock


def _shape(value: Any) -> Any:
    """Shape of a block; None: a scalar."""
    return value.type.shape if type(value.type) is _block else None


def _element(pointer: Any) -> Any:
    """Element type of a pointer, if it is a plain type; None otherwise, as for truth values, stored as bytes."""
    if type(pointer) is Value and type(pointer.dtype) is _pointer:
        element = pointer.dtype.element_ty
        if type(element) is tl.dtype and element.name != "int1":
            return element
    return None


def _policies(method: str, others: int) -> tuple[None, ...]:
    """Cache arguments of a builder's method, which the interpreter ignores: two arguments, or one in 3.9."""
    return (None,) * (len(inspect.signature(getattr(interpreter.InterpreterBuilder, method)).parameters) - others)


def _load(stock: Operator) -> Operator:
    semantic = interpreter.interpreter_semantic
    policies = _policies("create_masked_load", 5)

    def call(
        pointer: Any, mask: Any = None, other: Any = None, *rest: Any, volatile: Any = False, **options: Any
    ) -> Any:
        element = None if rest or options else _element(pointer)
        if element is not None:
            shape = _shape(pointer)
            if mask is None:
                if other is None:
                    everywhere, nothing = _filler(True, shape, tl.int1), _filler(0, shape, element)
                    handle = semantic.builder.create_masked_load(
                        pointer.handle, everywhere, nothing, *policies, volatile
                    )
                    return named(handle, like_of(element, shape))
            elif type(mask) is Value and mask.dtype.name == "int1" and shape is not None and _shape(mask) is shape:
                filler = None if other is None else _other(other, shape, element)
                if filler is not NotImplemented:
                    handle = semantic.builder.create_masked_load(
                        pointer.handle, mask.handle, filler, *policies, volatile
                    )
                    return named(handle, like_of(element, shape))
        return stock(pointer, mask, other, *rest, volatile=volatile, **options)

    return call


def _store(stock: Operator) -> Operator:
    semantic = interpreter.interpreter_semantic
    policies = _policies("create_masked_store", 4)

    def call(pointer: Any, value: Any, mask: Any = None, *rest: Any, **options: Any) -> Any:
        element = None if rest or options else _element(pointer)
        if element is not None and not pointer.dtype.is_const():
            shape = _shape(pointer)
            handle = _stored(value, shape, element)
            if handle is not None:
                if mask is None:
                    everywhere = _filler(True, shape, tl.int1)
                    semantic.builder.create_masked_store(pointer.handle, handle, everywhere, *policies)
                    return Value(None, tl.void)
                if type(mask) is Value and mask.dtype.name == "int1" and _shape(mask) is shape:
                    semantic.builder.create_masked_store(pointer.handle, handle, mask.handle, *policies)
                    return Value(None, tl.void)
        return stock(pointer, value, mask, *rest, **options)

    return call


def _stored(value: Any, shape: Any, element: Any) -> Any:
    """Handle of a value to store, with this shape and element type, or of 0; None: take the stock path."""
    if type(value) is Value:
        return value.handle if value.dtype.name == element.name and _shape(value) is shape else None
    return _filler(0, shape, element) if type(value) is int and value == 0 and element.name in INTEGERS else None


def _where(stock: Operator) -> Operator:
    def call(condition: Any, x: Any, y: Any) -> Any:
        if type(condition) is Value and condition.dtype.name == "int1":
            shape = _joint_shape(condition, x, y)
            element = x.dtype if type(x) is Value else y.dtype if type(y) is Value else tl.int32
            left = right = None
            if shape is not NotImplemented:
                left, right = _side(x, element), _side(y, element)
            if left is not None and right is not None and left.data.dtype.char == right.data.dtype.char:
                data = np.where(condition.handle.data, left.data, right.data)
                return made(like_of(element, shape), data, right.dtype.scalar)
        return stock(condition, x, y)

    return call


def _joint_shape(condition: Any, *sides: Any) -> Any:
    """Shape of a condition and of both sides, None = scalars; NotImplemented: take the stock path."""
    shape = _shape(condition)
    for side in sides:
        if type(side) is Value and type(side.type) is _block and side.type.shape is not shape:
            shape = NotImplemented if shape is None else broadcast_shape(shape, side.type.shape)
            if shape is NotImplemented:
                break
    return shape


def _side(value: Any, element: Any) -> Any:
    """Handle of one side of a `where`; None: take the stock path."""
    if type(value) is int:
        fits = element.name in INTEGERS and INTEGERS[element.name] <= value < BEYOND
        return constant(value, element) if fits else None
    if type(value) is not Value or value.dtype.name != element.name or element.name not in _WORDS:
        return None
    return value.handle


_kept_blocks: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}


def _same_again(stock: Operator) -> Operator:
    """Create a block of given numbers only once; no kernel writes to it."""

    def call(*args: Any, **options: Any) -> Any:
        try:
            key: Any = (stock, *map(_word, args), *options.items())
            kept = _kept_blocks.get(key)
        except TypeError:  # an argument is a value of the kernel, which has no hash
            return stock(*args, **options)
        if kept is None:
            value = stock(*args, **options)
            if type(value.type) is not _block:
                return value
            value.handle.data.flags.writeable = False
            kept = (value, value.handle.data, value.handle.dtype)
            keep(_kept_blocks, key, kept)
        return made(*kept)

    return call


def _word(argument: Any) -> Any:
    """Part of a key that differs even for different arguments that compare equal, such as 1 and 1.0."""
    if type(argument) is _constexpr:
        argument = argument.value
    if type(argument) in (list, tuple, tl.tuple):
        return tuple(map(_word, argument))
    return argument if type(argument) in (int, str, tl.dtype) else (hash(argument), type(argument), str(argument))


def _other(value: Any, shape: Any, element: Any) -> Any:
    """Handle of the values of masked-off lanes; NotImplemented: take the stock path."""
    if type(value) is _constexpr:
        value = value.value
    if type(value) is Value:
        same = value.dtype.name == element.name and _shape(value) is shape
        return value.handle if same else NotImplemented
    name = element.name
    if type(value) is int:
        fits = INTEGERS[name] <= value < BEYOND if name in INTEGERS else name in FLOATS and abs(value) < 2**24
    else:
        fits = type(value) is float and str(value) == "0.0" and element.is_floating()
    return _filler(int(value), shape, element) if fits else NotImplemented


_kept_fillers: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def _filler(value: int, shape: Any, element: Any) -> Any:
    """Handle of a read-only block of one number; narrow floats only have 0."""
    key = (value, id(shape), element.name)
    kept = _kept_fillers.get(key)
    if kept is None:
        dtype = bool if element.name == "int1" else interpreter._get_np_dtype(element)
        data = np.full([int(n) for n in shape or (1,)], value, dtype=dtype)
        data.flags.writeable = False
        kept = (shape, Handle(data, element))
        keep(_kept_fillers, key, kept)
    return kept[1]
