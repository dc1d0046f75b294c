"""Exchange rows between ranks: differentiable all-to-all collectives of a process group, quantised or not.

Elements and scales of quantised rows travel as bytes in two collectives, because communication libraries have no scale
dtype. Both start before the wait for either. They are torch's functional collectives, which compilers can trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from triton_ep.errors import InputError
from triton_ep.mx.formats import ScalingMode, check_high_precision
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.library import in_graph
from triton_ep.pipeline.permute import plain

Group = dist.ProcessGroup | str | None
_Splits = Sequence[int]


@in_graph
def dispatch(
    input: torch.Tensor,
    output_splits: _Splits,
    input_splits: _Splits,
    group: Group,
    scaling_mode: ScalingMode | str | Enum,
    block_size: int,
) -> torch.Tensor:
    """`pipeline.a2a_dispatch`."""
    name, outputs, inputs = _check("a2a_dispatch", input, output_splits, input_splits, group)
    if not isinstance(input, MXTensor):
        _check_blocks("a2a_dispatch", input, block_size)
    elif input.block_dim != -1:
        raise InputError(f"a2a_dispatch takes rows quantised along their length; they are {input!r}.")
    mode = ScalingMode.parse(scaling_mode)
    rows: torch.Tensor = _Dispatch.apply(input, outputs, inputs, name, mode, block_size)
    return rows


@in_graph
def combine(
    input: torch.Tensor,
    output_splits: _Splits,
    input_splits: _Splits,
    group: Group,
    scaling_mode: ScalingMode | str | Enum,
    block_size: int,
    mxfp8_bwd: bool,
) -> torch.Tensor:
    """`pipeline.a2a_combine`."""
    if isinstance(input, MXTensor):
        raise InputError("a2a_combine takes rows of a high-precision dtype, got an MXTensor; call .dequantize().")
    if not isinstance(mxfp8_bwd, bool):
        raise InputError(f"mxfp8_bwd must be True or False, got {type(mxfp8_bwd).__name__}.")
    name, outputs, inputs = _check("a2a_combine", input, output_splits, input_splits, group)
    if mxfp8_bwd:
        _check_blocks("a2a_combine", input, block_size)
    mode = ScalingMode.parse(scaling_mode)
    rows: torch.Tensor = _Combine.apply(input, outputs, inputs, name, mode, block_size, mxfp8_bwd)
    return rows


# --- arguments ------------------------------------------------------------------------------------------


def _resolve(group: Group) -> tuple[str, int | None]:
    """Name and size of a group; None is the world. While a compiler traces, a name has no size."""
    if isinstance(group, str) and torch.compiler.is_compiling():
        return group, None
    if not dist.is_initialized():
        raise InputError("there is no process group. Call triton_ep.initialize_distributed() first.")
    found = dist.group.WORLD if group is None else group
    if isinstance(found, str):
        try:
            found = dist.distributed_c10d._resolve_process_group(cast(Any, found))
        except (RuntimeError, ValueError, KeyError) as error:
            raise InputError(f"there is no process group named {group!r}; pass group.group_name.") from error
    if not isinstance(found, dist.ProcessGroup):
        raise InputError(f"group must be a process group that this rank is a member of, or its name; it is {group!r}.")
    return found.group_name, found.size()


def _check(
    what: str, input: torch.Tensor, output_splits: _Splits, input_splits: _Splits, group: Group
) -> tuple[str, list[int], list[int]]:
    """Name of the group and both splits as lists."""
    name, world_size = _resolve(group)
    if not isinstance(input, torch.Tensor):
        raise InputError(f"input of {what} must be a tensor, got {type(input).__name__}.")
    if input.dim() != 2:
        raise InputError(f"input of {what} must be [rows, row length]; it is {list(input.shape)}.")
    check_high_precision(input.dtype, f"dtype of the input of {what}")
    outputs, inputs = (
        _as_list(what, label, splits, world_size)
        for label, splits in (("output_splits", output_splits), ("input_splits", input_splits))
    )
    if sum(inputs) != input.shape[0]:
        remedy = "They are the rows that go to each rank."
        if sum(outputs) == input.shape[0]:
            remedy = "The two splits may be swapped: output_splits of a combine are input_splits of its dispatch."
        raise InputError(f"input_splits of {what} add up to {sum(inputs)}, input has {input.shape[0]} rows. {remedy}")
    return name, outputs, inputs


def _as_list(what: str, label: str, splits: Any, world_size: int | None) -> list[int]:
    if isinstance(splits, torch.Tensor):
        raise InputError(f"{label} of {what} is a tensor; the host must know it: pass {label}.tolist().")
    if isinstance(splits, str) or not isinstance(splits, Iterable):
        raise InputError(
            f"{label} of {what} must be a sequence of integers, rows per rank, got "
            f"{type(splits).__name__} {splits!r:.40}."
        )
    result = []
    for entry in splits:
        number = _integer(entry)
        if number is None:
            raise InputError(f"{label} of {what} has {entry!r:.40}; numbers of rows are integers.")
        result.append(number)
    if world_size is not None and len(result) != world_size:
        raise InputError(f"{label} of {what} has {len(result)} entries, the group has {world_size} ranks.")
    if any(entry < 0 for entry in result):
        raise InputError(f"{label} of {what} is {result}; numbers of rows are not negative.")
    return result


def _integer(value: Any) -> Any:
    """An integer of Python or numpy, or a compiler's symbol for one, else None."""
    if isinstance(value, int | torch.SymInt):
        return None if isinstance(value, bool) else value
    return int(value) if isinstance(value, np.integer) else None


