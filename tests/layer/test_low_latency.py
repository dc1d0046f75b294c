"""Layers with low_latency=True have the results of other static layers. CUDA graphs: test_large.py."""

import random
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.layer.cases import (
    Case,
    check_case,
    combine_and_check,
    dispatch_and_check,
    limit_of_calls,
    make_layer,
    workloads,
)
from triton_ep import EPConfig, MXTensor, autograd
from triton_ep.context.given import Rows
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, InputError, StaleHandleError, WaitTimeout
from triton_ep.kernels.device import codes
from triton_ep.reference import channel_scales as channels_reference
from triton_ep.reference import dispatch as dispatch_reference

CASES = {
    case.name: replace(case, low_latency=True)
    for case in (
        Case("plain", tokens=(5, 8, 1, 3)),
        Case("aligned_fp16", tokens=(9, 4, 0, 6), dtype=torch.float16, alignment=16, topk=5, experts=8, hidden=37),
        Case("mxfp8", tokens=(6, 0, 3, 7), payload="mxfp8", topk=4, experts=4, combine_weights=True, alignment=4),
        Case("mx_given", tokens=(4, 5), payload="mxfp8", quantised_input=True, topk=3, experts=3, weights=False),
        Case("one_expert_int64", tokens=(3, 7), routing="one_expert", topk=4, experts=8, idx_dtype=torch.int64, drop=0),
        Case("duplicates_fp32", tokens=(4, 2), routing="duplicates", topk=4, experts=4, dtype=torch.float32),
        Case("nothing", tokens=(0,)),
        # Rows of more than one tile, in every kernel.
        Case("wide", tokens=(2, 1), hidden=8224, alignment=2),
        Case("wide_mxfp8", tokens=(2, 1), hidden=8224, payload="mxfp8", alignment=2),
        Case("wide_mx_given", tokens=(2, 1), hidden=16416, payload="mxfp8", quantised_input=True),
    )
}
MOST = Case("most", tokens=(1024, 3), hidden=32, topk=2, experts=2, low_latency=True)
SMALL = Case("small", tokens=(6, 3), hidden=32, topk=2, experts=2, low_latency=True)


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4)])
@pytest.mark.parametrize("name", ["plain", pytest.param("mxfp8", marks=pytest.mark.plain)])
def test_dispatch_and_combine_equal_the_reference(run_ranks, backend, chaos_seed, nodes, ranks_per_node, name):
    """Every row, weight, count and offset is equal, and sums are within the roundings of partial sums."""
    calls = 1 if chaos_seed is not None or (backend == "host" and name != "plain") else 3
    run_ranks(check_case, nodes, ranks_per_node, replace(CASES[name], calls=calls))


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_the_most_tokens_that_there_may_be(run_ranks, nodes, ranks_per_node):
    """1024 tokens on a rank, checked as in `test_dispatch_and_combine_equal_the_reference`."""
    run_ranks(check_case, nodes, ranks_per_node, replace(MOST, calls=1))


def _wrap(rank, nodes, ranks_per_node):
    with make_layer(SMALL, rank, nodes, ranks_per_node) as layer:
        ctx, calls = layer.context, 2**31 - 2  # calls until the sign of the flags changes, less two
        for name, word in (("ll_flag", codes.EPOCH_LL_DISPATCH), ("ll_combine_flag", codes.EPOCH_LL_COMBINE)):
            ctx.state[word] = calls << 20
            ctx.local(name).fill_(calls << 32)
        ctx.local("ll_row_flag").fill_(calls << 32)
        dist.barrier()
        for call in range(4):
            if rank == 1:  # the others must wait for it
                time.sleep(0.3)
            combine_and_check(layer, dispatch_and_check(layer, SMALL, call))
        assert (ctx.local("ll_flag") < 0).all() and (ctx.local("ll_combine_flag") < 0).all()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_numbers_of_calls_may_wrap(run_ranks, nodes, ranks_per_node):
    """Ranks still wait for a late rank when the sign of the flags changes."""
    run_ranks(_wrap, nodes, ranks_per_node)


