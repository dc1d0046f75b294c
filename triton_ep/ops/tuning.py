"""Tile shapes and grids: one place for the GPU's and for the interpreter's.

The interpreter pays per operation, so it gets large tiles and few programs; two programs rather than one,
so that the order of programs is exercised.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from triton_ep import layout
from triton_ep.config import EPConfig
from triton_ep.runtime import INTERPRETING

ROUTING_TOKENS = 16
"""Tokens per routing chunk: chunk tables are [tokens * KP] squared."""

_LEAST_WAITING = 16
"""Fewer programs would take longer beside an exchange than all of them after it."""

_PROGRAM_REGISTERS = {"push": 2**15, "expand": 2**14}
"""Four programs of expand fit on a multiprocessor, and one of push in place of two, whatever their warps."""

_OVERLAPPED_TOKENS = 1024
"""With fewer tokens per rank, two streams cost more than they save."""

STEP_CHUNKS = 1 if INTERPRETING else 16
"""Routing chunks in a step of the push, at least: a release costs microseconds, so few tokens have one step."""


def compared_entries(kp: int) -> int:
    """Entries of a routing chunk that each of them is compared with at a time: a larger table is a longer program,
    and each instruction is fetched once."""
    return ROUTING_TOKENS * kp if INTERPRETING else min(ROUTING_TOKENS * kp, 16)


def tile(row_elements: int, elements: int = 4096) -> dict[str, int]:
    """ROWS and BLOCK_H of kernels that copy rows of `row_elements` words: `elements` of them at a time, or a row."""
    return _tile(row_elements, 2048, elements)


def summing_tile(row_elements: int) -> dict[str, int]:
    """ROWS and BLOCK_H of kernels that sum rows of `row_elements` elements."""
    return _tile(row_elements, 8192, 8192)


def _tile(row_elements: int, most: int, elements: int) -> dict[str, int]:
    block = min(layout.next_power_of_2(row_elements), 2048 if INTERPRETING else most)
    if INTERPRETING:
        return {"ROWS": layout.CHUNK, "BLOCK_H": block}
    block = max(block, 128)
    return {"ROWS": min(max(elements // block, 1), layout.CHUNK), "BLOCK_H": block}


def chosen(config: EPConfig, kernel: str) -> tuple[dict[str, int], dict[str, Any]]:
    """What the layer's tuned entry says of "push", "expand", "reduce" or "pull": constexprs, launcher's options."""
    choice = None if config.tuned is None or INTERPRETING else config.tuned.kernel(kernel)
    if choice is None:
        return {}, {}
    options: dict[str, Any] = {"num_warps": choice.warps}
    if kernel in _PROGRAM_REGISTERS:
        options["maxnreg"] = min(_PROGRAM_REGISTERS[kernel] // (32 * choice.warps), 255)
    return {"ROWS": choice.rows}, options


def exchange_programs(num_sm: int) -> int:
    """Programs of a kernel that talks to other ranks."""
    return min(num_sm, 2) if INTERPRETING else num_sm


def local_programs(device: torch.device, num_sm: int) -> int:
    """Programs of a kernel that only moves rows within this rank's memory, while nothing else runs."""
    if INTERPRETING:
        return 2
    return min(_multiprocessors(device), layout.STAGE_PROGRAMS)


def waiting_programs(device: torch.device, num_sm: int) -> int:
    """Programs of such a kernel that may run beside one of `num_sm` programs, and waits for it; 0: it may not.

    It must leave room on the GPU for what it waits for, even if it is there first.
    """
    if INTERPRETING:
        return 0
    programs = _multiprocessors(device) - num_sm
    return min(programs, layout.STAGE_PROGRAMS) if programs >= _LEAST_WAITING else 0


def expanding_programs(config: EPConfig, device: torch.device, overlapped: bool) -> int:
    """Programs of the kernel that expands rows, alone or beside the push, for which it waits.

    By their registers (kernels/spec.py) four of them fit on a multiprocessor, and a program of the push in place of
    two. Of two layers that dispatch at once, at most 3 * (multiprocessors - num_sm) programs wait here: on `num_sm`
    multiprocessors there is room for a push, whatever is there first.
    """
    if INTERPRETING:
        return 2
    if not overlapped:
        return 3 * _multiprocessors(device) // 2
    free = _multiprocessors(device) - config.num_sm
    # With several nodes they wait for kernels, too, of which a program takes a multiprocessor for itself.
    return 3 * free // 2 if config.is_intra_node else free


def overlaps(config: EPConfig, device: torch.device) -> bool:
    """True if local work of a layer runs beside its exchange, on a stream of its own."""
    return waiting_programs(device, config.num_sm) > 0 and config.max_tokens >= _OVERLAPPED_TOKENS


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def as_words(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """The same memory as the widest integers that fit rows of `row_bytes` and the start address.

    Copies need no dtype: one compiled kernel serves all, and the interpreter moves 8 bytes per element.
    """
    for dtype in (torch.int64, torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == 0 and rows.data_ptr() % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows.view(torch.uint8)


def common_constexprs(sizes: layout.Sizes, *names: str) -> dict[str, Any]:
    """The constexprs that follow from the sizes of a layer, by name."""
    config = sizes.config
    values = {
        "TOPK": config.topk,
        "KP": sizes.kp,
        "WP": layout.next_power_of_2(config.world_size),
        "LWP": layout.next_power_of_2(config.local_world_size),
        "NNP": layout.next_power_of_2(config.num_nodes),
        "MAX_PROGRAMS": sizes.max_programs,
        "SENDERS": sizes.senders,
        "MAX_CHUNKS": sizes.max_chunks,
        "CHUNK": layout.CHUNK,
    }
    return {name: values[name] for name in names}


def mx_blocks(num_blocks: int) -> int:
    """Blocks of 32 that a program quantises along rows."""
    if INTERPRETING:
        return min(layout.next_power_of_2(-(-num_blocks // 2)), 2048)
    return 128


def mx_columns(hidden: int) -> dict[str, int]:
    """BLOCK_H and STEPS of kernels that go by blocks of 32 rows."""
    if INTERPRETING:
        return {"BLOCK_H": min(max(layout.next_power_of_2(hidden), 32), 512), "STEPS": 2}
    return {"BLOCK_H": 128, "STEPS": 4}
