"""Plans of the low-latency dispatch and combine."""

from __future__ import annotations

from collections.abc import Mapping

from triton_ep.kernels.device.codes import QUANTISE
from triton_ep.runtime.plans.shape import TOKEN_BYTES, Plan, Shape, next_power_of_2

_SUM_PARTS = 2
_SUM_BYTES = 2**15
"""Bytes of the sums that a program waits for, over all ranks: half of the registers of four warps."""

MOST_REDUCING = 2**20 - 2**13
"""Most programs that reduce in a combine: the kernel counts the programs of a launch in 20 bits, and fewer than 2**13
of them wait."""


def expanded_rows(interpreted: bool) -> int:
    """Rows that one program expands."""
    return 16 if interpreted else 1


def summed_rows(interpreted: bool) -> int:
    """Rows that one program sums."""
    return 16 if interpreted else 1


def push(s: Shape, payload: int, has_weights: bool, row_words: int) -> Plan:
    """Push rows and their routing facts to all ranks."""
    constexprs = {
        "PAYLOAD": payload,
        "HAS_WEIGHTS": has_weights,
        "EP": next_power_of_2(s.experts_per_rank),
        "BLOCK_N": min(max(next_power_of_2(s.max_tokens * s.topk), 16), 1024),
        **_columns(s, row_words, 4096 if payload == QUANTISE else 1024),
        **s.common("TOPK", "KP", "WP"),
    }
    return Plan("low_latency_push_kernel", constexprs)


def expand(s: Shape, has_weights: bool, row_words: int, slabs: bool) -> Plan:
    """Lay out arrived rows expert by expert; slabs: in a slab per expert."""
    constexprs = {
        "HAS_SCALES": s.payload is not None,
        "HAS_WEIGHTS": has_weights,
        "HAS_PADDING": s.alignment > 1 and not slabs,
        "SLABS": slabs,
        "EP": next_power_of_2(s.experts_per_rank),
        "ROWS": expanded_rows(s.interpreted),
        **_columns(s, row_words, 2048),
        **s.common("TOPK", "KP", "WP"),
    }
    return Plan("low_latency_expand_kernel", constexprs)


def _weights_share(s: Shape) -> int:
    """Tokens of each rank that a program of `send_weights` takes; it holds the weights of up to 256 of all ranks."""
    return max(min(256 // next_power_of_2(s.world_size), 32), 1)


def weight_shares(s: Shape) -> int:
    """Number of programs of `send_weights` that push, and of those that copy."""
    return -(-s.max_tokens // _weights_share(s))


def send_weights(s: Shape) -> Plan:
    """Bring weights to the rows of their assignments."""
    return Plan("low_latency_weights_kernel", {"SHARE": _weights_share(s), **s.common("TOPK", "KP", "WP")})


def wait_signals(s: Shape, by_blocks: bool) -> Plan:
    """Wait for the caller's kernel that writes expert outputs; by_blocks: one signal per block of rows."""
    return Plan("wait_signals_kernel", {"BY_BLOCKS": by_blocks, "BLOCK": 256})


def combine(s: Shape, has_weights: bool) -> Plan:
    """Sum expert outputs per token, send the sums back, and add the sums of all ranks."""
    ranks, nbytes = next_power_of_2(s.world_size), TOKEN_BYTES[s.token]
    packed = nbytes == 2 and s.hidden % 2 == 0
    most = min(_SUM_BYTES // (ranks * nbytes), 4096)
    if (nbytes == 2 and not packed) or ranks > 4:
        most //= 2
    # On a GPU, each thread has at least one word.
    part = max(min(next_power_of_2(-(-s.hidden // _SUM_PARTS)), most), 256)
    if s.interpreted:
        part = min(next_power_of_2(s.hidden), 8192)
    constexprs = {
        "HAS_WEIGHTS": has_weights,
        "ROWS": summed_rows(s.interpreted),
        "PARTS": -(-s.hidden // part),
        "BLOCK_S": part,
        "PACKED": packed,
        **_columns(s, s.hidden, 8192 if s.interpreted else 1024),
        **s.common("TOPK", "KP", "WP"),
    }
    return Plan("low_latency_combine_kernel", constexprs)


def reducing_programs(tiles: Mapping[str, int], arrival_rows: int) -> int:
    """Number of programs that reduce in a combine; tiles: constexprs of its plan. arrival_rows: W * max_tokens."""
    return -(-arrival_rows // tiles["ROWS"]) * tiles["TILES"]


def _columns(s: Shape, row_words: int, most: int) -> dict[str, int]:
    """TILES and BLOCK_H of a kernel that takes a row of `row_words` in one piece if it has at most `most` words."""
    block = min(max(next_power_of_2(row_words), 32 if s.interpreted else 128), most)
    return {"TILES": -(-row_words // block), "BLOCK_H": block}
