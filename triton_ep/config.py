"""Configuration of one expert-parallel layer, validated once.

`read_environment` is re-exported: environment variables are read in triton_ep/runtime/environment.py only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch

from triton_ep.errors import ConfigError
from triton_ep.kernels.device.codes import P2P
from triton_ep.runtime.environment import Environment, as_integer, read_environment
from triton_ep.runtime.plans.shape import Shape, sending_in_budget
from triton_ep.runtime.tuned.table import KERNELS, TunedEntry

__all__ = ["MOST_ROWS", "EPConfig", "Environment", "as_integer", "read_environment"]

TOKEN_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_SHAPE = [field.name for field in fields(Shape) if field.name not in ("token", "network", "tuned", "interpreted")]
_POSITIVE = ("max_tokens", "hidden", "topk", "num_experts", "world_size", "local_world_size", "alignment", "num_sm")

# Each program scans the ids of all tokens of its rank and counts in half a word; ranks are bits of a word.
LOW_LATENCY_MOST = {"max_tokens": 1024, "num_experts": 2048, "world_size": 32}
_LOW_LATENCY_MOST_ENTRIES = 2**15 - 1

MOST_ROWS = 2**31 - 1
"""Most rows that a rank can receive: kernels number them in int32."""


@dataclass(frozen=True)
class Topology:
    """Position of one rank among `world_size` ranks on nodes of `local_world_size` ranks each.

    Ranks of a group are numbered node by node: node n has the ranks [n * local_world_size, (n + 1) * local_world_size).
    """

    rank: int
    world_size: int
    local_world_size: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size

    @property
    def node(self) -> int:
        """Node of this rank."""
        return self.rank // self.local_world_size

    @property
    def local_rank(self) -> int:
        """Index of this rank on its node."""
        return self.rank % self.local_world_size

    @property
    def first_rank(self) -> int:
        """Lowest rank of this node."""
        return self.node * self.local_world_size

    def counterpart(self, node: int) -> int:
        """Rank of `node` with the same local rank as this one; network traffic with that node goes through it."""
        return node * self.local_world_size + self.local_rank


@dataclass(frozen=True)
class EPConfig:
    """Sizes and choices that all ranks of a layer share, and the rank of this process.

    Attributes:
        max_tokens: most tokens this rank passes to one dispatch.
        hidden: elements per row.
        topk: experts per token.
        num_experts: experts over all ranks; a multiple of `world_size`.
        rank: rank in the layer's group.
        world_size: ranks of the layer's group.
        local_world_size: ranks per node; divides `world_size`.
        token_dtype: bfloat16, float16 or float32.
        weight_dtype: float32.
        offset_dtype: dtype of counts and offsets, int32.
        alignment: every expert's segment of received rows starts at a multiple of this many rows.
        recv_capacity: None = exact (the host waits for the row count, outputs have that size);
            n = static (n output rows, no host synchronisation, overflow flagged on the device).
        num_sm: programs of the communication kernels; at most `sm_budget`, or half of it with several nodes. Within one
            node and without a budget, kernels that sum rows, or push rows while others are laid out, use all
            multiprocessors instead.
        sm_budget: multiprocessors of the exchange; None: kernels that lay out and sum rows use all free ones.
        enable_local_combine: sum rows of a token on the expert's rank before they cross a link.
        timeout_s: bound of every wait, in seconds.
        payload: how rows travel in dispatch: None = as they are, "mxfp8" = e4m3 with one e8m0 scale per 32 values.
        low_latency: fewer launches for few tokens; static, one node, at most 1024 tokens, 2048 experts, 32 ranks.
        shared_staging: received rows and the sums that combine publishes are staged in the same memory, one after the
            other; with `enable_local_combine` only.
        copy_engines: copy engines send the rows of dispatches, all rows of a rank to each other rank, and those of
            combines of compact rows whose counts the host has read; one node, no low latency, no shared staging.
        tuned: entry of a tuned table with kernel parameters for a GPU; None: the built-in ones. Does not set `num_sm`.

    Raises:
        ConfigError: naming the field, its value and what would fit.
    """

    max_tokens: int
    hidden: int
    topk: int
    num_experts: int
    rank: int
    world_size: int
    local_world_size: int
    token_dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32
    offset_dtype: torch.dtype = torch.int32
    alignment: int = 1
    recv_capacity: int | None = None
    num_sm: int = 20
    enable_local_combine: bool = False
    timeout_s: float = 30.0
    payload: str | None = None
    low_latency: bool = False
    tuned: TunedEntry | None = None
    sm_budget: int | None = None
    shared_staging: bool = False
    copy_engines: bool = False

    def __post_init__(self) -> None:
        for name in (*_POSITIVE, "rank"):
            least = 0 if name == "rank" else 1
            object.__setattr__(self, name, as_integer(f"EPConfig.{name}", getattr(self, name), least))
        for name in ("enable_local_combine", "low_latency", "shared_staging", "copy_engines"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"EPConfig.{name} must be True or False, got {getattr(self, name)!r}.")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"EPConfig.rank is {self.rank}, but the group has ranks 0 to {self.world_size - 1}.")
        if self.world_size % self.local_world_size:
            raise ConfigError(
                f"EPConfig.local_world_size {self.local_world_size} does not divide world_size {self.world_size}: "
                "every node must have the same number of ranks."
            )
        if self.num_experts % self.world_size:
            raise ConfigError(
                f"EPConfig.num_experts {self.num_experts} is not a multiple of world_size {self.world_size}. "
                f"Pad the experts to {-(-self.num_experts // self.world_size) * self.world_size}."
            )
        if self.topk > self.num_experts:
            raise ConfigError(f"EPConfig.topk {self.topk} exceeds num_experts {self.num_experts}.")
        if self.topk > 32:
            raise ConfigError(f"EPConfig.topk {self.topk} exceeds 32, the most that the kernels unroll.")
        if self.num_sm > 1024:
            raise ConfigError(f"EPConfig.num_sm {self.num_sm} exceeds 1024.")
        if self.sm_budget is not None:
            self._take_budget(as_integer("EPConfig.sm_budget", self.sm_budget, 1))
        if not isinstance(self.token_dtype, torch.dtype) or self.token_dtype not in TOKEN_DTYPES:
            raise ConfigError(
                f"EPConfig.token_dtype {self.token_dtype!r} is none of {tuple(TOKEN_DTYPES)}. For quantised rows pass "
                'one of them, which combine takes, and payload="mxfp8".'
            )
        if self.weight_dtype is not torch.float32:
            raise ConfigError(f"EPConfig.weight_dtype {self.weight_dtype!r} is not torch.float32; convert the weights.")
        if self.offset_dtype is not torch.int32:
            raise ConfigError(f"EPConfig.offset_dtype {self.offset_dtype!r} is not torch.int32; leave it out.")
        if self.recv_capacity is not None:
            rows = as_integer("capacity (None for exact outputs, or a number of rows)", self.recv_capacity)
            object.__setattr__(self, "recv_capacity", rows)
        self._check_rows()
        if not isinstance(self.payload, str | None) or self.payload not in (None, "mxfp8"):
            raise ConfigError(f'EPConfig.payload is {self.payload!r}; rows travel as they are (None) or as "mxfp8".')
        if self.payload and self.hidden % 32:
            raise ConfigError(f"EPConfig.hidden {self.hidden} is not a multiple of 32, the block of an MXFP8 scale.")
        if self.tuned is not None and not isinstance(self.tuned, TunedEntry):
            raise ConfigError(f"EPConfig.tuned must be a TunedEntry or None, got {type(self.tuned).__name__}.")
        if self.low_latency:
            self._check_low_latency()
        if self.shared_staging and (self.low_latency or not self.enable_local_combine):
            raise ConfigError(
                "shared_staging=True needs enable_local_combine=True and low_latency=False: other layers stage rows "
                f"elsewhere, or many more. Got {self.enable_local_combine} and {self.low_latency}."
            )
        if self.copy_engines and (not self.is_intra_node or self.low_latency or self.shared_staging):
            raise ConfigError(
                "copy_engines=True needs all ranks on one node, low_latency=False and shared_staging=False. Got "
                f"local_world_size {self.local_world_size} of {self.world_size}, {self.low_latency} and "
                f"{self.shared_staging}."
            )
        limit_s = self.timeout_s
        if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s <= 2000:
            raise ConfigError(f"EPConfig.timeout_s must be above 0 and at most 2000 seconds, got {self.timeout_s!r}.")

    def _check_rows(self) -> None:
        """Raise ConfigError if a rank could receive more rows than kernels can number."""
        real = self.world_size * self.max_tokens * self.topk
        padding = self.num_experts_per_rank * (self.alignment - 1)
        if real + padding > MOST_ROWS:
            raise ConfigError(
                f"a rank could receive {real} rows and {padding} rows of padding, and at most {MOST_ROWS} can be "
                f"numbered. Lower EPConfig.max_tokens {self.max_tokens} or EPConfig.alignment {self.alignment}."
            )
        if self.recv_capacity is not None and self.recv_capacity > MOST_ROWS:
            raise ConfigError(f"capacity {self.recv_capacity} exceeds {MOST_ROWS}, the most rows that are numbered.")

    def _take_budget(self, budget: int) -> None:
        """Keep the budget, and limit `num_sm` by it."""
        if self.low_latency:
            raise ConfigError(
                f"sm_budget={budget} and low_latency=True do not go together: a program per token is short, and no "
                "number of multiprocessors limits them. Leave sm_budget out."
            )
        object.__setattr__(self, "sm_budget", budget)
        object.__setattr__(self, "num_sm", sending_in_budget(self.num_sm, budget, self.is_intra_node))

    @property
    def budgeted(self) -> bool:
        """Whether there is a budget of multiprocessors."""
        return self.sm_budget is not None

    @property
    def fits_low_latency(self) -> bool:
        """Whether a layer with low_latency=True accepts these sizes, given a static capacity."""
        fits = all(getattr(self, name) <= most for name, most in LOW_LATENCY_MOST.items())
        fits = fits and self.max_tokens * self.topk <= _LOW_LATENCY_MOST_ENTRIES
        return self.is_intra_node and fits

    def _check_low_latency(self) -> None:
        if self.recv_capacity is None:
            raise ConfigError(
                "low_latency=True needs a static capacity, got capacity=None: nobody waits for the number of rows. "
                f"At most {self.world_size * self.max_tokens * self.topk} rows and their padding arrive on a rank."
            )
        if not self.is_intra_node:
            raise ConfigError(
                f"low_latency=True works inside one node, but local_world_size is {self.local_world_size} and "
                f"world_size {self.world_size}. Make a layer per node, or pass low_latency=False."
            )
        for name, most in LOW_LATENCY_MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(
                    f"low_latency=True takes {name} up to {most}, got {getattr(self, name)}. Pass low_latency=False."
                )
        if self.max_tokens * self.topk > _LOW_LATENCY_MOST_ENTRIES:
            raise ConfigError(
                f"low_latency=True takes max_tokens * topk up to {_LOW_LATENCY_MOST_ENTRIES}, got {self.max_tokens} * "
                f"{self.topk}. Pass low_latency=False."
            )

    @cached_property
    def num_experts_per_rank(self) -> int:
        """Experts that each rank owns."""
        return self.num_experts // self.world_size

    @cached_property
    def is_intra_node(self) -> bool:
        """True if all ranks are on one node."""
        return self.world_size == self.local_world_size

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size

    @property
    def topology(self) -> Topology:
        """Position of this rank."""
        return Topology(self.rank, self.world_size, self.local_world_size)

    def shape(self, network: int = P2P, interpreted: bool = False) -> Shape:
        """The sizes that kernels are compiled for; `network` is P2P or NVSHMEM (kernels/device/codes.py)."""
        choices = [] if self.tuned is None else [(name, self.tuned.kernel(name)) for name in KERNELS]
        return Shape(
            **{name: getattr(self, name) for name in _SHAPE},
            token=TOKEN_DTYPES[self.token_dtype],
            network=network,
            tuned=tuple((name, choice.rows, choice.warps) for name, choice in choices if choice is not None),
            interpreted=interpreted,
        )

    @property
    def partial_dtype(self) -> torch.dtype:
        """Dtype in which partial sums cross the network.

        float32 by default, so that the whole combine rounds once. With `enable_local_combine` it is the token
        dtype, half the bytes: the partial sums of ranks and of nodes are then rounded as well.
        """
        return self.token_dtype if self.enable_local_combine else torch.float32
