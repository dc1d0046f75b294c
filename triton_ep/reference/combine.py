"""Oracle of combine: the sum over k of the experts' outputs for a token's assignments."""

from collections.abc import Sequence

import torch

from triton_ep.reference.dispatch import DispatchResult


def combine(
    ys: Sequence[torch.Tensor],
    results: Sequence[DispatchResult],
    rank: int,
    out_dtype: torch.dtype,
    weights: Sequence[torch.Tensor] | None = None,
    biases: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Result of combine on rank `rank`: [T, H] `out_dtype`, the float32 sum in the order of k, rounded once.

    Arguments:
        ys: every rank's expert output [R_r, H], rows as in that rank's `recv_x`.
        results: every rank's dispatch.
        weights: every rank's row weights [R_r] float32; a row is multiplied by its weight in float32, and
            the product rounded to float32, before it is added. None: a plain sum.
        biases: [T, H] each, of this rank; the sum starts with them, in this order.

    A token without assignments comes back as zeros, or as the sum of its biases.
    """
    terms = _terms(ys, results, rank, weights)
    total = terms.new_zeros(terms.shape[0], terms.shape[2])
    for bias in biases:
        total = total + bias.float()
    for k in range(terms.shape[1]):
        total = total + terms[:, k]
    return total.to(out_dtype)


def slot_values(values: Sequence[torch.Tensor], results: Sequence[DispatchResult], rank: int) -> torch.Tensor:
    """Return one value per received row to its (token, k) on rank `rank`: [T, K], zeros for dropped entries.

    Arguments:
        values: every rank's [R_r] float32, one per row of its `recv_x`.
        results: every rank's dispatch.
    """
    return _terms([each.unsqueeze(1) for each in values], results, rank, None)[:, :, 0]


def combine_tolerance(
    ys: Sequence[torch.Tensor],
    results: Sequence[DispatchResult],
    rank: int,
    out_dtype: torch.dtype,
    weights: Sequence[torch.Tensor] | None = None,
    partial_dtype: torch.dtype = torch.float32,
    num_partial_roundings: int = 1,
) -> torch.Tensor:
    """Largest difference from `combine`, [T, H] float32, of a correct combine that adds in another order.

    Covers any order of the float32 additions, fused multiply-adds, partial sums rounded to `partial_dtype` on
    the way (once if partial sums per rank or per node travel, twice if both do), and the final rounding
    to `out_dtype`. With S the sum of the absolute terms and u half a step at 1: two float32 sums of K
    products differ by at most 2 K u32 S, each rounding of the partials adds at most u_partial S, and two
    numbers that are d apart round to numbers at most d + one step apart.
    """
    terms = _terms(ys, results, rank, weights)
    magnitude = terms.abs().sum(1).double()
    relative = terms.shape[1] * torch.finfo(torch.float32).eps
    if partial_dtype != torch.float32:
        relative = (1 + relative) * (1 + torch.finfo(partial_dtype).eps / 2) ** num_partial_roundings - 1
    before_rounding = relative * magnitude
    largest = terms.double().sum(1).abs() + before_rounding
    return (before_rounding + torch.finfo(out_dtype).eps * largest).float()


def _terms(
    ys: Sequence[torch.Tensor],
    results: Sequence[DispatchResult],
    rank: int,
    weights: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    """[T, K, H] float32: the term of each assignment; zeros for dropped entries."""
    dst_rank, dst_row = results[rank].dst_rank[rank], results[rank].dst_row[rank]
    terms = torch.zeros(*dst_rank.shape, ys[rank].shape[1])
    for owner, y in enumerate(ys):
        token, k = torch.nonzero(dst_rank == owner, as_tuple=True)
        row = dst_row[token, k]
        term = y[row].float()
        if weights is not None:
            term = term * weights[owner][row].float().unsqueeze(1)
        terms[token, k] = term
    return terms
