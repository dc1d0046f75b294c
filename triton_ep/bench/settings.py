"""Settings of a benchmark run: shapes, choices to sweep, and the cases that follow from them.

Imports nothing heavy: the command line imports it before deciding how kernels run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from triton_ep.errors import ConfigError
from triton_ep.runtime.environment import read_environment

COMMANDS = (
    "dispatch",
    "combine",
    "roundtrip",
    "low-latency",
    "beside-gemm",
    "host",
    "barrier",
    "quantise",
    "moe-layer",
)
COMPACT = "triton_ep_compact"
"""The layer's compact rows: one per token and rank, not permuted."""
OF_LAYER = ("triton_ep", COMPACT)
PROVIDERS = (*OF_LAYER, "nccl", "nccl_dedup", "vdev", "deep_ep")
MOE_PROVIDERS = ("triton_ep", "nccl", "gemm-only", "deep_ep")
PAYLOADS = ("bf16", "mxfp8")
PRECISIONS = ("default", "fast", "exact")
CAPACITIES = ("exact", "static")
MODELS = {
    "deepseek-v3": {"hidden": 7168, "topk": 8, "experts": 256, "ffn": 2048},
    "qwen3-235b": {"hidden": 4096, "topk": 8, "experts": 128, "ffn": 1536},
    "mixtral": {"hidden": 4096, "topk": 2, "experts": 8, "ffn": 14336},
    "gpt-oss": {"hidden": 2880, "topk": 4, "experts": 128, "ffn": 2880},
}
SMALL = {"tokens": 32, "hidden": 64, "topk": 2, "experts": 8, "ffn": 64}
"""Default shape of a run in the interpreter."""
PAIRS_PER_GRAPH = 10
BARRIERS_PER_CALL = 10
PRODUCTS_BESIDE = 8
TUNED = -1
"""In place of a number of programs: the layer chooses, from the tuned tables or by its formula."""
_MOST = 2**31 - 1  # largest size or seed
_INPUTS = 4
_INPUTS_INTERPRETED = 2
_OPS = {
    "dispatch": ("dispatch",),
    "combine": ("combine",),
    "roundtrip": ("dispatch", "combine", "roundtrip"),
    "low-latency": ("low_latency",),
    "beside-gemm": ("dispatch_beside", "combine_beside", "roundtrip_beside"),
    "host": ("dispatch_host", "combine_host"),
    "barrier": ("barrier",),
    "quantise": ("quantise",),
    "moe-layer": ("moe_layer_fwd",),
}


