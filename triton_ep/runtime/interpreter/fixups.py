"""Numeric fix-ups of Triton's interpreter: narrow floats behave as on a GPU.

As shipped (3.6 to 3.9) the interpreter truncates float32 to bf16, loses mantissa carries and saturation in
conversions to float8, reads the NaN of e4m3 as 480, does bf16 arithmetic on the raw 16-bit integers, turns a scalar
condition into a number when it meets a block, and cannot add through descriptors. With the fix-ups every operation on
bf16 computes in float32 and rounds once, and every conversion goes through `narrow.py`.
`triton_ep.runtime.interpreter.install` installs them once per process, on the interpreter's own classes.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from .narrow import BF16, E4M3, FORMATS, NarrowFloat, decode_e2m1, decode_e8m0

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

# Names of the builder's arithmetic methods whose operands and result are all handles.
_ARITHMETIC = ("create_fma", "create_clampf", "create_rsqrt", "create_erf")


def apply() -> None:
    """Change the interpreter's classes. Once per process."""
    _fix_casts()
    _fix_arithmetic()
    _fix_reductions()
    _fix_dots()
    _fix_conditions()
    _add_descriptor_sums()
    _keep_compile_time_arguments()
    _silence_overflow()


def _format_of(dtype: Any) -> NarrowFloat | None:
    return FORMATS.get(dtype.scalar.name)


def _is_bf16(handle: Any) -> bool:
    # Hot path of every operation of every kernel: check the storage first, which is cheap.
    return isinstance(handle, Handle) and handle.data.dtype.char == "H" and handle.dtype.scalar == tl.bfloat16