@pytest.mark.plain
@pytest.mark.parametrize(
    "name, nodes, ranks_per_node",
    [("aligned_fp16", 1, 1), ("mxfp8", 1, 1), ("aligned_fp16", 1, 3)]
    + [(name, 1, 2) for name in CASES if name not in ("aligned_fp16", "mxfp8")]
    + [
        pytest.param(name, 1, 4, marks=pytest.mark.on_gpus)
        for name in ("aligned_fp16", "mx_given", "one_expert_int64", "duplicates_fp32", "nothing")
    ]
    + [pytest.param(name, 1, 8, marks=pytest.mark.on_gpus) for name in CASES],
)
def test_other_sizes_and_numbers_of_ranks(run_ranks, name, nodes, ranks_per_node):
    """The same for one rank, for a number of ranks that is not a power of two, and for a whole node of GPUs."""
    run_ranks(check_case, nodes, ranks_per_node, CASES[name])


def _many_calls(rank, nodes, ranks_per_node, calls):
    draw = random.Random(calls)
    with make_layer(SMALL, rank, nodes, ranks_per_node, max_tokens=9, capacity=9 * 4 * 2) as layer:
        live = []
        for call in range(calls):
            tokens = tuple(draw.choice((0, 1, 2, 5, 9)) for _ in range(4))
            routing = draw.choice(("uniform", "uniform", "skewed", "one_expert", "all_dropped"))
            now = replace(SMALL, tokens=tokens, routing=routing, weights=draw.random() < 0.5)
            live.append(dispatch_and_check(layer, now, call))
            if len(live) > 1 and draw.random() < 0.7:
                combine_and_check(layer, live.pop(draw.randrange(len(live))))
        for call in live:
            combine_and_check(layer, call)


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_many_calls_of_random_sizes(run_ranks, backend, chaos_seed, nodes, ranks_per_node):
    """Stale state of any call would show in a later one; descriptors combine in any order."""
    calls = 400 if backend != "host" else 4 if chaos_seed is not None else 12
    run_ranks(_many_calls, nodes, ranks_per_node, calls)


def _same_as_static(rank, nodes, ranks_per_node, payload):
    """Compare the results of a static and a low-latency layer, including ids out of range."""
    case = Case("both", tokens=(7, 4), hidden=64, topk=3, experts=4, payload=payload, local_combine=True, static=True)
    device = current_heap().device
    mine = workloads(case, nodes * ranks_per_node, 0)[rank]
    idx = mine.topk_idx.clone()
    idx[1, 1], idx[2, 0] = 10**6, -7
    given = MXTensor.to_mx(mine.x.to(device)) if payload else mine.x.to(device)
    seen = []
    for low_latency in (False, True):
        with make_layer(case, rank, nodes, ranks_per_node, low_latency=low_latency) as layer:
            recv_x, weights, desc = layer.dispatch(given, idx.to(device), mine.topk_weights.to(device))
            rows = recv_x.dequantize() if payload else recv_x
            used = int(desc.expert_offsets[-1])
            seen.append((rows[:used], weights, desc.expert_offsets, desc.topk_indices_tensor, desc.overflow))
            layer.combine(rows, desc)
            if low_latency:
                layer.check()
            else:
                with pytest.raises(InputError, match=r"exp_indices\[1, 1\] of rank 0"):
                    layer.check()
    for plain, low in zip(*seen, strict=True):
        assert torch.equal(plain, low)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("payload", [None, "mxfp8"])
def test_dispatch_has_the_bits_of_another_static_layer(run_ranks, nodes, ranks_per_node, payload):
    """Rows, weights of all rows, offsets and kept ids; an id out of range counts as dropped."""
    run_ranks(_same_as_static, nodes, ranks_per_node, payload)


