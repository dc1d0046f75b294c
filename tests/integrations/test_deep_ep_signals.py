"""low_latency_combine concurrently with the kernel that writes its rows: it sends the rows that are signalled."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.test_deep_ep import EXPERTS, HIDDEN, equal, works_of
from triton_ep.distributed import current_heap
from triton_ep.errors import InputError, PeerFailed, WaitTimeout
from triton_ep.integrations import deep_ep as door

MOST, BLOCK_M, THRESHOLD = 12, 4, 3
LATE_S = 0.3


def _in_the_background(write: Callable[[], None]) -> Callable[[], None]:
    """Run `write` later, on another stream or in a thread; returns a function that joins it."""
    if current_heap().device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            write()
        return stream.synchronize

    def later() -> None:
        time.sleep(LATE_S)
        write()

    thread = threading.Thread(target=later)
    thread.start()
    return thread.join


def _dispatched(rank: int, ranks: int, buffer: door.Buffer) -> tuple[Any, ...]:
    """Dispatch; returns ids, weights, handle, outputs [e, W * M, H] for its rows, counts [e]."""
    device, work = current_heap().device, works_of(ranks, 0)[rank]
    ids, weights = work.topk_idx.to(device), work.topk_weights.to(device)
    slabs, counts, handle, _, _ = buffer.low_latency_dispatch(
        work.x.to(device), ids, MOST, EXPERTS * ranks, use_fp8=False
    )
    experts = torch.arange(1, EXPERTS + 1, device=device).view(-1, 1, 1)
    inside = torch.arange(slabs.shape[1], device=device) < counts.unsqueeze(1)
    return ids, weights, handle, torch.where(inside.unsqueeze(2), slabs * experts, torch.nan), counts


def _buffer(ranks: int, **options: Any) -> door.Buffer:
    size = door.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, ranks, EXPERTS * ranks)
    return door.Buffer(dist.group.WORLD, 0, size, low_latency_mode=True, **options)


def _signals(kind: str, counts: torch.Tensor, slab_rows: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Cleared signals, raised signals, and the arguments to pass with them."""
    if kind == "src_signals":
        raised = torch.full((EXPERTS,), 2, dtype=torch.int32, device=counts.device)
        cleared = torch.zeros_like(raised)
        return cleared, raised, {"src_signals": cleared.view(torch.uint32), "src_signal_expect_value": 2}
    blocks = -(-slab_rows // BLOCK_M)
    used = torch.arange(blocks, device=counts.device) * BLOCK_M < counts.unsqueeze(1)
    raised = used.int().flatten() * THRESHOLD  # signals of blocks without rows are never raised
    cleared = torch.zeros(raised.shape[0] + 5, dtype=torch.int32, device=counts.device)
    given = {"comp_signal": cleared, "block_m": BLOCK_M, "threshold": THRESHOLD, "packed_recv_count": counts}
    return cleared, raised, {**given, "num_sms": 3}


def _check_overlap(rank: int, nodes: int, ranks_per_node: int, kind: str) -> None:
    ranks = nodes * ranks_per_node
    buffer = _buffer(ranks)
    for late, how in ((True, {}), (True, {"return_recv_hook": True}), (False, {"async_finish": True})):
        ids, weights, handle, outputs, counts = _dispatched(rank, ranks, buffer)
        expected, _, _ = buffer.low_latency_combine(outputs, ids, weights, handle)
        x = torch.full_like(outputs, torch.nan)
        values, raised, given = _signals(kind, counts, x.shape[1])

        def write(x=x, outputs=outputs, values=values, raised=raised) -> None:
            x.copy_(outputs)
            values[: raised.shape[0]].copy_(raised)

        join = _in_the_background(write) if late else write
        if not late:
            write()
        out, event, hook = buffer.low_latency_combine(x, ids, weights, handle, overlap=True, **given, **how)
        hook()
        event.current_stream_wait()
        equal(out, expected.cpu())
        join()
    values, _, given = _signals(kind, counts, x.shape[1])
    name = next(iter(given))
    for wrong, message in (
        ({}, "pass src_signals or comp_signal"),
        ({"src_signals": values, "comp_signal": values}, "pass src_signals or comp_signal"),
        ({**given, name: given[name][:2]}, rf"{name} must be contiguous with at least \d+ signals, got \[2\]"),
        ({**given, name: given[name].float()}, f"{name} .*float32"),
        ({**given, "block_m": 0, "src_signal_expect_value": -1}, "must be an integer of at least"),
    ):
        with pytest.raises(InputError, match=message):
            buffer.low_latency_combine(x, ids, weights, handle, overlap=True, **wrong)
    buffer.destroy()


@pytest.mark.plain
@pytest.mark.parametrize("kind", ["src_signals", "comp_signal"])
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_combine_sends_what_was_signalled(run_ranks, nodes, ranks_per_node, kind):
    """Combine sends rows that a kernel on another stream writes after the call, as a later combine would."""
    run_ranks(_check_overlap, nodes, ranks_per_node, kind)


def _check_never(rank: int, nodes: int, ranks_per_node: int) -> None:
    ranks = nodes * ranks_per_node
    buffer = _buffer(ranks, timeout_s=3.0)
    ids, weights, handle, outputs, _ = _dispatched(rank, ranks, buffer)
    signals = torch.full((EXPERTS,), int(rank != 0), dtype=torch.int32, device=outputs.device)
    given = {"overlap": True, "src_signals": signals, "src_signal_expect_value": 1}
    message = r"the kernel that writes expert outputs.*signals\[0\] should be 1, is 0" if rank == 0 else "rank"

    def combine() -> None:
        buffer.low_latency_combine(outputs, ids, weights, handle, **given)
        handle.layer.check()  # for calls in which the host does not wait

    with pytest.raises((WaitTimeout, PeerFailed), match=message):
        combine()
    buffer.destroy()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_signals_that_never_come_are_named(run_ranks, nodes, ranks_per_node):
    """The wait is bounded; the error says which signal is missing, and the other ranks do not hang."""
    run_ranks(_check_never, nodes, ranks_per_node)
