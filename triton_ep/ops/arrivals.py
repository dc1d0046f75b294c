"""Expansion of rows that an earlier dispatch delivered (kernels/experts/expand.py)."""

from __future__ import annotations

import torch

from triton_ep.errors import InputError
from triton_ep.ops import library
from triton_ep.ops.tiles import check_offsets
from triton_ep.runtime import launch as runtime  # before the kernels: decides whether they are interpreted
from triton_ep.runtime.plans import experts_backward as plans


def _expand_arrivals(
    arrived: torch.Tensor,
    copies: torch.Tensor,
    counts: torch.Tensor,
    at: int,
    offs: torch.Tensor,
    filled: torch.Tensor,
    num_rows: int,
    first: int,
    width: int,
    stream: torch.cuda.Stream | None = None,
) -> torch.Tensor:
    """stream: of the kernel, None = the current one, which the memory of the result belongs to."""
    (num_arrivals, hidden), experts = arrived.shape, offs.shape[0] - 1
    out = arrived.new_empty(num_rows, width)
    plan = plans.expand_arrivals(width, runtime.INTERPRETING)
    with torch.cuda.stream(stream):
        runtime.launch(
            plan,
            num_arrivals + experts * plan.constexprs["SHARES"] if out.numel() else 0,
            arrived_ptr=arrived,
            copies_ptr=copies,
            counts_ptr=counts,
            offs_ptr=offs,
            filled_ptr=filled,
            out_ptr=out,
            num_arrivals=num_arrivals,
            at=at,
            topk=copies.shape[1],
            hidden=hidden,
            first=first,
            width=width,
        )
    return out


_expand_op = library.op(
    "(Tensor arrived, Tensor copies, Tensor counts, int at, Tensor offs, Tensor filled, SymInt num_rows, int first, "
    "int width) -> Tensor",
    lambda arrived, copies, counts, at, offs, filled, num_rows, first, width: arrived.new_empty(num_rows, width),
)(_expand_arrivals)


@library.without_grad
def expand_arrivals(
    arrived: torch.Tensor,
    copies: torch.Tensor,
    counts: torch.Tensor,
    at: int,
    offs: torch.Tensor,
    filled: torch.Tensor,
    num_rows: int,
    columns: slice = slice(None),
) -> torch.Tensor:
    """[num_rows, W] bf16: each arrived row at the rows of its assignments, zeros in the padding of segments.

    Has no gradient. Does not write rows from offs[-1] on.

    Arguments:
        arrived: [C, H] bf16, contiguous.
        copies: [C, K] int32, contiguous: rows of the result, each at most once; -1 = none.
        counts: int32, contiguous; entry `at` is the number of valid rows of `arrived` and `copies`. The other entries
            are not read.
        offs: [E + 1] int32, first row of each expert's segment, then the end of the last.
        filled: [E] int32, rows of each segment that hold assignments: the first ones; the rest is padding.
        columns: the W columns of `arrived` that are wanted.

    Raises:
        InputError: operands that do not fit each other.
    """
    if arrived.ndim != 2 or arrived.dtype != torch.bfloat16 or not arrived.is_contiguous():
        raise InputError(f"arrived must be contiguous bfloat16 [C, H]; it is {arrived.dtype} {list(arrived.shape)}.")
    check_offsets(offs, device=arrived.device)
    shapes = {"copies": (copies, arrived.shape[:1]), "filled": (filled, (offs.shape[0] - 1,))}
    for name, (each, shape) in {**shapes, "counts": (counts, ())}.items():
        fits = each.dtype == torch.int32 and each.is_contiguous() and each.device == arrived.device
        if not fits or each.shape[: len(shape)] != tuple(shape):
            raise InputError(
                f"{name} must be contiguous int32 {[*shape, '...']} on {arrived.device}; it is {each.dtype} "
                f"{list(each.shape)} on {each.device}."
            )
    if copies.ndim != 2 or not 0 <= at < counts.numel():
        raise InputError(f"copies must be [C, K], at an entry of counts; got {list(copies.shape)}, {at}.")
    first, end, step = columns.indices(arrived.shape[1])
    if step != 1 or end < first:
        raise InputError(f"columns must be a slice of consecutive columns of arrived; it is {columns}.")
    given = (arrived, copies, counts, at, offs.contiguous(), filled, num_rows, first, end - first)
    found: torch.Tensor = _expand_op(*given)
    return found


def expand_arrivals_beside(
    arrived: torch.Tensor,
    copies: torch.Tensor,
    counts: torch.Tensor,
    at: int,
    offs: torch.Tensor,
    filled: torch.Tensor,
    num_rows: int,
    columns: slice,
    stream: torch.cuda.Stream | None,
) -> torch.Tensor:
    """`expand_arrivals` of operands that are known to fit, on another stream, by programs that fit next to those of
    gradients of weights.

    The result has memory of the current stream, which must wait for that stream before it uses or frees it.

    stream: None = the current one.
    """
    first, end, _ = columns.indices(arrived.shape[1])
    return _expand_arrivals(arrived, copies, counts, at, offs, filled, num_rows, first, end - first, stream)
