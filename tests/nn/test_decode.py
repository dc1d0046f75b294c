"""Decoding: low latency in CUDA graphs, two micro-batches in flight, and weights that are not read.

On the CPU a replay is the call itself.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError
from triton_ep.nn import MoE, finalize_exchanges, new_exchange
from triton_ep.ops.experts import gate_up, rows_product
from triton_ep.ops.row_scales import RowScaled, quantize_to_rows

pytestmark = pytest.mark.plain
HIDDEN, FFN = 128, 160
SIZES: dict[str, Any] = {"num_experts": 8, "topk": 2, "low_latency": True, "timeout_s": 60.0}


def _captured(call: Callable[[], list[torch.Tensor]], device: torch.device) -> tuple[Callable[[], Any], Any]:
    """A function that replays the call, and its output tensors; on the CPU the call itself, which returns them."""
    if device.type == "cpu":
        return call, None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        written = call()
    return graph.replay, written


def _decode(rank: int, nodes: int, ranks_per_node: int, payload: str | None) -> None:
    device = current_heap().device
    most = 512 if device.type == "cuda" else 8
    torch.manual_seed(7)
    first = MoE(HIDDEN, FFN, **SIZES, max_tokens=most, payload=payload)
    exchange = new_exchange(HIDDEN, **SIZES, max_tokens=most, payload=payload)
    second = first.over(exchange)
    assert second.experts is first.experts and second.exchange is exchange is not first.exchange
    assert [name for name, _ in second.named_parameters()] == [name for name, _ in first.named_parameters()]
    side = torch.cuda.Stream() if device.type == "cuda" else None

    for tokens in (1, most // 2 + rank, most) if side is not None else (most - rank,):
        xs = [torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2)]

        def step(xs: list[torch.Tensor] = xs) -> list[torch.Tensor]:
            """Run both micro-batches; on a GPU the second on a side stream."""
            if side is None:
                return [first(xs[0]), second(xs[1])]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = second(xs[1])
            found = [first(xs[0]), y]
            torch.cuda.current_stream().wait_stream(side)
            return found

        with torch.no_grad():
            wanted = []
            for seed in range(2):  # one after the other
                draw = torch.Generator().manual_seed(10 * seed + rank)
                for x in xs:
                    x.copy_(torch.randn(x.shape, generator=draw))
                wanted.append([x.clone() for x in xs] + [first(xs[0]).clone(), first(xs[1]).clone()])
            if side is not None:
                step()
                first.forget_captures()
                second.forget_captures()
            replay, written = _captured(step, device)
            for *given, one, other in reversed(wanted):
                for x, value in zip(xs, given, strict=True):
                    x.copy_(value)
                seen = replay() or written
                assert torch.equal(seen[0], one) and torch.equal(seen[1], other)
            assert not torch.equal(wanted[0][2], wanted[1][2])
    first.check()
    second.check()
    exchange.finalize()
    with pytest.raises(ConfigError, match="1024"):
        MoE(HIDDEN, FFN, **SIZES, max_tokens=1025, payload=payload)
    finalize_exchanges()


@pytest.mark.parametrize("payload", [pytest.param(None, marks=pytest.mark.on_gpus), "mxfp8"])
def test_two_micro_batches_in_flight(run_ranks, payload):
    """Few tokens and max_tokens, in one graph over two exchanges: bit-identical to sequential calls."""
    run_ranks(_decode, 1, 2, payload)


# --- weights that are not read --------------------------------------------------------------------------------


def _guarded(values: torch.Tensor, open_experts: list[int]) -> torch.Tensor:
    """Copy [E, ...] to pages and protect the pages of all other experts: reading them ends the process."""
    num_bytes = values[0].numel() * values.element_size()
    assert num_bytes % mmap.PAGESIZE == 0
    memory = mmap.mmap(-1, values.shape[0] * num_bytes)
    copy = torch.frombuffer(memory, dtype=torch.uint8).view(values.dtype).view(values.shape)
    copy.copy_(values)
    libc = ctypes.CDLL(None, use_errno=True)
    for expert in set(range(values.shape[0])) - set(open_experts):
        address = ctypes.c_void_p(copy.data_ptr() + expert * num_bytes)
        assert libc.mprotect(address, ctypes.c_size_t(num_bytes), 0) == 0, ctypes.get_errno()
    return copy


def _reads(rank: int, nodes: int, ranks_per_node: int) -> None:
    """Experts 1 and 4 of 6 have rows."""
    g = torch.Generator().manual_seed(1)
    hidden, ffn, active = 128, 64, [1, 4]
    w13, w2 = torch.randn(6, 2 * ffn, hidden, generator=g), torch.randn(6, hidden, ffn, generator=g)
    x = torch.randn(256, hidden, generator=g).bfloat16()
    offs = torch.tensor([0, 0, 3, 3, 3, 8, 8], dtype=torch.int32)
    for fp8 in (False, True):
        weights: list[Any] = [w13.bfloat16(), w2.bfloat16()]
        rows: Any = x
        if fp8:
            rows = quantize_to_rows(x, offs)
            weights = [RowScaled(w.to(torch.float8_e4m3fn), torch.ones(w.shape[:2])) for w in (w13, w2)]
        found = []
        for guard in (False, True):
            if guard:
                weights = [
                    RowScaled(_guarded(w.qdata, active), w.scale) if fp8 else _guarded(w, active) for w in weights
                ]
            act, _ = gate_up(rows, weights[0], offs, act="mx" if fp8 else "bf16")
            found.append(rows_product(act, weights[1], offs)[:8])
        assert torch.equal(*found) and found[0].isfinite().all()


def test_weights_of_experts_without_rows_are_not_read(run_ranks, backend):
    """The products run although the pages of these experts are protected."""
    if backend != "host":
        pytest.skip("memory of GPUs has no such pages; the decoding rows show the bytes")
    run_ranks(_reads, 1, 1)
