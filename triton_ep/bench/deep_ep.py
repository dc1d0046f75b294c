"""DeepEP's own calls as a provider: its normal kernels, and its low-latency kernels for few tokens.

DeepEP does less than the layer, and the mode of a row says so: rows stay in the order of source ranks or in slabs, and
FP8 rows have one scale per 128 values. Chunk sizes of the normal kernels are tuned for each case before it is timed, as
in DeepEP's own tests.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist

from triton_ep.bench import timing
from triton_ep.bench.by_source import BLOCK, BySource, Checked, Scaled
from triton_ep.bench.job import Job, WrongResult
from triton_ep.bench.providers import Unavailable
from triton_ep.bench.settings import Case

_RECEIVED_CHUNK = 256
_DISPATCH_CHUNKS = (4, 8, 12, 16, 24, 32)
_COMBINE_CHUNKS = (2, 4, 6, 8, 12, 16)


def check_here(job: Job, case: Case) -> None:
    """Raise Unavailable, with the reason for the row, if DeepEP cannot run a case."""
    if importlib.util.find_spec("deep_ep") is None:
        raise Unavailable("deep_ep is not installed.")
    if job.place.ranks_per_node != job.num_ranks:
        raise Unavailable("deep_ep is measured inside one node only.")
    if case.num_sm % 2:
        raise Unavailable(f"deep_ep takes an even number of SMs, not {case.num_sm}.")
    if case.payload == "mxfp8" and job.shape.hidden % BLOCK:
        raise Unavailable(f"FP8 rows of deep_ep are multiples of {BLOCK} values, not {job.shape.hidden}.")


class DeepEPProvider(BySource):
    """deep_ep.Buffer in its normal mode, one node: one row per (token, rank), by source rank, not permuted.

    Case "static" uses its mode without host synchronisation (`num_worst_tokens`). FP8 rows are quantised beforehand.

    Raises:
        Unavailable: as `check_here`.
    """

    def __init__(self, job: Job, case: Case) -> None:
        check_here(job, case)
        super().__init__(job, case)
        from deep_ep import Buffer, Config

        Buffer.set_num_sms(case.num_sm)
        self._config = lambda chunk: Config(case.num_sm, chunk, _RECEIVED_CHUNK)
        row_bytes = job.shape.hidden * torch.bfloat16.itemsize
        largest = self._config(max(*_DISPATCH_CHUNKS, *_COMBINE_CHUNKS))
        self.buffer = Buffer(dist.group.WORLD, largest.get_nvl_buffer_size_hint(row_bytes, job.num_ranks), 0)
        self._worst = job.num_ranks * job.shape.tokens if case.capacity == "static" else 0
        self._send, self._return = self._config(_DISPATCH_CHUNKS[0]), self._config(_COMBINE_CHUNKS[0])
        self._tune()

    def _tune(self) -> None:
        """Choose the chunk sizes, the same on all ranks; collective."""
        x, idx = self.job.inputs[0]
        best: dict[int, float] = {}
        for chunk in _DISPATCH_CHUNKS:
            self._send = self._config(chunk)
            best[chunk] = self._time(lambda _: self.dispatch(x, idx))
        sent = min(best, key=lambda chunk: best[chunk])
        self._send = self._config(sent)
        rows, state = self.dispatch(x, idx)
        y = rows.dequantize() if isinstance(rows, Scaled) else rows
        for chunk in _COMBINE_CHUNKS:
            self._return = self._config(chunk)
            best[-chunk] = self._time(lambda _: self.combine(y, state))
        returned = min(_COMBINE_CHUNKS, key=lambda chunk: best[-chunk])
        self._return = self._config(returned)
        self.job.say(f"    deep_ep: chunks of {sent} tokens in dispatch, of {returned} in combine")

    def _time(self, call: timing.Call) -> float:
        timer = timing.Timer(self.device, 1 if self.device.type == "cpu" else 5, 0 if self.device.type == "cpu" else 1)
        return timing.over_ranks(timer.times(call, self.meet)).median_us

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[Any, Any]:
        """(rows, state for combine)."""
        ids = idx.long()
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids, self.experts)
        given = self.given(x)
        worst = {"num_worst_tokens": self._worst} if self._worst else {}
        rows, _, _, _, handle, _ = self.buffer.dispatch(
            tuple(given) if self.fp8 else given,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=torch.ones(ids.shape, dtype=torch.float32, device=self.device),
            config=self._send,
            **worst,
        )
        return Scaled(*rows) if self.fp8 else rows, handle

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """[T, H]: per token, the sum over its ranks."""
        out: torch.Tensor = self.buffer.combine(y, state, config=self._return)[0]
        return out


class DeepEPLowLatency(Checked):
    """deep_ep.Buffer in its low-latency mode: one row per (token, expert), in slabs with room for all tokens.

    Raises:
        Unavailable: as `check_here`.
    """

    def __init__(self, job: Job, case: Case) -> None:
        check_here(job, case)
        super().__init__(job, case)
        from deep_ep import Buffer

        shape = job.shape
        nbytes = Buffer.get_low_latency_rdma_size_hint(shape.tokens, shape.hidden, job.num_ranks, shape.experts)
        self.buffer = Buffer(
            dist.group.WORLD,
            0,
            nbytes,
            low_latency_mode=True,
            num_qps_per_rank=shape.experts // job.num_ranks,
            allow_nvlink_for_low_latency_mode=True,
        )

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[Any, Any]:
        """(rows by slab, state for combine)."""
        ids = idx.long()
        rows, counts, handle, _, _ = self.buffer.low_latency_dispatch(
            x, ids, self.job.shape.tokens, self.experts, use_fp8=self.fp8
        )
        return (Scaled(*rows) if self.fp8 else rows), (counts, handle, ids)

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """[T, H]: per token, the sum over its experts."""
        _, handle, ids = state
        weights = torch.ones(ids.shape, dtype=torch.float32, device=self.device)
        out: torch.Tensor = self.buffer.low_latency_combine(y, ids, weights, handle)[0]
        return out

    def check_slabs(self, number: int, rows: Any, counts: torch.Tensor) -> None:
        """Check the row count of each expert and, in bf16, that it received the rows sent to it, in any order.

        Raises:
            WrongResult: a count or a row differs.
        """
        job = self.job
        mine = self.experts // self.num_ranks
        ids = torch.cat(job.idxs[number]).to(self.device)
        everyone = None if self.fp8 else torch.cat([job.rows_of(rank, number) for rank in range(job.num_ranks)])
        for expert in range(mine):
            token = torch.nonzero((ids == job.rank * mine + expert).any(1)).flatten()
            if int(counts[expert]) != token.numel():
                raise WrongResult(f"expert {expert} of rank {job.rank} has {int(counts[expert])} rows")
            if everyone is not None:
                received, sent = rows[expert, : token.numel()], everyone[token]
                same = torch.equal(_sorted(received), _sorted(sent))
                if not same:
                    raise WrongResult(f"expert {expert} of rank {job.rank} has other rows than were sent to it")

    def copies(self, idx: torch.Tensor) -> torch.Tensor:
        """Number of experts of the token."""
        return (idx >= 0).sum(1)


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """Rows sorted by their first three columns, which hold their origin."""
    key = rows[:, :3].contiguous().view(torch.int16).long() & 0xFFFF
    return rows[torch.argsort((key[:, 2] << 32) | (key[:, 1] << 16) | key[:, 0])]
