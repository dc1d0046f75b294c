"""Random layers, and random sequences of their calls, against the plain-torch references.

A sequence has one or two layers, whose calls take turns, several descriptors open, every kind of rows, calls in halves
and on another stream, gradients, too small capacities, and arguments that are refused on one rank. The layers belong to
all ranks, or to two groups of them with a sequence each. All ranks of a layer draw the same numbers, so each knows what
the others send. `--sequences N` runs N of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.draws import Draws, bits, parametrize_sequences, same
from tests.layer.cases import full_scatter_indices, layer_limit_s
from triton_ep import EPAll2AllLayer, InputError, MXTensor, PeerFailed, autograd
from triton_ep.ops.row_scales import RowScaled
from triton_ep.reference import combine as combine_reference
from triton_ep.reference import compact, dispatch
from triton_ep.runtime.launch import INTERPRETING

STEPS = 7 if INTERPRETING else 12
TOKENS = (4, 20, 40) if INTERPRETING else (4, 40, 300)
WIDE = () if INTERPRETING else (2048, 7168)
TOPOLOGIES = ((1, 2), (1, 1), (2, 2), (2, 1), (1, 4), (1, 2), (4, 1))
FACTORS = (-1.0, 0.5, 1.0, 2.0)  # products and sums with them are exact


@dataclass
class Opened:
    """A dispatch that all ranks have made.

    Attributes:
        tokens, ids, weights: of every rank; weights may be None.
        results: the reference's for every rank, of `dispatch` or of `compact.dispatch`.
        rows: of this rank's outputs, with those past the received ones.
        room: rows from here on are left out on every rank; None: none are.
        given_order: `full_scatter_indices` were given.
    """

    desc: Any
    tokens: list[int]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor] | None
    results: list[Any]
    rows: int
    room: int | None = None
    given_order: bool = False

    @property
    def is_compact(self) -> bool:
        """Whether it has one row per (token, rank)."""
        return isinstance(self.results[0], compact.CompactResult)

    def used(self, rank: int) -> int:
        """Rows of a rank that have arrived, and their padding."""
        number = len(self.results[rank].src)
        return number if self.room is None else min(number, self.room)


class Calls:
    """A random layer, and random calls of it."""

    def __init__(self, draws: Draws, group: Any) -> None:
        self.draws, self.draw = draws, draws.draw
        self.rank, self.world, self.device = draws.rank, draws.world, draws.device
        self.opened: list[Opened] = []
        pick, chance = draws.draw.choice, draws.chance
        one_node = draws.ranks_per_node == draws.world
        payload, low = pick([None, None, "mxfp8"]), one_node and chance(0.25)
        self.experts, self.most, align = pick([1, 2, 3, 6, 16]), pick(TOKENS), pick([1, 1, 4, 16])
        topk = min(pick([1, 2, 3, 5, 8]), self.experts * self.world)
        local = chance(0.5)
        shared = local and not low and chance(0.3)
        ample = self.world * self.most * topk + self.experts * align
        self.kinds_of_low_latency = pick([("plain",), ("scaled",)])
        self.layer = EPAll2AllLayer(
            group,
            self.most,
            pick([*((32, 64, 160, 544) if payload else (16, 37, 100, 128, 256, 520)), *WIDE]),
            topk,
            num_tot_experts=self.experts * self.world,
            local_world_size=draws.ranks_per_node,
            dtype=pick([torch.bfloat16, torch.float16, torch.float32]),
            num_sm=pick([1, 3, 20]),
            enable_local_combine=local,
            payload=payload,
            alignment=align,
            capacity=pick([ample, ample, max(ample // 8, 1)]) if low or chance(0.4) else None,
            low_latency=low,
            sm_budget=None if low else pick([None, None, 24]),
            shared_staging=shared,
            copy_engines=one_node and not low and not shared and chance(0.3),
            timeout_s=layer_limit_s(),
        )
        self.config = self.layer.config

    @property
    def calls(self) -> list[Callable[[], None]]:
        """Those that this layer takes now."""
        found = [self.dispatch] * 3 + [self.checked]
        if not self.config.low_latency:
            found += [self.refused, self.out_of_range]
        if not self.config.low_latency and self.config.payload is None:
            found.append(self.gradients)
        if self.opened:
            found += [self.again, *[self.combine] * 3]
        if any(each.is_compact for each in self.opened):
            found.append(self.combine_topk)
        return found

    # --- what is drawn ----------------------------------------------------------------------------------

    def tokens(self) -> list[int]:
        """A number of tokens for each rank."""
        return [self.draw.choice([0, 1, 3, self.most // 2, self.most]) for _ in range(self.world)]

    def routing(self, tokens: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Ids and weights of all ranks. Some tokens name an expert twice."""
        ids = [self.draws.ids(each, self.config.topk, self.config.num_experts) for each in tokens]
        if self.draws.chance(0.2):
            ids = [each[:, :1].expand_as(each).contiguous() for each in ids]
        weights = [self.factors(tuple(each.shape)) for each in ids]
        return [each.to(self.draw.choice([torch.int32, torch.int64])) for each in ids], weights

    def factors(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Random ones of FACTORS."""
        return torch.tensor(FACTORS)[torch.randint(len(FACTORS), shape, generator=self.draws.data)]

    def xs(self, tokens: list[int], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Rows of all ranks."""
        hidden = self.config.hidden
        return [self.draws.integers((each, hidden), dtype or self.config.token_dtype) for each in tokens]

    def scales(self, tokens: list[int]) -> list[torch.Tensor]:
        """Scales of all ranks, a byte per 32 values."""
        hidden = self.config.hidden
        if self.draws.chance(0.5):
            return [torch.rand(each, hidden // 128, generator=self.draws.data) for each in tokens]
        shapes = [(each, hidden // 32) for each in tokens]
        return [torch.randint(256, shape, generator=self.draws.data, dtype=torch.uint8) for shape in shapes]

    def expected(self, opened: Opened, xs: list[torch.Tensor]) -> torch.Tensor:
        """Rows that arrive if these are sent by the routing of `opened`, those that fit."""
        source = opened.results[self.rank].src[: opened.used(self.rank)]
        real, starts = source[:, 0] >= 0, torch.tensor([0, *opened.tokens]).cumsum(0)
        whole = torch.cat([bits(each) for each in xs])
        want = whole.new_zeros(len(source), whole.shape[1])
        want[real] = whole[starts[source[real, 0]] + source[real, 1]]
        return want

    # --- calls ------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Rows as they are, quantised, by the caller or on the way, or compact ones."""
        cfg, kinds = self.config, ["plain"]
        if cfg.payload is None and cfg.hidden % 128 == 0:
            kinds += ["scaled"]
        if cfg.payload is None and cfg.recv_capacity is None and not cfg.low_latency:
            kinds += ["compact"]
        if cfg.low_latency and "scaled" in kinds:  # rows of one kind
            kinds = list(self.kinds_of_low_latency)
        call = getattr(self, f"dispatch_{self.draw.choice(kinds)}")
        self.opened = [*self.opened[-3:], self.several(call)]

    def several(self, call: Callable[[], Any]) -> Any:
        """Make a call once, or three times with other data, of which the third repeats launches. Returns the last."""
        times, state = self.draw.choice([1, 1, 3]), self.draw.getstate()
        for _ in range(times):
            self.draw.setstate(state)
            result = call()
        return result

    def _results(self, tokens: list[int], ids: list[torch.Tensor], weights: list[torch.Tensor] | None) -> list[Any]:
        """The reference's results of a dispatch, without rows."""
        cfg, none = self.config, [torch.empty(each, 0) for each in tokens]
        return [
            dispatch.dispatch(none, ids, weights, rank, cfg.num_experts, cfg.alignment) for rank in range(self.world)
        ]

    def _finished(self, call: Callable[..., Any], *arguments: Any, hooks: bool = True, **options: Any) -> list[Any]:
        """Results of a call that is made as a whole, in halves, or on the other stream; all of it has been launched."""
        cfg = self.config
        takes = {"halves": hooks and not cfg.shared_staging, "aside": call != self.layer.dispatch_scaled}
        how = self.draw.choice(["whole", "whole", "halves", "aside"])
        if not takes.get(how):
            how = "whole"
        if how == "whole":
            found = call(*arguments, **options)
            return list(found) if isinstance(found, tuple) else [found]
        if how == "halves":
            *found, hook = call(*arguments, return_recv_hook=True, **options)
            if call != self.layer.combine and self.opened and self.draws.chance(0.3):
                self.sum_up(self.draw.choice(self.opened), whole=True)  # of an earlier one, between the halves
            hook()
            return list(found)
        *found, event = call(*arguments, async_finish=True, **options)
        event.current_stream_wait()
        return list(found)

    def dispatch_plain(self) -> Opened:
        """`dispatch`."""
        cfg, tokens, mine = self.config, self.tokens(), self.draws.mine
        (ids, weights), xs = self.routing(tokens), self.xs(tokens)
        sent = weights if self.draws.chance(0.7) else None
        given_order = not cfg.low_latency and self.draws.chance(0.2)
        order = [full_scatter_indices(each, cfg.num_experts) for each in ids] if given_order else None
        landing = self.draw.choice([None, "mx", "row", "bf16"]) if cfg.payload and not cfg.low_latency else None
        x = mine(xs)
        if cfg.payload and self.draws.chance(0.3):
            x = MXTensor.to_mx(x)
        options = {"landing": landing} if landing else {}
        recv_x, recv_weights, desc = self._finished(
            self.layer.dispatch, x, mine(ids), mine(sent), mine(order), **options
        )
        results = self._results(tokens, ids, sent)
        opened = Opened(desc, tokens, ids, sent, results, recv_x.shape[0], cfg.recv_capacity, given_order)
        self.check_rows(opened, recv_x, recv_weights, xs, sent)
        self.check_desc(opened)
        return opened

    def dispatch_scaled(self) -> Opened:
        """`dispatch_scaled`."""
        tokens, mine = self.tokens(), self.draws.mine
        (ids, weights), xs, scales = self.routing(tokens), self.xs(tokens, torch.float8_e4m3fn), self.scales(tokens)
        sent = weights if self.draws.chance(0.7) else None
        call = self.layer.dispatch_scaled
        recv_x, recv_scale, recv_weights, desc = self._finished(call, mine(xs), mine(scales), mine(ids), mine(sent))
        results = self._results(tokens, ids, sent)
        opened = Opened(desc, tokens, ids, sent, results, recv_x.shape[0], self.config.recv_capacity)
        self.check_rows(opened, recv_x, recv_weights, xs, sent)
        assert torch.equal(bits(recv_scale[: opened.used(self.rank)]), self.expected(opened, scales))
        self.check_desc(opened)
        return opened

    def dispatch_compact(self) -> Opened:
        """`dispatch_compact`, exact or with `num_rows`, which may be too few."""
        cfg, tokens, mine = self.config, self.tokens(), self.draws.mine
        ids, weights = self.routing(tokens)
        sent = weights if self.draws.chance(0.7) else None
        scaled = cfg.hidden % 128 == 0 and self.draws.chance(0.3)
        xs = self.xs(tokens, torch.float8_e4m3fn if scaled else None)
        scales = self.scales(tokens) if scaled else None
        most = self.world * self.most
        room = self.draw.choice([most, most + 3, most // 4]) if self.draws.chance(0.4) else None
        (rows,) = self._finished(
            self._compact_rows, mine(xs), mine(ids), mine(sent), hooks=False, scale=mine(scales), num_rows=room
        )
        none = [torch.empty(each, 0) for each in tokens]
        results = [compact.dispatch(none, ids, sent, rank, cfg.num_experts) for rank in range(self.world)]
        opened = Opened(rows.layout_desc, tokens, ids, sent, results, len(rows.x), room)
        want, used = results[self.rank], opened.used(self.rank)
        assert len(rows.x) == (used if room is None else room)
        assert torch.equal(bits(rows.x[:used]), self.expected(opened, xs))
        if scales is not None:
            assert torch.equal(bits(rows.scale[:used]), self.expected(opened, scales))
        same(rows.topk_idx[:used], want.recv_topk_idx[:used].to(ids[self.rank].dtype))
        assert (rows.topk_idx[used:] == -1).all()
        if sent is None:
            assert rows.topk_weights is None
        else:
            same(rows.topk_weights[:used], want.recv_topk_weights[:used])
            assert not rows.topk_weights[used:].any()
        counts = want.num_recv_tokens_per_expert.tolist()
        assert list(rows.num_recv_tokens_per_expert or ()) == (counts if room is None else [])
        return opened

    def _compact_rows(self, *arguments: Any, **options: Any) -> Any:
        """`dispatch_compact`, whose results end with the event, as those of the others do."""
        rows = self.layer.dispatch_compact(*arguments, **options)
        return (rows, rows.event) if options.get("async_finish") else rows

    def again(self) -> None:
        """Other rows to the places of a dispatch."""
        usable = [each for each in self.opened if not each.given_order]
        if not usable:
            return
        opened, mine, cfg = self.draw.choice(usable), self.draws.mine, self.config
        scaled = cfg.payload is None and cfg.hidden % 128 == 0 and not cfg.low_latency and self.draws.chance(0.4)
        if cfg.low_latency and "scaled" in self.kinds_of_low_latency and cfg.hidden % 128 == 0 and not cfg.payload:
            return  # has sent one-byte rows
        xs = self.xs(opened.tokens, torch.float8_e4m3fn if scaled else None)
        scales = self.scales(opened.tokens) if scaled else None
        if opened.is_compact:
            recv_x, *recv_scale, _ = self.layer.dispatch_compact_again(mine(xs), opened.desc, scale=mine(scales))
            assert torch.equal(bits(recv_x[: opened.used(self.rank)]), self.expected(opened, xs))
        else:
            _, weights = self.routing(opened.tokens)
            sent = weights if self.draws.chance(0.5) else None
            if scales is not None:
                recv_x, *recv_scale, recv_weights, _ = self.layer.dispatch_scaled(
                    mine(xs), mine(scales), None, mine(sent), layout_desc=opened.desc
                )
            else:
                recv_x, recv_weights = self.layer.dispatch_again(mine(xs), opened.desc, mine(sent))
            self.check_rows(opened, recv_x, recv_weights, xs, sent)
        if scales is not None:
            assert torch.equal(bits(recv_scale[0][: opened.used(self.rank)]), self.expected(opened, scales))

    def combine(self) -> None:
        """Outputs of the experts of any dispatch."""
        opened = self.draw.choice(self.opened)
        self.several(lambda: self.sum_up(opened))

    def sum_up(self, opened: Opened, whole: bool = False) -> None:
        """`combine`, with or without weights of rows or tokens, biases, `out` and `combine_buffer`.

        whole: neither in halves nor on the other stream.
        """
        cfg, chance = self.config, self.draws.chance
        ys, y = self.outputs(opened), None
        weights = [self.factors((len(result.src),)) for result in opened.results] if chance(0.5) else None
        if chance(0.3) and not (cfg.enable_local_combine or cfg.low_latency or opened.is_compact):
            y = self.layer.combine_buffer(opened.rows)
        y = self.own(opened, ys) if y is None else y.copy_(self.own(opened, ys))
        biases, options = self._biases_and_out(opened.tokens[self.rank])
        arguments = y, opened.desc, None if weights is None else self._passed_weights(opened, weights)
        if whole:
            out = self.layer.combine(*arguments, **options)
        else:
            (out,) = self._finished(self.layer.combine, *arguments, **options)
        assert "out" not in options or out is options["out"]
        same(out, self.summed(opened, ys, weights, biases))

    def _biases_and_out(self, tokens: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Up to two biases of this rank, and arguments of a combine: these, and memory for the sums or none."""
        cfg, own, options = self.config, torch.Generator().manual_seed(self.rank), {}
        shape, dtype = (tokens, cfg.hidden), cfg.token_dtype
        number = 0 if cfg.low_latency else self.draw.choice([0, 0, 1, 2])
        biases = [torch.randint(-8, 9, shape, generator=own).to(dtype) for _ in range(number)]
        given = tuple(each.to(self.device) for each in biases)
        if given:
            options["bias"] = given if len(given) == 2 or self.draws.chance(0.5) else given[0]
        if self.draws.chance(0.3):
            options["out"] = torch.full(shape, torch.nan, dtype=dtype, device=self.device)
        return biases, options

    def outputs(self, opened: Opened) -> list[torch.Tensor]:
        """Outputs of every rank's experts; zero in rows that are left out."""
        ys = []
        for rank, result in enumerate(opened.results):
            y = self.draws.integers((len(result.src), self.config.hidden), self.config.token_dtype, 2)
            y[opened.used(rank) :] = 0
            ys.append(y)
        return ys

    def own(self, opened: Opened, parts: list[torch.Tensor]) -> torch.Tensor:
        """This rank's part of values of rows, NaN where there is no row."""
        part, used = parts[self.rank], opened.used(self.rank)
        whole = torch.full((opened.rows, *part.shape[1:]), torch.nan, dtype=part.dtype)
        real = opened.results[self.rank].src[:used, 0] >= 0
        whole[:used][real] = part[:used][real]
        return whole.to(self.device)

    def _passed_weights(self, opened: Opened, weights: list[torch.Tensor]) -> torch.Tensor:
        """This rank's weights, NaN where there is no row; of a low-latency layer those of its tokens as well."""
        if self.config.low_latency and not opened.is_compact and self.draws.chance(0.5):
            tables = [self.factors(tuple(each.shape)) for each in opened.ids]
            for rank, result in enumerate(opened.results):
                for row, (source, token, k) in enumerate(result.src.tolist()):
                    weights[rank][row] = tables[source][token, k] if source >= 0 else 0
            return tables[self.rank].to(self.device)
        return self.own(opened, weights)

    def summed(
        self, opened: Opened, ys: list[torch.Tensor], weights: list[torch.Tensor] | None, biases: list[torch.Tensor]
    ) -> torch.Tensor:
        """The sums of this rank's tokens."""
        cfg = self.config
        if not opened.is_compact:
            return combine_reference.combine(ys, opened.results, self.rank, cfg.token_dtype, weights, biases)
        if weights is not None:
            ys = [(y.float() * each.unsqueeze(1)).to(y.dtype) for y, each in zip(ys, weights, strict=True)]
        first = compact.first_choice(opened.ids[self.rank], cfg.num_experts, self.world)
        return compact.combine(ys, opened.results, self.rank, first, cfg.token_dtype, biases)

    def combine_topk(self) -> None:
        """A number of each slot comes back to it."""
        opened = self.draw.choice([each for each in self.opened if each.is_compact])
        shape, back = opened.ids[self.rank].shape, torch.zeros(opened.ids[self.rank].shape)
        mine = torch.zeros(opened.rows, shape[1])
        for rank, result in enumerate(opened.results):
            used = opened.used(rank)
            values = torch.rand(len(result.src), shape[1], generator=self.draws.data)
            values = torch.where(result.recv_topk_idx >= 0, values, 0.0)
            values[used:] = 0
            if rank == self.rank:
                mine[:used] = values[:used]
            here = result.src[:, 0] == self.rank
            back.index_add_(0, result.src[here, 1], values[here])
        found, event = self.layer.combine_topk(mine.to(self.device), opened.desc, async_finish=self.draws.chance(0.3))
        if event is not None:
            event.current_stream_wait()
        same(found, back)

    def gradients(self) -> None:
        """`autograd.dispatch` and `autograd.combine`, each with its backward pass."""
        cfg, tokens, mine = self.config, self.tokens(), self.draws.mine
        (ids, weights), xs = self.routing(tokens), self.xs(tokens)
        x, w = mine(xs).requires_grad_(), mine(weights).requires_grad_()
        recv_x, recv_weights, desc = autograd.dispatch(self.layer, x, mine(ids), w)
        results = self._results(tokens, ids, weights)
        opened = Opened(desc, tokens, ids, weights, results, recv_x.shape[0], cfg.recv_capacity)
        self.check_rows(opened, recv_x.detach(), recv_weights.detach(), xs, weights)
        grads, of_rows = self.outputs(opened), [self.factors((len(result.src),)) for result in results]
        for rank, each in enumerate(of_rows):
            each[opened.used(rank) :] = 0
        given = self.own(opened, grads), self.own(opened, of_rows)
        of_x, of_w = torch.autograd.grad([recv_x, recv_weights], [x, w], given)
        same(of_x, combine_reference.combine(grads, results, self.rank, cfg.token_dtype))
        same(of_w, combine_reference.slot_values(of_rows, results, self.rank))
        ys, upstream, used = self.outputs(opened), self.xs(tokens), opened.used(self.rank)
        y = self.own(opened, ys).requires_grad_()
        out = autograd.combine(self.layer, y, desc)
        same(out.detach(), combine_reference.combine(ys, results, self.rank, cfg.token_dtype))
        (of_y,) = torch.autograd.grad(out, y, mine(upstream))
        same(of_y[:used], self.expected(opened, upstream))
        assert not of_y[used:].any()

    # --- calls that fail, and checks --------------------------------------------------------------------

    def refused(self) -> None:
        """One rank passes rows of a wrong size: it raises at once, the others raise or are told by `check`."""
        tokens, mine = self.tokens(), self.draws.mine
        (ids, weights), xs = self.routing(tokens), self.xs(tokens)
        bad, x = self.draw.randrange(self.world), mine(xs)
        if self.rank == bad:
            x = torch.zeros(len(x), self.config.hidden + 1, dtype=x.dtype, device=self.device)
        waits = self.config.recv_capacity is None
        if self.rank == bad:
            with pytest.raises(InputError, match="input"):
                self.layer.dispatch(x, mine(ids), mine(weights))
            self.check()  # it knows
        elif waits:
            with pytest.raises(PeerFailed, match=str(bad)):
                self.layer.dispatch(x, mine(ids), mine(weights))
        else:
            self.layer.dispatch(x, mine(ids), mine(weights))
            with pytest.raises(PeerFailed, match=str(bad)):
                self.check()

    def out_of_range(self) -> None:
        """One rank has an id out of range: every rank raises, at once or from `check`, which names that rank."""
        tokens, mine = self.tokens(), self.draws.mine
        (ids, weights), xs = self.routing(tokens), self.xs(tokens)
        bad = self.draw.randrange(self.world)
        if not tokens[bad]:
            return
        ids[bad][-1, 0] = self.config.num_experts + 5

        def told() -> None:
            self.layer.dispatch(mine(xs), mine(ids), mine(weights))
            self.check()

        with pytest.raises(InputError, match=f"of rank {bad} is {self.config.num_experts + 5}"):
            told()

    def checked(self) -> None:
        """A barrier, and no error."""
        self.layer.ep_barrier_all(intra_node_only=self.draws.chance(0.5))
        self.check()

    def check(self) -> None:
        """Raise what the device has reported; capacities that are too small are meant so."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*did not fit capacity")
            self.layer.check()

    def check_rows(
        self,
        opened: Opened,
        recv_x: Any,
        recv_weights: torch.Tensor | None,
        xs: list[torch.Tensor],
        weights: list[torch.Tensor] | None,
    ) -> None:
        """Compare what arrived of these rows and weights."""
        used, cfg = opened.used(self.rank), self.config
        assert recv_x.shape[0] == opened.rows == (used if cfg.recv_capacity is None else cfg.recv_capacity)
        if isinstance(recv_x, RowScaled):
            recv_x = (recv_x.qdata.float() * recv_x.scale.unsqueeze(1)).to(cfg.token_dtype)
        elif isinstance(recv_x, MXTensor):
            recv_x = recv_x.dequantize()
        elif recv_x.dtype != xs[0].dtype:
            assert recv_x.dtype == torch.bfloat16
            recv_x = recv_x.to(cfg.token_dtype)
        assert torch.equal(bits(recv_x[:used]), self.expected(opened, xs))
        if weights is None:
            assert recv_weights is None
            return
        want = torch.zeros(len(opened.results[self.rank].src))
        for row, (source, token, k) in enumerate(opened.results[self.rank].src.tolist()):
            want[row] = weights[source][token, k] if source >= 0 else 0
        assert recv_weights is not None and recv_weights.shape == (opened.rows,)
        same(recv_weights[:used], want[:used])

    def check_desc(self, opened: Opened) -> None:
        """Compare the descriptor of a dispatch to expert-major rows."""
        want, room = opened.results[self.rank], opened.room
        offsets = want.expert_offsets if room is None else want.expert_offsets.clamp(max=room)
        same(opened.desc.expert_offsets, offsets)
        assert int(opened.desc.overflow) == (0 if room is None else max(len(want.src) - room, 0))
        tokens = torch.tensor(opened.tokens, dtype=torch.int32)
        same(opened.desc.num_input_tokens_per_rank, tokens)


def _run(rank: int, nodes: int, ranks_per_node: int, seed: int) -> None:
    draws, group = Draws(rank, nodes, ranks_per_node, seed), dist.group.WORLD
    if nodes * ranks_per_node == 4 and draws.chance(0.3):  # two groups, which know nothing of each other
        pair, rank = divmod(rank, 2)
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][pair]
        draws = Draws(rank, 2 // min(ranks_per_node, 2), min(ranks_per_node, 2), 1000 * (pair + 1) + seed)
    layers = [Calls(draws, group) for _ in range(draws.draw.choice([1, 2]))]
    for _ in range(STEPS):
        draws.draw.choice(draws.draw.choice(layers).calls)()
    for each in layers:
        each.checked()
        each.layer.finalize()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Sequences of every topology."""
    parametrize_sequences(metafunc, TOPOLOGIES)


@pytest.mark.plain
def test_random_layers(run_ranks, nodes: int, ranks_per_node: int, seed: int) -> None:
    """A sequence of calls of one or two layers."""
    run_ranks(_run, nodes, ranks_per_node, seed)