def _overflow(rank, nodes, ranks_per_node):
    # All four assignments of a token go to rank 1. The first k have the last experts, so their rows do not fit.
    case = replace(SMALL, name="over", tokens=(8,), topk=4, experts=4, drop=0.0, routing="one_expert")
    world, room, device = nodes * ranks_per_node, 40, current_heap().device
    with make_layer(case, rank, nodes, ranks_per_node, capacity=room) as layer:
        works = [replace(work, topk_idx=work.topk_idx.flip(1).contiguous()) for work in workloads(case, world, 0)]
        mine = works[rank]
        inputs = [w.x for w in works], [w.topk_idx for w in works], [w.topk_weights for w in works]
        want = [dispatch_reference.dispatch(*inputs, r, case.experts * world) for r in range(world)]
        arguments = mine.x, mine.topk_idx, mine.topk_weights
        recv_x, weights, desc = layer.dispatch(*(argument.to(device) for argument in arguments))
        arriving = want[rank].recv_x.shape[0]
        used = min(arriving, room)
        assert int(desc.overflow) == max(arriving - room, 0)
        assert desc.expert_offsets.tolist() == want[rank].expert_offsets.clamp(max=room).tolist()
        assert torch.equal(desc.num_recv_tokens_per_expert.cpu(), desc.expert_offsets.cpu().diff())
        assert torch.equal(recv_x[:used].cpu(), want[rank].recv_x[:used])
        assert torch.equal(weights[:used].cpu(), want[rank].recv_weights[:used]) and not weights[used:].any()
        out = layer.combine(torch.ones_like(recv_x), desc)
        row = want[rank].dst_row[rank]
        copies = ((row >= 0) & (row < room)).sum(1, keepdim=True).expand(-1, case.hidden)
        assert torch.equal(out.cpu().float(), copies.float())  # a row that fits adds 1, a dropped one nothing
        combine_and_check(layer, dispatch_and_check(layer, replace(case, tokens=(1,), routing="uniform"), 1))
    return int(desc.overflow)


@pytest.mark.plain  # weights, sums and rows arrive as in other calls
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_overflow_is_flagged_and_harmless(run_ranks, nodes, ranks_per_node):
    """Rows beyond the capacity are counted and dropped; all others are correct, and so is the next call."""
    assert max(run_ranks(_overflow, nodes, ranks_per_node)) > 0


def _overflow_of_padding(rank, nodes, ranks_per_node):
    case = replace(SMALL, name="padded_over", tokens=(8,), topk=4, experts=4, drop=0.0, alignment=3)
    world, room, device = nodes * ranks_per_node, 23, current_heap().device
    with make_layer(case, rank, nodes, ranks_per_node, capacity=room) as layer:
        works = workloads(case, world, 0)
        inputs = [w.x for w in works], [w.topk_idx for w in works], [w.topk_weights for w in works]
        want = dispatch_reference.dispatch(*inputs, rank, case.experts * world, case.alignment)
        mine = works[rank]
        arguments = [each.to(device) for each in (mine.x, mine.topk_idx, mine.topk_weights)]
        torch.use_deterministic_algorithms(True)  # fills memory that nothing has written with NaN
        try:
            recv_x, weights, desc = layer.dispatch(*arguments)
        finally:
            torch.use_deterministic_algorithms(False)
        used = min(want.recv_x.shape[0], room)
        assert torch.equal(recv_x[:used].cpu(), want.recv_x[:used])
        assert torch.equal(weights[:used].cpu(), want.recv_weights[:used]) and not weights[used:].any()
    return int(desc.overflow)


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_padding_rows_of_an_overflow_have_no_weights(run_ranks, nodes, ranks_per_node):
    """Real rows that do not fit take no padding row's place among those whose weights are zeroed."""
    assert min(run_ranks(_overflow_of_padding, nodes, ranks_per_node)) > 0