def _widen(handle: Any) -> Any:
    """Convert a bf16 handle to float32; return other handles unchanged."""
    return Handle(BF16.decode(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrow(handle: Any) -> Any:
    """Convert the result of float32 arithmetic to the bf16 (or bool) that the kernel expects."""
    if handle.data.dtype == np.bool_:
        return Handle(handle.data, tl.int1)
    return Handle(BF16.encode(handle.data), tl.bfloat16)


def _in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a builder's method so that it computes bf16 operands in float32."""

    def method(self: Any, *operands: Any) -> Any:
        if not any(map(_is_bf16, operands)):
            return original(self, *operands)
        return _narrow(original(self, *map(_widen, operands)))

    return method


def _convert(source: Any, dst_type: Any, truncate: bool) -> Any:
    """Convert a handle to another dtype; one of the two dtypes is a narrow float."""
    data, target = source.data, _format_of(dst_type)
    from_format = _format_of(source.dtype)
    if from_format is not None:
        data = from_format.decode(data)
    if target is not None:
        return Handle(target.encode(data, truncate), dst_type.scalar)
    return Handle(data.astype(interpreter._get_np_dtype(dst_type.scalar)), dst_type.scalar)


def _fix_casts() -> None:
    stock_cast, stock_fp_to_fp = Builder.cast_impl, Builder.create_fp_to_fp
    towards_zero = interpreter._ir.ROUNDING_MODE.RTZ
    known = {tl.float16.name, tl.float32.name, tl.float64.name, *FORMATS}

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if _format_of(src.dtype) or _format_of(dst_type):
            return _convert(src, dst_type, truncate=False)
        return stock_cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        names = {src.dtype.scalar.name, dst_type.scalar.name}
        if names & FORMATS.keys() and names <= known:
            return _convert(src, dst_type, truncate=rounding_mode == towards_zero)
        return stock_fp_to_fp(self, src, dst_type, rounding_mode)

    def get_bf16(self: Any, value: float) -> Any:
        return Handle(BF16.encode(np.array([value], dtype=np.float64)), tl.bfloat16)

    Builder.cast_impl = cast_impl
    Builder.create_fp_to_fp = create_fp_to_fp
    Builder.get_bf16 = get_bf16


def _fix_arithmetic() -> None:
    stock_binary, stock_unary = Builder.binary_op, Builder.unary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.data.dtype.char == "B" and lhs.dtype.scalar.is_fp8():
            raise TypeError(f"{lhs.dtype.scalar} has no arithmetic: cast to float32 first")
        if not (_is_bf16(lhs) or _is_bf16(rhs)):
            return stock_binary(self, lhs, rhs, op)
        return _narrow(stock_binary(self, _widen(lhs), _widen(rhs), op))

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return _narrow(stock_unary(self, _widen(arg), op)) if _is_bf16(arg) else stock_unary(self, arg, op)

    Builder.binary_op = binary_op
    Builder.unary_op = unary_op
    for name in _ARITHMETIC:
        setattr(Builder, name, _in_float32(getattr(Builder, name)))


def _fix_reductions() -> None:
    """tl.reduce and tl.associative_scan: accumulate bf16 in float32, round the result once."""

    def in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply_impl(self: Any, inputs: tuple[Any, ...]) -> Any:
            narrow = [_is_bf16(each.handle) for each in inputs]
            if not any(narrow):
                return original(self, inputs)
            results = original(self, tuple(map(_widen_tensor, inputs)))
            if not isinstance(results, list | tuple):
                results = (results,)
            return tuple(
                _narrow_tensor(each) if was_narrow else each for each, was_narrow in zip(results, narrow, strict=False)
            )

        return apply_impl

    for ops in (interpreter.ReduceOps, interpreter.ScanOps):
        ops.apply_impl = in_float32(ops.apply_impl)


def _widen_tensor(tensor: Any) -> Any:
    return _retyped(tensor, _widen(tensor.handle)) if _is_bf16(tensor.handle) else tensor


def _narrow_tensor(tensor: Any) -> Any:
    return _retyped(tensor, _narrow(tensor.handle)) if tensor.dtype == tl.float32 else tensor


def _retyped(tensor: Any, handle: Any) -> Any:
    """A tensor with the shape of `tensor`, and the data and dtype of `handle`."""
    dtype = handle.dtype
    return tl.core.tensor(handle, tl.block_type(dtype, tensor.type.shape) if tensor.type.is_block() else dtype)


def _fix_dots() -> None:
    stock_dot = Builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (_decoded(each) if _format_of(each.dtype) else each for each in (a, b))
        return stock_dot(self, a, b, *rest)

    Builder.create_dot = create_dot
    # One implementation for all versions: 3.6 and 3.7 have none, and 3.9 converts bf16 through float16.
    Builder.create_dot_scaled = _create_dot_scaled
    # 3.6 and 3.7 insist on constexpr formats, which string literals of an interpreted kernel are not.
    stock_scaled = TritonSemantic.dot_scaled
    if "lhs_format.value" in inspect.getsource(stock_scaled):

        def dot_scaled(self: Any, *operands: Any) -> Any:
            return stock_scaled(self, *(tl.constexpr(x) if isinstance(x, str) else x for x in operands))

        TritonSemantic.dot_scaled = dot_scaled


def _fix_conditions() -> None:
    """Keep a scalar condition a condition when it meets a block: 3.9 takes no mask of another type."""
    stock_splat = Builder.create_splat

    def create_splat(self: Any, to: Any, scalar: Any) -> Any:
        # A comparison's handle has the type of the compared operands.
        return stock_splat(self, to, Handle(scalar.data, tl.int1) if scalar.data.dtype == bool else scalar)

    Builder.create_splat = create_splat


def _add_descriptor_sums() -> None:
    """Add a box of float32 to memory. Not atomic: the programs of a process run one after the other."""
    add = interpreter._ir.DESCRIPTOR_REDUCE_KIND.ADD

    def create_descriptor_reduce(self: Any, kind: Any, desc: Any, value: Any, indices: Any) -> Any:
        assert kind == add and value.dtype.scalar == tl.float32, f"a box of {value.dtype} cannot be reduced by {kind}"
        there = self.create_descriptor_load(desc, indices, None, None)
        return self.create_descriptor_store(desc, Handle(there.data + value.data, there.dtype), indices)

    Builder.create_descriptor_reduce = create_descriptor_reduce


def _keep_compile_time_arguments() -> None:
    """Give a compile-time argument in a group (kernels/spec.py) the same value as one that is a parameter itself."""
    stock_convert = interpreter._implicit_cvt

    def convert(arg: Any) -> Any:
        return arg.value if isinstance(arg, tl.constexpr) else stock_convert(arg)

    interpreter._implicit_cvt = convert


def _silence_overflow() -> None:
    """Silence numpy's warnings of overflow and NaN, which are plain values on a GPU. Division by zero still warns."""
    stock_call = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            return stock_call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = call


def _decoded(handle: Any) -> Any:
    """Convert a handle of a narrow float to float32."""
    fmt = _format_of(handle.dtype)
    assert fmt is not None, f"{handle.dtype} is no narrow float"
    return Handle(fmt.decode(handle.data), tl.float32)


def _create_dot_scaled(
    self: Any,
    lhs: Any,
    lhs_scale: Any,
    lhs_format: Any,
    rhs: Any,
    rhs_scale: Any,
    rhs_format: Any,
    fast_math: Any,
    lhs_k_pack: Any,
    rhs_k_pack: Any,
    acc: Any,
) -> Any:
    """[M, K] x [K, N] + [M, N] float32; scales [M, K / group] and [N, K / group], one per group along K."""
    left = _scaled_operand(lhs, lhs_scale, lhs_format, -1 if _value(lhs_k_pack) else -2)
    transposed = Handle(np.swapaxes(rhs.data, -1, -2), rhs.dtype)
    right = _scaled_operand(transposed, rhs_scale, rhs_format, -1 if _value(rhs_k_pack) else -2)
    product = np.matmul(left, np.swapaxes(right, -1, -2)) + acc.data
    return Handle(product.astype(acc.data.dtype, copy=False), acc.dtype.scalar)


def _value(flag: Any) -> Any:
    return flag.value if isinstance(flag, tl.constexpr) else flag


def _scaled_operand(operand: Any, scale: Any, format_enum: Any, packed_axis: int) -> Any:
    """Operand [rows, K], K along the last axis, times its scales [rows, K / group], as float32."""
    if format_enum == interpreter._ir.ScaleDotElemTypeTY.E2M1:
        values = decode_e2m1(operand.data.view(np.uint8), packed_axis)
    elif _format_of(operand.dtype):
        values = _decoded(operand).data
    else:
        values = operand.data.astype(np.float32)
    if scale is None:
        return values
    is_e4m3 = scale.dtype.scalar.name == E4M3.name  # nvfp4; the MX formats have powers of two
    factors = E4M3.decode(scale.data) if is_e4m3 else decode_e8m0(scale.data)
    return values * np.repeat(factors, values.shape[-1] // factors.shape[-1], axis=-1)
