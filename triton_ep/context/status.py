"""Status records that kernels report to the host (kernels/device/waits.py), and the errors for them: which wait
expired, which ranks are missing, which value was expected."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch

from triton_ep.context.calls import mismatch
from triton_ep.context.layout import Sizes
from triton_ep.errors import EPError, PeerFailed, WaitTimeout
from triton_ep.kernels.device import codes


class StatusRecord(NamedTuple):
    """Record that a kernel writes when a wait expires, four int64.

    Example: (2, 5, 12884901888, 8589934592) = WAIT_ARRIVALS: arrive_flag[5] should be 3 << 32, 3 steps, and is 2 << 32.

    Attributes:
        operation: WAIT_* or CALLS_* (kernels/device/codes.py); 0 = all is well.
        flag: index of the first flag that was too low.
        expected, seen: values of that flag.
    """

    operation: int
    flag: int
    expected: int
    seen: int


class Operation(NamedTuple):
    """A kind of wait: what it waits for, and the buffer of its flags."""

    what: str
    flags: str


OPERATIONS = {
    codes.WAIT_SPLITS: Operation("the splits of all ranks (dispatch)", "splits_flag"),
    codes.WAIT_ARRIVALS: Operation("the rows of its node (dispatch)", "arrive_flag"),
    codes.WAIT_NETWORK_ROWS: Operation("the rows of another node (dispatch)", "token_flag"),
    codes.WAIT_COMBINE_ENTERED: Operation("the ranks of this node to begin this combine (combine)", "entered_flag"),
    codes.WAIT_COMBINE_FREE: Operation("all ranks to end the previous combine (combine)", "done_flag"),
    codes.WAIT_COMBINE_STAGED: Operation("the expert outputs of its node (combine)", "staged_flag"),
    codes.WAIT_NETWORK_PARTIALS: Operation("the partial sums of another node (combine)", "partial_flag"),
    codes.WAIT_BARRIER: Operation("a barrier", "barrier_flag"),
    codes.WAIT_NODE_BARRIER: Operation("a barrier of its node", "node_barrier_flag"),
    codes.WAIT_LL_ROWS: Operation("the rows of all ranks (low-latency dispatch)", "ll_flag"),
    codes.WAIT_LL_PARTIALS: Operation("the sums of all ranks (low-latency combine)", "ll_combine_flag"),
    codes.WAIT_SIGNALS: Operation("the kernel that writes expert outputs (low-latency combine)", "signals"),
}
"""Kinds of waits, by number."""


class DeviceState:
    """The state of one layer on its device, with the status record that kernels write there.

    Attributes:
        words: int64 [codes.STATE_WORDS + W]; positions are in kernels/device/codes.py, the last W are tags of calls.
        alarm: its value is not 0 once the host can see that a kernel has written a record; reading it never waits.
    """

    @torch.inference_mode(False)  # these tensors outlive inference mode and must stay writable outside it
    def __init__(self, num_ranks: int, timeout_s: float, device: torch.device) -> None:
        self.words = torch.zeros(codes.STATE_WORDS + num_ranks, dtype=torch.int64, device=device)
        self.words[codes.TIMEOUT_US] = int(timeout_s * 1e6)
        # A word that the host can read at any time; the device sets it with the status record.
        self._alarm = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.words[codes.ALARM] = self._alarm.data_ptr()
        self.alarm = ctypes.c_int64.from_address(self._alarm.data_ptr())

    def record(self) -> StatusRecord | None:
        """Wait for the current stream and return the record that a kernel wrote; None = no record."""
        found = StatusRecord(*self.words[codes.STATUS :][: codes.STATUS_WORDS].tolist())
        return found if found.operation else None

    def tags(self) -> list[int]:
        """Tags of the calls of all ranks, plus one; 0 if this rank has not received the tag."""
        return self.words[codes.STATE_WORDS :].tolist()

    def error(
        self, record: StatusRecord, sizes: Sizes, local: Callable[[str], torch.Tensor], failed_peer: int | None
    ) -> EPError:
        """The error for a record: of `expired_wait` or `overrun`, or CallMismatch if ranks are in different calls."""
        if record.operation == codes.OVERRUN:
            return overrun(record, sizes)
        if record.operation not in OPERATIONS:
            return mismatch(record.operation, self.tags())
        return expired_wait(record, sizes, local, failed_peer)


def overrun(record: StatusRecord, sizes: Sizes) -> PeerFailed:
    """The error for rows that another rank may have overwritten (kernels/device/overruns.py)."""
    cfg = sizes.config
    return PeerFailed(
        f"rank {cfg.rank} of {cfg.world_size} may have read wrong rows in its last calls: a wait of rank {record.flag} "
        "expired, and its copy engines then wrote into the memory of the other ranks. Its own error says for whom it "
        "waited. Discard what this layer has computed since the last check, finalize it, and make another; raise "
        "timeout_s if ranks are only slow."
    )


def expired_wait(
    record: StatusRecord, sizes: Sizes, local: Callable[[str], torch.Tensor], failed_peer: int | None
) -> EPError:
    """The error for a record of one of OPERATIONS: PeerFailed if the process of a rank has ended, else WaitTimeout.

    local: returns this rank's copy of a buffer by name. failed_peer: world rank of the process that has ended.
    """
    cfg = sizes.config
    operation, index, expected, seen = record
    what, flags = OPERATIONS[operation]
    if operation == codes.WAIT_SIGNALS:  # signals of this rank's own kernel
        return WaitTimeout(
            f"rank {cfg.rank} of {cfg.world_size} waited {cfg.timeout_s:g} s for {what}: {flags}[{index}] should be "
            f"{expected}, is {seen}. Launch that kernel on another stream before combine, and clear signals before it."
        )
    if failed_peer is not None:
        return PeerFailed(
            f"rank {cfg.rank} of {cfg.world_size} waited {cfg.timeout_s:g} s for {what} in vain, and the process of "
            f"rank {failed_peer} of the world has ended. Start the job again."
        )
    missing = sorted(missing_ranks(record, sizes, local))
    # Drop the low bits, which hold rows, tokens or tags; the upper bits count calls or steps.
    if operation in (codes.WAIT_ARRIVALS, codes.WAIT_LL_ROWS, codes.WAIT_LL_PARTIALS):
        expected, seen = expected >> 32, seen >> 32
    elif operation in (codes.WAIT_COMBINE_STAGED, codes.WAIT_NETWORK_PARTIALS):
        expected, seen = expected >> codes.TAG_BITS, seen >> codes.TAG_BITS
    return WaitTimeout(
        f"rank {cfg.rank} of {cfg.world_size} waited {cfg.timeout_s:g} s for {what}: "
        f"missing rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}; {flags}[{index}] should "
        f"be {expected}, is {seen}. Look at the missing ranks first (dead, late, in another call, or waiting "
        "themselves: their own error says for whom); raise timeout_s if they are only slow."
    )


def missing_ranks(record: StatusRecord, sizes: Sizes, local: Callable[[str], torch.Tensor]) -> set[int]:
    """Ranks for which a wait of one of OPERATIONS waits in vain: its sender, and all that are late now."""
    flags = local(OPERATIONS[record.operation].flags)
    return {_sender(sizes, record.operation, record.flag)} | _late_senders(sizes, record, flags)


def _sender(sizes: Sizes, operation: int, index: int) -> int:
    """Rank that sets flag `index` of an operation."""
    topology, shape = sizes.config.topology, sizes.shape
    if operation == codes.WAIT_ARRIVALS:
        return topology.first_rank + index // shape.senders % topology.local_world_size
    if operation == codes.WAIT_COMBINE_STAGED:
        return topology.first_rank + index // shape.max_programs
    if operation in (codes.WAIT_NETWORK_ROWS, codes.WAIT_NETWORK_PARTIALS):
        return topology.counterpart(index // shape.max_chunks)
    return index % topology.world_size


def _late_senders(sizes: Sizes, record: StatusRecord, values: torch.Tensor) -> set[int]:
    """All ranks whose first flag is too low; the record itself names only one rank. values: the flags now."""
    cfg, operation = sizes.config, record.operation
    topology = cfg.topology
    if operation in (codes.WAIT_ARRIVALS, codes.WAIT_COMBINE_STAGED):
        if operation == codes.WAIT_ARRIVALS:
            values = values[topology.node]
        of_first_program = values[:, 0].tolist()
        return {topology.first_rank + i for i, v in enumerate(of_first_program) if v < record.expected}
    if operation in (codes.WAIT_NETWORK_ROWS, codes.WAIT_NETWORK_PARTIALS):
        return set()
    if operation in (codes.WAIT_LL_ROWS, codes.WAIT_LL_PARTIALS):
        values = values[record.flag // cfg.world_size]
    late = {rank for rank, value in enumerate(values.tolist()) if value < record.expected}
    if operation == codes.WAIT_NODE_BARRIER:
        return late & set(range(topology.first_rank, topology.first_rank + cfg.local_world_size))
    return late
