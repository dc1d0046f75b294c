"""Wrong arguments: a clear error on every rank that can know of it, no hang, and the layer still works afterwards."""

import contextlib
import os
import signal
import time
from concurrent import futures
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from tests.combinations import combinations
from tests.layer.cases import Case, combine_and_check, dispatch_and_check, limit_of_calls, make_layer, workloads
from tests.patience import LIMIT_S
from triton_ep import EPAll2AllLayer, MXTensor, autograd
from triton_ep.distributed import current_heap
from triton_ep.errors import (
    AotMiss,
    ConfigError,
    EPError,
    FinalizedError,
    HeapError,
    InputError,
    PeerFailed,
    StaleHandleError,
    WaitTimeout,
)
from triton_ep.testing import RankError

CASE = Case("errors", tokens=(6,), hidden=32, topk=2, experts=2)
TOPOLOGIES = [(1, 4), (2, 2)]


def _inputs(rank, tokens=6):
    device = current_heap().device
    x = torch.full((tokens, CASE.hidden), float(rank + 1), dtype=CASE.dtype, device=device)
    idx = torch.arange(tokens * 2, device=device).view(tokens, 2).to(torch.int32)
    idx %= CASE.experts * dist.get_world_size()
    return x, idx, torch.rand(tokens, 2, device=device)


def _caught(call, *kinds):
    """Name and text of the error that a call raises; fails if it raises none of these kinds."""
    try:
        call()
    except kinds as error:
        assert isinstance(error, EPError)
        return type(error).__name__, str(error)
    raise AssertionError(f"none of {[kind.__name__ for kind in kinds]} was raised")


BAD_INPUTS = {
    "too_many_tokens": (lambda x, i, w: (x.repeat(2, 1), i.repeat(2, 1), w.repeat(2, 1)), "max_tokens"),
    "dtype": (lambda x, i, w: (x.float(), i, w), "torch.bfloat16"),
    "hidden": (lambda x, i, w: (x[:, :31].contiguous(), i, w), "[any, 32]"),
    "not_contiguous": (lambda x, i, w: (x.t().contiguous().t(), i, w), "contiguous"),
    "index_dtype": (lambda x, i, w: (x, i.float(), w), "torch.int32"),
    "index_shape": (lambda x, i, w: (x, i[:5], w), "[6, 2]"),
    "weight_dtype": (lambda x, i, w: (x, i, w.double()), "torch.float32"),
    "weight_shape": (lambda x, i, w: (x, i, w[:, :1].contiguous()), "[6, 2]"),
    "not_a_tensor": (lambda x, i, w: (x.tolist(), i, w), "tensor"),
    "device": (lambda x, i, w: (x.to("meta"), i, w), "meta"),
}


def _bad_inputs(rank, nodes, ranks_per_node, names):
    caught = []
    with make_layer(CASE, rank, nodes, ranks_per_node) as layer:
        for call, name in enumerate(names):
            args = _inputs(rank)
            if rank == 1:
                args = BAD_INPUTS[name][0](*args)
            caught.append(_caught(lambda args=args: layer.dispatch(*args), InputError, PeerFailed))
            if call % 3 == 0:  # the others are followed by a mistake, which is reported as well
                combine_and_check(layer, dispatch_and_check(layer, CASE, call))
    return caught


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_a_rejected_input_raises_on_every_rank(run_ranks, nodes, ranks_per_node):
    """InputError on the rank with the mistake, PeerFailed naming that rank on the others; the next call works."""
    _raise_on_every_rank(run_ranks, nodes, ranks_per_node, list(BAD_INPUTS))


@pytest.mark.parametrize("nodes, ranks_per_node", TOPOLOGIES[1:])
def test_the_news_of_a_rejected_input_comes_in_any_order(run_ranks, chaos_seed, nodes, ranks_per_node):
    """The same on two nodes and in chaos mode. Ranks report all mistakes in the same way, so one case is enough."""
    _raise_on_every_rank(run_ranks, nodes, ranks_per_node, ["hidden"])


