"""Split-phase calls, calls on a stream of their own, and calls with the combine buffer: same results as plain calls."""

import random
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.combinations import combinations
from tests.layer.cases import (
    Case,
    check_dispatched,
    check_sum,
    combine_and_check,
    dispatch_and_check,
    expert_outputs,
    limit_of_calls,
    make_layer,
    start_combine,
    start_dispatch,
    workloads,
)
from tests.layer.origins import row_experts
from tests.layer.test_large import _capture, _StaticCall
from triton_ep import EPEvent
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, FinalizedError, InputError, WaitTimeout
from triton_ep.kernels.device.codes import SENT_COMPACT, SENT_TO_EXPERTS
from triton_ep.ops import tuning
from triton_ep.ops.tuning import Pushing
from triton_ep.testing import apply_expert

PLAIN, ON_GPUS = pytest.mark.plain, pytest.mark.on_gpus

SMALL = Case("small", tokens=(7, 12, 5, 9), hidden=32, topk=2, experts=2)
LOW_LATENCY = Case("low latency", tokens=(6, 3, 0, 8), hidden=32, topk=3, experts=4, low_latency=True)
LOCAL = replace(SMALL, name="local", local_combine=True, static=True, payload="mxfp8", combine_weights=True)
LOW_LATENCY_MX = replace(LOW_LATENCY, name="low latency mxfp8", payload="mxfp8", alignment=4)


def _id(value: object) -> str:
    return str(getattr(value, "name", value))


class _Halves:
    """Halves of dispatches and combines of one layer, checked when they end."""

    def __init__(self, layer, case):
        self.layer, self.case = layer, case
        self.calls = 0
        self.live = []
        self.sent = self.published = None  # the open dispatch and combine, whose hooks have not been called

    def next_works(self):
        self.calls += 1
        return self.calls - 1, workloads(self.case, self.layer.config.world_size, self.calls - 1)

    def dispatch(self):
        call, works = self.next_works()
        self.live.append(check_dispatched(self.layer, self.case, call, *start_dispatch(self.layer, self.case, works)))

    def send(self):
        call, works = self.next_works()
        *results, hook = start_dispatch(self.layer, self.case, works, return_recv_hook=True)
        self.sent = call, results, hook

    def receive(self):
        call, results, hook = self.sent
        hook()
        self.sent = None
        self.live.append(check_dispatched(self.layer, self.case, call, *results))

    def combine(self):
        combine_and_check(self.layer, self.live.pop(0))

    def publish(self):
        done = self.live.pop()
        self.published = done, *start_combine(self.layer, done, return_recv_hook=True)

    def pull(self):
        done, out, hook = self.published
        hook()
        self.published = None
        check_sum(self.layer, done, out)

    def possible(self):
        """Names of the calls that the layer allows now."""
        names = ["receive"] if self.sent else ["dispatch", "send"]
        if self.published:
            names.append("pull")
        elif self.live:
            names += ["combine", "publish"]
        return names

    def finish(self):
        if self.published:
            self.pull()
        if self.sent:
            self.receive()
        while self.live:
            self.combine()


def _any_order(rank, nodes, ranks_per_node, case, steps):
    draw, own = random.Random(steps + len(case.name)), random.Random(rank)
    # From 1024 tokens on a GPU runs parts of plain calls concurrently.
    options = {"max_tokens": 1024} if current_heap().device.type == "cuda" and case.name == "local" else {}
    with make_layer(case, rank, nodes, ranks_per_node, **options) as layer:
        halves = _Halves(layer, case)
        # First a fixed sequence, then random calls; all ranks draw the same ones.
        script = ["send", "receive", "send", "publish", "pull", "receive", "publish", "dispatch", "pull"]
        for step in range(steps):
            name = script[step] if step < len(script) else draw.choice(halves.possible())
            assert name in halves.possible()
            getattr(halves, name)()
            if own.random() < 0.2:
                time.sleep(0.003)  # ranks get out of step
        halves.finish()
        layer.check()


