"""Permute received rows into expert-major order, and back: differentiable gathers and scatters of torch.

Received rows are sorted by rank, then by expert. `permuted_indices[p]` is the received row at position p of the
expert-major order; a negative index is padding. A padding row is zero: elements 0x00, scale byte 0. No step reads a
number on the host, so none waits for the device; lengths are upper bounds derived from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from triton_ep.errors import InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.library import in_graph

_WIDE = 8  # bytes moved as one number
_MOST = 1 << 31  # of rows, experts and ranks
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class PermuteIndices(NamedTuple):
    """Results of `generate_permute_indices`.

    Attributes:
        permuted_indices: [max_len] int32, received row of each expert-major row; -1 = padding.
        m_sizes: [E] int32, rows of each local expert, padding included.
        m_offsets: [E] int32, end of each local expert's rows (exclusive).
    """

    permuted_indices: torch.Tensor
    m_sizes: torch.Tensor
    m_offsets: torch.Tensor


class Permuted(NamedTuple):
    """Results of `permute_mxfp8_fwd_hp_bwd` and `permute_and_pad`.

    Attributes:
        padded_shape: (R + 1, H): shape of the received rows plus one row of zeros.
        rows: [P, H], expert-major, MXTensor or plain as given; P = R + E * alignment, rounded up to the alignment.
        permuted_indices: [P] int32, see `PermuteIndices`.
        m_sizes: [E] int32.
        group_offsets: [E] int32, end of each local expert's rows (exclusive), as a grouped GEMM takes it.
    """

    padded_shape: torch.Size
    rows: torch.Tensor
    permuted_indices: torch.Tensor
    m_sizes: torch.Tensor
    group_offsets: torch.Tensor


def generate_permute_indices(
    tokens_per_expert_group: torch.Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
    use_cpu: bool = False,
) -> PermuteIndices:
    """Compute the received row of each row in expert-major order: sorted by expert, rank, order within the rank.

    Arguments:
        tokens_per_expert_group: [num_ranks * experts_per_rank] integers on the device, rank-major: entry
            r * experts_per_rank + i counts the rows from rank r for local expert i.
        max_len: length of the result; at least the sum of `m_sizes`, for which rows + experts_per_rank * alignment
            suffices. Indices that do not fit are left out.
        alignment: every expert's rows are padded to a multiple of it; an expert without rows gets `alignment` rows.
        use_cpu: accepted for callers of torchao; the work runs on the device of the counts.

    Raises:
        InputError: impossible shape, dtype or sizes; on the CPU also a `max_len` that is too small.
    """
    counts = tokens_per_expert_group
    _check_tensor("counts of rows", counts)
    for name, number in (
        ("experts_per_rank", experts_per_rank),
        ("num_ranks", num_ranks),
        ("max_len", max_len),
        ("alignment", alignment),
    ):
        _check_integer(name, number)
    if experts_per_rank < 1 or num_ranks < 1 or alignment < 1 or max_len < 0:
        raise InputError(
            f"experts_per_rank is {experts_per_rank}, num_ranks {num_ranks}, alignment {alignment}, max_len {max_len}; "
            "the first three must be positive, the last one not negative."
        )
    if counts.numel() != num_ranks * experts_per_rank or counts.dtype not in _INTEGERS:
        raise InputError(
            f"counts of rows are {list(counts.shape)} {counts.dtype}; {num_ranks} ranks with {experts_per_rank} local "
            f"experts need {num_ranks * experts_per_rank} integers."
        )
    if _readable(counts) and counts.numel() and int(counts.min()) < 0:
        raise InputError(f"counts of rows are {counts.tolist()}; none can be negative.")
    counts = counts.reshape(-1).long()
    first_row = (counts.cumsum(0) - counts).view(num_ranks, experts_per_rank)
    counts = counts.view(num_ranks, experts_per_rank)
    num_rows = counts.sum(0)
    m_sizes = (num_rows.clamp(min=1) + alignment - 1) // alignment * alignment
    m_offsets = m_sizes.cumsum(0)
    if _readable(counts) and int(m_offsets[-1]) > max_len:
        raise InputError(
            f"{int(counts.sum())} rows in groups aligned to {alignment} take {int(m_offsets[-1])} rows, max_len is "
            f"{max_len}. Pass at least rows + experts_per_rank * alignment."
        )
    # The result is a sequence of runs: for each expert one run per rank, then one of padding.
    runs = torch.cat([counts, (m_sizes - num_rows).unsqueeze(0)]).t().flatten()
    ends = runs.cumsum(0)
    from_position = torch.cat([first_row, torch.zeros_like(first_row[:1])]).t().flatten() - (ends - runs)
    position = torch.arange(max_len, device=counts.device)
    run = torch.searchsorted(ends, position, right=True)
    is_row = (run % (num_ranks + 1) < num_ranks) & (run < runs.numel())
    source = position + from_position[run.clamp(max=runs.numel() - 1)]
    return PermuteIndices(torch.where(is_row, source, -1).int(), m_sizes.int(), m_offsets.int())


@in_graph
def permute(mx: torch.Tensor, permuted_indices: torch.Tensor, padded_shape: Sequence[int]) -> torch.Tensor:
    """[P, H]: row p is row permuted_indices[p] of the input, or zeros if that index is negative.

    Arguments:
        mx: [R, H], MXTensor or plain; the result is of the same kind.
        permuted_indices: [P] int32 or int64 on the device, at most R (R gives zeros as well); no row twice.
        padded_shape: (R + 1, H), shape of the rows plus one row of zeros.

    The gradient of a row is the gradient of its position p, or zero if it has none; in `mx.dtype`, not quantised.

    Raises:
        InputError: shapes that do not fit each other, or, on the CPU, an index out of range.
    """
    _check_tensor("rows", mx)
    _check_shape(padded_shape)
    if mx.dim() != 2 or tuple(padded_shape) != (mx.shape[0] + 1, mx.shape[1]):
        raise InputError(
            f"padded_shape is {list(padded_shape)} for rows {list(mx.shape)}; it must be [R, H] with one row more."
        )
    if isinstance(mx, MXTensor) and mx.block_dim != -1:
        raise InputError(f"rows must be quantised along their length; they are {mx!r}.")
    _check_indices(permuted_indices, mx.device, mx.shape[0])
    rows: torch.Tensor = _Permute.apply(mx, permuted_indices)
    return rows


@in_graph
def unpermute(x: torch.Tensor, permuted_indices: torch.Tensor, padded_shape: Sequence[int]) -> torch.Tensor:
    """[R, N]: the inverse of `permute`. Row permuted_indices[p] is row p of the input; rows without a p are zero.

    Arguments:
        x: [P, N] of any floating dtype.
        permuted_indices: [P], as given to `permute`; rows with a negative index are dropped.
        padded_shape: (R + 1, any): pass the one of `permute`, even if the GEMM has changed the row length.

    The gradient is gathered as `permute` gathers rows, and is an MXTensor if the incoming gradient is one.

    Raises:
        InputError: shapes that do not fit each other, or, on the CPU, an index out of range.
    """
    if isinstance(x, MXTensor):
        raise InputError("unpermute takes rows of a high-precision dtype, got an MXTensor; call .dequantize().")
    _check_tensor("x", x)
    _check_tensor("permuted_indices", permuted_indices)
    _check_shape(padded_shape)
    if x.dim() != 2 or x.shape[:1] != permuted_indices.shape:
        raise InputError(
            f"x is {list(x.shape)}, permuted_indices {list(permuted_indices.shape)}; they must be [P, N] and [P]."
        )
    if len(padded_shape) != 2 or padded_shape[0] < 1:
        raise InputError(f"padded_shape is {list(padded_shape)}; it must be [R + 1, row length].")
    num_rows = padded_shape[0] - 1
    _check_indices(permuted_indices, x.device, num_rows)
    rows: torch.Tensor = _Unpermute.apply(x, permuted_indices, num_rows)
    return rows


def permute_and_pad(
    x: torch.Tensor, num_tokens_per_expert: torch.Tensor, ep_degree: int, num_local_experts: int, alignment: int
) -> Permuted:
    """Compute the indices and permute received rows into expert-major order, with zero rows as padding.

    Arguments:
        x: [R, H], plain or MXTensor: sorted by rank, then by expert.
        num_tokens_per_expert: [ep_degree * num_local_experts] integers on the device, rank-major; their sum is R.
        ep_degree: ranks that sent rows.
        alignment: see `generate_permute_indices`.

    Raises:
        InputError: as `generate_permute_indices` and `permute`; on the CPU also counts whose sum is not R.
    """
    _check_tensor("x", x)
    if x.dim() != 2:
        raise InputError(f"x must be [R, H]; it is {list(x.shape)}.")
    num_rows = x.shape[0]
    if not isinstance(num_tokens_per_expert, torch.Tensor):
        raise InputError(f"num_tokens_per_expert is {num_tokens_per_expert!r:.80}; it must be a tensor of integers.")
    if num_tokens_per_expert.dtype not in _INTEGERS:
        raise InputError(f"num_tokens_per_expert must hold integers, got {num_tokens_per_expert.dtype}.")
    if _readable(num_tokens_per_expert) and int(num_tokens_per_expert.sum()) != num_rows:
        raise InputError(
            f"num_tokens_per_expert adds up to {int(num_tokens_per_expert.sum())}, but there are {num_rows} rows."
        )
    for name, number in (("alignment", alignment), ("num_local_experts", num_local_experts), ("ep_degree", ep_degree)):
        _check_integer(name, number)
    if alignment < 1:
        raise InputError(f"the alignment of groups is {alignment}; it must be positive.")
    max_len = -(-(num_rows + num_local_experts * alignment) // alignment) * alignment
    indices, sizes, offsets = generate_permute_indices(
        num_tokens_per_expert, num_local_experts, ep_degree, max_len, alignment
    )
    padded_shape = torch.Size((num_rows + 1, x.shape[1]))
    return Permuted(padded_shape, permute(x, indices, padded_shape), indices, sizes, offsets)


# --- below autograd -------------------------------------------------------------------------------------


def _readable(x: torch.Tensor) -> bool:
    """Whether the host may read values without waiting for a device or breaking a compiler's graph."""
    return x.device.type == "cpu" and type(x) is torch.Tensor and not torch.compiler.is_compiling()


