"""Plans for integrations, beyond expert-major rows: compact rows, slabs, token counts per destination, routing maps."""

from __future__ import annotations

from triton_ep.runtime.plans.exchange import (
    EXPANDING,
    NO_RING,
    as_many_as_four,
    bulk_landing,
    copy_tile,
    copying,
    landed_ring,
    of_map,
    watching,
)
from triton_ep.runtime.plans.shape import Plan, Shape, next_power_of_2


def copy_out(s: Shape, has_scales: bool, has_idx: bool, has_weights: bool, row_words: int) -> Plan:
    """Copy arrived rows out unchanged, with their expert ids and weights."""
    constexprs = {
        "HAS_SCALES": has_scales,
        "HAS_IDX": has_idx,
        "HAS_WEIGHTS": has_weights,
        **s.common("TOPK", "KP", "LWP", "SENDERS", "ENGINES"),
    }
    rows, options = s.chosen("expand")
    in_bulk = landed_ring(s, has_scales)
    if in_bulk["SLOTS"] and not rows:
        return bulk_landing(s, "compact_rows_kernel", constexprs, in_bulk)
    tile, options = copy_tile(s, row_words, rows), EXPANDING | options
    if not rows:
        tile, options = as_many_as_four(s, tile, options, has_scales)
    constexprs |= watching(s, options["num_warps"])
    return copying(s, "compact_rows_kernel", constexprs | tile | NO_RING, options)


def token_layout_tokens(interpreted: bool) -> int:
    """Tokens of a program of `token_layout`."""
    return 64 if interpreted else 16


def token_layout(topk: int, num_ranks: int, interpreted: bool) -> Plan:
    """Count the destinations of one rank's tokens."""
    constexprs = {
        "TOPK": topk,
        "KP": next_power_of_2(topk),
        "GP": min(next_power_of_2(num_ranks), 8),
        "BLOCK_T": token_layout_tokens(interpreted),
    }
    return Plan("token_layout_kernel", constexprs)


def map_slots_tokens(interpreted: bool) -> int:
    """Tokens of a program of `map_slots`."""
    return 256 if interpreted else 4


def map_slots(s: Shape, has_probs: bool, count_excess: bool) -> Plan:
    """Ids and weights of the experts that a routing map names."""
    constexprs = {
        "KP": s.kp,
        "BLOCK_T": map_slots_tokens(s.interpreted),
        **of_map(s, has_probs, count_excess),
    }
    return Plan("map_slots_kernel", constexprs)


def slab_rows(pack: bool, row_words: int, interpreted: bool) -> Plan:
    """Copy rows of experts to slabs, or back."""
    block = min(next_power_of_2(row_words), 2048)
    rows = 16 if interpreted else min(max(4096 // max(block, 128), 1), 16)
    return Plan("slab_rows_kernel", {"PACK": pack, "ROWS": rows, "BLOCK_H": block if interpreted else max(block, 128)})