@pytest.mark.parametrize(
    "case, nodes, ranks_per_node",
    [
        (SMALL, 1, 2),
        (LOW_LATENCY, 1, 2),
        (LOCAL, 2, 1),
        # The same protocols with other rows, or between more ranks.
        pytest.param(LOW_LATENCY_MX, 1, 2, marks=PLAIN),
        pytest.param(SMALL, 2, 1, marks=PLAIN),
        *(pytest.param(case, 2, 2, marks=ON_GPUS) for case in (SMALL, LOCAL)),
        pytest.param(LOCAL, 1, 2, marks=ON_GPUS),
        *(pytest.param(case, 1, 4, marks=ON_GPUS) for case in (SMALL, LOCAL, LOW_LATENCY, LOW_LATENCY_MX)),
    ],
    ids=_id,
)
def test_halves_in_any_order_equal_the_reference(run_ranks, backend, chaos_seed, case, nodes, ranks_per_node):
    """In random order: combines of earlier dispatches before a dispatch's hook, dispatches before a combine's hook."""
    steps = 80 if backend != "host" else 11 if chaos_seed is not None else 13
    run_ranks(_any_order, nodes, ranks_per_node, case, steps)


def _more_flags_than_programs(rank, nodes, ranks_per_node, case):
    """Ranks send with one to three programs, which raise six flags, and watch for those of all. Steps end elsewhere on
    each rank."""
    counts = iter([1 + rank % 3, 1 + (rank + 1) % 3])
    sent = (SENT_TO_EXPERTS, SENT_COMPACT)[rank % 2]

    def pushing(ctx, fmt, overlapped, laid):
        return Pushing(next(counts), 6, sent, False)

    with mock.patch.object(tuning, "_pushing", pushing), make_layer(case, rank, nodes, ranks_per_node, num_sm=8) as one:
        for call in range(4):
            combine_and_check(one, dispatch_and_check(one, case, call))
        one.check()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=ON_GPUS)])
def test_programs_raise_the_flags_of_more(run_ranks, nodes, ranks_per_node):
    """Ranks need not send with the same number of programs, as where only some give the receiving half to a hook."""
    run_ranks(_more_flags_than_programs, nodes, ranks_per_node, SMALL)


def _two_micro_batches(rank, nodes, ranks_per_node, case, rounds):
    """While the rows of one micro-batch are in flight the other one computes."""
    with make_layer(case, rank, nodes, ranks_per_node) as one, make_layer(case, rank, nodes, ranks_per_node) as two:
        a, b = _Halves(one, case), _Halves(two, case)
        a.send()
        for _ in range(rounds):
            b.send()
            a.receive()
            a.publish()
            b.receive()
            b.publish()
            a.pull()
            a.send()
            b.pull()
        a.finish()
        b.finish()


@pytest.mark.plain  # orders of stores in halves: the tests above
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=ON_GPUS)])
def test_two_micro_batches_on_two_layers(run_ranks, backend, nodes, ranks_per_node):
    """The decoder's schedule: every half of one layer runs between two halves of the other."""
    run_ranks(_two_micro_batches, nodes, ranks_per_node, LOW_LATENCY, 40 if backend != "host" else 2)


def _some_ranks(rank, nodes, ranks_per_node, case, calls):
    options = {"max_tokens": 1024} if current_heap().device.type == "cuda" and not case.low_latency else {}
    with make_layer(case, rank, nodes, ranks_per_node, **options) as layer:
        halves = _Halves(layer, case)
        for call in range(calls):
            for steps, plain in (("send", "receive"), "dispatch"), (("publish", "pull"), "combine"):
                for step in steps if (rank + call) % 2 else (plain,):
                    getattr(halves, step)()