def _check_tensor(name: str, given: Any) -> None:
    if not isinstance(given, torch.Tensor):
        raise InputError(f"{name} must be a tensor, got {type(given).__name__}.")


def _check_integer(name: str, given: Any) -> None:
    """Raise unless `given` is an integer, or a symbol, which a compiler passes in place of an integer."""
    if not isinstance(given, int | torch.SymInt) or isinstance(given, bool) or given > _MOST:
        raise InputError(f"{name} must be an integer of at most {_MOST}, got {type(given).__name__} {given!r:.40}.")


def _check_shape(given: Any) -> None:
    if not isinstance(given, Sequence) or not all(isinstance(size, int | torch.SymInt) for size in given):
        raise InputError(f"padded_shape must be a sequence of integers, got {type(given).__name__} {given!r:.40}.")


def _check_indices(indices: torch.Tensor, device: torch.device, num_rows: int) -> None:
    _check_tensor("permuted_indices", indices)
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64) or indices.device != device:
        raise InputError(
            f"permuted_indices is {list(indices.shape)} {indices.dtype} on {indices.device}; it must be 1-D, int32 or "
            f"int64, on {device}."
        )
    if _readable(indices) and indices.numel() and int(indices.max()) > num_rows:
        raise InputError(
            f"permuted_indices has {int(indices.max())}, there are {num_rows} rows; a negative index is padding."
        )


