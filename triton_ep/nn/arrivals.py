"""Staging rows kept for the backward pass in place of the expert-major rows expanded from them.

A token for several experts of one rank arrives there once and is expanded to one row per expert. The gradient of the
first product's weights needs the expanded rows. The backward pass expands them again from the rows as they arrived,
which the dispatch keeps in memory of their own: the next one overwrites the staging buffer.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from triton_ep.config import EPConfig
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.kernels.device.codes import REPORT_ARRIVALS, REPORT_WORDS
from triton_ep.ops.arrivals import expand_arrivals, expand_arrivals_beside

_COPIES = 2
"""Least number of rows per staging row at which keeping staging rows is worth the second expansion."""
_Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor, int]
"""The first arguments of `expand_arrivals`, up to num_rows."""


class Arrived(NamedTuple):
    """Rows of the latest dispatch as they arrived here.

    Attributes:
        rows: [C, H] bf16 by staging row: C have arrived, or may arrive.
        rank: this rank, whose report holds the number that did arrive.
    """

    rows: torch.Tensor
    rank: int

    def expand(self, desc: EPAllToAllLayoutDesc, columns: slice) -> torch.Tensor:
        """[R, W] bf16: these columns of the rows of this dispatch, bit for bit, except rows past the last segment."""
        return expand_arrivals(*self._operands(desc), columns)

    def expand_beside(
        self, desc: EPAllToAllLayoutDesc, columns: slice, stream: torch.cuda.Stream | None
    ) -> torch.Tensor:
        """The same on a stream, next to products (`expand_arrivals_beside`)."""
        return expand_arrivals_beside(*self._operands(desc), columns, stream)

    def _operands(self, desc: EPAllToAllLayoutDesc) -> _Operands:
        copies = desc.skipped_token_topk_mapping_indices
        assert copies is not None, "kept with local combine only"
        return (
            self.rows,
            copies,
            desc.report,
            self.rank * REPORT_WORDS + REPORT_ARRIVALS,
            desc.expert_offsets,
            desc.num_recv_tokens_per_expert,
            desc.num_recv_rows,
        )


def keeps_arrivals(config: EPConfig) -> bool:
    """True if rows are bf16, at most half as many arrive as are expanded, and the table of their expansion is kept.

    The result is the same on all ranks and known before any row arrives.
    """
    rows = config.max_tokens * config.topk if config.recv_capacity is None else config.recv_capacity
    fits = config.enable_local_combine and not config.low_latency and config.payload is None
    fits = fits and not config.copy_engines  # which stage rows in another order
    return fits and config.token_dtype == torch.bfloat16 and _COPIES * config.world_size * config.max_tokens <= rows


def maker_of_arrivals(config: EPConfig) -> partial[Arrived] | None:
    """Makes `Arrived` from the rows that a dispatch has kept; None if the expanded rows themselves are kept."""
    return partial(Arrived, rank=config.rank) if keeps_arrivals(config) else None