@pytest.mark.parametrize(
    "case, nodes, ranks_per_node",
    [
        (SMALL, 1, 2),
        (LOW_LATENCY, 1, 2),
        (LOCAL, 2, 1),
        pytest.param(LOCAL, 1, 2, marks=ON_GPUS),
        pytest.param(SMALL, 2, 1, marks=ON_GPUS),
        *(pytest.param(case, 2, 2, marks=ON_GPUS) for case in (SMALL, LOCAL)),
    ],
    ids=_id,
)
def test_ranks_need_not_agree_on_hooks(run_ranks, backend, case, nodes, ranks_per_node):
    """Split-phase calls on some ranks meet whole calls on others."""
    run_ranks(_some_ranks, nodes, ranks_per_node, case, 20 if backend != "host" else 2)


def _refused(rank, nodes, ranks_per_node, case):
    device = current_heap().device
    layer = make_layer(case, rank, nodes, ranks_per_node)
    halves = _Halves(layer, case)
    x = torch.zeros(1, case.hidden, dtype=case.dtype, device=device)
    idx = torch.zeros(1, case.topk, dtype=torch.int32, device=device)
    halves.send()
    _, (_, _, desc), hook = halves.sent
    with pytest.raises(InputError, match=r"before the hook of dispatch number 1.*a layer of its own"):
        layer.dispatch(x, idx)
    with pytest.raises(InputError, match="whose hook has not been called: its rows are not there yet"):
        layer.combine(torch.zeros(desc.num_recv_rows, case.hidden, dtype=case.dtype, device=device), desc)
    halves.receive()
    with pytest.raises(InputError, match="twice"):
        hook()
    halves.dispatch()
    halves.publish()
    with pytest.raises(InputError, match=r"before the hook of the previous combine.*a layer of its own"):
        halves.combine()
    halves.dispatch()
    hook = halves.published[-1]
    halves.pull()
    with pytest.raises(InputError, match="twice"):
        hook()
    for options, text in (
        ({"return_recv_hook": True, "async_finish": True}, "Choose one"),
        ({"previous_event": EPEvent.record()}, "is for async_finish=True"),
        ({"previous_event": 1, "async_finish": True}, "must be an EPEvent, got int"),
    ):
        with pytest.raises(InputError, match=text):
            layer.dispatch(x, idx, **options)  # on all ranks; the next call works
        with pytest.raises(InputError, match=text):
            start_combine(layer, halves.live[0], **options)
    halves.send()
    halves.publish()
    layer.finalize()
    for hook in (halves.sent[-1], halves.published[-1]):
        with pytest.raises(FinalizedError):
            hook()


def _of_earlier_dispatches(rank: int, nodes: int, ranks_per_node: int) -> None:
    with make_layer(SMALL, rank, nodes, ranks_per_node) as layer:
        work = workloads(SMALL, layer.config.world_size, 0)[rank]
        x, idx = work.x.to(layer.context.device), work.topk_idx.to(layer.context.device)
        rows = layer.dispatch_compact(x, idx)
        values = torch.rand(rows.topk_idx.shape, device=x.device)
        want = layer.combine(rows.x, rows.layout_desc), layer.combine_topk(values, rows.layout_desc)[0]
        *_, hook = layer.dispatch(x, idx, return_recv_hook=True)
        assert torch.equal(layer.combine(rows.x, rows.layout_desc), want[0])
        assert torch.equal(layer.combine_topk(values, rows.layout_desc)[0], want[1])
        hook()
        layer.check()


@pytest.mark.plain
def test_rows_of_an_earlier_dispatch_return_between_the_halves_of_another(run_ranks):
    """By combine and by combine_topk."""
    run_ranks(_of_earlier_dispatches, 1, 2)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("case", [SMALL, LOW_LATENCY], ids=_id)
def test_what_would_overwrite_rows_is_refused(run_ranks, nodes, ranks_per_node, case):
    """A second dispatch or combine before the hook, rows not there yet, a hook's second call, a hook after the end."""
    run_ranks(_refused, nodes, ranks_per_node, case)


