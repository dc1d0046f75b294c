"""Plans of dispatch and combine: routing, splits, rows, sums, barriers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from triton_ep.kernels.device.codes import (
    BARRIER_FLAG,
    EPOCH_BARRIER_ALL,
    EPOCH_BARRIER_NODE,
    LANDING_BF16,
    LANDING_MX,
    LANDING_ROW,
    LANDING_WORDS,
    MX,
    NODE_BARRIER_FLAG,
    WORDS,
    ring_bytes,
)
from triton_ep.runtime.plans.shape import (
    CHUNK,
    ROUTING_TOKENS,
    TOKEN_BYTES,
    Plan,
    Shape,
    next_power_of_2,
    step_chunks,
)

SPLITS_COLUMNS = 8
"""Columns of counts that one program of the splits exchange adds up."""
PACKED_BLOCKS = 512
"""Blocks of 32 that a program of the splits exchange quantises."""
_FEW_RANKS = 8
"""Most ranks that have, with their nodes, a field each in a word of counts (kernels/compute/routing.py)."""
_WORDS_OF_MAP = 64
"""Most words of 8 experts of a token in a routing map that are read at a time."""
NO_MAP = {"WORDS": 0, "WHOLE": False, "HAS_PROBS": False, "COUNT_EXCESS": False}
_SEGMENTS = 4096  # most segments in a program's tile, unless one owner alone has more
_PUSH_REGISTERS = 64
"""Per thread: a push program fits on a multiprocessor next to programs that expand rows, which wait for it."""
_COPY_STAGES = 3
"""Of the loop that copies arrived rows."""
_SPREAD_WORDS = {None: 1024, "mxfp8": 512}
"""Most words of a row that a program on each multiprocessor sends at a time, by the payload: about half a row."""
_RING_BYTES = 46 * 1024
"""Most bytes of shared memory for rows that are copied in bulk: with what the compiler adds, 48 KB, which a kernel may
take without asking."""
SHARED_BESIDE_RING = 2 * 1024
"""Most bytes of shared memory that the compiler adds."""
_LEAST_SLOTS, _MOST_SLOTS = 2, 8
_BYTES_AHEAD = 14 * 1024
"""Bytes on their way per program, as far as these slots allow. With three or six rows of 7168 elements instead of two,
fewer programs lay rows out, and a dispatch is 1 to 4 % slower."""
NO_RING = {"SLOTS": 0, "ROW_BYTES": 16, "SCALE_BYTES": 0}
ONE_ROW = {"ROWS": 1, "BLOCK_H": 512}
"""Tile of kernels that copy rows in bulk, for what else they store."""
SHORT_ROW = 128
"""Most elements of a row that carries gradients of routing weights."""
EXPANDING = {"num_warps": 4, "maxnreg": 128}
"""Warps and registers of kernels that lay out arrived rows: they fit next to the push, for which they wait."""


def of_map(s: Shape, has_probs: bool, count_excess: bool) -> Mapping[str, Any]:
    """Compile-time arguments that belong to a routing map."""
    words = min(next_power_of_2(-(-s.num_experts // 8)), _WORDS_OF_MAP)
    flags = {"HAS_PROBS": has_probs, "COUNT_EXCESS": count_excess}
    return {"WORDS": words, "WHOLE": s.num_experts % 8 == 0, **flags}


def splits(s: Shape, has_scatter: bool, packs: bool = False, given: tuple[bool, bool] | None = None) -> Plan:
    """Count this rank's entries, give them slots, and exchange splits between all ranks.

    packs: quantise rows meanwhile. given: a routing map that has weights, and whose experts without a slot are counted;
    None: ids.
    """
    ranks, experts = next_power_of_2(s.world_size), next_power_of_2(s.experts_per_rank)
    constexprs = {
        "BLOCK_T": ROUTING_TOKENS,
        "CLEARED": min(next_power_of_2(s.num_columns), 512),
        # A larger table of comparisons makes a longer program, and each instruction is fetched for a single use.
        "OTHERS": ROUTING_TOKENS * s.kp if s.interpreted else max(min(2048 // (ROUTING_TOKENS * s.kp), 16), 1),
        "RANKS": ranks if ranks <= _FEW_RANKS else 0,
        "HAS_SCATTER": has_scatter,
        "NETWORK": s.network,
        "EP": experts,
        "OWNERS": max(min(ranks, _SEGMENTS // (ranks * experts)), 1),
        "BLOCK_N": min(max(next_power_of_2(-(-s.max_tokens // ROUTING_TOKENS)), 16), 256),
        "BLOCK_C": SPLITS_COLUMNS,
        "BLOCK": 128 if s.interpreted else min(next_power_of_2(s.row_length), 512),
        "PACKED_BLOCKS": PACKED_BLOCKS if packs else 0,
        **(of_map(s, *given) if given else NO_MAP),
        **s.common("TOPK", "KP", "WP", "LWP", "ENGINES"),
    }
    return Plan("splits_kernel", constexprs)


def place(s: Shape, has_weights: bool, has_scatter: bool) -> Plan:
    """Compute the rows of this rank's entries at their owners."""
    constexprs = {
        "HAS_SCATTER": has_scatter,
        "HAS_WEIGHTS": has_weights,
        "EP": next_power_of_2(s.experts_per_rank),
        "BLOCK_T": ROUTING_TOKENS,
        **s.common("TOPK", "KP", "LWP", "NNP", "SENDERS", "ENGINES"),
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


def ring(s: Shape, row_bytes: int, scale_bytes: int = 0) -> dict[str, int]:
    """Shared memory for rows of so many bytes that are copied in bulk. It has no slots if they are not: because they
    are no multiple of 16 bytes, or two do not fit.

    scale_bytes: of these, bytes of scales.
    """
    slots = min(max(-(-_BYTES_AHEAD // row_bytes), _LEAST_SLOTS), _MOST_SLOTS)
    fits = s.copies_in_bulk and row_bytes % 16 == scale_bytes % 16 == 0 and ring_bytes(slots, row_bytes) <= _RING_BYTES
    return {"SLOTS": slots, "ROW_BYTES": row_bytes, "SCALE_BYTES": scale_bytes} if fits else NO_RING


def bulk_plan(kernel: str, constexprs: Mapping[str, Any], ring: Mapping[str, int]) -> Plan:
    """The plan of a kernel that copies rows in bulk: programs of one warp."""
    shared = ring_bytes(ring["SLOTS"], ring["ROW_BYTES"])
    values = {**constexprs, **ring}
    return Plan(kernel, values, 1, None, shared + SHARED_BESIDE_RING, shared, side_by_side=True)


def bulk_landing(s: Shape, kernel: str, constexprs: Mapping[str, Any], ring: Mapping[str, int]) -> Plan:
    """The plan of a kernel that copies arrived rows in bulk."""
    tile = {**ONE_ROW, "TILES": 1, "STAGES": 1, **watching(s, 1)}
    return bulk_plan(kernel, {**constexprs, **tile}, ring)


def push(s: Shape, payload: int, row_words: int, spread: bool = False, aligned: bool = True) -> Plan:
    """Push rows to the ranks of this node.

    spread: from all multiprocessors, next to programs that lay rows out. Stores that wait for the links hold up those
    of all programs on their multiprocessor, so few are on their way at a time, or rows are copied in bulk, unless a
    tuned entry names rows and warps, which copy through registers.
    aligned: rows begin at an address that is a multiple of 16.
    """
    constexprs = {
        "PAYLOAD": payload,
        "BLOCK_T": ROUTING_TOKENS,
        "STEP_CHUNKS": step_chunks(s.interpreted),
        **s.common("TOPK", "LWP", "SENDERS"),
    }
    rows, options = s.chosen("push")
    in_bulk = ring(s, s.wire_bytes, s.hidden // 32 if payload == MX else 0) if spread and aligned else NO_RING
    if in_bulk["SLOTS"] and not rows:
        return bulk_plan("dispatch_push_kernel", {**constexprs, **ONE_ROW}, in_bulk)
    # Each rank that a token may go to takes registers for an address, and so do pointers to scales.
    most = min(s.topk, s.local_world_size)
    tile = s.tile(row_words, 4096 if payload == WORDS else 2048 if most <= 4 else 1024)
    # Fewer warps move as many short rows, and leave room for programs that lay them out.
    warps = 16 if s.payload is None else 8
    if s.payload is not None and payload == WORDS and not s.interpreted:
        if most <= 2:
            tile["ROWS"] = min(tile["ROWS"], 4)
        else:  # more rows in flight take longer (4 x H200, 20 programs: 428 us with 4 rows of 8 warps, 380 so)
            tile["ROWS"], warps = 1, 16
    if spread:
        # Addresses of several short rows would spill registers.
        words = _SPREAD_WORDS[s.payload]
        tile, warps = s.tile(row_words, words, words) | {"ROWS": 1}, 4
    options = {"num_warps": warps, "maxnreg": _PUSH_REGISTERS} | options
    return Plan("dispatch_push_kernel", constexprs | tile | NO_RING | rows, **options, side_by_side=s.copies_ahead)


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


def expand(
    s: Shape, landing: int, has_weights: bool, keep_copies: bool, row_words: int, keep_rows: bool = False
) -> Plan:
    """Lay out arrived rows expert by expert, converted as `landing` says (kernels/device/codes.py).

    keep_copies: record the output rows of each staging row, which combine needs in some layers. row_words: words of an
    output row. keep_rows: copy the staging rows, too, in LANDING_WORDS.
    """
    constexprs = {
        "LANDING": landing,
        "HAS_WEIGHTS": has_weights,
        "HAS_PADDING": s.alignment > 1,
        "KEEP_COPY_ROWS": keep_copies,
        "KEEP_ROWS": keep_rows,
        **s.common("TOPK", "KP", "LWP", "SENDERS", "ENGINES"),
    }
    rows, chosen = s.chosen("expand")
    in_bulk = landed_ring(s, landing == LANDING_MX) if landing in (LANDING_WORDS, LANDING_MX) else NO_RING
    if in_bulk["SLOTS"] and not rows:
        return bulk_landing(s, "dispatch_expand_kernel", constexprs, in_bulk)
    if landing in (LANDING_ROW, LANDING_BF16):
        # More of such short rows would spill registers; tuned tiles are for rows in wire form.
        tile, options, rows = s.tile(row_words, 2048), EXPANDING, {}
        most = 4 if landing == LANDING_ROW else 2
        tile["ROWS"] = tile["ROWS"] if s.interpreted else min(tile["ROWS"], most)
        tile |= {"TILES": -(-row_words // tile["BLOCK_H"]), "STAGES": 1}
    else:
        most = 1024 if landing == LANDING_WORDS else 2048
        tile, options = copy_tile(s, row_words, rows, most), EXPANDING | chosen
    if not rows:  # tuned tiles stay as they are
        tile, options = as_many_as_four(s, tile, options, landing == LANDING_MX)
    constexprs |= {**tile, **watching(s, options["num_warps"]), **NO_RING}
    return copying(s, "dispatch_expand_kernel", constexprs, options)


def landed_ring(s: Shape, has_scales: bool) -> dict[str, int]:
    """`ring` of rows that are laid out as they arrived: data, then scales, both multiples of 16 bytes."""
    if not has_scales:
        return ring(s, s.payload_bytes)
    return ring(s, s.hidden // 32 * 33, s.hidden // 32) if s.hidden % 512 == 0 else NO_RING


def copy_tile(s: Shape, row_words: int, chosen: Mapping[str, int], most: int = 2048) -> dict[str, int]:
    """Tile of a kernel that copies arrived rows. chosen: from `Shape.chosen`. most: most words of a row in a tile."""
    tile = s.tile(row_words, 1024, 1024 if s.copies_ahead else most)
    if s.copies_ahead and s.payload is not None and not s.interpreted:  # scales of several rows would spill registers
        tile["ROWS"] = 1
    tile |= chosen
    return {**tile, "TILES": -(-row_words // tile["BLOCK_H"]), "STAGES": _COPY_STAGES if s.copies_ahead else 1}


def copying(s: Shape, kernel: str, constexprs: Mapping[str, Any], options: Mapping[str, int]) -> Plan:
    """The plan of a kernel that copies arrived rows with a tile of `copy_tile`."""
    shared = 0 if s.interpreted else bytes_copied_ahead(constexprs)
    return Plan(kernel, constexprs, **options, shared_bytes=shared, side_by_side=s.copies_ahead)


def bytes_copied_ahead(constexprs: Mapping[str, Any]) -> int:
    """Most bytes of shared memory of a program that copies rows, of words of at most 8 bytes, their scales, and the
    lists that say where to; 0 if nothing is loaded ahead."""
    c = constexprs
    return c["STAGES"] * c["TILES"] * c["ROWS"] * c["BLOCK_H"] * 8 * 33 // 32 + 1024 if c["STAGES"] > 1 else 0


def as_many_as_four(
    s: Shape, tile: dict[str, int], options: dict[str, int], has_scales: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options of a program that does the work of four, with several nodes and no budget.

    Programs that lay rows out then wait for programs that take whole multiprocessors, so only one is launched for each
    multiprocessor that is left (ops/tuning.py), and it may use all registers.
    """
    if s.num_nodes == 1 or s.budgeted or s.interpreted:
        return tile, options
    if has_scales:  # which take more registers than 16 warps leave
        return {**tile, "ROWS": min(4 * tile["ROWS"], CHUNK)}, {"num_warps": 8, "maxnreg": 248}
    warps, wide = 4 * options["num_warps"], 2 if tile["TILES"] > 1 else 1
    larger = {"ROWS": min(4 // wide * tile["ROWS"], CHUNK), "BLOCK_H": wide * tile["BLOCK_H"]}
    larger["TILES"] = -(-tile["TILES"] // wide)
    return {**tile, **larger}, {"num_warps": warps, "maxnreg": 2**16 // (32 * warps)}


def watching(s: Shape, num_warps: int) -> dict[str, int]:
    """SOURCES and WATCHED of a kernel that lays rows out: not several but one thread watches each pair of flags."""
    sources, watched = max(next_power_of_2(s.local_world_size), 2), s.watched(num_warps)
    if s.num_nodes == 1 and watched <= s.senders:
        return {"SOURCES": sources, "WATCHED": watched}
    return {"SOURCES": max(sources, watched // s.senders), "WATCHED": 0}


class Summing(NamedTuple):
    """How a kernel sums rows.

    Attributes:
        warps, registers: of a program.
        elements: of a tile of sums, if they have two bytes; other tiles have as many bytes.
        at_once, stages: as in SumTile (kernels/device/payload.py).
        tiles: tiles that are summed at once, unless tuned settings say how many rows are.
    """

    warps: int
    registers: int
    elements: int
    at_once: int
    stages: int
    tiles: int = 1

    def plan(self, s: Shape, kernel: str, constexprs: dict[str, Any]) -> Plan:
        """The plan of combine_{kernel}_kernel: "reduce", "pull" or "partial". constexprs: all others."""
        name = f"combine_{kernel}_kernel"
        if s.interpreted:
            tile = {**s.row_tile(2048), "AT_ONCE": min(self.at_once, 2), "STAGES": self.stages}
            return Plan(name, {**constexprs, **tile}, self.warps, self.registers)
        if s.hidden <= SHORT_ROW:
            # Tuned tiles were not chosen for short rows. A program fits on a multiprocessor next to two programs of the
            # weight-gradient products, which leave 22,000 registers.
            tile = {**s.row_tile(SHORT_ROW), "ROWS": 8, "AT_ONCE": min(self.at_once, 4), "STAGES": 1}
            return Plan(name, {**constexprs, **tile}, 4, 160)
        rows, options = s.chosen(kernel)
        warps = options.get("num_warps", self.warps)
        tile = s.row_tile(self.elements * 2 // TOKEN_BYTES[s.token] // rows.get("ROWS", 1))
        tile = {**tile, "ROWS": min(tile["ROWS"] * self.tiles, CHUNK), **rows}
        values = {**constexprs, **tile, "AT_ONCE": self.at_once, "STAGES": self.stages}
        registers = min(self.registers, 2**16 // (32 * warps))
        return Plan(name, values, warps, registers, bytes_ahead(values, s.token))


def bytes_ahead(constexprs: Mapping[str, Any], token: str) -> int:
    """Most bytes of shared memory of a program that sums rows: rows on their way, and the lists that name them; 0 if
    nothing is copied ahead."""
    c, ahead = constexprs, constexprs["STAGES"] - 1
    tile_bytes = c["AT_ONCE"] * c["ROWS"] * c["BLOCK_H"] * TOKEN_BYTES[token]
    return ahead * tile_bytes + 16 * c["ROWS"] * next_power_of_2(c["TOPK"]) * (ahead + 1) + 1024 if ahead else 0


BESIDE_PRODUCTS = {"reduce": Summing(4, 160, 8192, 2, 1), "pull": Summing(4, 128, 4096, 4, 1)}
"""Programs of which one fits on a multiprocessor next to two of the products that compute gradients of weights in bf16,
or one that adds them to float32 and leaves room. These leave 20,480 registers and 1536 bytes of shared memory, of which
CUDA takes 1024. With top-8 on four ranks a rank adds 2.2 rows per token on average, and then 3.6 sums per token."""

_SLOTS_BESIDE = 32
"""Slots whose values a program next to products gathers at a time: 8 bytes of shared memory each, in Triton 3.6."""


def _beside_products(s: Shape, kernel: str, constexprs: dict[str, Any]) -> Plan:
    # Tuned tiles were not chosen for this.
    return replace(BESIDE_PRODUCTS[kernel].plan(replace(s, tuned=()), kernel, constexprs), side_by_side=True)


def reduce(s: Shape, has_weights: bool, copies: int = 0, of_slots: bool = False, beside: bool = False) -> Plan:
    """Sum expert outputs per token into the buffers of the ranks that add these sums up.

    copies: most rows per token, 1 for compact rows, 0 = top-k.
    of_slots: each row has one value, which goes to a column of its own.
    beside: next to products (`BESIDE_PRODUCTS`).
    """
    most = copies or s.topk
    one_node = s.num_nodes == 1
    if s.budgeted and one_node and s.hidden > SHORT_ROW:
        # Four programs take a multiprocessor. A program that only sends rows takes one.
        summing = Summing(4, 128, 8192, 2, 1) if most > 1 else Summing(16, 128, 8192, 1, 1, 4)
    elif one_node:
        summing = Summing(16, 64, 8192, min(most, 4), 1)  # two programs do
    elif copies == 1:
        summing = Summing(16, 128, 8192, 1, 1)
    else:
        summing = Summing(32, 64, 8192, min(most, 8), 1)  # one program does
    kind = {"HAS_WEIGHTS": has_weights, "TOPK": most, "OF_SLOTS": of_slots, **s.common("WP", "LWP", "MAX_PROGRAMS")}
    plan = _beside_products(s, "reduce", kind) if beside else summing.plan(s, "reduce", kind)
    if not of_slots:
        return plan
    # Each load depends on another one, so many are in flight to hide the latency.
    width = next_power_of_2(s.hidden)
    rows = min(max(_SLOTS_BESIDE // width, 1), CHUNK) if beside and not s.interpreted else CHUNK
    tile = {"ROWS": rows, "BLOCK_H": width, "TILES": 1, "STAGES": 1}
    return replace(plan, constexprs={**plan.constexprs, **tile}, shared_bytes=0)


def enter(s: Shape, beside: bool = False) -> Plan:
    """Wait until no rank of this node reads rows of a dispatch any more. beside: as for `reduce`."""
    return Plan("combine_enter_kernel", s.common("LWP"), side_by_side=beside)


def stage(s: Shape, has_weights: bool, row_words: int) -> Plan:
    """Copy expert outputs to the buffer that the ranks of this node read."""
    common = s.common("WP", "LWP", "MAX_PROGRAMS")
    return Plan("combine_stage_kernel", {"HAS_WEIGHTS": has_weights, **common, **s.tile(row_words)})


def publish(s: Shape) -> Plan:
    """Publish expert outputs that are in place already."""
    return Plan("combine_publish_kernel", s.common("LWP", "MAX_PROGRAMS"))


def begin(s: Shape) -> Plan:
    """Wait until no rank reads the combine buffer, before copies that start in any case."""
    return Plan("combine_begin_kernel", s.common("WP", "LWP", "MAX_PROGRAMS"))


def await_staged(s: Shape) -> Plan:
    """Wait until all ranks of this node have sent their rows."""
    return Plan("combine_await_kernel", s.common("LWP", "MAX_PROGRAMS"))


def free(s: Shape) -> Plan:
    """Wait until no rank reads the combine buffer."""
    return Plan("combine_free_kernel", s.common("WP"))


def _pull(s: Shape, kernel: str, reduced: bool, constexprs: dict[str, Any], whole: bool = False) -> Plan:
    # A list of reduced rows has one per rank, the other one per expert.
    most = min(s.topk, s.local_world_size) if reduced else s.topk
    if s.num_nodes > 1:
        # Loops are short between messages, so nothing is copied ahead. Fewer ranks hold rows of more tokens at once.
        tiles = max(4 // next_power_of_2(most), 1) if reduced else 1
        return Summing(16, 128, 8192, min(most, 4), 1, tiles).plan(s, kernel, constexprs)
    at_once = min(most, 4 if reduced else 8)
    if whole and s.copy_engines:
        # Of rows that copy engines sent, all have arrived. Sums from registers take longer then: 138 us instead of 74,
        # and next to products 264 instead of 205 (2 x H200, 24 multiprocessors).
        return Summing(16, 64, 8192, at_once, 3).plan(s, kernel, constexprs)
    if whole:
        return Summing(32, 64, 8192, at_once, 1).plan(s, kernel, constexprs)
    # Three programs that sum rows of this rank take a multiprocessor, or two next to one that sends sums. What they
    # copy ahead keeps room for others, too (`sums_here` in ops/tuning.py).
    warps, registers, in_flight = (8, 64, 16384) if reduced else (8, 80, 16384) if s.budgeted else (16, 128, 32768)
    elements = in_flight // max(next_power_of_2(at_once), 4)
    summing = Summing(warps, registers, elements, at_once, 3 if at_once > 2 else 5)
    return summing.plan(s, kernel, constexprs)


def _sum(s: Shape, has_weights: bool, reduced: bool) -> dict[str, Any]:
    return {
        "REDUCED": reduced,
        "PARTIAL_DTYPE": s.token if s.enable_local_combine else "fp32",
        "HAS_WEIGHTS": has_weights,
        "NETWORK": s.network,
        **s.common("TOPK", "LWP", "MAX_PROGRAMS", "MAX_CHUNKS", "CHUNK"),
    }


def partial(s: Shape, has_weights: bool, reduced: bool) -> Plan:
    """Sum this node's rows of the tokens of other nodes."""
    return _pull(s, "partial", reduced, _sum(s, has_weights, reduced))


def pull(
    s: Shape, has_weights: bool, reduced: bool, has_bias: bool = False, copies: int = 0, beside: bool = False
) -> Plan:
    """Sum the rows of this rank's tokens, and with `has_bias` the caller's biases. copies, beside: as for `reduce`."""
    more = {**s.common("NNP", "ENGINES"), "BLOCK_T": ROUTING_TOKENS, "HAS_BIAS": has_bias}
    constexprs = _sum(s, has_weights, reduced) | more
    if beside:
        return _beside_products(s, "pull", constexprs)
    return _pull(s, "pull", reduced, constexprs, whole_programs(s, copies))


def whole_programs(s: Shape, copies: int) -> bool:
    """True if a program takes a multiprocessor: within a budget in one node, those that send and add compact rows.

    copies: as for `reduce`. Sums of several rows take less time in small programs.
    """
    return s.budgeted and s.num_nodes == 1 and copies == 1 and s.hidden > SHORT_ROW
