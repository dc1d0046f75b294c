"""Grids: one place for the GPU's and for the interpreter's. Tile shapes are in triton_ep/plans.

The interpreter pays per operation, so it gets few programs; two rather than one, so that the order of programs is
exercised.
"""

from __future__ import annotations

import functools

import torch

from triton_ep.config import EPConfig
from triton_ep.ops.strides import view_as
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans import compute
from triton_ep.runtime.plans.shape import STAGE_PROGRAMS, word_type

_LEAST_WAITING = 16
"""Fewer programs would take longer concurrently with an exchange than all of them after it."""

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
    return min(_multiprocessors(device), STAGE_PROGRAMS)


def waiting_programs(device: torch.device, num_sm: int) -> int:
    """Programs of such a kernel that waits for a concurrent one of `num_sm` programs; 0: they may not overlap.

    It spins on another kernel, so it must leave SMs free for that kernel even when scheduled first.
    """
    if INTERPRETING:
        return 0
    programs = _multiprocessors(device) - num_sm
    return min(programs, STAGE_PROGRAMS) if programs >= _LEAST_WAITING else 0


def expanding_programs(config: EPConfig, device: torch.device, overlapped: bool) -> int:
    """Programs of the kernel that expands rows, alone or concurrently with the push, for which it waits.

    By their registers (triton_ep/runtime/plans/exchange.py) four of them fit on a multiprocessor, and a program of the
    push in place of two. Of two layers that dispatch at once, at most 3 * (multiprocessors - num_sm) programs wait
    here: on `num_sm` multiprocessors there is room for a push, whatever is there first.
    """
    if INTERPRETING:
        return 2
    if not overlapped:
        return 3 * _multiprocessors(device) // 2
    free = _multiprocessors(device) - config.num_sm
    # With several nodes they wait for kernels, too, of which a program takes a multiprocessor for itself.
    return 3 * free // 2 if config.is_intra_node else free


def overlaps(config: EPConfig, device: torch.device) -> bool:
    """True if local work of a layer runs concurrently with its exchange, on a stream of its own."""
    return config.max_tokens >= _OVERLAPPED_TOKENS and waiting_programs(device, config.num_sm) > 0


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def as_words(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """The same memory as the widest integers that fit rows of `row_bytes` and the start address.

    Copies need no dtype: one compiled kernel serves all, and the interpreter moves 8 bytes per element.
    """
    # torch wants a multiple of the words in front of the rows as well, where memory itself begins at an odd address.
    offset = int(rows.storage_offset()) * rows.element_size()
    return view_as(rows, _WORDS[word_type(row_bytes, rows.data_ptr() | offset)])


def mx_blocks(num_blocks: int) -> int:
    """Blocks of 32 that a program quantises along rows."""
    return compute.mx_blocks(num_blocks, INTERPRETING)


def mx_columns(hidden: int) -> dict[str, int]:
    """BLOCK_H and STEPS of kernels that go by blocks of 32 rows."""
    return compute.mx_columns(hidden, INTERPRETING)