def _raise_on_every_rank(run_ranks, nodes, ranks_per_node, names):
    for rank, caught in enumerate(run_ranks(_bad_inputs, nodes, ranks_per_node, names)):
        for name, (kind, text) in zip(names, caught, strict=True):
            if rank == 1:
                assert kind == "InputError" and BAD_INPUTS[name][1] in text, (name, kind, text)
            else:
                assert kind == "PeerFailed" and "rank 1" in text, (name, kind, text)


@contextlib.contextmanager
def _another_gpu(ctx):
    """Make another GPU current than that of a layer. On the CPU a stand-in says which is."""
    if ctx.device.type == "cuda":
        with torch.cuda.device((ctx.device.index + 1) % torch.cuda.device_count()):
            yield
        return
    current = mock.Mock(return_value=0)
    with mock.patch.object(ctx, "_gpu", 1), mock.patch.object(torch._C, "_cuda_getDevice", current, create=True):
        yield


def _on_another_gpu(rank, nodes, ranks_per_node):
    with make_layer(CASE, rank, nodes, ranks_per_node) as layer:
        ctx, inputs = layer.context, _inputs(rank)
        recv_x, _, desc, hook = layer.dispatch(*inputs, return_recv_hook=True)
        with _another_gpu(ctx):
            here, there = (1, 0) if ctx.device.index is None else (ctx.device.index, torch.cuda.current_device())
            text = rf"layer is on cuda:{here}, but .*cuda:{there}.* torch\.cuda\.set_device\({here}\)"
            with pytest.raises(InputError, match=text):
                hook()
        hook()
        with _another_gpu(ctx):
            for call in (
                lambda: layer.dispatch(*inputs),
                lambda: layer.dispatch_compact(*inputs),
                lambda: layer.combine(recv_x, desc),
                lambda: layer.combine_buffer(4),
                layer.check,
                layer.ep_barrier_all,
            ):
                with pytest.raises(InputError, match=text):
                    call()
        if rank:
            _in_a_thread(ctx, lambda: layer.combine(recv_x, desc))
        layer.combine(recv_x, desc)
        combine_and_check(layer, dispatch_and_check(layer, CASE, 0))


def _in_a_thread(ctx, call):
    """New threads begin with the first GPU, so a layer of another one refuses there."""
    if ctx.device.type == "cuda":
        with futures.ThreadPoolExecutor(1) as threads, pytest.raises(InputError, match="new threads begin with cuda:0"):
            threads.submit(call).result()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_another_current_gpu_is_named(run_ranks, nodes, ranks_per_node):
    """Kernels run on the current GPU. Nothing is sent from another one, and the layer works afterwards."""
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU is always current")
    run_ranks(_on_another_gpu, nodes, ranks_per_node)


def _exotic(x):
    """Tensors that look like rows but cannot be sent as they are."""
    with FakeTensorMode():
        fake = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    yield "sparse_csr", x.to_sparse_csr()
    yield "sparse_coo", x.to_sparse()
    yield "nested", torch.nested.nested_tensor([x[:2], x[2:]])
    yield "negated", torch._neg_view(x)
    yield "no memory", torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)
    yield "no memory", fake
    if x.device.type == "cpu":
        yield "mkldnn", x.to_mkldnn()