@dataclass(frozen=True)
class Shape:
    """Tokens per rank, elements per row, experts per token, experts over all ranks, width of an expert."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    ffn: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens, hidden {self.hidden}, top-{self.topk} of {self.experts}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run; `check` validates it.

    Attributes:
        command: one of COMMANDS.
        interpreting: kernels are interpreted, on CPU ranks.
        ranks: ranks of the whole job.
        local_world_size: ranks per node; None: the ranks of a host.
        routing: "uniform", "zipf:S", "one-hot" or "file:PATH".
        capacities: "exact" or "static", or both for `moe-layer`.
        alignment: rows to which the segment of an expert is aligned.
        graph: the layer's calls are captured in a CUDA graph.
        backward: `moe-layer` measures a training step as well.
        refresh_weights: `moe-layer` also measures both with weights that change before each call.
        main_grad: `moe-layer` also measures a training step that adds gradients of weights to float32.
        precisions: precisions of products of MXFP8 rows in `moe-layer`.
        few_tokens: `host` measures a low-latency layer.
        sm_budget: budget of the layer; None: no budget.
        copy_engines: copy engines send the rows of the layer.
        decode: `moe-layer` measures a forward pass of few tokens over a low-latency exchange.
        csv, plot, timeline: files to write; None: none.
    """

    command: str
    interpreting: bool
    ranks: int
    local_world_size: int | None
    shapes: tuple[Shape, ...]
    routing: str
    payloads: tuple[str, ...]
    num_sm: tuple[int, ...]
    capacities: tuple[str, ...]
    alignment: int
    graph: bool
    local_combine: bool
    backward: bool
    refresh_weights: bool
    precisions: tuple[str, ...]
    decode: bool
    iters: int
    warmup: int
    providers: tuple[str, ...]
    seed: int
    commit: str
    csv: str | None
    json: bool
    stages: bool
    plot: str | None
    timeline: str | None
    main_grad: bool = False
    few_tokens: bool = False
    sm_budget: int | None = None
    copy_engines: bool = False

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that get a row, in order."""
        if self.decode:
            return ("moe_layer_decode",)
        ops = _OPS[self.command] + (("moe_layer_step",) if self.backward else ())
        refreshed = tuple(f"{op}_refresh" for op in ops if self.refresh_weights)
        return ops + refreshed + (("moe_layer_step_main_grad",) if self.main_grad else ())

    @property
    def capacity(self) -> str:
        """The first of `capacities`; the only one except in `moe-layer`."""
        return self.capacities[0]

    @property
    def inputs(self) -> int:
        """Number of inputs that the calls cycle through, each with rows and a routing of its own."""
        if self.interpreting:
            return _INPUTS_INTERPRETED
        return PAIRS_PER_GRAPH if self.low_latency else _INPUTS

    def cases(self) -> list[Case]:
        """The cases to measure, in order."""
        found = []
        for shape in self.shapes:
            for payload in self.payloads:
                for provider in self.providers:
                    if payload not in payloads_of(provider, self.command):
                        continue
                    counts = self.num_sm if self._uses_num_sm(provider) else (0,)
                    if provider == "deep_ep" and self._uses_num_sm(provider):
                        counts = tuple(count for count in counts if count != TUNED)
                    found += [
                        Case(self, shape, provider, payload, num_sm, capacity, precision)
                        for num_sm in counts
                        for capacity in (self.capacities if provider == "triton_ep" else self.capacities[:1])
                        for precision in (self.precisions if payload == "mxfp8" else PRECISIONS[:1])
                    ]
        return found

    @property
    def routed(self) -> bool:
        """Whether the command sends tokens to experts."""
        return self.command not in ("barrier", "quantise")

    @property
    def low_latency(self) -> bool:
        """Whether the layer uses its low-latency path."""
        return self.command == "low-latency" or self.decode or self.few_tokens

    def _uses_num_sm(self, provider: str) -> bool:
        if provider == "deep_ep":
            return self.decode or not self.low_latency
        return provider in OF_LAYER and not self.low_latency and self.routed

    def check(self) -> None:
        """Raise ConfigError, naming the option or the shape, if the run cannot work. Reads no file."""
        check_routing(self.routing, self.seed)
        if self.warmup < 0:
            raise ConfigError(f"--warmup is {self.warmup}; 0 calls or more are needed.")
        if self.sm_budget is not None and (self.sm_budget < 1 or self.low_latency):
            raise ConfigError(f"--sm-budget is {self.sm_budget}; at least 1 is needed, and no low latency.")
        for name in ("ranks", "iters", "alignment"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}; at least 1 is needed.")
        per_node = self.local_world_size
        if per_node is not None and (per_node < 1 or self.ranks % per_node):
            raise ConfigError(f"{self.ranks} ranks cannot be shared evenly by nodes of {per_node}.")
        for shape in self.shapes:
            sizes = (shape.tokens, shape.hidden, shape.topk, shape.experts, shape.ffn)
            if min(sizes) < 1 or max(sizes) > _MOST:
                raise ConfigError(f"every size of a shape must be at least 1 and at most {_MOST}: {shape}.")
            if shape.experts % self.ranks and self.routed:
                raise ConfigError(f"{shape.experts} experts cannot be shared evenly by {self.ranks} ranks.")
            if shape.topk > shape.experts:
                raise ConfigError(f"--topk {shape.topk} exceeds the {shape.experts} experts.")
            if "mxfp8" in self.payloads and shape.hidden % 32:
                raise ConfigError(f"--payload mxfp8 needs a multiple of 32 as --hidden, it is {shape.hidden}.")
        if len(self.capacities) > 1 and self.command != "moe-layer":
            raise ConfigError("several --capacity are for moe-layer; choose exact or static.")
        if COMPACT in self.providers and (self.low_latency or not self.routed):
            raise ConfigError(f"{COMPACT} sends rows as dispatch_compact does; {self.command} has no such rows.")
        if self.low_latency and self.capacities != ("static",):
            raise ConfigError("low latency needs --capacity static.")
        if self.decode and (self.backward or self.refresh_weights or self.main_grad):
            raise ConfigError("--low-latency measures decoding, which has no backward pass and no changed weights.")
        if self.graph and self.capacities != ("static",):
            raise ConfigError("--graph needs --capacity static: an exact dispatch waits on the host.")
        if self.graph and self.refresh_weights:
            raise ConfigError("--graph and --refresh-weights do not go together: a replay does not look at weights.")
        if self.graph and self.command in ("beside-gemm", "host"):
            raise ConfigError(f"--graph measures calls by themselves; {self.command} launches them anew. Leave it out.")
        if self.graph and self.interpreting:
            raise ConfigError("--graph needs GPUs: there are no CUDA graphs in the interpreter.")
        if self.plot and self.command in ("beside-gemm", "host", "barrier", "quantise", "moe-layer"):
            has = "--csv" if self.command == "host" else "--csv and --timeline"
            raise ConfigError(f"--plot draws exchanges; {self.command} has {has}.")
        if self.timeline and self.command == "host":
            raise ConfigError("--timeline draws kernels; host measures the host. Pass --stages, which names functions.")
        if self.command == "moe-layer" and (self.alignment != 128 or not self.local_combine):
            raise ConfigError("moe-layer measures triton_ep.nn.MoE, which aligns rows to 128 and combines locally.")
        if self.backward and self.command != "moe-layer":
            raise ConfigError("--backward is an option of moe-layer.")
        if self.routed and "triton_ep" in self.providers:
            self._check_layers()

    def _check_layers(self) -> None:
        """Raise ConfigError if a layer of the run would be refused: by the limits of the layer itself."""
        from triton_ep.config import EPConfig  # imports torch

        for case in self.cases():
            if case.provider != "triton_ep":
                continue
            shape, static = case.shape, case.capacity == "static"
            try:
                EPConfig(
                    shape.tokens,
                    shape.hidden,
                    shape.topk,
                    shape.experts,
                    rank=0,
                    world_size=self.ranks,
                    # A low-latency layer over several nodes is a row with a reason to skip it.
                    local_world_size=self.ranks if self.low_latency else self.local_world_size or self.ranks,
                    alignment=self.alignment,
                    recv_capacity=shape.tokens * shape.topk if static else None,
                    num_sm=max(case.num_sm, 1),
                    sm_budget=self.sm_budget,
                    enable_local_combine=self.local_combine,
                    payload="mxfp8" if case.payload == "mxfp8" else None,
                    low_latency=self.low_latency,
                    copy_engines=self.copy_engines,
                )
            except ConfigError as error:
                raise ConfigError(
                    f"{self.command} cannot create a layer for {shape} over {self.ranks} ranks: {error} Pass other "
                    "sizes, or another command."
                ) from error


@dataclass(frozen=True)
class Case:
    """One provider with one choice of options; num_sm is TUNED, or 0 if the provider has no such option."""

    settings: Settings
    shape: Shape
    provider: str
    payload: str
    num_sm: int
    capacity: str
    precision: str = PRECISIONS[0]

    @property
    def mode(self) -> str:
        """The column `mode`: how kernels run, capacity, programs, and options that differ from the default."""
        s, how = self.settings, origin_of_kernels(self.settings.interpreting)
        if s.command in ("barrier", "quantise"):
            return how if self.provider == "triton_ep" else "torch"
        if s.command == "moe-layer":
            return self._moe_mode()
        aligned = [f"a{s.alignment}"] if s.alignment > 1 else []
        if self.provider == "deep_ep":
            return self._deep_ep_mode()
        budget = [] if s.sm_budget is None else [f"budget{s.sm_budget}"]
        budget += ["engines"] if s.copy_engines else []
        programs = "tuned" if self.num_sm == TUNED else f"sm{self.num_sm}"
        if self.provider == COMPACT:
            fp8 = ["quantised-before", "fp8"] if self.payload == "mxfp8" else []
            parts = [how, self.capacity, programs, *budget, "unpermuted", *fp8]
            return "-".join([*parts, "graph"] if s.graph else parts)
        if self.provider != "triton_ep":
            return "-".join(["torch-exact", *aligned])
        parts = [how, self.capacity, "ll" if s.low_latency else programs, *budget]
        parts += [*(["local"] if s.local_combine else []), *aligned]
        return "-".join([*parts, "graph"] if s.graph else parts)

    def _deep_ep_mode(self) -> str:
        s, fp8 = self.settings, ["fp8"] if self.payload == "mxfp8" else []
        if s.low_latency:
            return "-".join(["ll-slabs", *fp8, *(["graph"] if s.graph else [])])
        waits = "exact" if self.capacity == "exact" else "nosync"
        return "-".join([waits, f"sm{self.num_sm}", "unpermuted", *(["quantised-before"] if fp8 else []), *fp8])

    def _moe_mode(self) -> str:
        s, width = self.settings, f"ffn{self.shape.ffn}"
        if self.provider == "deep_ep":
            return f"exact-sm{self.num_sm}-{width}"
        if self.provider != "triton_ep":
            return f"torch-exact-{width}"
        programs = "ll" if s.decode else "tuned" if self.num_sm == TUNED else f"sm{self.num_sm}"
        # Modules for decoding do not align rows.
        parts = [
            origin_of_kernels(s.interpreting),
            self.capacity,
            programs,
            "local",
            *([] if s.decode else [f"a{s.alignment}"]),
            width,
        ]
        parts += [self.precision] if self.precision != PRECISIONS[0] else []
        return "-".join([*parts, "graph"] if s.graph else parts)

    @property
    def provider_here(self) -> str:
        """The provider's name in rows: on the CPU the collectives are gloo's."""
        return self.provider.replace("nccl", "gloo") if self.settings.interpreting else self.provider

    def columns(self, op: str, ranks: int, ranks_per_node: int) -> dict[str, object]:
        """The columns of a row that describe the measured call."""
        s, shape = self.settings, self.shape
        found: dict[str, object] = {"op": op, "provider": self.provider_here, "mode": self.mode}
        found |= {"nodes": ranks // ranks_per_node, "ranks": ranks, "iters": s.iters}
        if s.command == "barrier":
            return found
        found |= {"payload": self.payload, "tokens": shape.tokens, "hidden": shape.hidden}
        if s.command == "quantise":
            return found
        seeded = s.routing.startswith(("uniform", "zipf"))
        return found | {
            "topk": shape.topk,
            "experts": shape.experts,
            "routing": f"{s.routing}:{s.seed}" if seeded else s.routing,
        }


def check_routing(spec: str, seed: int) -> None:
    """Raise ConfigError unless `spec` is a valid routing and `seed` a valid seed."""
    kind, _, argument = spec.partition(":")
    if kind not in ("uniform", "zipf", "one-hot", "file") or (kind in ("uniform", "one-hot") and argument):
        raise ConfigError(f"--routing {spec} is none of uniform, zipf:S, one-hot, file:PATH.")
    if kind == "zipf":
        _positive_number(argument, "--routing zipf:S")
    if not 0 <= seed <= _MOST:
        raise ConfigError(f"--seed is {seed}; it must be 0 to {_MOST}.")


def payloads_of(provider: str, command: str) -> tuple[str, ...]:
    """The payloads that a provider supports."""
    both = ("triton_ep",) if command == "moe-layer" else (*OF_LAYER, "nccl", "nccl_dedup", "deep_ep")
    return PAYLOADS if provider in both else PAYLOADS[:1]


def parse_list(text: str, option: str, allowed: Sequence[str] = ()) -> tuple[str, ...]:
    """The parts of "a,b".

    Raises:
        ConfigError: a part is not among those allowed.
    """
    parts = tuple(part.strip() for part in text.split(","))
    if allowed and (unknown := [part for part in parts if part not in allowed]):
        raise ConfigError(f"{option} {','.join(unknown)}: choose from {', '.join(allowed)}.")
    return parts


def parse_programs(text: str, option: str) -> tuple[int, ...]:
    """The integers of "1,2,auto"; auto becomes TUNED.

    Raises:
        ConfigError: a part is neither, or below 1.
    """
    parts = [part.strip() for part in text.split(",")]
    found = tuple(TUNED if part == "auto" else max(parse_numbers(part, option)[0], 0) for part in parts)
    if 0 in found:
        raise ConfigError(f"{option} {text}: give numbers of programs from 1 on, or auto.")
    return found


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """The integers of "1,2".

    Raises:
        ConfigError: a part is no integer.
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text:.60} is no integer, nor several with commas between them.") from None
    if max(found) > _MOST:
        raise ConfigError(f"{option} {text:.60}: {_MOST} is the most.")
    return found


def origin_of_kernels(interpreting: bool) -> str:
    """How kernels of this run come to be, the first part of `mode`: "interpreted", "jit"; "aot" from an ahead-of-time
    library, "prefer-aot" from one as far as it has them."""
    if interpreting:
        return "interpreted"
    return {"require": "aot", "prefer": "prefer-aot"}.get(read_environment().aot or "", "jit")


def _positive_number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{option} needs a positive number, got {text!r}.")
    return value
