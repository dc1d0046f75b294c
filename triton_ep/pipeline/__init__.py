"""The differentiable MXFP8 pipeline, stage by stage over collectives of a process group.

    a2a_dispatch -> permute -> to_mxfp8_then_scaled_grouped_mm -> unpermute -> a2a_combine

In the forward pass rows are quantised before they are sent, and the GEMM reads them as they were sent; its results
travel in high precision. The backward pass is the mirror image: combine quantises the gradient, and the GEMM's two
gradients read it quantised; the gradient of the rows travels in high precision. Each stage is a function with a short
name; the long names take the arguments of torchao's functions of the same name. torch.compile traces stages below
Dynamo, because the gradient between two stages may be an MXTensor, which Dynamo would take for a plain tensor.

Every exchange needs its splits on the host, moves one row per (token, expert), and returns rows that still have to be
permuted. `triton_ep.autograd` over a layer with payload="mxfp8" gives the same rows in one step:
docs/reference/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from triton_ep.errors import InputError
from triton_ep.mx import grouped_mm
from triton_ep.mx.formats import BLOCK, ScalingMode
from triton_ep.ops.library import in_graph
from triton_ep.pipeline import exchange as exchange
from triton_ep.pipeline.exchange import Group
from triton_ep.pipeline.permute import (
    Permuted,
    PermuteIndices,
    generate_permute_indices,
    permute,
    permute_and_pad,
    unpermute,
)

__all__ = [
    "PermuteIndices",
    "Permuted",
    "_to_mxfp8_then_scaled_grouped_mm",
    "a2a_combine",
    "a2a_combine_hp_fwd_mxfp8_bwd",
    "a2a_dispatch",
    "a2a_dispatch_mxfp8_fwd_hp_bwd",
    "generate_permute_indices",
    "permute",
    "permute_and_pad",
    "permute_mxfp8_fwd_hp_bwd",
    "to_mxfp8_then_scaled_grouped_mm",
    "unpermute",
    "unpermute_hp_fwd_mxfp8_bwd",
]

to_mxfp8_then_scaled_grouped_mm = in_graph(grouped_mm._to_mxfp8_then_scaled_grouped_mm)
_to_mxfp8_then_scaled_grouped_mm = to_mxfp8_then_scaled_grouped_mm


def a2a_dispatch(
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: Group = None,
    scaling_mode: ScalingMode | str | Enum = "rceil",
    block_size: int = BLOCK,
) -> torch.Tensor:
    """Quantise rows and send them to the ranks of their experts. Collective, and so is its backward pass.

    Arguments:
        input: [T, H] bf16, fp16 or fp32, one row per (token, expert), sorted by target rank; or an MXTensor, which
            is sent as it is. H is a multiple of `block_size`.
        output_splits: [W], rows from each rank; not compared with what the other ranks send.
        input_splits: [W], rows to each rank; their sum is T.
        group: process group or its name; None = all ranks.
        scaling_mode: "rceil", "floor", "ceil", "even".

    Returns an MXTensor [sum of output_splits, H], e4m3, with `input.dtype` as its high-precision dtype, sorted by
    source rank. Gradients travel back in that dtype, not quantised; all ranks or none must require them.

    Raises:
        InputError: splits, shape, dtype or group do not fit; nothing was sent.
    """
    return exchange.dispatch(input, output_splits, input_splits, group, scaling_mode, block_size)


def a2a_combine(
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: Group = None,
    scaling_mode: ScalingMode | str | Enum = "rceil",
    block_size: int = BLOCK,
    mxfp8_bwd: bool = True,
) -> torch.Tensor:
    """Send rows back to the ranks of their tokens, as they are. Collective, and so is its backward pass.

    Arguments:
        input: [R, H] bf16, fp16 or fp32, in the row order of `a2a_dispatch`.
        output_splits: [W], rows that come back from each rank: `input_splits` of the dispatch.
        input_splits: [W], rows that go back to each rank: `output_splits` of the dispatch.
        group, scaling_mode, block_size: as for `a2a_dispatch`; the latter two for the gradient.
        mxfp8_bwd: send the gradient quantised, and return it as an MXTensor; False: as it is.

    Returns [sum of output_splits, H], one row per dispatched row, in the same order.

    Raises:
        InputError: splits, shape, dtype or group do not fit; nothing was sent.
    """
    return exchange.combine(input, output_splits, input_splits, group, scaling_mode, block_size, mxfp8_bwd)


# --- torchao's names ------------------------------------------------------------------------------------


def a2a_dispatch_mxfp8_fwd_hp_bwd(
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group_name: Group = None,
    scaling_mode: ScalingMode | str | Enum = "rceil",
    block_size: int = BLOCK,
    *,
    group: Group = None,
) -> torch.Tensor:
    """`a2a_dispatch`; `group_name` and `group` both accept a group or its name."""
    chosen = _either(group_name, group)
    return exchange.dispatch(input, output_splits, input_splits, chosen, scaling_mode, block_size)


def permute_mxfp8_fwd_hp_bwd(
    mx_tensor: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    ep_degree: int,
    num_local_experts: int,
    group_size_multiple_of: int = BLOCK,
    use_mxfp8: bool = True,
    use_triton_for_bwd: bool = True,
) -> Permuted:
    """`permute_and_pad` with an alignment of `group_size_multiple_of`; the last two arguments have no effect."""
    return permute_and_pad(mx_tensor, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of)


def unpermute_hp_fwd_mxfp8_bwd(
    input: torch.Tensor, permuted_indices: torch.Tensor, padded_shape: Sequence[int]
) -> torch.Tensor:
    """`unpermute`."""
    return unpermute(input, permuted_indices, padded_shape)


def a2a_combine_hp_fwd_mxfp8_bwd(
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group_name: Group = None,
    scaling_mode: ScalingMode | str | Enum = "rceil",
    block_size: int = BLOCK,
    mxfp8_bwd: bool = True,
    *,
    group: Group = None,
) -> torch.Tensor:
    """`a2a_combine`; `group_name` and `group` both accept a group or its name."""
    chosen = _either(group_name, group)
    return exchange.combine(input, output_splits, input_splits, chosen, scaling_mode, block_size, mxfp8_bwd)


def _either(group_name: Group, group: Group) -> Group:
    if group_name is not None and group is not None:
        raise InputError(f"group_name is {group_name!r} and group {group!r}; pass one of them.")
    return group if group_name is None else group_name
