"""Random sequences of calls of the interfaces against the plain-torch references.

A sequence has several handles open, layers that grow, rows of every dtype and with scales, ids and routing maps, calls
that wait for the host and calls that do not. All ranks draw the same numbers, so each knows what the others send.
`--sequences N` runs N of each interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from tests.draws import Draws, bits, parametrize_sequences, same
from triton_ep.integrations import deep_ep as door
from triton_ep.integrations.deep_ep.layers import layers_of
from triton_ep.integrations.hybrid_ep import HybridEPBuffer
from triton_ep.reference import compact, dispatch
from triton_ep.runtime.launch import INTERPRETING

STEPS = 5 if INTERPRETING else 8
TOPOLOGIES = ((1, 1), (1, 2), (2, 2), (1, 4), (2, 1))
WAIT_S = 60.0


@dataclass
class Sent:
    """What all ranks send: rows [T, H], scales [T, H / 128] or None, ids [T, K] int64, weights [T, K] or None."""

    xs: list[torch.Tensor]
    scales: list[torch.Tensor] | None
    ids: list[torch.Tensor]
    weights: list[torch.Tensor] | None
    num_experts: int


@dataclass
class Opened:
    """A handle, and what is known of it.

    Attributes:
        sources: per rank [R, 2 or more]: (source rank, token) of each row, -1 = padding.
        num_rows: rows of this rank, with those past the received ones.
        weights: what this rank received.
        repeated_by: arguments of a dispatch with the handle.
    """

    handle: Any
    sent: Sent
    sources: list[torch.Tensor]
    num_rows: int
    dtype: torch.dtype
    weights: torch.Tensor | None = None
    repeated_by: dict[str, Any] = field(default_factory=dict)


class Calls(Draws, ABC):
    """Random calls of one interface; those that subclasses make are methods named in CHOICES."""

    CHOICES: ClassVar[tuple[str, ...]] = ("dispatch", "dispatch", "dispatch", "again", "combine", "combine")

    def __init__(self, rank: int, nodes: int, ranks_per_node: int, seed: int) -> None:
        super().__init__(rank, nodes, ranks_per_node, seed)
        self.opened: list[Opened] = []

    def run(self) -> None:
        """Make STEPS calls."""
        for _ in range(STEPS):
            name = self.draw.choice(self.CHOICES) if self.opened else "dispatch"
            if name == "dispatch":
                self.opened = [*self.opened[-3:], self.dispatch()]
            else:
                getattr(self, name)(self.draw.choice(self.opened))

    @abstractmethod
    def dispatch(self) -> Opened:
        """Dispatch random rows and check what arrives."""

    # --- what is drawn ----------------------------------------------------------------------------------

    def sent(self, hidden: int, topk: int, experts: int, most: int = 50, one_byte: bool = True) -> Sent:
        """What the ranks send in one dispatch; experts: per rank."""
        tokens = [self.draw.choice([0, 1, 3, most // 2, most]) for _ in range(self.world)]
        scaled = one_byte and hidden % 128 == 0 and self.chance(0.3)
        dtype = torch.float8_e4m3fn if scaled else self.draw.choice([torch.bfloat16, torch.float16, torch.float32])
        ids = [self.ids(each, min(topk, experts * self.world), experts * self.world) for each in tokens]
        weights = [torch.rand(each.shape, generator=self.data) for each in ids]
        scales = [torch.rand(each, hidden // 128, generator=self.data) for each in tokens]
        return Sent(
            [self.integers((each, hidden), dtype) for each in tokens],
            scales if scaled else None,
            ids,
            weights if self.chance(0.7) else None,
            experts * self.world,
        )

    def other_rows(self, opened: Opened) -> Sent:
        """Draw other rows for the routing of a handle."""
        opened.sent.xs = [self.integers(tuple(each.shape), each.dtype) for each in opened.sent.xs]
        return opened.sent

    def rows(self, sent: Sent) -> Any:
        """This rank's rows, with their scales if they have some."""
        return self.mine(sent.xs) if sent.scales is None else (self.mine(sent.xs), self.mine(sent.scales))

    def my_ids(self, sent: Sent) -> torch.Tensor:
        """This rank's ids, int32 or int64."""
        ids: torch.Tensor = self.mine(sent.ids).to(self.draw.choice([torch.int32, torch.int64]))
        return ids

    # --- what is checked --------------------------------------------------------------------------------

    def check_rows(self, got: Any, sent: Sent, source: torch.Tensor) -> int:
        """Check received rows, of which padding is zero, and scales, except those of padding; returns how many there
        are. Rows past them are not looked at."""
        rows, scales = got if isinstance(got, tuple) else (got, None)
        real = source[:, 0] >= 0
        for part, parts in ((rows, sent.xs), (scales, sent.scales)):
            if parts is None:
                assert part is None
                continue
            starts = torch.tensor([0, *(len(each) for each in parts)]).cumsum(0)
            whole = torch.cat([bits(each) for each in parts])
            want = whole.new_zeros(len(source), whole.shape[1])
            want[real] = whole[starts[source[real, 0]] + source[real, 1]]
            seen = bits(part[: len(source)])
            looked_at = real if part is scales else slice(None)
            assert torch.equal(seen[looked_at], want[looked_at])
        return len(source)

    def outputs(self, opened: Opened, most: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """Random outputs of the experts of this rank, NaN where there is no row, and the float32 sums of its tokens."""
        hidden = opened.sent.xs[0].shape[1]
        mine = torch.full((opened.num_rows, hidden), torch.nan, dtype=opened.dtype)
        sums = torch.zeros(len(opened.sent.xs[self.rank]), hidden)
        for rank, source in enumerate(opened.sources):
            y = self.integers((len(source), hidden), opened.dtype, most)
            if rank == self.rank:
                mine[: len(source)] = torch.where((source[:, 0] >= 0).unsqueeze(1), y, torch.nan)
            here = source[:, 0] == self.rank
            sums.index_add_(0, source[here, 1], y[here].float())
        return mine.to(self.device), sums

    def biases(self, sums: torch.Tensor, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
        """None, one or two biases, and the sums with them."""
        number, own = self.draw.choice([0, 0, 1, 2]), torch.Generator().manual_seed(self.rank)
        added = [torch.randint(-8, 9, tuple(sums.shape), generator=own).to(dtype) for _ in range(number)]
        given = tuple(each.to(self.device) for each in added)
        bias = (None, *given[:1], given)[len(given)]
        return bias, torch.stack([sums, *(each.float() for each in added)]).sum(0)

    def kept_weights(self, sent: Sent) -> torch.Tensor:
        """This rank's weights, zero where the entry was dropped."""
        assert sent.weights is not None
        return torch.where(sent.ids[self.rank] >= 0, sent.weights[self.rank], 0.0)


class OfDeepEP(Calls):
    """Calls that DeepEP's two buffers have in common: dispatch with a handle, and combine.

    ASYNC: name of the argument for a call on the communication stream.
    """

    ASYNC: ClassVar[str]
    buffer: door.Buffer | door.ElasticBuffer

    def order(self) -> dict[str, Any]:
        """Arguments about streams."""
        previous = self.buffer.capture() if self.chance(0.3) else None
        return {"previous_event": previous, self.ASYNC: self.chance(0.3)}

    def again(self, opened: Opened) -> None:
        """Other rows to the places of a handle."""
        sent = self.other_rows(opened)
        recv, *_, event = self.buffer.dispatch(
            self.rows(sent), handle=opened.handle, **opened.repeated_by, **self.order()
        )
        event.current_stream_wait()
        self.check_rows(recv, sent, opened.sources[self.rank])

    def combine(self, opened: Opened) -> None:
        """With or without weights and biases."""
        y, sums = self.outputs(opened)
        bias, sums = self.biases(sums, opened.dtype)
        weights = opened.weights if self.chance(0.6) else None
        out, back, event = self.buffer.combine(y, opened.handle, topk_weights=weights, bias=bias, **self.order())
        event.current_stream_wait()
        same(out, sums.to(opened.dtype))
        if weights is not None:
            same(back, self.kept_weights(opened.sent))


class DeepEP(OfDeepEP):
    """`Buffer`: dispatch by ids or by the ranks of a token, with a handle, and combine."""

    ASYNC = "async_finish"

    def __init__(self, *place: int) -> None:
        super().__init__(*place)
        size = door.Buffer.get_dispatch_config(self.world).get_nvl_buffer_size_hint(256 * 4, self.world)
        self.buffer = door.Buffer(dist.group.WORLD, size, 0)

    def dispatch(self) -> Opened:
        """By ids with or without weights, or by `is_token_in_rank`; exact, or with `num_worst_tokens`."""
        experts, align = self.draw.choice([2, 3, 5]), self.draw.choice([1, 4])
        sent = self.sent(self.draw.choice([40, 128, 256]), self.draw.choice([1, 2, 5]), experts)
        results = [compact.dispatch(sent.xs, sent.ids, sent.weights, r, sent.num_experts) for r in range(self.world)]
        mine, by_ids = results[self.rank], self.chance(0.8)
        worst = self.world * max(map(len, sent.xs)) if by_ids and self.chance(0.3) else 0
        ids = self.my_ids(sent)
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids, sent.num_experts)
        routing = {"topk_idx": ids, "topk_weights": self.mine(sent.weights), "num_worst_tokens": worst}
        recv, recv_ids, weights, counts, handle, event = self.buffer.dispatch(
            self.rows(sent),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            expert_alignment=align,
            **(routing if by_ids else {}),
            **self.order(),
        )
        event.current_stream_wait()
        num = self.check_rows(recv, sent, mine.src)
        assert counts == ([] if worst else [-(-n // align) * align for n in mine.num_recv_tokens_per_expert.tolist()])
        assert (recv_ids is None) == (not by_ids)
        if by_ids:
            same(recv_ids[:num], mine.recv_topk_idx.to(ids.dtype))
            assert (recv_ids[num:] == -1).all()
        if mine.recv_topk_weights is None or not by_ids:
            assert weights is None
        else:
            same(weights[:num], mine.recv_topk_weights)
        rows = recv[0] if isinstance(recv, tuple) else recv
        assert len(rows) == (worst or num)
        dtype = torch.bfloat16 if sent.scales else rows.dtype
        return Opened(handle, sent, [each.src for each in results], len(rows), dtype, weights)


class Elastic(OfDeepEP):
    """`ElasticBuffer`: compact and expanded rows."""

    ASYNC = "async_with_compute_stream"

    def __init__(self, *place: int) -> None:
        super().__init__(*place)
        self.pool = layers_of(dist.group.WORLD)
        self.before, self.pool.ranks_per_node = self.pool.ranks_per_node, self.ranks_per_node  # virtual nodes
        self.hidden, self.most, self.topk = self.draw.choice([128, 256]), 20, self.draw.choice([1, 2, 4])
        sizes = {"num_max_tokens_per_rank": self.most, "hidden": self.hidden, "num_topk": self.topk}
        self.buffer = door.ElasticBuffer(
            dist.group.WORLD, **sizes, allow_multiple_reduction=self.chance(0.5), num_gpu_timeout_secs=WAIT_S
        )

    def run(self) -> None:
        """As `Calls.run`, then free the buffer."""
        super().run()
        self.buffer.destroy()
        self.pool.ranks_per_node = self.before

    def dispatch(self) -> Opened:
        """Compact or expanded rows, whose number the host knows or not."""
        experts, expand = self.draw.choice([1, 2, 3]), self.chance(0.5)
        sync, align = self.draw.choice([None, True, False]), self.draw.choice([None, 1, 4])
        sent = self.sent(self.hidden, self.topk, experts, self.most)
        given = sent.xs, sent.ids, sent.weights
        ranks = range(self.world)
        if expand:
            wide = [dispatch.dispatch(*given, r, sent.num_experts, align or 1) for r in ranks]
            sources, want_weights = [each.src for each in wide], wide[self.rank].recv_weights
        else:
            narrow = [compact.dispatch(*given, r, sent.num_experts) for r in ranks]
            sources, want_weights = [each.src for each in narrow], narrow[self.rank].recv_topk_weights
        counts = compact.dispatch(*given, self.rank, sent.num_experts).num_recv_tokens_per_expert
        stats = torch.ones(experts, dtype=torch.int32, device=self.device) if self.chance(0.5) else None
        ids = self.my_ids(sent)
        recv, recv_ids, weights, handle, event = self.buffer.dispatch(
            self.rows(sent),
            topk_idx=ids,
            topk_weights=self.mine(sent.weights),
            cumulative_local_expert_recv_stats=stats,
            num_experts=sent.num_experts,
            num_max_tokens_per_rank=self.draw.choice([None, 60]),
            expert_alignment=align,
            do_cpu_sync=sync,
            do_expand=expand,
            use_tma_aligned_col_major_sf=sent.scales is not None and self.chance(0.3),
            **self.order(),
        )
        event.current_stream_wait()
        num = self.check_rows(recv, sent, sources[self.rank])
        if not expand:
            same(recv_ids[:num], narrow[self.rank].recv_topk_idx.to(ids.dtype))
            assert (recv_ids[num:] == -1).all()
        if want_weights is None:
            assert weights is None
        else:
            same(weights[:num], want_weights)
        if stats is not None:
            same(stats, (1 + counts).int())
        padded = -(-counts // (align or 1)) * (align or 1)
        assert handle.num_recv_tokens_per_expert_list == ([] if sync is False else padded.tolist())
        rows = recv[0] if isinstance(recv, tuple) else recv
        assert len(rows) == num or sync is False
        dtype = torch.bfloat16 if sent.scales else rows.dtype
        return Opened(handle, sent, sources, len(rows), dtype, weights, {"do_expand": expand})


class HybridEP(Calls):
    """`HybridEPBuffer`: permuted rows, by a routing map or by ids."""

    def __init__(self, *place: int) -> None:
        super().__init__(*place)
        self.hidden, self.experts = self.draw.choice([128, 256]), self.draw.choice([1, 2, 3])
        self.buffer = HybridEPBuffer(
            dist.group.WORLD,
            hidden_dim=self.hidden,
            max_num_of_tokens_per_rank=self.draw.choice([4, 64]),
            num_local_experts=self.experts,
            num_of_hybrid_ep_ranks_per_nvlink_domain=self.ranks_per_node,
            enable_local_combine=self.chance(0.5),
            timeout_s=WAIT_S,
        )

    def run(self) -> None:
        """As `Calls.run`, then free the buffer."""
        super().run()
        self.buffer.close()

    def _map(self, sent: Sent, weights: list[torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's routing map [T, E], and its probabilities [T, E]."""
        ids = torch.where(sent.ids[self.rank] < 0, sent.num_experts, sent.ids[self.rank])
        routed = torch.zeros(len(ids), sent.num_experts + 1, dtype=torch.bool).scatter_(1, ids, True)[:, :-1]
        if weights is None:
            return routed.contiguous(), None
        probs = torch.zeros(len(ids), sent.num_experts + 1).scatter_(1, ids, weights[self.rank])[:, :-1]
        return routed.contiguous(), probs.contiguous()

    def dispatch(self) -> Opened:
        """Exact or within a budget, for which the host waits or not."""
        sent = self.sent(self.hidden, self.draw.choice([1, 2, 4]), self.experts, self.draw.choice([20, 40]))
        pad = self.draw.choice([None, 1, 4, 16])
        given = sent.xs, sent.ids, sent.weights
        results = [dispatch.dispatch(*given, r, sent.num_experts, pad or 1) for r in range(self.world)]
        mine, most = results[self.rank], max(len(each.src) for each in results)
        budget = max(most + (pad or 1) * self.draw.choice([0, 2]), pad or 1) if self.chance(0.3) else None
        most_tokens = max(1, *map(len, sent.xs))  # with a budget ranks do not learn it
        by_ids = {"topk_idx": self.my_ids(sent), "topk_weights": self.mine(sent.weights)}
        routed, probs = self._map(sent, sent.weights)
        by_map = {"routing_map": routed.to(self.device), "probs": None if probs is None else probs.to(self.device)}
        recv, weights, scales, counts, handle = self.buffer.dispatch_with_permute(
            hidden=self.mine(sent.xs),
            scaling_factor=self.mine(sent.scales),
            use_fp8=sent.scales is not None,
            pad_multiple=pad,
            num_permuted_tokens=budget,
            non_blocking=budget is not None and self.chance(0.5),
            num_of_tokens_per_rank=most_tokens if budget is not None else self.draw.choice([None, most_tokens]),
            **self.draw.choice([by_ids, by_map]),
        )
        got = recv if scales is None else (recv, scales)
        num = self.check_rows(got, sent, mine.src)
        assert len(recv) == (num if budget is None else budget)
        same(counts.cpu(), mine.expert_offsets.diff().long())
        if mine.recv_weights is None:
            assert weights is None
        else:
            same(weights[:num], mine.recv_weights)
            assert (weights[num:] == 0).all()
        assert budget is None or int(handle[-1]) == 0
        dtype = torch.bfloat16 if sent.scales else recv.dtype
        return Opened(handle, sent, [each.src for each in results], len(recv), dtype, weights)

    def again(self, opened: Opened) -> None:
        """Other rows to the places of a handle."""
        sent = self.other_rows(opened)
        recv, _, scales, _, _ = self.buffer.dispatch_with_permute(
            hidden=self.mine(sent.xs),
            scaling_factor=self.mine(sent.scales),
            use_fp8=sent.scales is not None,
            handle=opened.handle,
        )
        got = recv if scales is None else (recv, scales)
        self.check_rows(got, sent, opened.sources[self.rank])

    def combine(self, opened: Opened) -> None:
        """With or without probabilities."""
        y, sums = self.outputs(opened)
        probs = opened.weights if self.chance(0.6) else None
        out, back = self.buffer.combine_with_unpermute(hidden=y, probs=probs, handle=opened.handle)
        same(out, sums.to(opened.dtype))
        if probs is not None:
            same(back, self._map(opened.sent, opened.sent.weights)[1])


class LowLatency(Calls):
    """`Buffer`'s low-latency calls, in bf16: pairs, the receiving half called by a hook or not."""

    CHOICES = ("dispatch",)

    def __init__(self, *place: int) -> None:
        super().__init__(*place)
        self.experts, self.most = self.draw.choice([1, 2, 3]), self.draw.choice([4, 32])
        sizes = self.most, 512, self.world, self.experts * self.world
        self.buffer = door.Buffer(
            dist.group.WORLD,
            0,
            door.Buffer.get_low_latency_rdma_size_hint(*sizes),
            low_latency_mode=True,
            num_qps_per_rank=self.experts,
        )

    def dispatch(self) -> Opened:
        """A pair, whose weights travel in dispatch or in combine."""
        sent = self.sent(512, self.draw.choice([1, 2, 4]), self.experts, self.most, one_byte=False)
        sent.xs = [each.bfloat16() for each in sent.xs]
        sent.weights = [1 + self.integers(tuple(each.shape), torch.float32, 1) for each in sent.ids]
        ids, weights, hooked = self.my_ids(sent), self.mine(sent.weights), self.chance(0.4)
        got, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            self.mine(sent.xs),
            ids,
            self.most,
            sent.num_experts,
            use_fp8=False,
            return_recv_hook=hooked,
            topk_weights=weights if self.chance(0.4) else None,
        )
        hook()
        given = sent.xs, sent.ids, sent.weights
        results = [dispatch.dispatch(*given, r, sent.num_experts) for r in range(self.world)]
        same(counts, results[self.rank].num_recv_tokens_per_expert)
        slabs = torch.full(tuple(got.shape), torch.nan, dtype=torch.bfloat16)
        sums = torch.zeros(len(sent.xs[self.rank]), 512)
        for rank, result in enumerate(results):
            y, factors = self.integers((len(result.src), 512), torch.bfloat16, 2), result.recv_weights
            assert factors is not None
            here = result.src[:, 0] == self.rank
            sums.index_add_(0, result.src[here, 1], y[here].float() * factors[here].unsqueeze(1))
            for expert, (first, end) in enumerate(zip(result.expert_offsets, result.expert_offsets[1:], strict=False)):
                if rank == self.rank:
                    slabs[expert, : end - first] = y[first:end]
                    self.check_rows(got[expert], sent, result.src[first:end])
        out, _, hook = self.buffer.low_latency_combine(
            slabs.to(self.device), ids, weights, handle, return_recv_hook=hooked
        )
        hook()
        same(out, sums.bfloat16())
        return Opened(handle, sent, [each.src for each in results], 0, torch.bfloat16)


def _run(rank: int, nodes: int, ranks_per_node: int, kind: Callable[..., Calls], seed: int) -> None:
    kind(rank, nodes, ranks_per_node, seed).run()
    door.release(dist.group.WORLD)  # layers of buffers that no test destroys


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Sequences of every topology."""
    parametrize_sequences(metafunc, TOPOLOGIES)


@pytest.mark.plain
@pytest.mark.parametrize("kind", [DeepEP, Elastic, HybridEP, LowLatency], ids=lambda kind: kind.__name__)
def test_random_calls(run_ranks, nodes: int, ranks_per_node: int, seed: int, kind: type[Calls]) -> None:
    """A sequence of calls of each interface."""
    run_ranks(_run, nodes, ranks_per_node, kind, seed)