def _places(indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Indices as int64, with `num_rows` in place of padding."""
    return torch.where(indices < 0, num_rows, indices).long()


def _take(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows by index, zeros for padding; an MXTensor gives an MXTensor."""
    if isinstance(rows, MXTensor):
        places = _places(indices, rows.shape[0])
        data, scale = (_take_bytes(part.view(torch.uint8), places) for part in (rows.qdata, rows.scale))
        return MXTensor.from_qdata_and_scales(
            data, scale, rows.orig_dtype, block_size=rows.block_size, elem_dtype=rows.elem_dtype
        )
    return F.pad(rows, (0, 0, 0, 1)).index_select(0, _places(indices, rows.shape[0]))


def _take_bytes(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Gather [P, bytes] uint8 from [R, bytes] plus one row of zeros."""
    padded = F.pad(rows.contiguous(), (0, 0, 0, 1))
    if rows.shape[1] % _WIDE == 0:
        # torch's gather uses one thread per element, so wide elements are faster.
        return padded.view(torch.int64).index_select(0, places).view(torch.uint8)
    return padded.index_select(0, places)


def _put(rows: torch.Tensor, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, N]: rows at their indices, zeros elsewhere; padding rows go to an extra row that is cut off."""
    out = rows.new_zeros(num_rows + 1, rows.shape[1])
    return out.index_copy_(0, _places(indices, num_rows), rows)[:num_rows]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.num_rows = rows.shape[0]
        return _take(rows, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return _put(plain(grads[0]), indices, ctx.num_rows), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        return _put(x, indices, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return _take(grads[0], indices), None, None


def plain(rows: torch.Tensor) -> torch.Tensor:
    """Dequantise rows if they are an MXTensor."""
    return rows.dequantize() if isinstance(rows, MXTensor) else rows