def _exotic_inputs(rank, nodes, ranks_per_node, cfg):
    case = replace(CASE, dtype=torch.float32, **cfg)
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        x, idx, weights = _inputs(rank)
        x, idx = x.float(), idx % layer.config.num_experts
        calls = [lambda x: layer.dispatch(x, idx, weights), lambda x: autograd.dispatch(layer, x, idx, weights)]
        for number, (name, bad) in enumerate(_exotic(x)):
            call = calls[number % 2 if name.startswith("sparse") else 0]
            if rank == 0:
                with pytest.raises(InputError, match=f"input .*{name}"):
                    call(bad)
            else:
                if layer.config.recv_capacity is None:
                    with pytest.raises(PeerFailed, match="rank 0 rejected"):
                        call(x)
                else:
                    call(x)
                    with pytest.raises(PeerFailed, match="rank 0 rejected"):
                        layer.check()
            _, _, desc = layer.dispatch(x, idx, weights)
            with pytest.raises(InputError, match="input"):
                layer.combine(bad, desc)
        if rank == 0:
            with pytest.raises(InputError, match=r"exp_indices .*sparse"):
                layer.dispatch(x, idx.to_sparse(), weights)
        elif layer.config.recv_capacity is None:
            with pytest.raises(PeerFailed, match="rank 0 rejected"):
                layer.dispatch(x, idx, weights)
        else:
            layer.dispatch(x, idx, weights)
        combine_and_check(layer, dispatch_and_check(layer, case, 1))


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore")  # torch warns about such tensors
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("cfg", [{}, {"static": True}], ids=["exact", "static"])
def test_tensors_that_cannot_be_sent_are_refused_on_every_rank(run_ranks, nodes, ranks_per_node, cfg):
    """The rank with the mistake names the kind of tensor, the others raise too, and the layer stays usable."""
    run_ranks(_exotic_inputs, nodes, ranks_per_node, cfg)


BAD_IDS = {
    -2: "-2",
    9: "9",
    2**31 - 1: "2147483647 or more",
    2**40: "2147483647 or more",
    -(2**31): "-2147483647 or less",
}


def _bad_ids(rank, nodes, ranks_per_node, values):
    caught = []
    with make_layer(CASE, rank, nodes, ranks_per_node) as layer:
        for call, value in enumerate(values):
            x, idx, weights = _inputs(rank)
            idx = idx.long() if value == 2**40 else idx
            if rank == 1:
                idx[3, 1] = value
            caught.append(_caught(lambda given=(x, idx, weights): layer.dispatch(*given), InputError))
            if call % 4 == 0:  # the others are followed by a mistake, which is reported as well
                combine_and_check(layer, dispatch_and_check(layer, CASE, call))
    return caught


@pytest.mark.parametrize(
    "nodes, ranks_per_node, values",
    [
        pytest.param(1, 2, list(BAD_IDS), marks=pytest.mark.plain, id="1-2"),
        pytest.param(2, 2, [-2], marks=pytest.mark.plain, id="2-2"),
    ],
)
def test_an_illegal_expert_id_names_the_token_on_every_rank(run_ranks, nodes, ranks_per_node, values):
    """Ids are checked on the device, before any row is sent."""
    for caught in run_ranks(_bad_ids, nodes, ranks_per_node, values):
        for value, (_, text) in zip(values, caught, strict=True):
            assert "exp_indices[3, 1] of rank 1" in text
            assert f" 0 to {CASE.experts * nodes * ranks_per_node - 1}" in text
            assert f" is {BAD_IDS[value]}: expert ids" in text


def _bad_id_of_a_static_layer(rank, nodes, ranks_per_node):
    with make_layer(replace(CASE, static=True), rank, nodes, ranks_per_node) as layer:
        x, idx, weights = _inputs(rank)
        if rank == 2:
            idx[3, 1] = 9
        _, _, desc = layer.dispatch(x, idx, weights)
        caught = _caught(layer.check, InputError)
        layer.check()  # reported only once
        if rank == 2:
            assert int(desc.topk_indices_tensor[3, 1]) == -1
        layer.dispatch(*_inputs(rank))
        layer.check()
    return caught


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", TOPOLOGIES[:1])
def test_a_static_layer_reports_an_illegal_id_when_asked(run_ranks, nodes, ranks_per_node):
    """The call itself does not wait for the check: it drops the entry."""
    for _, text in run_ranks(_bad_id_of_a_static_layer, nodes, ranks_per_node):
        assert "exp_indices[3, 1] of rank 2" in text and "0 to 7" in text


def _bad_scatter(rank, nodes, ranks_per_node):
    caught = []
    with make_layer(CASE, rank, nodes, ranks_per_node) as layer:
        for call, same in enumerate((False, True)):
            x, idx, weights = _inputs(rank)
            scatter = torch.argsort(torch.argsort(idx.flatten(), stable=True), stable=True).view(idx.shape).int()
            if rank == 0:
                scatter[0, 0] = scatter[4, 0] if same else 77
            given = x, idx, weights, scatter
            caught.append(_caught(lambda given=given: layer.dispatch(*given), InputError))
            combine_and_check(layer, dispatch_and_check(layer, CASE, call))
    return caught


