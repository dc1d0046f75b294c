"""What arrived, kept for a backward pass in place of the rows that were made of it.

A token that several experts of a rank want arrives there once, and its expansion has a row for each of them. The
gradient of the first product's weights needs those rows: they are expanded again from a copy of what arrived, which is
made before the next dispatch writes over it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from triton_ep.config import EPConfig
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.kernels.device.codes import REPORT_ARRIVALS, REPORT_WORDS
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.arrivals import expand_arrivals

_COPIES = 2
"""Rows per arrival from which on keeping arrivals is worth a copy and another expansion."""


class Arrived(NamedTuple):
    """Rows of the latest dispatch as they arrived here.

    Attributes:
        rows: [C, H] bf16, C arrival rows, or as many as may arrive.
        rank: this rank, whose report says how many have.
    """

    rows: torch.Tensor
    rank: int

    def expand(self, desc: EPAllToAllLayoutDesc) -> torch.Tensor:
        """[R, H] bf16: the rows that this dispatch gave, bit for bit, those behind the last segment aside."""
        copies = desc.skipped_token_topk_mapping_indices
        assert copies is not None, "kept with local combine only"
        return expand_arrivals(
            self.rows,
            copies,
            desc.report,
            self.rank * REPORT_WORDS + REPORT_ARRIVALS,
            desc.expert_offsets,
            desc.num_recv_tokens_per_expert,
            desc.num_recv_rows,
        )


def keeps_arrivals(config: EPConfig) -> bool:
    """True where at most half as many rows arrive as are made of them, in bf16, and where their copies are known.

    The same on all ranks, and known before any row has come.
    """
    rows = config.max_tokens * config.topk if config.recv_capacity is None else config.recv_capacity
    fits = config.enable_local_combine and not config.low_latency and config.payload is None
    return fits and config.token_dtype == torch.bfloat16 and _COPIES * config.world_size * config.max_tokens <= rows


def copy_arrivals(layer: EPAll2AllLayer, desc: EPAllToAllLayoutDesc) -> Arrived:
    """A copy of what has arrived by the latest dispatch, before the next one."""
    copies, ctx = desc.skipped_token_topk_mapping_indices, layer.context
    assert copies is not None, "with local combine"
    rows = ctx.local("stage_x")[: copies.shape[0]].view(torch.bfloat16)
    return Arrived(rows.clone(), ctx.config.rank)


def keeper_of_arrivals(layer: EPAll2AllLayer) -> partial[Arrived] | None:
    """`copy_arrivals` of this layer; None where rows are kept as they are."""
    return partial(copy_arrivals, layer) if keeps_arrivals(layer.config) else None