def _no_halves(rank, nodes, ranks_per_node):
    case = replace(SMALL, local_combine=True)
    with make_layer(case, rank, nodes, ranks_per_node, shared_staging=True) as layer:
        halves = _Halves(layer, case)
        halves.dispatch()
        for call in (halves.send, halves.publish):
            with pytest.raises(InputError, match="without shared_staging"):
                call()
        combine_and_check(layer, dispatch_and_check(layer, case, 2))


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_shared_staging_has_no_halves(run_ranks, nodes, ranks_per_node):
    """Hooks are refused where another call between the halves would overwrite rows; the next call works."""
    run_ranks(_no_halves, nodes, ranks_per_node)


def _growth_refused(rank, nodes, ranks_per_node):
    few = replace(SMALL, tokens=(2,), drop=0.0)
    many = replace(few, tokens=(24,), routing="one_expert", topk=2)
    with make_layer(few, rank, nodes, ranks_per_node, max_tokens=24) as layer:
        first = dispatch_and_check(layer, few, 0)
        out, hook = start_combine(layer, first, return_recv_hook=True)
        with pytest.raises(InputError, match="the hook of a combine is still to be called"):
            dispatch_and_check(layer, many, 1)
        hook()
        check_sum(layer, first, out)
        combine_and_check(layer, dispatch_and_check(layer, many, 2))


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4)])  # two ranks never have too little room
def test_rows_that_others_still_read_are_not_given_up(run_ranks, nodes, ranks_per_node):
    """An exact layer that must grow its combine buffer before a combine's hook raises, and stays usable."""
    run_ranks(_growth_refused, nodes, ranks_per_node)


def _late(rank, nodes, ranks_per_node, where):
    limit_s = limit_of_calls(LOW_LATENCY, rank, nodes, ranks_per_node)
    layer = make_layer(LOW_LATENCY, rank, nodes, ranks_per_node, timeout_s=limit_s)
    done = dispatch_and_check(layer, LOW_LATENCY, 0)
    dist.barrier()
    if rank != 1:
        halves = _Halves(layer, LOW_LATENCY)
        halves.live.append(done)
        getattr(halves, "send" if where == "dispatch" else "publish")()
        hook = (halves.sent or halves.published)[-1]

        def end():
            hook()
            layer.check()  # a GPU reports later

        with pytest.raises(WaitTimeout, match=f"low-latency {where}.*missing rank 1;"):
            end()
    dist.barrier()
    layer.context.failure = layer.context.failure or "the other ranks gave up"
    layer.finalize()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("where", ["dispatch", "combine"])
def test_a_hook_names_the_rank_that_did_not_send(run_ranks, nodes, ranks_per_node, where):
    """The sending half waits for no rank; the hook raises the error of a plain call."""
    run_ranks(_late, nodes, ranks_per_node, where)


def _on_comm_stream(rank, nodes, ranks_per_node, case, calls):
    device = current_heap().device
    on_gpu = device.type == "cuda"
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        assert (layer.comm_stream is not None) == on_gpu and layer.comm_stream is layer.comm_stream
        for call in range(calls):
            works = workloads(case, layer.config.world_size, call)
            *results, event = start_dispatch(layer, case, works, async_finish=True)
            assert isinstance(event, EPEvent) and (event.event is not None) == on_gpu
            event.current_stream_wait()
            done = check_dispatched(layer, case, call, *results)
            if call % 2:
                y = done.recv_x.clone()
                ready = EPEvent.record()
                out, event = layer.combine(y, done.desc, async_finish=True, previous_event=ready)
                del y  # the allocator must not reuse its memory before the combine has read it
                torch.full_like(done.recv_x, float("nan"))
                event.current_stream_wait()
                assert torch.equal(out, layer.combine(done.recv_x, done.desc))
            else:
                out, event = start_combine(layer, done, async_finish=True)
                event.current_stream_wait()
                check_sum(layer, done, out)
            combine_and_check(layer, dispatch_and_check(layer, case, call + 100))  # plain calls after it
        layer.check()