@pytest.mark.plain  # every rank hears of them like of illegal ids
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(2, 2, marks=pytest.mark.on_gpus)])
def test_wrong_scatter_indices_raise_on_every_rank(run_ranks, nodes, ranks_per_node):
    """A position out of range, or used twice, is detected before anything is sent."""
    for caught in run_ranks(_bad_scatter, nodes, ranks_per_node):
        for _, text in caught:
            assert "full_scatter_indices of rank 0" in text


def _bad_mx(rank, nodes, ranks_per_node):
    x, idx, _ = _inputs(rank)
    with (
        make_layer(CASE, rank, nodes, ranks_per_node) as plain,
        make_layer(CASE, rank, nodes, ranks_per_node, payload="mxfp8") as layer,
    ):
        texts = [_caught(lambda: plain.dispatch(MXTensor.to_mx(x), idx), InputError)[1]]
        e5m2 = MXTensor.to_mx(x, elem_dtype=torch.float8_e5m2)
        texts.append(_caught(lambda: layer.dispatch(e5m2, idx), InputError)[1])
        recv_x, _, desc = layer.dispatch(MXTensor.to_mx(x), idx)
        texts.append(_caught(lambda: layer.combine(recv_x, desc), InputError)[1])
        layer.combine(recv_x.dequantize(), desc)
    return texts


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(2, 2, marks=pytest.mark.on_gpus)])
def test_quantised_input_must_fit_the_layer(run_ranks, nodes, ranks_per_node):
    """Every rank refuses an MXTensor on a layer without MXFP8, with other elements, or in combine."""
    for plain, elements, combined in run_ranks(_bad_mx, nodes, ranks_per_node):
        assert 'payload="mxfp8"' in plain and "e4m3" in elements and "dequantize" in combined


def _weights_on_some(rank, nodes, ranks_per_node):
    with make_layer(CASE, rank, nodes, ranks_per_node) as layer:
        x, idx, weights = _inputs(rank)
        caught = _caught(lambda: layer.dispatch(x, idx, weights if rank != 3 else None), InputError)
        combine_and_check(layer, dispatch_and_check(layer, CASE, 1))
    return caught


@pytest.mark.plain  # reported like a rejected input
@pytest.mark.parametrize("nodes, ranks_per_node", [pytest.param(1, 4, marks=pytest.mark.on_gpus), (2, 2)])
def test_weights_on_some_ranks_only_raise_everywhere(run_ranks, nodes, ranks_per_node):
    """Weights must come from all ranks or from none."""
    assert all("without: [3]" in text for _, text in run_ranks(_weights_on_some, nodes, ranks_per_node))


def _combine_mistakes(rank, nodes, ranks_per_node):
    with (
        make_layer(CASE, rank, nodes, ranks_per_node) as layer,
        make_layer(CASE, rank, nodes, ranks_per_node) as other,
    ):
        done = dispatch_and_check(layer, CASE, 0)
        theirs = dispatch_and_check(other, CASE, 0)
        y = done.recv_x
        texts = [
            _caught(lambda: layer.combine(y[1:], done.desc), InputError),
            _caught(lambda: layer.combine(y.float(), done.desc), InputError),
            _caught(lambda: layer.combine(y.t().contiguous().t(), done.desc), InputError),
            _caught(lambda: layer.combine(y, "desc"), InputError),
            _caught(lambda: layer.combine(y, done.desc, torch.ones(3)), InputError),
            _caught(lambda: layer.combine(theirs.recv_x, theirs.desc), StaleHandleError),
        ]
        combine_and_check(layer, done)
        combine_and_check(other, theirs)
    texts.append(_caught(lambda: layer.combine(y, done.desc), FinalizedError))
    texts.append(_caught(lambda: layer.dispatch(*_inputs(rank)), FinalizedError))
    layer.finalize()
    with make_layer(CASE, rank, nodes, ranks_per_node) as again:
        texts.append(_caught(lambda: again.combine(y, done.desc), StaleHandleError))
    return len(texts)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_combine_refuses_what_does_not_fit(run_ranks, nodes, ranks_per_node):
    """Shapes, dtypes, foreign and stale descriptors, finalized layers; finalize is idempotent."""
    assert run_ranks(_combine_mistakes, nodes, ranks_per_node) == [9] * (nodes * ranks_per_node)