def _late_weights(rank, nodes, ranks_per_node, name, calls):
    case = replace(LATE[name], combine_weights=True)
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        device, live = layer.context.device, []
        for call in range(calls):
            mine = workloads(case, nodes * ranks_per_node, call)[rank]
            x, idx, weights = (each.to(device) for each in (mine.x, mine.topk_idx, mine.topk_weights))
            _, came, known = layer.dispatch(x, idx, weights)
            rows, _, desc = layer.dispatch(x, idx)
            live.append((came, rows, known, desc, weights))
            if call % 2:  # two in flight, combined in the other order; one combine without weights in between
                # What is left of these weights in both halves must not be used again, in rows with fewer assignments.
                for _, rows, _, desc, weights in live:
                    for _ in range(2):
                        layer.combine(rows, desc, torch.full_like(weights, torch.nan))
                for came, rows, known, desc, weights in reversed(live):
                    # A row times a sum of weights may overflow fp16.
                    y = (rows / 64).to(case.dtype)
                    layer.combine(y, desc)
                    late = layer.combine(y, desc, weights)
                    assert torch.equal(late, layer.combine(y, known, came))
                    split, hook = layer.combine(y, desc, weights, return_recv_hook=True)
                    hook()
                    assert torch.equal(split, late)
                live.clear()
        return int((desc.skipped_token_topk_mapping_indices >= 0).sum())


LATE = {
    "plain": CASES["plain"],
    "padded": CASES["aligned_fp16"],
    "duplicates": CASES["duplicates_fp32"],
    "nothing": CASES["nothing"],
    "many": replace(MOST, tokens=(35, 3), topk=4, experts=4),  # a program sends the weights of 32 tokens
}


@pytest.mark.parametrize(
    "nodes, ranks_per_node, name",
    [
        (1, 2, "plain"),
        *(pytest.param(1, 2, name, marks=pytest.mark.plain) for name in LATE if name != "plain"),
        pytest.param(1, 1, "plain", marks=pytest.mark.plain),
        *(pytest.param(*given, marks=pytest.mark.on_gpus) for given in ((1, 3, "padded"), (1, 4, "duplicates"))),
    ],
)
def test_weights_may_follow_the_rows(run_ranks, backend, chaos_seed, nodes, ranks_per_node, name):
    """Weights of the tokens multiply the rows that they would have come with: more tokens than programs, ranks without
    tokens, an expert named twice, two dispatches in flight, split combines; the bits are the same."""
    # Two calls use both halves; "plain" uses them again.
    calls = 4 if backend != "host" or (name == "plain" and chaos_seed is None) else 2
    rows = run_ranks(_late_weights, nodes, ranks_per_node, name, calls)
    assert max(rows) > 0 or name == "nothing"


def _missing_weights(rank, nodes, ranks_per_node):
    limit_s = limit_of_calls(SMALL, rank, nodes, ranks_per_node)
    with make_layer(SMALL, rank, nodes, ranks_per_node, timeout_s=limit_s) as layer:
        mine = workloads(SMALL, 2, 0)[rank]
        rows, _, desc = layer.dispatch(mine.x.to(layer.context.device), mine.topk_idx.to(layer.context.device))
        weights = mine.topk_weights.to(layer.context.device)
        with pytest.raises(InputError, match=r"weights must have shape"):
            layer.combine(rows, desc, weights[:-1])
        dist.barrier()

        def combine():
            layer.combine(rows, desc, weights)
            layer.check()

        if rank == 1:
            with pytest.raises(WaitTimeout, match=r"the sums of all ranks .* missing rank 0; ll_combine_flag\["):
                combine()
        dist.barrier()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_weights_that_do_not_come(run_ranks, nodes, ranks_per_node):
    """A wrong shape is refused; a rank that does not send its weights is named."""
    run_ranks(_missing_weights, nodes, ranks_per_node)


