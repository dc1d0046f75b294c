"""Grids of all kernels, for GPUs and for the interpreter. Tile shapes are in triton_ep/runtime/plans.

The interpreter pays per operation, so it gets few programs: two rather than one, to exercise the order of programs.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

from triton_ep.config import EPConfig
from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.rows import RowFormat
from triton_ep.errors import InputError
from triton_ep.kernels.device.codes import SENT_COMPACT, SENT_EVENLY, SENT_TO_EXPERTS
from triton_ep.ops.strides import view_as
from triton_ep.runtime.launch import INTERPRETING, Launcher
from triton_ep.runtime.plans import compute
from triton_ep.runtime.plans.residency import (
    LITTLE_SHARED,
    Program,
    in_budget,
    most_waiting,
    per_multiprocessor,
    share_of_one,
)
from triton_ep.runtime.plans.shape import OVERLAPPED_TOKENS, SENDING_PROGRAMS, STAGE_PROGRAMS, word_type

_LEAST_WAITING = 16
"""Fewer programs that overlap an exchange would take longer than a full grid after it."""

_EXPANDING_SHARE = (2, 1)
"""Programs that expand rows per free multiprocessor, as a fraction (tests/bench/bench_exchange_tiles.py)."""

_EXPANDING_BESIDE = 3
"""Programs that expand rows per multiprocessor, next to one or two that push rows, as far as there is room."""

_LAYERS = 2
"""Number of single-node layers that may dispatch or combine at the same time without a budget."""

_COUNTING = Program(8, 128)
"""The largest program of the kernels that count and place rows (kernels/internode/splits.py). One at a time is enough:
they wait for programs of lower numbers only."""

_PULL_SHARE = (1, 4)
"""Share of a budget that pulls rows, as a fraction; the rest sums rows at the same time."""

_PULL_SHARE_OF_COMPACT = (5, 12)
"""The same if the rest only sends rows."""

_WORDS = {"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "u8": torch.uint8}


def exchange_programs(num_sm: int) -> int:
    """Programs of a kernel that communicates with other ranks."""
    return min(num_sm, 2) if INTERPRETING else num_sm


def local_programs(device: torch.device) -> int:
    """Programs of a kernel that only moves rows within this rank's memory and overlaps no other kernel."""
    if INTERPRETING:
        return 2
    return min(multiprocessors(device), STAGE_PROGRAMS)


def waiting_programs(multiprocessors: int, num_sm: int) -> int:
    """Programs of a local kernel that waits for a concurrent kernel of `num_sm` programs, if each program of either
    may take a whole multiprocessor; 0: the two kernels may not overlap."""
    if INTERPRETING:
        return 0
    programs = multiprocessors - num_sm
    return min(programs, STAGE_PROGRAMS) if programs >= _LEAST_WAITING else 0


class Pushing(NamedTuple):
    """Programs that push rows within a node.

    Attributes:
        programs: their number.
        flags: arrival flags of a rank, an even number, the same on all ranks, whatever their programs.
        sent: where the steps end in which they send the rows, SENT_* (kernels/device/codes.py).
        spread: small programs on all multiprocessors.
    """

    programs: int
    flags: int
    sent: int
    spread: bool


Laid = Literal["compact", "experts", "converted"]
"""How a rank lays its rows out: once; for each of their experts; for each of these, converted."""

_SENT: dict[Laid, int] = {"compact": SENT_COMPACT, "experts": SENT_TO_EXPERTS, "converted": SENT_EVENLY}
"""Where the steps of small programs end. Other ends were not measured where rows are converted."""


def pushing_programs(ctx: DispatchCombineContext, fmt: RowFormat, overlapped: bool, laid: Laid) -> Pushing:
    """Programs of the push.

    overlapped: rows are laid out concurrently; otherwise the caller may run kernels of its own beside the push, which
    then has `num_sm` programs. laid: on other ranks rows that are not compact may be laid out in the other way.
    """
    found: Pushing | None = fmt.grids.get(("push", overlapped, laid))
    if found is None:
        found = fmt.grids["push", overlapped, laid] = _pushing(ctx, fmt, overlapped, laid)
    return found