BAD_CONFIGS = {
    "experts": ({"num_tot_experts": 7}, ConfigError, "8"),
    "max_tokens": ({"max_tokens": 0}, ConfigError, "max_tokens"),
    "negative_hidden": ({"hidden": -4}, ConfigError, "hidden"),
    "topk": ({"topk": 9}, ConfigError, "num_experts 8"),
    "local_world_size": ({"local_world_size": 3}, ConfigError, "3"),
    "rank": ({"rank": 1}, ConfigError, "rank"),
    "world_size": ({"world_size": 8, "local_world_size": 8}, ConfigError, "8"),
    "dtype": ({"dtype": torch.int8}, ConfigError, "int8"),
    "weight_dtype": ({"weight_dtype": torch.float64}, ConfigError, "float64"),
    "alignment": ({"alignment": 0}, ConfigError, "alignment"),
    "capacity": ({"capacity": -5}, ConfigError, "-5"),
    "timeout": ({"timeout_s": 0}, ConfigError, "timeout_s"),
    "payload": ({"payload": "fp3"}, ConfigError, "fp3"),
    "mxfp8_hidden": ({"payload": "mxfp8", "hidden": 48}, ConfigError, "multiple of 32"),
    "shared_staging": ({"shared_staging": True}, ConfigError, "enable_local_combine=True"),
    "copy_engines": ({"copy_engines": True, "low_latency": True, "capacity": 64}, ConfigError, "low_latency=False"),
    "aot": ({"use_aot": True, "aot_dir": "/nowhere"}, AotMiss, "TRITON_EP_AOT"),
}


def _bad_config(rank, nodes, ranks_per_node, name):
    changes, kind, words = BAD_CONFIGS[name]
    arguments = {
        "max_tokens": 4,
        "hidden": 16,
        "topk": 2,
        "rank": rank,
        "num_tot_experts": 8,
        "local_world_size": ranks_per_node,
        "world_size": nodes * ranks_per_node,
    }
    if name == "rank":
        changes = {"rank": (rank + 1) % 4}
    _, text = _caught(lambda: EPAll2AllLayer(dist.group.WORLD, **{**arguments, **changes}), kind)
    assert words in text, text


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4)])
@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_configuration_that_cannot_work_is_refused(run_ranks, nodes, ranks_per_node, name):
    """The constructor raises before anything is allocated."""
    run_ranks(_bad_config, nodes, ranks_per_node, name)


def _no_room(rank, nodes, ranks_per_node):
    heap = current_heap()
    text = _caught(lambda: make_layer(CASE, rank, nodes, ranks_per_node, max_tokens=2**26), HeapError)[1]
    with make_layer(CASE, rank, nodes, ranks_per_node, max_tokens=64) as layer:
        rest = heap.alloc((heap.available() - 4096,), torch.uint8)  # leaves no room for growth
        crowd = replace(CASE, tokens=(64,), routing="one_expert", drop=0.0)
        works = workloads(crowd, nodes * ranks_per_node, 0)
        grown = _caught(lambda: layer.dispatch(works[rank].x, works[rank].topk_idx), HeapError)[1]
        combine_and_check(layer, dispatch_and_check(layer, CASE, 1))
        heap.free(rest)
        combine_and_check(layer, dispatch_and_check(layer, crowd, 2))
    return text, grown


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4)])
def test_lack_of_symmetric_memory_is_told_before_anything_is_allocated(run_ranks, backend, nodes, ranks_per_node):
    """HeapError on every rank names the layer's bytes and the setting; a layer that cannot grow stays usable."""
    if backend != "host":
        pytest.skip("a GPU heap uses the memory of the GPU: filling it would disturb other processes")
    for text, grown in run_ranks(_no_room, nodes, ranks_per_node):
        assert "no room for" in text and "TRITON_EP_HEAP_SIZE=" in text
        assert "no room for" in grown