@pytest.mark.plain  # without streams these are whole calls
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=ON_GPUS)])
@pytest.mark.parametrize("case", [LOCAL, LOW_LATENCY], ids=_id)
def test_calls_on_a_stream_of_their_own(run_ranks, backend, nodes, ranks_per_node, case):
    """Results are correct after the event, with plain calls in between. On the CPU the event is done at once."""
    run_ranks(_on_comm_stream, nodes, ranks_per_node, case, 20 if backend != "host" else 2)


def _in_place(rank, nodes, ranks_per_node, case, calls):
    """Combine the same outputs twice: copied by combine, and written into the combine buffer."""
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        live = []
        for call in range(calls):
            live.append(dispatch_and_check(layer, case, call))
            done = live[0] if call % 3 == 2 else live[-1]
            y = expert_outputs(layer, done)
            weights = done.recv_weights if case.combine_weights else None
            copied, hook = layer.combine(y, done.desc, weights, return_recv_hook=True)
            first = call < 2
            time.sleep(0.02 * first * (rank == call))  # the other ranks must not write until this rank has pulled
            hook()
            rows = layer.combine_buffer(done.desc.num_recv_rows)
            assert rows.shape == y.shape and rows.dtype == y.dtype and rows.is_contiguous()
            rows.fill_(float("nan"))
            time.sleep(0.04 * first)
            rows.copy_(y)
            if call % 2:
                out, hook = layer.combine(rows, done.desc, weights, return_recv_hook=True)
                hook()
            else:
                out = layer.combine(rows, done.desc, weights)
            assert torch.equal(copied, out)
            check_sum(layer, done, out)
        layer.check()


@pytest.mark.parametrize(
    "static, nodes, ranks_per_node",
    [
        (False, 1, 2),
        pytest.param(True, 2, 1, marks=PLAIN),
        pytest.param(True, 1, 2, marks=ON_GPUS),
        pytest.param(False, 2, 1, marks=ON_GPUS),
        *(pytest.param(static, *at, marks=ON_GPUS) for static in (False, True) for at in ((1, 4), (2, 2))),
    ],
)
def test_rows_written_into_the_combine_buffer_need_no_copy(run_ranks, backend, static, nodes, ranks_per_node):
    """The same bits as with a copy, weighted or not, after earlier combines whose rows slow ranks still read."""
    case = replace(SMALL, static=static, combine_weights=static, alignment=8 if static else 1)
    run_ranks(_in_place, nodes, ranks_per_node, case, 20 if backend != "host" else 3)


def _no_buffer(rank, nodes, ranks_per_node):
    few = replace(SMALL, tokens=(2,), drop=0.0)
    with make_layer(few, rank, nodes, ranks_per_node, max_tokens=24) as layer:
        first = dispatch_and_check(layer, few, 0)
        y, num_rows = expert_outputs(layer, first), first.desc.num_recv_rows
        rows = layer.combine_buffer(num_rows)
        rows.copy_(y)
        with pytest.raises(InputError, match="but combine_buffer has lent it"):
            dispatch_and_check(layer, replace(few, tokens=(24,), routing="one_expert"), 1)
        layer.combine(y, first.desc)  # ends the loan
        with pytest.raises(InputError, match="Call combine_buffer again"):
            layer.combine(rows, first.desc)
        with pytest.raises(InputError, match=r"asked for 10\d+ rows, the layer has \d+"):
            layer.combine_buffer(10**6)
        with pytest.raises(InputError, match=r"asked for 2\.5 rows"):
            layer.combine_buffer(2.5)
        _, hook = layer.combine(y, first.desc, return_recv_hook=True)
        with pytest.raises(InputError, match="Call that hook first"):
            layer.combine_buffer(num_rows)
        hook()
        layer.combine_buffer(num_rows).copy_(y)
        combine_and_check(layer, first)
    for case, option in ((replace(SMALL, local_combine=True), "enable_local_combine"), (LOW_LATENCY, "low_latency")):
        with (
            make_layer(case, rank, nodes, ranks_per_node) as layer,
            pytest.raises(ConfigError, match=f"with {option}=True combine sums"),
        ):
            layer.combine_buffer(1)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4)])  # two ranks never have too little room