def _slabs(rank, nodes, ranks_per_node, kind):
    # A token names an expert of rank 1 twice, so that expert can get more rows than its slab has.
    case = replace(SMALL, name="slabs", tokens=(8, 5), topk=4, experts=4, drop=0.1, hidden=256)
    world, experts, device = nodes * ranks_per_node, case.experts, current_heap().device
    num_rows, works = world * max(case.tokens), workloads(case, world, 0)
    for work in works:
        work.topk_idx[:, :2] = experts + 1
    mine = works[rank]
    idx, weights = mine.topk_idx.to(device), mine.topk_weights.to(device)
    words = torch.arange(mine.x.shape[0] * 2, dtype=torch.int32, device=device).view(-1, 2) + 1000 * rank
    data = torch.arange(mine.x.shape[0], device=device).unsqueeze(1).expand(-1, case.hidden) + 100 * rank
    mx, channels, scaled = kind == "mxfp8", kind == "channels", kind in ("scaled", "channels")
    given = sent = Rows(mine.x.to(device))
    if kind == "scaled":
        given = sent = Rows(data.to(torch.uint8).contiguous(), words)
    if channels:  # the dispatch to slabs quantises rows; one is zero, one has the largest number
        given.data[:1], given.data[1:2, 130] = 0, torch.finfo(torch.bfloat16).max
        sent = Rows(*(part.to(device) for part in channels_reference.quantize_channels(given.data.cpu(), False, False)))
    capacity = world * max(case.tokens) * case.topk
    plain, slabby = (
        make_layer(case, rank, nodes, ranks_per_node, capacity=capacity, payload=kind if mx else None) for _ in range(2)
    )
    with plain, slabby:
        if scaled:
            flat, scales, flat_weights, desc = plain.dispatch_scaled(*sent, idx, weights)
            scales = scales.view(torch.int32)
        else:
            flat, flat_weights, desc = plain.dispatch(given.data, idx, weights)
        if mx:
            flat, scales = flat.qdata, flat.scale.view(torch.uint8)
        dtype = torch.float8_e4m3fn if scaled or mx else case.dtype
        slabs = torch.full((experts, num_rows, case.hidden), 3, device=device).to(dtype)
        kept = None
        if scaled:  # of each row's two words "scaled" keeps only the first
            kept = torch.full((experts, 1 + channels, num_rows), -5, dtype=torch.int32, device=device)
        if mx:
            kept = torch.full((experts, num_rows, case.hidden // 32), 5, dtype=torch.uint8, device=device)
        row_weights, of_slabs, hook = slabby.dispatch_to_slabs(given, idx, weights, Rows(slabs, kept), True)
        hook()
        counts = desc.num_recv_tokens_per_expert
        assert torch.equal(of_slabs.num_recv_tokens_per_expert, counts.clamp(max=num_rows))
        assert of_slabs.expert_offsets.tolist() == [num_rows * i for i in range(experts + 1)]
        assert int(of_slabs.overflow) == int((counts - num_rows).clamp(min=0).sum())
        assert int(of_slabs.overflow) > 0 or rank == 0
        y = torch.zeros_like(flat, dtype=case.dtype)
        raw = (lambda x: x.view(torch.uint8)) if scaled or mx else (lambda x: x)
        for expert, first in enumerate(desc.expert_offsets[:-1].tolist()):
            n = min(int(counts[expert]), num_rows)
            assert torch.equal(raw(slabs[expert, :n]), raw(flat[first : first + n]))
            assert torch.equal(row_weights.view(experts, -1)[expert, :n], flat_weights[first : first + n])
            assert (slabs[expert, n:].float() == 3).all()  # left alone
            if scaled:
                assert torch.equal(kept[expert, :, :n], scales[first : first + n, : 1 + channels].T)
                assert (kept[expert, :, n:] == -5).all()
            if mx:
                assert torch.equal(kept[expert, :n], scales[first : first + n])
                assert (kept[expert, n:] == 5).all()
            y[first : first + n] = expert + 1
        outputs = torch.full((experts, num_rows, case.hidden), torch.nan, dtype=case.dtype, device=device)
        inside = torch.arange(num_rows, device=device) < of_slabs.num_recv_tokens_per_expert.unsqueeze(1)
        outputs[inside] = (inside.nonzero()[:, :1] + 1).to(case.dtype)
        out = slabby.combine(outputs.view(-1, case.hidden), of_slabs, row_weights)
        assert torch.equal(out, plain.combine(y, desc, flat_weights))


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.plain) for kind in ("scaled", "mxfp8", "channels"))]
)
def test_rows_go_to_slabs(run_ranks, nodes, ranks_per_node, kind):
    """Each expert's rows, weights and scales are those of the expert-major dispatch; memory past them is left alone;
    rows that do not fit are counted and add nothing; combine takes outputs in slabs."""
    run_ranks(_slabs, nodes, ranks_per_node, kind)


