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
"""Columns of counts that one program of the splits exchange adds up."""
_SEGMENTS = 4096  # most segments in a program's tile, unless one owner alone has more
_PUSH_REGISTERS = 64
"""Per thread: a push program fits on a multiprocessor next to programs that expand rows, which wait for it."""
SHORT_ROW = 128
"""Most elements of a row that carries gradients of routing weights."""
EXPANDING = {"num_warps": 4, "maxnreg": 128}
"""Warps and registers of kernels that lay out arrived rows: they fit next to the push, for which they wait."""


def splits(s: Shape, has_scatter: bool) -> Plan:
    """Count this rank's entries, give them slots, and exchange splits between all ranks."""
    ranks, experts = next_power_of_2(s.world_size), next_power_of_2(s.experts_per_rank)
    constexprs = {
        "BLOCK_T": ROUTING_TOKENS,
        "CLEARED": min(next_power_of_2(s.num_columns), 512),
        # A larger table of comparisons makes a longer program, and each instruction is fetched for a single use.
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
    """Compute the rows of this rank's entries at their owners."""
    constexprs = {
        "HAS_SCATTER": has_scatter,
        "HAS_WEIGHTS": has_weights,
        "EP": next_power_of_2(s.experts_per_rank),
        "BLOCK_T": ROUTING_TOKENS,
        **s.common("TOPK", "KP", "LWP"),
    }
    return Plan("routing_slots_kernel", constexprs)


def barrier(s: Shape, intra_node_only: bool) -> Plan:
    """A barrier of all ranks, or of the ranks of this node."""
    constexprs = {
        "EPOCH": EPOCH_BARRIER_NODE if intra_node_only else EPOCH_BARRIER_ALL,
        "FLAG_BUFFER": NODE_BARRIER_FLAG if intra_node_only else BARRIER_FLAG,
        "SAME_NODE_ONLY": intra_node_only,
        "NETWORK": s.network,
        **s.common("WP", "LWP"),
    }
    return Plan("barrier_kernel", constexprs)


def quantize(s: Shape, num_blocks: int) -> Plan:
    """Quantise rows to MXFP8 before they are sent; `num_blocks` blocks of 32."""
    blocks = mx_blocks(num_blocks, s.interpreted)
    return Plan("quantize_rows_kernel", {"MODE": MODE_RCEIL, "E5M2": False, "BLOCKS": blocks})


def push(s: Shape, payload: int, row_words: int) -> Plan:
    """Push rows to the ranks of this node."""
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
    """Send rows to other nodes."""
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
    """Forward rows of other nodes to the ranks of this node; `reduced`: combine will pull one row per (token, rank)."""
    constexprs = {
        "HAS_WEIGHTS": has_weights,
        "REDUCED": reduced,
        "STEP_CHUNKS": step_chunks(s.interpreted),
        **s.common("TOPK", "KP", "LWP", "SENDERS", "MAX_CHUNKS", "CHUNK"),
        **s.tile(row_words),
    }
    return Plan("internode_forward_kernel", constexprs)


def expand(s: Shape, landing: int, has_weights: bool, keep_copies: bool, row_words: int) -> Plan:
    """Lay out arrived rows expert by expert, converted as `landing` says (kernels/device/codes.py).

    keep_copies: record the output rows of each staging row, which combine needs in some layers. row_words: words of an
    output row.
    """
    constexprs = {
        "LANDING": landing,
        "HAS_WEIGHTS": has_weights,
        "HAS_PADDING": s.alignment > 1,
        "KEEP_COPY_ROWS": keep_copies,
        **s.common("TOPK", "KP", "SENDERS"),
    }
    if landing in (LANDING_ROW, LANDING_BF16):
        # More of such short rows would spill registers; tuned tiles are for rows in wire form.
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
    """SOURCES of the kernel that expands rows, so that not several but one thread watches each flag."""
    fewest = max(next_power_of_2(s.local_world_size), 2)
    return fewest if s.interpreted else max(fewest, 32 * num_warps // s.senders)


def _short(s: Shape) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options for short rows, for which tuned tiles were not chosen: a program fits on a multiprocessor next
    to two programs of the weight-gradient products, which leave 22,000 registers."""
    return {} if s.interpreted else {"ROWS": 8}, {"num_warps": 4, "maxnreg": 160}


def _budgeted(s: Shape) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options of kernels that sum rows within a budget: three programs per multiprocessor instead of one, so
    that some wait for memory while others sum."""
    if not s.budgeted or s.interpreted or s.num_nodes > 1 or s.hidden <= SHORT_ROW:
        return {}, {}
    return {"ROWS": 1, "BLOCK_H": min(s.summing_tile()["BLOCK_H"], 4096)}, {"num_warps": 8, "maxnreg": 80}


def reduce(s: Shape, has_weights: bool, copies: int = 0, of_slots: bool = False) -> Plan:
    """Sum expert outputs per token for the ranks of this node; `copies`: most rows per token, 1 for compact rows,
    0 = top-k.

    of_slots: each row has one value, which goes to a column of its own.
    """
    common = s.common("WP", "LWP", "MAX_PROGRAMS")
    rows, options = s.chosen("reduce")
    tile, within = _budgeted(s)
    rows, options = rows | tile, options | within
    if s.hidden <= SHORT_ROW:
        rows, options = _short(s)
    elif copies == 1:
        options = {"num_warps": 16} | options  # more would spill registers
    if of_slots:  # each load depends on another one, so many are in flight to hide the latency
        rows = {"ROWS": CHUNK, "BLOCK_H": next_power_of_2(s.hidden)}
    kind = {"HAS_WEIGHTS": has_weights, "TOPK": copies or s.topk, "OF_SLOTS": of_slots}
    constexprs = {**kind, **common, **s.summing_tile(), **rows}
    return Plan("combine_reduce_kernel", constexprs, **options)


def stage(s: Shape, has_weights: bool, row_words: int) -> Plan:
    """Copy expert outputs to the buffer that the ranks of this node read."""
    common = s.common("WP", "LWP", "MAX_PROGRAMS")
    return Plan("combine_stage_kernel", {"HAS_WEIGHTS": has_weights, **common, **s.tile(row_words)})


def publish(s: Shape) -> Plan:
    """Publish expert outputs that are in place already."""
    return Plan("combine_publish_kernel", s.common("LWP", "MAX_PROGRAMS"))


def free(s: Shape) -> Plan:
    """Wait until no rank reads the combine buffer."""
    return Plan("combine_free_kernel", s.common("WP"))


def _sum(s: Shape, has_weights: bool, reduced: bool) -> dict[str, Any]:
    tile = s.summing_tile()
    if reduced and not s.interpreted:
        # Take more tokens at a time, to keep as many rows in flight as with four ranks.
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
    """Sum this node's rows of the tokens of other nodes."""
    return Plan("combine_partial_kernel", _sum(s, has_weights, reduced))


def pull(s: Shape, has_weights: bool, reduced: bool, has_bias: bool = False) -> Plan:
    """Sum the rows of this rank's tokens, and with `has_bias` the caller's biases."""
    rows, options = s.chosen("pull")
    tile, within = _budgeted(s)
    rows, options = rows | tile, options | within
    if s.hidden <= SHORT_ROW:
        rows, options = _short(s)
    constexprs = {**_sum(s, has_weights, reduced), **s.common("NNP"), "BLOCK_T": ROUTING_TOKENS, **rows}
    constexprs["HAS_BIAS"] = has_bias
    return Plan("combine_pull_kernel", constexprs, **options)