def test_the_combine_buffer_is_lent_for_one_combine(run_ranks, nodes, ranks_per_node):
    """Refused while others read it, for a second combine, and if combine stores sums; it cannot grow while lent."""
    run_ranks(_no_buffer, nodes, ranks_per_node)


class _Schedule:
    """Two static layers that take turns, captured in one CUDA graph."""

    def __init__(self, how, *arguments):
        self.how = how
        self.calls = [_StaticCall(*arguments) for _ in range(2)]
        self.device = self.calls[0].device

    def load(self, seed):
        for index, call in enumerate(self.calls):
            call.load(2 * seed + index)

    def check(self):
        for call in self.calls:
            call.check()

    def __call__(self):
        options = {"async_finish" if self.how == "events" else "return_recv_hook": True}
        ends = []
        for call in self.calls:
            *received, end = call.layer.dispatch(call.x, call.idx, call.weights, **options)
            call.recv_x, call.recv_weights, call.desc = received
            ends.append(end)
        for index, call in enumerate(self.calls):
            self._end(ends[index])
            experts = row_experts(
                call.desc.expert_offsets, call.recv_x.shape[0], call.rank * call.experts // call.world
            )
            y = apply_expert(call.recv_x, experts)
            if self.how == "buffer":
                y = call.layer.combine_buffer(y.shape[0]).copy_(y)
            call.out, ends[index] = call.layer.combine(y, call.desc, **options)
        for end in ends:
            self._end(end)

    @staticmethod
    def _end(end):
        end.current_stream_wait() if isinstance(end, EPEvent) else end()


def _replays(rank, nodes, ranks_per_node, how, *sizes):
    schedule = _Schedule(how, rank, nodes, ranks_per_node, *sizes)
    one, two = (call.layer for call in schedule.calls)
    with one, two:
        schedule.load(0)
        replay = _capture(schedule, schedule.device)
        for seed in range(1, 4):
            schedule.load(seed)
            replay()
            schedule.check()


# Low latency has one node, and a stream changes nothing between nodes.
OF_NODES = [("hooks", False, 128), ("hooks", False, 1024), ("buffer", False, 128)]
OF_ONE_NODE = [*OF_NODES, ("hooks", True, 128), ("events", True, 128), ("events", False, 1024)]


def _replayed_on_cpu(how, low_latency, tokens, nodes, ranks_per_node):
    """Events of whole calls: `test_calls_on_a_stream_of_their_own`."""
    return (how, low_latency) in (("hooks", True), ("buffer", False)) and ranks_per_node == 2


@pytest.mark.plain
@pytest.mark.parametrize(
    "how, low_latency, tokens, nodes, ranks_per_node",
    [
        *combinations(OF_ONE_NODE, [(1, 2), (1, 4)], on_cpu=_replayed_on_cpu),
        *combinations(OF_NODES, [(2, 2)], on_cpu=lambda *_: False),
    ],
)
def test_a_graph_replays_halves_events_and_the_buffer(
    run_ranks, backend, how, low_latency, tokens, nodes, ranks_per_node
):
    """Two layers in turn, captured once, are correct for other inputs. On the CPU the schedule runs without a graph."""
    sizes = (low_latency, tokens, 1024, 64) if backend != "host" else (low_latency, 6, 40, 16)
    run_ranks(_replays, nodes, ranks_per_node, how, *sizes)
