"""Grids: one place for the GPU's and for the interpreter's. Tile shapes are in triton_ep/plans.

The interpreter pays per operation, so it gets few programs; two rather than one, so that the order of programs is
exercised.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from triton_ep.config import EPConfig
from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.rows import RowFormat
from triton_ep.ops.strides import view_as
from triton_ep.runtime.launch import INTERPRETING, Launcher
from triton_ep.runtime.plans import compute
from triton_ep.runtime.plans.residency import Program, in_budget, most_waiting, per_multiprocessor
from triton_ep.runtime.plans.shape import STAGE_PROGRAMS, word_type

_LEAST_WAITING = 16
"""Fewer programs would take longer concurrently with an exchange than all of them after it."""

_EXPANDING_SHARE = (3, 2)
"""Of multiprocessors that are left, programs that expand rows (tests/bench/bench_exchange_tiles.py)."""

_LAYERS = 2
"""Layers within a node that may dispatch at the same time, without a budget."""

_PULL_SHARE = (1, 2)
"""Of a budget, what pulls rows; the rest sums them meanwhile."""

_WORDS = {"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "u8": torch.uint8}

_OVERLAPPED_TOKENS = 1024
"""With fewer tokens per rank, two streams cost more than they save."""


def exchange_programs(num_sm: int) -> int:
    """Programs of a kernel that talks to other ranks."""
    return min(num_sm, 2) if INTERPRETING else num_sm


def local_programs(device: torch.device) -> int:
    """Programs of a kernel that only moves rows within this rank's memory, while nothing else runs."""
    if INTERPRETING:
        return 2
    return min(multiprocessors(device), STAGE_PROGRAMS)


def waiting_programs(multiprocessors: int, num_sm: int) -> int:
    """Programs of such a kernel that waits for a concurrent one of `num_sm` programs, where each of both may take a
    multiprocessor; 0: they may not overlap."""
    if INTERPRETING:
        return 0
    programs = multiprocessors - num_sm
    return min(programs, STAGE_PROGRAMS) if programs >= _LEAST_WAITING else 0


def expanding_programs(ctx: DispatchCombineContext, fmt: RowFormat, expand: Launcher, overlapped: bool) -> int:
    """Programs of the kernel that expands rows, alone or concurrently with those that send, for which it waits.

    expand: launches it. fmt: of its rows, whose kernels that send have been launched before.
    """
    if INTERPRETING:
        return 2
    # What programs take is known once they are compiled: a number is for the kernels compiled when it was computed.
    num_compiled, programs = fmt.grids.get((expand, overlapped), (-1, 0))
    if num_compiled != Launcher.num_compiled:
        cfg = ctx.config
        grid = Expanding(multiprocessors(ctx.device), cfg.num_sm, cfg.sm_budget, cfg.is_intra_node, overlapped)
        programs = grid.programs(expand.program, fmt.programs("push", "send", "forward"))
        fmt.grids[expand, overlapped] = Launcher.num_compiled, programs
    return int(programs)