def _check_blocks(what: str, input: torch.Tensor, block_size: int) -> None:
    if _integer(block_size) is None:
        raise InputError(
            f"block_size of {what} must be an integer, got {type(block_size).__name__} {block_size!r:.40}."
        )
    if block_size < 1 or input.shape[1] % block_size:
        raise InputError(
            f"rows of {what} have {input.shape[1]} elements, which must be a multiple of block_size, {block_size}. "
            "Pad them, or leave them unquantised: the layer without payload; mxfp8_bwd=False for a combine."
        )


# --- below autograd -------------------------------------------------------------------------------------


def _start(rows: torch.Tensor, outputs: list[int], inputs: list[int], name: str) -> torch.Tensor:
    result: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), outputs, inputs, name)
    return result


def _finish(rows: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(rows)
    return result


def _exchange(rows: torch.Tensor, outputs: list[int], inputs: list[int], name: str) -> torch.Tensor:
    """Rows from all ranks, sorted by rank; an MXTensor if the input is one."""
    if not isinstance(rows, MXTensor):
        return _finish(_start(rows, outputs, inputs, name))
    parts = [_start(part.view(torch.uint8), outputs, inputs, name) for part in (rows.qdata, rows.scale)]
    data, scale = map(_finish, parts)
    return MXTensor.from_qdata_and_scales(
        data, scale, rows.orig_dtype, block_size=rows.block_size, elem_dtype=rows.elem_dtype
    )


def _quantized(rows: torch.Tensor, mode: ScalingMode, block_size: int) -> torch.Tensor:
    if isinstance(rows, MXTensor):
        return rows
    return MXTensor.to_mx(rows.contiguous(), block_size=block_size, scaling_mode=mode)


class _Dispatch(torch.autograd.Function):
    """Quantised rows forward, high-precision gradients backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        outputs: list[int],
        inputs: list[int],
        name: str,
        mode: ScalingMode,
        block_size: int,
    ) -> torch.Tensor:
        ctx.back = inputs, outputs, name
        return _exchange(_quantized(rows, mode, block_size), outputs, inputs, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(plain(grads[0]), *ctx.back), None, None, None, None, None


class _Combine(torch.autograd.Function):
    """High-precision rows forward, quantised gradients backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        outputs: list[int],
        inputs: list[int],
        name: str,
        mode: ScalingMode,
        block_size: int,
        mxfp8_bwd: bool,
    ) -> torch.Tensor:
        ctx.back, ctx.blocks = (inputs, outputs, name), (mode, block_size) if mxfp8_bwd else None
        return _exchange(rows, outputs, inputs, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = plain(grads[0]) if ctx.blocks is None else _quantized(grads[0], *ctx.blocks)
        return _exchange(grad, *ctx.back), None, None, None, None, None, None
