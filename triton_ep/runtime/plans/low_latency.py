"""Plans of the low-latency dispatch and combine."""

from __future__ import annotations

from collections.abc import Mapping

from triton_ep.kernels.device.codes import QUANTISE, QUANTISE_CHANNELS
from triton_ep.runtime.plans.shape import TOKEN_BYTES, Plan, Shape, next_power_of_2

_SUM_BYTES = 2**13
"""Bytes of the sums that a worker waits for at once, over all ranks. With more, registers spill."""
_SUM_ELEMENTS = 1024
_FEW_ROWS = 256
"""Rows that arrive, for which there are enough workers in any case."""


def rows_per_program(interpreted: bool) -> int:
    """Rows that one program expands or sums at a time."""
    return 16 if interpreted else 1


def dispatch(
    s: Shape, payload: int, has_weights: bool, x_words: int, row_words: int, slabs: bool, columns: bool
) -> Plan:
    """Push rows and their routing facts to all ranks, and lay arrived rows out expert by expert.

    x_words, row_words: words of a row that is sent and received; slabs: a slab per expert; columns: with slabs, scales
    are columns.
    """
    many = payload == QUANTISE and s.world_size * s.max_tokens > _FEW_ROWS
    block = {QUANTISE: 2048 if many else 4096, QUANTISE_CHANNELS: 2048}.get(payload, 512)
    pushed = _columns(s, x_words, block)
    constexprs = {
        "PAYLOAD": payload,
        "PUSH_TILES": pushed["TILES"],
        "PUSH_BLOCK": pushed["BLOCK_H"],
        "HAS_SCALES": s.payload is not None,
        "HAS_WEIGHTS": has_weights,
        "HAS_PADDING": s.alignment > 1 and not slabs,
        "SLABS": slabs,
        "COLUMNS": columns,
        "EP": next_power_of_2(s.experts_per_rank),
        "BLOCK_N": min(max(next_power_of_2(s.max_tokens * s.topk), 16), 1024),
        "ROWS": rows_per_program(s.interpreted),
        **_columns(s, row_words, 2048),
        **s.common("TOPK", "KP", "WP"),
    }
    # With fewer registers more workers fit. Rows that are not quantised gain nothing from that.
    return Plan("low_latency_dispatch_kernel", constexprs, maxnreg=_registers(s) if many else None)


def _registers(s: Shape) -> int:
    """Registers of a thread: as few as hold what it knows of all ranks, so that many workers fit."""
    ranks = next_power_of_2(s.world_size)
    return 64 if ranks <= 4 else 80 if ranks <= 8 else 128


def _share(columns: int) -> int:
    """Tokens of which a messenger sends the weights, one per thread; it compares all pairs of a token's experts."""
    return max(min(128 // columns, 2048 // columns**2), 1)


def wait_signals(s: Shape, by_blocks: bool) -> Plan:
    """Wait for the caller's kernel that writes expert outputs; by_blocks: one signal per block of rows."""
    return Plan("wait_signals_kernel", {"BY_BLOCKS": by_blocks, "BLOCK": 256})


def combine(s: Shape, weights: int) -> Plan:
    """Sum expert outputs per token, send the sums back, and add the sums of all ranks; weights: LL_*_WEIGHTS."""
    ranks, nbytes = next_power_of_2(s.world_size), TOKEN_BYTES[s.token]
    packed = nbytes == 2 and s.hidden % 2 == 0
    most = min(_SUM_BYTES // (ranks * nbytes), _SUM_ELEMENTS)
    if nbytes == 2 and not packed:
        most //= 2
    # On a GPU, each thread has at least one word.
    part = max(min(next_power_of_2(s.hidden), most), 256)
    if s.interpreted:
        part = min(next_power_of_2(s.hidden), 8192)
    constexprs = {
        "WEIGHTS": weights,
        "ROWS": rows_per_program(s.interpreted),
        "PARTS": -(-s.hidden // part),
        "BLOCK_S": part,
        "PACKED": packed,
        "SHARE": _share(next_power_of_2(s.topk)),
        **_columns(s, s.hidden, 8192 if s.interpreted else 2048),
        **s.common("TOPK", "KP", "WP"),
    }
    return Plan("low_latency_combine_kernel", constexprs, maxnreg=_registers(s))


def combining_items(tiles: Mapping[str, int], arrival_rows: int, tokens: int) -> tuple[int, int]:
    """Number of items that the workers of a combine reduce, and sum; tiles: constexprs of its plan. arrival_rows:
    W * max_tokens."""
    rows = tiles["ROWS"]
    return -(-arrival_rows // rows) * tiles["TILES"], -(-tokens // rows) * tiles["PARTS"]


def _columns(s: Shape, row_words: int, most: int) -> dict[str, int]:
    """TILES and BLOCK_H of a kernel that takes a row of `row_words` in one piece if it has at most `most` words."""
    block = min(max(next_power_of_2(row_words), 32 if s.interpreted else 128), most)
    return {"TILES": -(-row_words // block), "BLOCK_H": block}
