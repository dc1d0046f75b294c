"""Plans of dispatch and combine: routing, splits, rows, sums, barriers."""

from __future__ import annotations

from typing import Any

from triton_ep.kernels.device.codes import (
    BARRIER_FLAG,
    EPOCH_BARRIER_ALL,
    EPOCH_BARRIER_NODE,
    LANDING_BF16,
    LANDING_ROW,
    MODE_RCEIL,
    NODE_BARRIER_FLAG,
    WORDS,
)
from triton_ep.runtime.plans.compute import mx_blocks
from triton_ep.runtime.plans.shape import CHUNK, ROUTING_TOKENS, Plan, Shape, next_power_of_2, step_chunks

SPLITS_COLUMNS = 16
"""Columns of a program of the splits exchange that adds counts up."""
_SEGMENTS = 4096  # of a program's tile, at most, unless one owner has more
_PUSH_REGISTERS = 64
"""Of a thread: a program fits beside programs of the kernel that expands rows, which wait for it."""
SHORT_ROW = 128
"""Elements of rows that carry gradients of routing weights, at most."""
EXPANDING = {"num_warps": 4, "maxnreg": 128}
"""Warps and registers of kernels that lay out arrived rows: they fit beside the push, for which they wait."""


def splits(s: Shape, has_scatter: bool) -> Plan:
    """Counts and slots of this rank's entries, and the splits exchange between all ranks."""
    ranks, experts = next_power_of_2(s.world_size), next_power_of_2(s.experts_per_rank)
    constexprs = {
        "BLOCK_T": ROUTING_TOKENS,
        "CLEARED": min(next_power_of_2(s.num_columns), 512),
        # A larger table of comparisons is a longer program, and each instruction is fetched once.
        "OTHERS": ROUTING_TOKENS * s.kp if s.interpreted else min(ROUTING_TOKENS * s.kp, 16),
        "HAS_SCATTER": has_scatter,
        "NETWORK": s.network,
        "EP": experts,
        "OWNERS": max(min(ranks, _SEGMENTS // (ranks * experts)), 1),
        "BLOCK_N": min(max(next_power_of_2(-(-s.max_tokens // ROUTING_TOKENS)), 16), 256),
        "BLOCK_C": SPLITS_COLUMNS,
        "BLOCK": min(next_power_of_2(s.row_length), 512),
        **s.common("TOPK", "KP", "WP", "LWP"),
    }
    return Plan("splits_kernel", constexprs)


def place(s: Shape, has_weights: bool, has_scatter: bool) -> Plan:
    """Rows of this rank's entries at their owners."""
    constexprs = {
        "HAS_SCATTER": has_scatter,
        "HAS_WEIGHTS": has_weights,
        "EP": next_power_of_2(s.experts_per_rank),
        "BLOCK_T": ROUTING_TOKENS,
        **s.common("TOPK", "KP", "LWP"),
    }
    return Plan("routing_slots_kernel", constexprs)


def barrier(s: Shape, intra_node_only: bool) -> Plan:
    """A barrier of all ranks, or of those of this node."""
    constexprs = {
        "EPOCH": EPOCH_BARRIER_NODE if intra_node_only else EPOCH_BARRIER_ALL,
        "FLAG_BUFFER": NODE_BARRIER_FLAG if intra_node_only else BARRIER_FLAG,
        "SAME_NODE_ONLY": intra_node_only,
        "NETWORK": s.network,
        **s.common("WP", "LWP"),
    }
    return Plan("barrier_kernel", constexprs)


def quantize(s: Shape, num_blocks: int) -> Plan:
    """Rows to MXFP8 before they are sent; `num_blocks` of 32."""
    blocks = mx_blocks(num_blocks, s.interpreted)
    return Plan("quantize_rows_kernel", {"MODE": MODE_RCEIL, "E5M2": False, "BLOCKS": blocks})


def push(s: Shape, payload: int, row_words: int) -> Plan:
    """Rows to the ranks of this node."""
    constexprs = {
        "PAYLOAD": payload,
        "BLOCK_T": ROUTING_TOKENS,
        "STEP_CHUNKS": step_chunks(s.interpreted),
        **s.common("TOPK", "LWP", "SENDERS"),
        **s.tile(row_words, 4096 if payload == WORDS else 2048),
    }
    rows, options = s.chosen("push")
    # Pointers to scales take registers as well.
    options = {"num_warps": 16 if payload == WORDS else 8, "maxnreg": _PUSH_REGISTERS} | options
    return Plan("dispatch_push_kernel", constexprs | rows, **options)


def send(s: Shape, payload: int, row_words: int, has_weights: bool) -> Plan:
    """Rows to other nodes."""
    constexprs = {
        "PAYLOAD": payload,
        "HAS_WEIGHTS": has_weights,
        "BLOCK_T": ROUTING_TOKENS,
        "NETWORK": s.network,
        **s.common("TOPK", "KP", "MAX_CHUNKS", "CHUNK"),
        **s.tile(row_words, 8192 if payload == WORDS else 4096),
    }
    return Plan("internode_send_kernel", constexprs)


def forward(s: Shape, has_weights: bool, reduced: bool, row_words: int) -> Plan:
    """Rows of other nodes on to the ranks of this one; `reduced`: combine will pull one row per (token, rank)."""
    constexprs = {
        "HAS_WEIGHTS": has_weights,
        "REDUCED": reduced,
        "STEP_CHUNKS": step_chunks(s.interpreted),
        **s.common("TOPK", "KP", "LWP", "SENDERS", "MAX_CHUNKS", "CHUNK"),
        **s.tile(row_words),
    }
    return Plan("internode_forward_kernel", constexprs)


def expand(s: Shape, landing: int, has_weights: bool, keep_copies: bool, row_words: int) -> Plan:
    """Arrived rows, expert by expert, as `landing` says (kernels/device/codes.py).

    keep_copies: noting where each went, as combine needs it in some layers. row_words: of the output.
    """
    constexprs = {
        "LANDING": landing,
        "HAS_WEIGHTS": has_weights,
        "HAS_PADDING": s.alignment > 1,
        "KEEP_COPY_ROWS": keep_copies,
        **s.common("TOPK", "KP", "SENDERS"),
    }
    if landing in (LANDING_ROW, LANDING_BF16):
        # More rows of short ones would spill registers; what was tuned are rows as they travel.
        tile, options = s.tile(row_words, 2048), EXPANDING
        most = 4 if landing == LANDING_ROW else 2
        tile["ROWS"] = tile["ROWS"] if s.interpreted else min(tile["ROWS"], most)
    else:
        rows, options = s.chosen("expand")
        tile, options = s.tile(row_words, 1024) | rows, EXPANDING | options
    constexprs |= {**tile, "TILES": -(-row_words // tile["BLOCK_H"])}
    constexprs["SOURCES"] = watched_sources(s, options["num_warps"])
    return Plan("dispatch_expand_kernel", constexprs, **options)


def watched_sources(s: Shape, num_warps: int) -> int:
    """SOURCES of the kernel that expands rows: one thread for each flag that it watches, not several."""
    fewest = max(next_power_of_2(s.local_world_size), 2)
    return fewest if s.interpreted else max(fewest, 32 * num_warps // s.senders)


def _short(s: Shape) -> tuple[dict[str, int], dict[str, int]]:
    """Rows and options for short rows, which tuned tiles were not chosen for: a program finds room on a multiprocessor
    beside two of the products for gradients of weights, which leave 22,000 registers."""
    return {} if s.interpreted else {"ROWS": 8}, {"num_warps": 4, "maxnreg": 160}


def _budgeted(s: Shape) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options of kernels that sum rows within a budget: three programs on a multiprocessor in place of one, so
    that some wait for memory while others have their rows."""
    if not s.budgeted or s.interpreted or s.num_nodes > 1 or s.hidden <= SHORT_ROW:
        return {}, {}
    return {"ROWS": 1, "BLOCK_H": min(s.summing_tile()["BLOCK_H"], 4096)}, {"num_warps": 8, "maxnreg": 80}


def reduce(s: Shape, has_weights: bool, copies: int = 0, of_slots: bool = False) -> Plan:
    """Expert outputs summed per token, for the ranks of this node; `copies` at most: 1 of compact rows, 0 = top-k.

    of_slots: they are one value per row, and each has a column of its own.
    """
    common = s.common("WP", "LWP", "MAX_PROGRAMS")
    rows, options = s.chosen("reduce")
    tile, within = _budgeted(s)
    rows, options = rows | tile, options | within
    if s.hidden <= SHORT_ROW:
        rows, options = _short(s)
    elif copies == 1:
        options = {"num_warps": 16} | options  # more would spill registers
    if of_slots:  # a load that waits for another, so as many at once as make up for it
        rows = {"ROWS": CHUNK, "BLOCK_H": next_power_of_2(s.hidden)}
    kind = {"HAS_WEIGHTS": has_weights, "TOPK": copies or s.topk, "OF_SLOTS": of_slots}
    constexprs = {**kind, **common, **s.summing_tile(), **rows}
    return Plan("combine_reduce_kernel", constexprs, **options)


def stage(s: Shape, has_weights: bool, row_words: int) -> Plan:
    """Expert outputs copied to where the ranks of this node read them."""
    common = s.common("WP", "LWP", "MAX_PROGRAMS")
    return Plan("combine_stage_kernel", {"HAS_WEIGHTS": has_weights, **common, **s.tile(row_words)})


def publish(s: Shape) -> Plan:
    """Expert outputs that are in place already."""
    return Plan("combine_publish_kernel", s.common("LWP", "MAX_PROGRAMS"))


def free(s: Shape) -> Plan:
    """Wait until nobody reads the combine buffer."""
    return Plan("combine_free_kernel", s.common("WP"))


def _sum(s: Shape, has_weights: bool, reduced: bool) -> dict[str, Any]:
    tile = s.summing_tile()
    if reduced and not s.interpreted:
        # As many rows on their way as there are with four ranks, by more tokens at a time.
        at_once = max(4 // next_power_of_2(min(s.topk, s.local_world_size)), 1)
        tile["ROWS"] = min(tile["ROWS"] * at_once, CHUNK)
    return {
        "REDUCED": reduced,
        "PARTIAL_DTYPE": s.token if s.enable_local_combine else "fp32",
        "HAS_WEIGHTS": has_weights,
        "NETWORK": s.network,
        **s.common("TOPK", "LWP", "MAX_PROGRAMS", "MAX_CHUNKS", "CHUNK"),
        **tile,
    }


def partial(s: Shape, has_weights: bool, reduced: bool) -> Plan:
    """Sums of this node for the tokens of other nodes."""
    return Plan("combine_partial_kernel", _sum(s, has_weights, reduced))


def pull(s: Shape, has_weights: bool, reduced: bool, has_bias: bool = False) -> Plan:
    """Sums of this rank's tokens, and with `has_bias` of what the caller adds to them."""
    rows, options = s.chosen("pull")
    tile, within = _budgeted(s)
    rows, options = rows | tile, options | within
    if s.hidden <= SHORT_ROW:
        rows, options = _short(s)
    constexprs = {**_sum(s, has_weights, reduced), **s.common("NNP"), "BLOCK_T": ROUTING_TOKENS, **rows}
    constexprs["HAS_BIAS"] = has_bias
    return Plan("combine_pull_kernel", constexprs, **options)
