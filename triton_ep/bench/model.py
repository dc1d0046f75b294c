"""Predicted times of dispatch and combine, by arithmetic alone: bytes per link, their time, and fixed costs.

The protocol decides the bytes (docs/concepts/protocol.md); a few measured rates turn them into time. Nothing here needs
a GPU. Work that overlaps an exchange is assumed to overlap perfectly, so measured times are longer; the gap is the room
for improvement. Nothing has been measured between nodes: those times are pure prediction.

Letters: W ranks, L of them per node, N nodes, E experts, e per rank, k experts per token, T tokens per rank, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from triton_ep.bench.settings import PAYLOADS
from triton_ep.errors import ConfigError
from triton_ep.runtime.plans.shape import OVERLAPPED_TOKENS, ROW_UNIT, last_share_of_combine, shares_of_dispatch

_CHUNK = 16  # tokens per network message
_STEPS = 8  # most steps of a push or a reduction; the receiver continues after each
_STEP_TOKENS = 256  # fewest tokens in a step of the push


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates in 10^9 bytes per second and times in microseconds; docs/benchmarks/scaling.md gives the source of each.

    Attributes:
        nvlink_gbps: rate out of a GPU to the others of its node, all of them at once. None: 343 on nodes of 8 ranks
            and more, 305 on smaller ones.
        nic_gbps: rate out of a GPU to other nodes; 50 is one port of 400 Gb/s per GPU.
        memory_gbps: bytes read and written by kernels that copy or sum rows within a GPU.
        program_gbps: bytes read by one program alone.
        kernel_us: one more kernel on the critical path: its launch and run, without its rows.
        flags_us: time until all ranks of a node have seen each other's flags.
        network_us: time from a put to its flag at a rank of another node.
        message_us: time for a rank to issue one put to another node.
    """

    nvlink_gbps: float | None = None
    nic_gbps: float = 50.0
    memory_gbps: float = 2900.0
    program_gbps: float = 30.0
    kernel_us: float = 5.6
    flags_us: float = 4.2
    network_us: float = 5.0
    message_us: float = 0.2

    def link(self, ranks_per_node: int) -> float:
        """NVLink rate on nodes of this size."""
        return self.nvlink_gbps or (343.0 if ranks_per_node >= 8 else 305.0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One layer: tokens are per rank, experts over all ranks. `virtual` nodes share one host and its NVLink.

    Raises:
        ConfigError: no layer can have these sizes.
    """

    ranks: int
    ranks_per_node: int
    experts: int
    tokens: int = 4096
    hidden: int = 7168
    topk: int = 8
    alignment: int = 128
    local_combine: bool = True
    virtual: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node", "experts", "tokens", "hidden", "topk", "alignment"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 to {2**31 - 1}.")
        if self.ranks % self.ranks_per_node:
            raise ConfigError(f"{self.ranks} ranks cannot be shared evenly by nodes of {self.ranks_per_node}.")
        if self.experts % self.ranks:
            raise ConfigError(f"{self.experts} experts cannot be shared evenly by {self.ranks} ranks.")
        if self.topk > self.experts:
            raise ConfigError(f"top-{self.topk} exceeds the {self.experts} experts.")

    @property
    def nodes(self) -> int:
        """N."""
        return self.ranks // self.ranks_per_node

    def reach(self, ranks: int) -> float:
        """Probability that a token has an expert on any of these many ranks: 1 - C(E - e n, k) / C(E, k)."""
        others = self.experts - self.experts // self.ranks * ranks
        missed = 1.0
        for i in range(self.topk):  # the ratio of binomials, factor by factor
            missed *= max(others - i, 0) / (self.experts - i)
        return 1.0 - missed

    @property
    def ranks_per_token(self) -> float:
        """Distinct ranks that receive a token, its own rank included."""
        return self.ranks * self.reach(1)

    @property
    def nodes_per_token(self) -> float:
        """Distinct nodes that receive a token, its own node included."""
        return self.nodes * self.reach(self.ranks_per_node)

    @property
    def output_rows(self) -> float:
        """Output rows of a rank on average, including half a tile of padding per expert."""
        return self.tokens * self.topk + self.experts // self.ranks * (self.alignment - 1) / 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a bf16 row."""
        return 2 * self.hidden

    def wire_bytes(self, payload: str) -> int:
        """Bytes of a row in dispatch; "mxfp8" adds a scale per 32 elements, and padding."""
        if payload != "mxfp8":
            return self.row_bytes
        return -(-(self.hidden + self.hidden // 32) // ROW_UNIT) * ROW_UNIT

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial sum between nodes: float32, or bf16 with local combine."""
        return self.row_bytes if self.local_combine else 4 * self.hidden

    def message_bytes(self, payload: str) -> int:
        """Bytes of a row between nodes: its payload, and four tables of k (rounded up to a power of two) int32 each."""
        return -(-self.wire_bytes(payload) // 16) * 16 + 16 * (1 << (self.topk - 1).bit_length())

    @property
    def counts_bytes(self) -> int:
        """Bytes that each rank publishes to each other before rows move: counts per expert, rank and node; a tail."""
        return 4 * (-(-(self.experts + self.ranks + self.nodes) // 4) * 4 + 4)

    @property
    def messages(self) -> int:
        """Puts of rows, or of partial sums, from each rank to other nodes."""
        return (self.nodes - 1) * math.ceil(self.tokens * self.reach(self.ranks_per_node) / _CHUNK)

    def network_buffers(self, payload: str) -> int:
        """Bytes of symmetric memory per rank for messages and partial sums, sent and received."""
        if self.nodes == 1:
            return 0
        partial = -(-self.hidden // 8) * 8 * self.partial_bytes // self.hidden
        return 2 * self.nodes * self.tokens * (self.message_bytes(payload) + partial)


@dataclass(frozen=True)
class Traffic:
    """Payload bytes out of each rank in one call, on average."""

    nvlink: float
    nic: float


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one call, and their parts.

    Attributes:
        us: the whole call.
        fixed_us: kernels, counts of all ranks, flags.
        wire_us: rows on NVLink or NIC, whichever takes longer.
        local_us: rows copied or summed within a GPU, without the part that overlaps the wire.
        traffic: bytes that take `wire_us`.
        limit: the longest part: "NVLink", "NIC", "memory" or "fixed".
    """

    us: float
    fixed_us: float
    wire_us: float
    local_us: float
    traffic: Traffic
    limit: str


def dispatch_traffic(w: Workload, payload: str) -> Traffic:
    """A token goes once to each rank of its node and once to each other node, where one rank forwards it."""
    inside = w.nodes * (w.ranks_per_node - 1) * w.reach(1) * w.tokens * w.wire_bytes(payload)
    across = (w.nodes - 1) * w.reach(w.ranks_per_node) * w.tokens * w.wire_bytes(payload)
    return Traffic(inside, across)


def combine_traffic(w: Workload) -> Traffic:
    """In a node a row per assignment, or (token, rank) with local combine; between nodes a sum per (token, node)."""
    per_token = w.nodes * w.reach(1) if w.local_combine else w.topk / w.ranks_per_node
    inside = per_token * (w.ranks_per_node - 1) * w.tokens * w.row_bytes
    across = (w.nodes - 1) * w.reach(w.ranks_per_node) * w.tokens * w.partial_bytes
    return Traffic(inside, across)


def predict_dispatch(w: Workload, machine: Machine, payload: str = "bf16") -> Prediction:
    """From bf16 rows and expert ids to aligned expert-major rows: routing, quantising, exchange, expansion."""
    _check_payload(payload, w)
    wire_row, far = w.wire_bytes(payload), w.nodes > 1
    fixed = (7 if far else 5) * machine.kernel_us + _counts_us(w, machine)
    if payload == "mxfp8":
        quantise = w.tokens * (w.row_bytes + wire_row) / machine.memory_gbps / 1e3
        fixed = max(fixed, quantise)  # by the kernel that exchanges counts
    traffic = dispatch_traffic(w, payload)
    sent = replace(traffic, nic=traffic.nic * w.message_bytes(payload) / wire_row)  # tables travel with the rows
    expanded = (w.tokens * w.ranks_per_token + w.output_rows) * wire_row
    if w.tokens < OVERLAPPED_TOKENS:
        return _joined(w, machine, fixed, traffic, sent, expanded, _one_by_one)

    def beside(wire: float, local: float) -> float:
        # Rows from other nodes are laid out once all have arrived.
        near = local / w.nodes
        first, last = push_steps(w.tokens, w.nodes)
        return max(wire + last * near, first * wire + near) + local - near

    return _joined(w, machine, fixed, traffic, sent, expanded, beside)


def predict_combine(w: Workload, machine: Machine) -> Prediction:
    """From a bf16 row per assignment to a row per token."""
    far = w.nodes > 1
    fixed = (4 if far else 3) * machine.kernel_us + 2 * machine.flags_us
    if far and not w.virtual:
        fixed += 2 * machine.network_us
    copies = w.tokens * w.topk
    published = w.tokens * w.ranks_per_token if w.local_combine else copies
    local = (copies + published) * w.row_bytes
    if w.local_combine:  # what arrives is summed again
        local += (published + w.tokens) * w.row_bytes
    traffic = combine_traffic(w)
    overlapped = w.local_combine and w.tokens >= OVERLAPPED_TOKENS
    return _joined(w, machine, fixed, traffic, traffic, local, _sent_beside if overlapped else _one_by_one)


def push_steps(tokens: int, nodes: int) -> tuple[float, float]:
    """Fractions of the tokens in the first and in the last step of a push."""
    return shares_of_dispatch(min(max(tokens // _STEP_TOKENS, 1), _STEPS), nodes == 1)


def _sent_beside(wire: float, local: float) -> float:
    """Sums are sent while others are computed, in steps; those of the last step are summed when they have arrived."""
    return max(wire, local) + last_share_of_combine() * local


def _one_by_one(wire: float, local: float) -> float:
    return wire + local


def _counts_us(w: Workload, machine: Machine) -> float:
    """Every rank publishes its counts to all ranks and waits for theirs; one program reads all of them."""
    near, far = w.ranks_per_node - 1, w.ranks - w.ranks_per_node
    posted = machine.flags_us + near * w.counts_bytes / machine.link(w.ranks_per_node) / 1e3
    if far and not w.virtual:
        across = max(far * w.counts_bytes / machine.nic_gbps / 1e3, far * machine.message_us)
        posted = max(posted, machine.network_us + across)
    return posted + w.ranks * w.counts_bytes / machine.program_gbps / 1e3


def _joined(
    w: Workload,
    machine: Machine,
    fixed: float,
    traffic: Traffic,
    sent: Traffic,
    local_bytes: float,
    join: Callable[[float, float], float],
) -> Prediction:
    link = machine.link(w.ranks) if w.virtual else machine.link(w.ranks_per_node)
    nvlink = sent.nvlink / link / 1e3
    nic = 0.0
    if w.virtual:
        nvlink += sent.nic / link / 1e3
    elif w.nodes > 1:
        nic = max(sent.nic / machine.nic_gbps / 1e3, w.messages * machine.message_us)
    wire = max(nvlink, nic)
    local = local_bytes / machine.memory_gbps / 1e3
    both = join(wire, local)
    parts = {"NVLink": nvlink, "NIC": nic, "memory": local, "fixed": fixed}
    return Prediction(fixed + both, fixed, wire, both - wire, traffic, max(parts, key=lambda name: parts[name]))


def _check_payload(payload: str, w: Workload) -> None:
    if payload not in PAYLOADS:
        raise ConfigError(f"payload {payload!r} is none of {', '.join(PAYLOADS)}.")
    if payload == "mxfp8" and w.hidden % 32:
        raise ConfigError(f"payload mxfp8 needs a multiple of 32 as hidden, it is {w.hidden}.")
