"""EPAllToAllLayoutDesc: the routing facts of one dispatch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from triton_ep.context.layout import placement_parts, tile_words
from triton_ep.kernels.device.codes import (
    ENTRY_DST_ROW,
    ENTRY_KEPT,
    ENTRY_NODE_SLOT,
    ENTRY_OWNER,
    ENTRY_STAGE_ROW,
    REPORT_ARRIVALS,
    REPORT_ARRIVALS_HERE,
    REPORT_TOKENS,
    REPORT_WORDS,
    TILE_WORDS,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class EPAllToAllLayoutDesc:
    """Routing facts of one dispatch, needed by its combine and by both backward passes.

    Returned by `EPAll2AllLayer.dispatch`. It owns its tensors: any number may be live, in any order, until the
    layer is finalized. Holds tensors and ints only, so it is a pytree and passes through CUDA graphs.
    Letters: T tokens of this rank, K top-k, W ranks, N nodes, M max_tokens, e local experts, C staging rows.

    Attributes:
        num_dispatch_token_cur_rank: T.
        num_recv_rows: rows of `recv_x`: received rows with padding (exact), or the capacity (static).
        entries: [F, T, K] int32, F = 6 or 7 fields of every (token, k); low latency: [1, T, K], the ids only.
        placement: int32, facts about this rank from the splits of all ranks; see the properties below. Low
            latency: only up to `overflow`, and of the report only tokens, host words and this rank's rows.
        shape: (W, LW, e), ranks, ranks per node, local experts; determines the parts of `placement`.
        layer_id: identifies the layer of the dispatch.
        dispatch_number: the host's number of this dispatch on its layer, from 1; 0 if an op of torch.library builds
            the descriptor. Kernels compare the epoch of the device instead, which replays of a graph advance as well.
        forward: [2, N, M, K] int32, targets of the tokens that this rank forwards for other nodes, by node and slot:
            ranks, and rows there, in k order, -1 = dropped; with `enable_local_combine` the ranks of this node that
            a token goes to, and rows of their sums here, then -1. None with one node.
        send_reqs_recv_tensor: None; the protocol has no ranges of tokens.
        skipped_token_mapping_indices: None; the next field maps a token to its rows.
        skipped_token_topk_mapping_indices: [C, K] int32, rows in `recv_x` of each received token, -1 = none; only
            with `enable_local_combine`. Low latency: C = W * M, a row per token of any rank, with its rows in
            `recv_x` first, -2 = a row beyond the capacity.
        full_scatter: `full_scatter_indices` gave the order of rows.
        compact: one row per (token, rank), from `dispatch_compact`. The field above is then [C, 1], the row itself, -1
            from R on.
        host_expert_offsets: e + 1 numbers, `expert_offsets` as the host has read it; None if the host has not: with a
            capacity, after `dispatch_again`, or with compact rows. Not part of the pytree.
        host_num_rows: W numbers, the `num_recv_rows` of every rank; None, and no part of the pytree, like the last.
        host_arrivals: W numbers, `arrivals_from_rank` as the host of a layer with `copy_engines` has read it; None, and
            no part of the pytree, if it has not.
    """

    num_dispatch_token_cur_rank: int
    num_recv_rows: int
    entries: torch.Tensor
    placement: torch.Tensor
    shape: tuple[int, int, int]
    layer_id: int
    dispatch_number: int
    forward: torch.Tensor | None = None
    send_reqs_recv_tensor: torch.Tensor | None = None
    skipped_token_mapping_indices: torch.Tensor | None = None
    skipped_token_topk_mapping_indices: torch.Tensor | None = None
    full_scatter: bool = False
    compact: bool = False
    host_expert_offsets: tuple[int, ...] | None = None
    host_num_rows: tuple[int, ...] | None = None
    host_arrivals: tuple[int, ...] | None = None

    # Views, created on access: a descriptor that goes straight into combine creates none. A low-latency dispatch leaves
    # out what its combine does not need; those properties are None.

    @property
    def topk_indices_tensor(self) -> torch.Tensor:
        """[T, K] int32, expert ids, -1 = dropped."""
        return self.entries[ENTRY_KEPT]

    @property
    def owner_ranks(self) -> torch.Tensor | None:
        """[T, K] int32, ranks that own the experts, -1 = dropped."""
        return self._field(ENTRY_OWNER)

    @property
    def token_dst_scatter_idx(self) -> torch.Tensor | None:
        """[T, K] int32, row of each assignment in its owner's `recv_x`, -1 = dropped."""
        return self._field(ENTRY_DST_ROW)

    @property
    def stage_row(self) -> torch.Tensor | None:
        """[T, K] int32, staging row of the token at each rank, at the first k that goes there, else -1."""
        return self._field(ENTRY_STAGE_ROW)

    @property
    def node_slot(self) -> torch.Tensor | None:
        """[T, K] int32, the token's slot among the tokens for that node, at the first k that goes there, else -1."""
        return self._field(ENTRY_NODE_SLOT)

    @property
    def report(self) -> torch.Tensor:
        """[W, 8] int32, the report of every rank: triton_ep.context.records.Report, columns REPORT_*."""
        return self._part("report").view(-1, REPORT_WORDS)

    @property
    def num_input_tokens_per_rank(self) -> torch.Tensor:
        """[W] int32, tokens that each rank dispatched."""
        return self.report[:, REPORT_TOKENS]

    @property
    def arrivals_of_rank(self) -> torch.Tensor:
        """[W] int32, staging rows of each rank."""
        return self.report[:, REPORT_ARRIVALS]

    @property
    def arrivals_from_rank(self) -> torch.Tensor:
        """[W] int32, rows that arrive here from each rank."""
        return self.report[:, REPORT_ARRIVALS_HERE]

    @property
    def expert_offsets(self) -> torch.Tensor:
        """[e + 1] int32, first row of each local expert; the last entry = rows in use."""
        return self._part("expert_offsets")

    @property
    def num_recv_tokens_per_expert(self) -> torch.Tensor:
        """[e] int32, rows of each local expert without padding."""
        return self._part("num_recv")

    @property
    def overflow(self) -> torch.Tensor:
        """[1] int32, rows that did not fit a static capacity on this rank; 0 = none.

        Padding rows of an alignment count, too: the last expert offset plus this number is the capacity that the
        dispatch would have filled. `num_recv_tokens_per_expert` counts the rows that arrived, without padding.
        """
        return self._part("overflow")

    @property
    def tiles(self) -> torch.Tensor | None:
        """[1 + ceil(R / 128) + e, 4] int32, tile table (kernels/device/tiles.py): the rows of each tile of a grouped
        GEMM. None for compact rows and with low latency."""
        if self._low_latency or self.compact:
            return None
        first, _ = placement_parts(*self.shape)["tiles"]
        _, _, experts = self.shape
        return self.placement[first : first + tile_words(self.num_recv_rows, experts)].view(-1, TILE_WORDS)

    @property
    def tokens_from_node(self) -> torch.Tensor | None:
        """[N] int32, tokens that this rank forwards for its counterpart of each node."""
        return None if self._low_latency else self._part("tokens_from_node")

    @property
    def tokens_per_node(self) -> torch.Tensor | None:
        """[N] int32, tokens of this rank for each node."""
        if self._low_latency:
            return None
        ranks, per_node, experts = self.shape
        return self._part("row")[ranks * experts + ranks :][: ranks // per_node]

    @property
    def _low_latency(self) -> bool:
        return self.entries.shape[0] == 1

    def _field(self, index: int) -> torch.Tensor | None:
        return None if self._low_latency else self.entries[index]

    def _part(self, name: str) -> torch.Tensor:
        first, count = placement_parts(*self.shape)[name]
        return self.placement[first : first + count]


if TYPE_CHECKING:
    made_desc = EPAllToAllLayoutDesc
else:

    def made_desc(**fields: Any) -> EPAllToAllLayoutDesc:
        """As the constructor, in a third of its time: that of a frozen dataclass makes a call for each field."""
        desc = object.__new__(EPAllToAllLayoutDesc)
        desc.__dict__.update(fields)  # the others are the defaults, which belong to the class
        return desc


# Excluded: its values change every step and would trigger recompilation.
_NAMES = tuple(field.name for field in fields(EPAllToAllLayoutDesc) if not field.name.startswith("host_"))


def _flatten(desc: EPAllToAllLayoutDesc) -> tuple[list[Any], None]:
    return [getattr(desc, name) for name in _NAMES], None


def _unflatten(values: Any, _: None) -> EPAllToAllLayoutDesc:
    return EPAllToAllLayoutDesc(**dict(zip(_NAMES, values, strict=True)))


_pytree.register_pytree_node(
    EPAllToAllLayoutDesc,
    _flatten,
    _unflatten,
    serialized_type_name="triton_ep.EPAllToAllLayoutDesc",
)