def _late(rank, nodes, ranks_per_node, where):
    limit_s = limit_of_calls(SMALL, rank, nodes, ranks_per_node)
    layer = make_layer(SMALL, rank, nodes, ranks_per_node, timeout_s=limit_s)
    done = [dispatch_and_check(layer, SMALL, call) for call in range(3)][-1]
    combine_and_check(layer, done)
    if current_heap().device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()

    def call():
        if where == "dispatch":
            mine, device = workloads(SMALL, nodes * ranks_per_node, 0)[rank], current_heap().device
            layer.dispatch(mine.x.to(device), mine.topk_idx.to(device))
        else:
            layer.combine(done.recv_x, done.desc)
        layer.check()

    if rank != 1:
        with pytest.raises(WaitTimeout, match="missing rank 1;") as caught:
            call()
        expected, seen = ("be 4, is 2", "ll_flag") if where == "dispatch" else ("be 2, is 0", "ll_combine_flag")
        assert f"low-latency {where}" in str(caught.value)
        assert expected in str(caught.value) and seen in str(caught.value), str(caught.value)
    dist.barrier()
    layer.context.failure = layer.context.failure or "the other ranks gave up"
    layer.finalize()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("where", ["dispatch", "combine"])
def test_a_late_rank_is_named_within_the_time_limit(run_ranks, nodes, ranks_per_node, where):
    """The error of the expired wait names the rank, and the expected and seen counts of the half in use."""
    run_ranks(_late, nodes, ranks_per_node, where)


def _refused(rank, nodes, ranks_per_node):
    with make_layer(SMALL, rank, nodes, ranks_per_node) as layer:
        mine, device = workloads(SMALL, nodes * ranks_per_node, 0)[rank], current_heap().device
        x, idx = mine.x.to(device), mine.topk_idx.to(device)
        with pytest.raises(InputError, match="full_scatter_indices"):
            layer.dispatch(x, idx, None, torch.zeros_like(idx))
        if rank == 0:
            with pytest.raises(InputError, match=r"must have shape \[any, 32\]"):
                layer.dispatch(x[:, :31].contiguous(), idx)
        else:  # as in every static layer, the others receive no rows of that rank
            _, _, desc = layer.dispatch(x, idx)
            assert desc.num_input_tokens_per_rank.tolist() == [0, x.shape[0]]
        with pytest.raises(ConfigError, match="no gradient"):
            autograd.dispatch(layer, x, idx)
        with pytest.raises(ConfigError, match="dispatch_ahead is not for low-latency layers"):
            layer.dispatch_ahead(x, idx, None, None)
        done = dispatch_and_check(layer, SMALL, 1)
        with pytest.raises(StaleHandleError), make_layer(SMALL, rank, nodes, ranks_per_node) as other:
            other.combine(done.recv_x, done.desc)
        combine_and_check(layer, done)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_what_is_refused(run_ranks, nodes, ranks_per_node):
    """Scatter indices, gradients, bad shapes, descriptors of other layers; the next call works."""
    run_ranks(_refused, nodes, ranks_per_node)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"recv_capacity": None}, r"capacity=None.*At most 96 rows"),
        ({"local_world_size": 1}, "local_world_size is 1 and world_size 2"),
        ({"max_tokens": 1025}, "max_tokens up to 1024, got 1025"),
        ({"max_tokens": 1024, "topk": 32, "num_experts": 32}, r"up to 32767, got 1024 \* 32"),
        ({"num_experts": 4096}, "num_experts up to 2048, got 4096"),
        ({"num_experts": 64, "world_size": 64, "local_world_size": 64}, "world_size up to 32, got 64"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, text):
    """The message has the given and the allowed number."""
    sizes = {"max_tokens": 16, "hidden": 32, "topk": 3, "num_experts": 8, "rank": 0, "world_size": 2}
    fits = {**sizes, "local_world_size": 2, "recv_capacity": 96, "low_latency": True}
    assert EPConfig(**fits).low_latency
    with pytest.raises(ConfigError, match=text):
        EPConfig(**{**fits, **changes})