def _late_on_cpu(nodes: int, ranks_per_node: int, where: str) -> bool:
    """Several nodes only for combine, in which a rank waits for some of the others."""
    return nodes * ranks_per_node == 2 and (nodes == 1 or where == "combine")


def _killed_on_cpu(nodes: int, ranks_per_node: int, where: str) -> bool:
    """Combine on two nodes, where some ranks need nothing from the dead one."""
    return (where == "combine") == (nodes == 2)


def _late(rank, nodes, ranks_per_node, where):
    limit_s = limit_of_calls(CASE, rank, nodes, ranks_per_node)
    layer = make_layer(CASE, rank, nodes, ranks_per_node, timeout_s=limit_s)
    device = current_heap().device
    done = dispatch_and_check(layer, CASE, 0)
    combine_and_check(layer, done)
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    start = time.monotonic()
    if rank == 1:
        result = None  # it comes to the barrier after the waits of the others have expired
    elif where == "dispatch":
        result = _caught(lambda: layer.dispatch(*_inputs(rank)), WaitTimeout)
    else:

        def combine():
            layer.combine(done.recv_x, done.desc)
            layer.check()

        result = _caught(combine, WaitTimeout)
    took = time.monotonic() - start
    reported = layer.context.reported().item(), layer.context.missing_ranks()
    if result is not None:
        again = _caught(lambda: layer.dispatch(*_inputs(rank)), WaitTimeout)
        assert "out of step" in again[1]
    dist.barrier()
    layer.context.failure = layer.context.failure or "the other ranks gave up"
    layer.finalize()
    return result, reported, took, limit_s


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, where",
    combinations([(1, 2), (2, 1), (2, 2)], ["dispatch", "combine"], on_cpu=_late_on_cpu),
)
def test_a_late_rank_is_named_within_the_time_limit(run_ranks, nodes, ranks_per_node, where):
    """Every waiting rank raises WaitTimeout; in combine, only ranks that wait for the late rank's rows name it."""
    results = run_ranks(_late, nodes, ranks_per_node, where)
    for rank, (caught, reported, took, limit_s) in enumerate(results):
        if rank == 1:
            assert reported == (False, set())
            continue
        assert reported[0] and reported[1], "the same without raising"
        assert caught[0] == "WaitTimeout" and "missing rank" in caught[1]
        if where == "dispatch" or rank // ranks_per_node == 1 // ranks_per_node:
            assert "missing rank 1;" in caught[1] and reported[1] == {1}, caught[1]
        assert limit_s <= took < LIMIT_S / 2, "the layer's time limit applies, not the process group's"


def _killed(rank, nodes, ranks_per_node, where):
    # The host heap detects that a process is gone; on a GPU the wait expires.
    limit = {"timeout_s": 8.0} if current_heap().device.type == "cuda" else {}
    layer = make_layer(CASE, rank, nodes, ranks_per_node, **limit)
    combine_and_check(layer, dispatch_and_check(layer, CASE, 0))
    done = dispatch_and_check(layer, CASE, 1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def call():
        if where == "combine":
            layer.combine(done.recv_x, done.desc)
            layer.check()  # a rank that needs nothing from the dead rank notices in the next call
        layer.dispatch(*_inputs(rank))
        layer.check()

    return _caught(call, PeerFailed, WaitTimeout)


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, where", combinations([(1, 2), (2, 2)], ["dispatch", "combine"], on_cpu=_killed_on_cpu)
)
def test_a_killed_rank_is_named(run_ranks, nodes, ranks_per_node, where):
    """No rank waits forever for a dead process."""
    results = run_ranks(_killed, nodes, ranks_per_node, where, return_exceptions=True, grace_s=LIMIT_S)
    assert isinstance(results[1], RankError)
    for rank, result in enumerate(results):
        if rank != 1:
            assert not isinstance(result, BaseException), result
            kind, text = result
            assert kind in ("PeerFailed", "WaitTimeout") and "rank 1" in text, text
