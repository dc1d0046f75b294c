"""EPHandle: state of an ElasticBuffer dispatch that its combine, and later dispatches with its routing, use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.exchange.slots import known_copies, needed_slots
from triton_ep.layer import EPAll2AllLayer


@dataclass(eq=False, kw_only=True)
class EPHandle:
    """State of a dispatch that its combine needs. Any number of handles may be live, used in any order.

    Letters: T tokens, K top-k, W ranks, U scale-up ranks, e local experts, C received tokens (each counted once), M
    most tokens per rank, R rows of `recv_x`. The cached properties are computed at their first read, and may be
    replaced.

    Attributes:
        layer, layout_desc: layer and descriptor of the dispatch.
        scaleup_ranks: U.
        do_expand: one row per (token, expert), by expert; False: one row per token, by source rank and token.
        num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: values of the dispatch.
        given_idx: `topk_idx` as the caller gave it; None: the handle takes the ids from the dispatch.
        idx_dtype: dtype of `topk_idx`.
        num_recv_tokens: C; without host synchronisation W * M, and the first C of these arrived.
        num_expanded_tokens: rows of all local experts, each count rounded up to `expert_alignment`; without host
            synchronisation the most rows that can arrive.
        num_recv_tokens_per_expert_list: the same by expert; empty without host synchronisation.
        copies: with `do_expand` [at least C, K] int32, the rows of each received token.
        token_metadata_at_forward, channel_linked_list: None; this protocol has no channels.
    """

    layer: EPAll2AllLayer
    layout_desc: EPAllToAllLayoutDesc
    scaleup_ranks: int
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    given_idx: torch.Tensor | None
    idx_dtype: torch.dtype
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    copies: torch.Tensor | None
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    @cached_property
    def topk_idx(self) -> torch.Tensor:
        """[T, K], expert ids, -1 = dropped; a copy, unless `given_idx` is set."""
        ids = self.layout_desc.topk_indices_tensor
        return ids.to(self.idx_dtype, copy=True) if self.given_idx is None else self.given_idx

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """[U] int32, inclusive prefix sum over scale-up ranks of the tokens received from them, on all nodes."""
        arrivals = self.layout_desc.arrivals_from_rank.view(-1, self.scaleup_ranks)
        return arrivals.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """[e] int32: with `do_expand` the end of each expert's rows, without its padding; otherwise the inclusive
        prefix sum of the experts' rows, each count rounded up to `expert_alignment`."""
        counts = self.layout_desc.num_recv_tokens_per_expert
        if self.do_expand:
            return self.layout_desc.expert_offsets[:-1] + counts
        align = self.expert_alignment
        return ((counts + (align - 1)) // align * align).cumsum(0, dtype=torch.int32)

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor | None:
        """[e] int32, rows of each expert, not rounded up; None without `do_expand`."""
        return self.layout_desc.num_recv_tokens_per_expert.clone() if self.do_expand else None

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor | None:
        """[T, K] int32, staging row of the token on each rank, at the first k that goes to the rank; else -1."""
        return self.layout_desc.stage_row

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """[num_recv_tokens, 2 + K] int32, for each received token: source rank * M + its number there; its place among
        the received tokens; its row in `recv_x` for each k, -1 where another rank, or none, has the expert. Rows past
        the received tokens are -1.

        The first read is collective: torch's all_to_all exchanges which tokens each rank sent for which k, eight bytes
        per token and rank. Read this on all ranks or on none, in the same order with other calls. Dispatches do not pay
        for it.
        """
        source, chosen = self._sources()
        place = torch.arange(source.shape[0], dtype=torch.int32, device=source.device)
        rows = self._rows(place, chosen)
        alone = torch.where(source < 0, -1, place)
        return torch.cat([source.unsqueeze(1), alone.unsqueeze(1), rows], 1)

    @cached_property
    def row_slots(self) -> torch.Tensor | None:
        """[R] int32, k of each row, -1 in padding; only with `do_expand`. None if the layer knows the slots."""
        return needed_slots(self.layer.context, self.layout_desc, self.copies)

    def _rows(self, place: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """[num_recv_tokens, K] int32, rows in `recv_x` of each received token, -1 = none; place: their numbers; chosen:
        from `_sources`."""
        desc = self.layout_desc
        if self.copies is not None:
            known = known_copies(self.layer.context, desc, self.copies)[: self.num_recv_tokens]
            return torch.where(known < desc.num_recv_rows, known, -1)
        k = torch.arange(self.layer.config.topk, device=place.device)
        return torch.where((chosen.unsqueeze(1) >> k) & 1 > 0, place.unsqueeze(1), -1)

    def _sources(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each received token [num_recv_tokens]: source rank * M + token, int32, else -1; and in bit k, int64,
        whether this rank has the token's expert k. Collective.

        Received tokens are ordered by source rank, then by number, so the set of tokens sent gives the place of each.
        """
        desc, cfg, most = self.layout_desc, self.layer.config, self.num_max_tokens_per_rank
        owners = desc.owner_ranks
        assert owners is not None, "a low-latency dispatch has a handle of its own"
        # One extra rank takes the choices that are dropped.
        leaving = torch.zeros(most, cfg.world_size + 1, dtype=torch.int64, device=owners.device)
        bits = (1 << torch.arange(cfg.topk, device=owners.device)).expand(owners.shape)
        column = torch.where(owners < 0, cfg.world_size, owners).long()
        leaving[: desc.num_dispatch_token_cur_rank].scatter_add_(1, column, bits)
        leaving = leaving.t()[:-1].contiguous()
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self.layer.context.group)
        chosen = coming.flatten()
        came = chosen != 0
        # One extra place takes the tokens that did not come.
        place = torch.where(came, came.cumsum(0) - 1, self.num_recv_tokens)
        source = torch.full((self.num_recv_tokens + 1,), -1, dtype=torch.int32, device=came.device)
        numbers = torch.arange(came.numel(), dtype=torch.int32, device=came.device)
        choices = torch.zeros_like(source, dtype=torch.int64).scatter_(0, place, chosen)
        return source.scatter_(0, place, numbers)[:-1], choices[:-1]