class Expanding(NamedTuple):
    """What decides how many programs expand rows.

    Attributes:
        overlapped: they run beside the programs that send.
    """

    multiprocessors: int
    num_sm: int
    sm_budget: int | None
    is_intra_node: bool
    overlapped: bool

    def programs(self, expand: Program, senders: tuple[Program, ...]) -> int:
        """Their number, so that what they wait for fits on the GPU beside them, wherever they are.

        Within a node also beside a second layer that dispatches at the same time. Without a budget they take what is
        left: by their registers (triton_ep/runtime/plans/exchange.py) four fit on a multiprocessor, and a program of
        the push in place of two. With several nodes they wait for programs, too, that take a multiprocessor each.
        """
        free = self.multiprocessors - self.num_sm * self.overlapped
        many, each = _EXPANDING_SHARE
        wanted = many * free // each if self.is_intra_node or not self.overlapped else free
        if self.sm_budget is not None:
            budget = min(self.sm_budget, self.multiprocessors)
            wanted = in_budget(budget, expand, senders, self.num_sm * self.overlapped)
        layers = _LAYERS if self.is_intra_node else 1
        for sender in senders if self.overlapped else ():
            wanted = min(wanted, most_waiting(self.multiprocessors, expand, sender, self.num_sm) // layers)
        return max(wanted, 1)


class Combining(NamedTuple):
    """Programs of a combine.

    Attributes:
        publishing: of the kernel that publishes rows, the same on all ranks.
        pulling: of those that bring them back.
        overlapped: both are there at the same time.
    """

    publishing: int
    pulling: int
    overlapped: bool


def combining_programs(config: EPConfig, device: torch.device, publish: Program, pull: Program,
                       reduced: bool) -> Combining:  # fmt: skip
    """Grids of a combine.

    publish, pull: what their programs take at most, which all ranks know.
    reduced: rows are summed before they are published, which may go on while others are pulled.
    """
    pulling = exchange_programs(config.num_sm)
    if INTERPRETING:
        return Combining(2, pulling, False)
    overlapped = reduced and overlaps(config, device)
    if config.sm_budget is not None:
        budget = min(config.sm_budget, multiprocessors(device))
        return budgeted_combine(budget, publish, pull, overlapped)
    if not overlapped:
        return Combining(local_programs(device), pulling, False)
    most = most_waiting(multiprocessors(device), publish, pull, config.num_sm)
    return Combining(min(waiting_programs(multiprocessors(device), config.num_sm), most), pulling, True)


def budgeted_combine(budget: int, publish: Program, pull: Program, overlapped: bool) -> Combining:
    """The same within a budget of multiprocessors."""
    if overlapped:
        pulling = in_budget(max(budget * _PULL_SHARE[0] // _PULL_SHARE[1], 1), pull)
        publishing = in_budget(budget, publish, [pull], pulling)
        if publishing and pulling:
            return Combining(min(publishing, STAGE_PROGRAMS), pulling, True)
    pulling = max(in_budget(budget, pull), 1)
    return Combining(min(max(in_budget(budget, publish), 1), STAGE_PROGRAMS), pulling, False)


def quantizing_programs(config: EPConfig, quantize: Launcher, tiles: int) -> int:
    """Programs of the kernel that quantises rows before they are sent; tiles: that there are."""
    if INTERPRETING or config.sm_budget is None:
        return tiles
    return min(tiles, max(in_budget(config.sm_budget, quantize.program), 1))


def summing_programs(device: torch.device, combine: Launcher) -> int:
    """Programs of a low-latency combine that wait, at most: half of those that fit on the GPU.

    So what they wait for finds room (kernels/intranode/low_latency_combine.py), whatever is there first.
    """
    return 2 if INTERPRETING else half_of(multiprocessors(device), combine.program)


def half_of(multiprocessors: int, program: Program) -> int:
    """Half of the programs that fit on so many multiprocessors, and at least one on each."""
    return max(per_multiprocessor(program) // 2, 1) * multiprocessors


def overlaps(config: EPConfig, device: torch.device) -> bool:
    """True if local work of a layer runs concurrently with its exchange, on a stream of its own."""
    if INTERPRETING or config.max_tokens < _OVERLAPPED_TOKENS:
        return False
    if config.sm_budget is not None:
        return config.sm_budget > 1 and multiprocessors(device) - config.num_sm >= _LAYERS
    return waiting_programs(multiprocessors(device), config.num_sm) > 0


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def as_words(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """The same memory as the widest integers that fit rows of `row_bytes` and the start address.

    Copies need no dtype: one compiled kernel serves all, and the interpreter moves 8 bytes per element.
    """
    # torch wants a multiple of the words in front of the rows as well, where memory itself begins at an odd address.
    place = rows.data_ptr() | int(rows.storage_offset()) * rows.element_size()
    if (row_bytes | place) & 7 == 0:  # most rows
        try:
            return rows.view(torch.int64)
        except RuntimeError:
            pass  # their strides say nothing
    return view_as(rows, _WORDS[word_type(row_bytes, place)])


def mx_blocks(num_blocks: int) -> int:
    """Blocks of 32 that a program quantises along rows."""
    return compute.mx_blocks(num_blocks, INTERPRETING)


def mx_columns(hidden: int) -> dict[str, int]:
    """BLOCK_H and STEPS of kernels that go by blocks of 32 rows."""
    return compute.mx_columns(hidden, INTERPRETING)