def _pushing(ctx: DispatchCombineContext, fmt: RowFormat, overlapped: bool, laid: Laid) -> Pushing:
    if ctx.config.copy_engines:  # they send two flags after the rows (ops/copy_engines.py)
        return Pushing(1, 2, SENT_EVENLY, False)
    programs = exchange_programs(ctx.config.num_sm)
    if not (fmt.shape.spreads and overlaps(ctx.config, ctx.device)):
        return Pushing(programs, even(programs), SENT_EVENLY, False)
    few = min(SENDING_PROGRAMS, multiprocessors(ctx.device))
    # What lays rows out for each expert slows those that send them: more of these keep the links busy where each has
    # few rows on their way. That was not measured where rows are converted.
    most = few * fmt.shape.most_sending if fmt.shape.copies_in_bulk and laid != "compact" else few
    wanted = (few if laid == "converted" else most) if overlapped else programs
    return Pushing(min(wanted, most), even(most), _SENT[laid], overlapped)


def even(programs: int) -> int:
    """Arrival flags of so many programs: they are watched in pairs (kernels/device/arrivals.py)."""
    return programs + programs % 2


def expanding_programs(
    ctx: DispatchCombineContext, fmt: RowFormat, expand: Launcher, overlapped: bool, laid: Laid
) -> int:
    """Programs of the kernel that lays rows out, alone or concurrently with the sending kernels it waits for.

    expand: its launcher. laid: as of `pushing_programs`. fmt: format of its rows; the sending kernels of this format
    have been launched before.
    """
    if INTERPRETING:
        return 2
    # Resources of programs are known once compiled, so a grid is valid only until another kernel is compiled.
    num_compiled, programs = fmt.grids.get((expand, overlapped), (-1, 0))
    if num_compiled != Launcher.num_compiled:
        cfg = ctx.config
        push = pushing_programs(ctx, fmt, overlapped, laid)
        sending = push.programs + (forwarding_programs(cfg, ctx.device) if sends_aside(cfg, ctx.device) else 0)
        grid = Expanding(
            multiprocessors(ctx.device), sending, cfg.sm_budget, cfg.is_intra_node, overlapped, push.spread
        )
        senders = ("spread",) if push.spread else ("push", "send", "forward")
        if cfg.copy_engines and laid == "compact" and cfg.sm_budget is None:
            # Many for a short time take least from products of cuBLAS beside them: 396 and 528 add 110 us, 264 add 126
            # to 131 (2 x H200; rows laid out for each of their experts add the same). What they wait for, copies, takes
            # no multiprocessor, but the kernels before those copies do, on another rank or of another layer.
            programs = max(most_waiting(multiprocessors(ctx.device), expand.program, _COUNTING, 1) // _LAYERS, 1)
        else:
            programs = grid.programs(expand.program, fmt.programs(*senders))
        fmt.grids[expand, overlapped] = Launcher.num_compiled, programs
    return int(programs)


class Expanding(NamedTuple):
    """The facts that decide how many programs expand rows.

    Attributes:
        sending: programs that send rows at the same time, of all kernels that do.
        overlapped: they run concurrently with the programs that send.
        spread: these are small, and on all multiprocessors.
    """

    multiprocessors: int
    sending: int
    sm_budget: int | None
    is_intra_node: bool
    overlapped: bool
    spread: bool = False

    def programs(self, expand: Program, senders: tuple[Program, ...]) -> int:
        """Number of programs that, wherever they are placed, leaves room on the GPU for the programs they wait for.

        Within a node it leaves room for a second layer that dispatches at the same time, too. Without a budget,
        expanding programs share all multiprocessors with small programs of the push, or they take the multiprocessors
        that are left: their registers (triton_ep/runtime/plans/exchange.py) let four fit on a multiprocessor, or one
        program of the push instead of two of them. With several nodes they also wait for programs that take a
        multiprocessor each, and are as large themselves.
        """
        free = self.multiprocessors - self.sending * self.overlapped
        many, each = _EXPANDING_SHARE
        wanted = many * free // each if self.is_intra_node or not self.overlapped else free
        if self.spread:
            wanted = _EXPANDING_BESIDE * self.multiprocessors
        if self.sm_budget is not None:
            budget = min(self.sm_budget, self.multiprocessors)
            wanted = in_budget(budget, expand, senders, self.sending * self.overlapped)
        layers = _LAYERS if self.is_intra_node else 1
        for sender in senders if self.overlapped else ():
            wanted = min(wanted, most_waiting(self.multiprocessors, expand, sender, self.sending) // layers)
        return max(wanted, 1)


class Combining(NamedTuple):
    """Programs of a combine.

    Attributes:
        publishing: programs of the kernel that publishes rows, the same number on all ranks.
        pulling: programs of each kernel that brings rows back.
        overlapped: publishing and pulling overlap.
    """

    publishing: int
    pulling: int
    overlapped: bool


def combining_programs(config: EPConfig, device: torch.device, publish: Program, pull: Program,
                       reduced: bool) -> Combining:  # fmt: skip
    """Grids of a combine.

    publish, pull: upper bounds of what their programs take, the same on all ranks.
    reduced: rows are summed before they are published; the sums may overlap the pull.

    With one node, both kernels share the whole GPU if sums are `reduced` (`sums_here`).
    """
    pulling = exchange_programs(config.num_sm)
    if INTERPRETING:
        return Combining(2, pulling, False)
    overlapped = reduced and overlaps(config, device)
    if config.sm_budget is not None:
        budget = min(config.sm_budget, multiprocessors(device))
        return budgeted_combine(budget, publish, pull, overlapped, config.is_intra_node and share_of_one(publish) == 1)
    if reduced and config.is_intra_node:
        return Combining(local_programs(device), sums_here(multiprocessors(device), publish, pull), overlapped)
    if not overlapped:
        return Combining(local_programs(device), pulling, False)
    sending = sending_programs(config, device)
    most = most_waiting(multiprocessors(device), publish, pull, sending)
    return Combining(min(waiting_programs(multiprocessors(device), sending), most), pulling, True)


def sums_here(multiprocessors: int, send: Program, pull: Program) -> int:
    """Programs that sum what all ranks send here, at most one per multiprocessor.

    They wait, and leave room for half as many programs that send as there are multiprocessors, even next to those of
    another layer. Programs with little shared memory leave some multiprocessors free, because they may take all the
    room of the others (`LITTLE_SHARED`).
    """
    most = most_waiting(multiprocessors, pull, send, multiprocessors // 2)
    if pull.shared_bytes < LITTLE_SHARED:
        most = min(most, multiprocessors - multiprocessors // 8)
    return max(min(multiprocessors, most // _LAYERS), 1)


def makes_room(ctx: DispatchCombineContext) -> bool:
    """True if combines can run next to products that compute gradients of weights."""
    return ctx.rows.own.shape.makes_room and overlaps(ctx.config, ctx.device)


def combining_beside(device: torch.device) -> Combining:
    """Grids of a combine next to products, of which each multiprocessor has as many as it can hold.

    At most one program of the two kernels fits next to these, so there are fewer than multiprocessors.
    """
    places = multiprocessors(device)
    return Combining(places * 7 // 11, places // 3, True)


def summing_programs(config: EPConfig, device: torch.device, pull: Program) -> int:
    """Programs that sum rows that have all arrived: as many as fit, since they wait for none. pull: as of
    `combining_programs`."""
    if INTERPRETING:
        return exchange_programs(config.num_sm)
    places = multiprocessors(device)
    return max(in_budget(min(config.sm_budget or places, places), pull), 1)


def budgeted_combine(
    budget: int, publish: Program, pull: Program, overlapped: bool, only_sends: bool = False
) -> Combining:
    """Grids of a combine within a budget of multiprocessors. only_sends: programs that publish add no rows up."""
    if overlapped:
        share = _PULL_SHARE_OF_COMPACT if only_sends else _PULL_SHARE
        pulling = in_budget(max(budget * share[0] // share[1], 1), pull)
        publishing = in_budget(budget, publish, [pull], pulling)
        if publishing and pulling:
            return Combining(min(publishing, STAGE_PROGRAMS), pulling, True)
    pulling = max(in_budget(budget, pull), 1)
    return Combining(min(max(in_budget(budget, publish), 1), STAGE_PROGRAMS), pulling, False)


def packing_programs(config: EPConfig, splits: Launcher, tiles: int) -> int:
    """Programs that quantise rows while counts are exchanged; tiles: number of tiles to quantise."""
    if INTERPRETING or config.sm_budget is None:
        return tiles
    return min(tiles, max(in_budget(config.sm_budget, splits.program), 1))


def low_latency_workers(device: torch.device, launcher: Launcher) -> int:
    """Most workers of a low-latency dispatch or combine. These and one more program wait, as many as half of those that
    fit on the GPU.

    Two layers then find room, whichever starts first (kernels/intranode/low_latency_*.py). Interpreted programs run one
    after the other, and workers of a combine wait for each other, so there is one.
    """
    return 1 if INTERPRETING else half_of(multiprocessors(device), launcher.program) - 1


def half_of(multiprocessors: int, program: Program) -> int:
    """Half of the programs that fit on this many multiprocessors, and at least one on each."""
    return max(per_multiprocessor(program) // 2, 1) * multiprocessors


def overlaps(config: EPConfig, device: torch.device) -> bool:
    """True if local work of a layer overlaps its exchange: its kernel is launched early, or has a side stream."""
    if INTERPRETING or config.max_tokens < OVERLAPPED_TOKENS:
        return False
    if config.sm_budget is not None:
        return config.sm_budget > 1 and multiprocessors(device) - config.num_sm >= _LAYERS
    return waiting_programs(multiprocessors(device), config.num_sm) > 0


def sends_aside(config: EPConfig, device: torch.device) -> bool:
    """True if rows and partial sums cross nodes on a stream of their own, while rows move within the node.

    Two kernels of `num_sm` programs each leave at least half of the multiprocessors to lay out and sum rows; the kernel
    that forwards rows may have more programs (`forwarding_programs`).
    """
    if config.is_intra_node or config.sm_budget is not None or not overlaps(config, device):
        return False
    return 4 * config.num_sm <= multiprocessors(device)


def sending_programs(config: EPConfig, device: torch.device) -> int:
    """Programs of the communication kernels of a combine that run at the same time."""
    return config.num_sm * (2 if sends_aside(config, device) else 1)


def forwarding_programs(config: EPConfig, device: torch.device) -> int:
    """Programs that forward rows of other nodes, the same number on all ranks.

    If rows are sent aside, these programs start when the push has ended, and most of their time runs after the sending
    kernel, too. So they are up to twice as many as those of either, at most a third of the multiprocessors.
    """
    if INTERPRETING:
        return 2 * exchange_programs(config.num_sm)
    if not sends_aside(config, device):
        return config.num_sm
    return min(2 * config.num_sm, multiprocessors(device) // 3)  # `num_sm` is at most a quarter


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU.

    Raises:
        InputError: it is none.
    """
    if device.type != "cuda":
        raise InputError(f"tensors are on {device}, but kernels of this process run on GPUs. Move them there.")
    return torch.cuda.get_device_properties(device).multi_processor_count


def as_words(rows: torch.Tensor, row_bytes: int, scales: torch.Tensor | None = None) -> torch.Tensor:
    """View `rows` as the widest integers that fit rows of `row_bytes` and the start address.

    Copies need no dtype: one compiled kernel serves all, and the interpreter moves 8 bytes per element.

    scales: rows of `row_bytes` / 32 bytes that the words must fit, too.
    """
    # torch also requires the storage offset to be a multiple of the words, even where memory begins at an odd address.
    place = rows.data_ptr() | int(rows.storage_offset()) * rows.element_size()
    if scales is not None:
        place |= scales.data_ptr() | row_bytes // 32
    if (row_bytes | place) & 7 == 0:  # most rows
        try:
            return rows.view(torch.int64)
        except RuntimeError:
            pass  # arbitrary strides (ops/strides.py)
    return view_as(rows, _WORDS[word_type(row_bytes, place)])


def mx_blocks(num_blocks: int) -> int:
    """Blocks of 32 along rows that one program quantises."""
    return compute.mx_blocks(num_blocks, INTERPRETING)


def mx_columns(hidden: int) -> dict[str, int]:
    """BLOCK_H and STEPS of kernels over blocks of 32 rows."""
    return compute.mx_columns(hidden, INTERPRETING)
