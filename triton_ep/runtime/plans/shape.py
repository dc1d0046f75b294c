"""The sizes that kernels are compiled for, tile shapes, and the type of a plan.

The interpreter pays per operation, so it gets large tiles. GPUs of one architecture share plans: the number of
multiprocessors decides only grids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from triton_ep.kernels.device.codes import (
    COMBINE_BOUNDS,
    DISPATCH_BOUNDS,
    EXPERTS_BOUNDS,
    MOST_WATCHED,
    P2P,
    PARTS,
    ROW_UNIT,
    STEPS,
)

CHUNK = 16
"""Tokens per network message."""
STAGE_PROGRAMS = 256
"""Most programs of the kernels that copy or sum local rows before a combine: more than any GPU has multiprocessors."""
SENDING_PROGRAMS = 128
"""Programs that send rows from all multiprocessors at once: a power of two, because each has a flag."""
_MOST_RANKS_IN_BULK = 8
"""Most ranks of a node whose arrival flags a program of one warp can watch without spilling registers."""
_MOST_RANKS_BESIDE = 16
"""Most ranks of a node whose flags a program next to products can watch, with 32 bytes of shared memory for each rank:
products leave 512 (`BESIDE_PRODUCTS` in exchange.py)."""
OVERLAPPED_TOKENS = 1024
"""With fewer tokens per rank, two streams cost more than they save."""
ROUTING_TOKENS = 16
"""Tokens per routing chunk: chunk tables are [tokens * KP] squared."""
TOKEN_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of the dtypes of rows, by Triton's names."""
_PROGRAM_REGISTERS = {"push": 2**15, "expand": 2**14}
"""With any number of warps, four programs of expand fit on a multiprocessor, and one of push replaces two of them."""


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Plan:
    """A kernel and its compile-time arguments and options.

    Attributes:
        kernel: name.
        constexprs: all of them; dtypes by Triton's names ("fp32").
        num_warps, maxnreg: None: as the kernel declares.
        shared_bytes: upper bound of the shared memory of a program; 0: that of all kernels of the exchange
            (residency.py).
        ring_bytes: of these, bytes that the kernel's assembly declares, which the compiler does not count.
        side_by_side: programs of different kernels share multiprocessors and wait for each other. On a multiprocessor
            whose memory was divided for a program with little shared memory, no program starts that prefers more of
            it. So these prefer as much as there is (4 x H200: dispatches that preferred 58 or 72 % hung).
    """

    kernel: str
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int | None = None
    maxnreg: int | None = None
    shared_bytes: int = 0
    ring_bytes: int = 0
    side_by_side: bool = False

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal plans, and hashable."""
        return self.kernel, self.num_warps, self.maxnreg, self.side_by_side, *self.constexprs.items()


@dataclass(frozen=True)
class Shape:
    """The part of an EPConfig that decides constexprs; fields have the same meaning as there.

    Attributes:
        token: dtype of rows: "bf16", "fp16" or "fp32".
        network: how bytes cross nodes, P2P or NVSHMEM (kernels/device/codes.py).
        tuned: (kernel, rows, warps) of the tuned entry.
        interpreted: for the interpreter.
        budgeted: the layer has a budget of multiprocessors.
        copy_engines: copy engines send the rows of dispatches, and compact rows of combines.
    """

    max_tokens: int
    hidden: int
    topk: int
    num_experts: int
    world_size: int
    local_world_size: int
    token: str = "bf16"
    alignment: int = 1
    num_sm: int = 20
    enable_local_combine: bool = False
    payload: str | None = None
    low_latency: bool = False
    network: int = P2P
    tuned: tuple[tuple[str, int, int], ...] = ()
    interpreted: bool = False
    budgeted: bool = False
    copy_engines: bool = False

    @property
    def experts_per_rank(self) -> int:
        """Experts that each rank owns."""
        return self.num_experts // self.world_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size

    @property
    def kp(self) -> int:
        """Top-k rounded up to a power of two."""
        return next_power_of_2(self.topk)

    @cached_property
    def num_columns(self) -> int:
        """Counts in a splits row: experts, ranks, nodes."""
        return self.num_experts + self.world_size + self.num_nodes

    @property
    def row_length(self) -> int:
        """int32 words of a splits row: counts padded to 4, then 4 words of tail."""
        return -(-self.num_columns // 4) * 4 + 4

    @property
    def copies_ahead(self) -> bool:
        """Arrived rows that are copied unconverted are loaded before they are stored, next to programs that send rows:
        within one node."""
        return self.num_nodes == 1

    @property
    def spreads(self) -> bool:
        """Rows are sent by small programs on all multiprocessors, next to the programs that lay rows out: without a
        budget, with enough tokens to overlap the two, and not to more ranks than programs can watch."""
        return self._watches_many and not self.budgeted

    @property
    def copies_in_bulk(self) -> bool:
        """Rows that are sent by small programs go through shared memory by bulk copies, and so do those that are laid
        out unconverted (kernels/device/bulk.py). Within a budget, the smaller programs of bulk copies that send rows
        take places on more multiprocessors from the kernels beside them; with copy engines there are none."""
        many = self._watches_many and (self.copy_engines or not self.budgeted)
        return many and self.local_world_size <= _MOST_RANKS_IN_BULK

    @property
    def makes_room(self) -> bool:
        """Sums of rows that are combined may run next to products: within one node that is not too large, without a
        budget, if they overlap the kernel that pulls them."""
        overlapped = self.max_tokens >= OVERLAPPED_TOKENS and not self.interpreted
        fits = self.num_nodes == 1 and self.local_world_size <= _MOST_RANKS_BESIDE
        return fits and self.enable_local_combine and not self.budgeted and overlapped

    @property
    def _watches_many(self) -> bool:
        """Enough tokens of one node for many programs that send rows, and not too many for those that watch them."""
        enough = self.num_nodes == 1 and self.max_tokens >= OVERLAPPED_TOKENS and self.most_sending > 0
        return enough and not self.interpreted

    @property
    def senders(self) -> int:
        """Flags per rank that sends rows, at least one for each of its programs: a power of two from 2 on, the same for
        all rows of a layer. Rows of other nodes are forwarded by up to twice `num_sm` programs (ops/tuning.py)."""
        programs = self.num_sm if self.num_nodes == 1 else 2 * self.num_sm
        return next_power_of_2(max(programs, SENDING_PROGRAMS * self.most_sending if self.spreads else 2))

    @property
    def most_sending(self) -> int:
        """How many times SENDING_PROGRAMS may send rows of the layer (ops/tuning.py): twice with two ranks, where a row
        goes to one other rank at most, so fewer rows are on their way (256 programs instead of 128 take 244 -> 231 us
        with 2 x H200, but 505 -> 535 with four); 0: all ranks of the node cannot watch as many."""
        wanted = 2 if self.local_world_size <= 2 else 1
        return min(MOST_WATCHED // (next_power_of_2(self.local_world_size) * SENDING_PROGRAMS), wanted)

    def watched(self, num_warps: int) -> int:
        """Arrival flags of a rank that a program of so many warps reads at a time, a pair per thread; interpreted ones
        read one pair."""
        return 2 if self.interpreted else 64 * num_warps

    @property
    def most_groups(self) -> int:
        """Groups of arrival flags of a rank, if the smallest programs watch them (kernels/device/arrivals.py)."""
        return max(self.senders // self.watched(1), 1)

    @property
    def max_chunks(self) -> int:
        """Flags per node that sends network messages, one for each message: a power of two."""
        return next_power_of_2(-(-self.max_tokens // CHUNK))

    @property
    def max_programs(self) -> int:
        """Flags per rank that stages rows, one for each of its programs: a power of two."""
        return next_power_of_2(STAGE_PROGRAMS)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one row of the token dtype."""
        return self.hidden * TOKEN_BYTES[self.token]

    @property
    def wire_bytes(self) -> int:
        """Bytes of one row in dispatch: unchanged, or e4m3 data, then scales, padded (kernels/device/payload.py)."""
        if self.payload is None:
            return self.payload_bytes
        return -(-(self.hidden + self.hidden // 32) // ROW_UNIT) * ROW_UNIT

    @property
    def scaled(self) -> Shape:
        """The shape for one-byte rows with scales, which travel like MXFP8 rows."""
        return replace(self, payload="mxfp8")

    def common(self, *names: str) -> dict[str, Any]:
        """Constexprs shared by several kernels, by name."""
        values = {
            "TOPK": self.topk,
            "KP": self.kp,
            "WP": next_power_of_2(self.world_size),
            "LWP": next_power_of_2(self.local_world_size),
            "NNP": next_power_of_2(self.num_nodes),
            "MAX_PROGRAMS": self.max_programs,
            "SENDERS": self.senders,
            "MAX_CHUNKS": self.max_chunks,
            "CHUNK": CHUNK,
            "ENGINES": self.copy_engines,
        }
        return {name: values[name] for name in names}

    def tile(self, row_elements: int, elements: int = 4096, most: int = 2048) -> dict[str, int]:
        """ROWS and BLOCK_H of kernels that copy rows of `row_elements` words: about `elements` words at a time, at most
        `most` of a row."""
        return self._tile(row_elements, most, elements)

    def row_tile(self, elements: int) -> dict[str, int]:
        """ROWS, BLOCK_H and TILES of kernels that sum rows, about `elements` elements at a time."""
        tile = self._tile(self.hidden, elements, elements)
        return {**tile, "TILES": -(-self.hidden // tile["BLOCK_H"])}

    def _tile(self, row_elements: int, most: int, elements: int) -> dict[str, int]:
        block = min(next_power_of_2(row_elements), 2048 if self.interpreted else most)
        if self.interpreted:
            return {"ROWS": CHUNK, "BLOCK_H": block}
        block = max(block, 128)
        return {"ROWS": min(max(elements // block, 1), CHUNK), "BLOCK_H": block}

    def chosen(self, kernel: str) -> tuple[dict[str, int], dict[str, int]]:
        """The tuned settings of "push", "expand", "reduce" or "pull": constexprs, and fields of a Plan."""
        for name, rows, warps in self.tuned:
            if name == kernel and not self.interpreted:
                options = {"num_warps": warps}
                if kernel in _PROGRAM_REGISTERS:
                    options["maxnreg"] = min(_PROGRAM_REGISTERS[kernel] // (32 * warps), 255)
                return {"ROWS": rows}, options
        return {}, {}


def sending_in_budget(num_sm: int, budget: int, one_node: bool) -> int:
    """`num_sm` of a layer with a budget of multiprocessors: half of the budget is left for the kernels that wait for
    these programs. One that pushes within a node takes half a multiprocessor, one that sends to other nodes all of it.
    """
    return min(num_sm, budget if one_node else max(budget // 2, 1))


def step_chunks(interpreted: bool) -> int:
    """Least routing chunks in a step of the push. A release costs microseconds, so few tokens take one step."""
    return 1 if interpreted else 16


def shares_of_dispatch(steps: int, one_node: bool) -> tuple[float, float]:
    """Parts of a rank's tokens in the first and in the last of the steps of a dispatch to expert-major rows, at most
    STEPS, as fractions."""
    bounds = EXPERTS_BOUNDS if one_node else DISPATCH_BOUNDS
    return bounds[STEPS // steps] / PARTS, 1 - bounds[(steps - 1) * STEPS // steps] / PARTS


def last_share_of_combine() -> float:
    """Part of the rows in the last of the STEPS steps of a combine, as a fraction."""
    return 1 - COMBINE_BOUNDS[STEPS - 1] / PARTS


def word_type(row_bytes: int, address: int = 0) -> str:
    """The widest integer type whose size divides `row_bytes` and the address."""
    for name, nbytes in (("i64", 8), ("i32", 4), ("i16", 2)):
        if row_bytes % nbytes == 0 and address % nbytes == 0:
            return name
    return "u8"


WORD_BYTES = {"i64": 8, "i32": 4, "i16": 2, "u8": 1}
"""Bytes of the types of `word_type`."""
