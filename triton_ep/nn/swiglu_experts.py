"""SwiGLUExperts: the experts of one rank, two grouped products with the activation between them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from triton_ep.config import as_integer
from triton_ep.distributed.dtensors import is_dtensor, local_part
from triton_ep.errors import ConfigError, InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.nn import operations
from triton_ep.nn.arrivals import maker_of_arrivals
from triton_ep.nn.exchanges import Exchange
from triton_ep.nn.expert_block import ExpertBlock, ExpertSettings, expert_block
from triton_ep.nn.joined import Joined, JoinedExperts
from triton_ep.nn.moe_block import MoEBlock, Params
from triton_ep.nn.prepared import PRECISIONS, PreparedWeights
from triton_ep.ops.activation import Activation, check_activation
from triton_ep.ops.row_scales import RowScaled
from triton_ep.runtime.untraced import untraced

_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of parameters."""

Parameters = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class SwiGLUExperts(nn.Module):
    """Experts of this rank: act(x w1^T) * (x w3^T), times w2^T, for rows in segments, one segment per expert.

    Letters: e experts of this rank, H hidden, F ffn, R rows.

    Arguments:
        hidden, ffn: H, F.
        num_local_experts: e.
        first_expert, num_experts: number of this rank's first expert, and number of experts over all ranks (None: e).
            Checkpoints may hold all experts, and initial values do not depend on the number of ranks.
        payload, precision: as of `MoE`.
        prepared: which quantised copies of the weights are kept, with payload="mxfp8": "both" (2 bytes per weight);
            "fprop", for the forward pass only (1 byte; every backward pass builds its own); or "none".
        activation: "silu", "gelu" (by the error function), "relu" or "relu2" (its square).
        gated: False: act(x w1^T) alone; w13 is then [e, F, H].
        limit: x w1^T is clamped from above, x w3^T from both sides; None: neither.
        alpha: of silu: g * sigmoid(alpha * g). up_offset: added to x w3^T. (gpt-oss: limit=7, alpha=1.702, up_offset=1)
        bias: add biases b13 [e, 2F] and b2 [e, H].
        separate: w1 and w3 [e, F, H] (and b1, b3) are separate parameters in place of w13, as existing checkpoints and
            optimizers have them. One product computes both, so a joined copy w13 is kept as well.
        dtype, device: of the parameters.

    State dicts may have w13 or w1 and w3, and all experts or only this rank's; loading converts them.

    Raises:
        ConfigError: options that do not go together.
    """

    w13: torch.Tensor
    w1: torch.Tensor
    w3: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor
    b1: torch.Tensor
    b3: torch.Tensor
    b2: torch.Tensor | None

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_local_experts: int,
        *,
        first_expert: int = 0,
        num_experts: int | None = None,
        payload: str | None = None,
        precision: str = "default",
        prepared: str = "both",
        activation: str = "silu",
        gated: bool = True,
        limit: float | None = None,
        alpha: float = 1.0,
        up_offset: float = 0.0,
        bias: bool = False,
        separate: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
    ) -> None:
        super().__init__()
        check_precision(payload, precision)
        for name, flag in (("gated", gated), ("bias", bias), ("separate", separate)):
            if not isinstance(flag, bool):
                raise ConfigError(f"{name} must be True or False, got {flag!r}.")
        first_expert = as_integer("first_expert", first_expert, 0)
        if prepared != "both" and payload is None:
            raise ConfigError(
                f'prepared={prepared!r} is for payload="mxfp8"; bf16 products read the weights themselves.'
            )
        if separate and not gated:
            raise ConfigError("separate=True splits w13 of gated experts; with gated=False there is no w3.")
        self.hidden, self.ffn, self.num_local_experts = hidden, ffn, num_local_experts
        self.first_expert = first_expert
        self.num_experts = num_local_experts if num_experts is None else num_experts
        self.payload, self.precision, self.separate = payload, precision, separate
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype is {dtype}; parameters of experts are torch.bfloat16 or torch.float32.")
        self.activation = Activation(activation, gated, limit, alpha, up_offset)
        check_activation(self.activation)
        check_sizes(hidden, ffn, payload)
        last = as_integer("num_local_experts", num_local_experts) + first_expert
        if first_expert < 0 or last > self.num_experts:
            raise ConfigError(
                f"experts {first_expert} to {last - 1} of this rank are not among {self.num_experts}. Check "
                "first_expert, num_local_experts and num_experts."
            )
        self.prepared = None if payload is None else PreparedWeights(prepared, precision)
        e = num_local_experts
        halves = {"1": ffn, "3": ffn} if separate else {"13": 2 * ffn if gated else ffn}
        for name, rows in halves.items():
            self.register_parameter(f"w{name}", nn.Parameter(torch.empty(e, rows, hidden, dtype=dtype, device=device)))
            b = nn.Parameter(torch.empty(e, rows, dtype=dtype, device=device)) if bias else None
            self.register_parameter(f"b{name}", b)
        self._joined_weight, self._joined_bias = Joined(), Joined()
        self.w2 = nn.Parameter(torch.empty(e, hidden, ffn, dtype=dtype, device=device))
        b2 = nn.Parameter(torch.empty(e, hidden, dtype=dtype, device=device)) if bias else None
        self.register_parameter("b2", b2)
        self.register_load_state_dict_pre_hook(_fit_state_dict)
        self.register_load_state_dict_post_hook(_after_load)
        ends = ("1", "3", "2") if separate else ("13", "2")
        self._names = [letter + end for letter in ("wb" if bias else "w") for end in ends]
        self._shapes = [getattr(self, name).shape for name in self._names]
        self._shards: list[int] = []
        self.key = operations.register(self)
        self.reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register a copied module under a key of its own."""
        super().__setstate__(state)
        self.key = operations.register(self)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normally distributed weights with a variance of 1 / columns, zero biases.

        Draws one number from torch's generator; the number and an expert's index determine the expert's values. So
        ranks seeded alike start with different experts, and all experts together are the same for any number of ranks.
        """
        if self.w2.device.type == "meta":
            return
        seed = int(torch.randint(1 << 48, (), device="cpu"))
        generator = torch.Generator(self.w2.device)
        for local in range(self.num_local_experts):
            generator.manual_seed(seed + self.first_expert + local)
            for name, weight in self.named_parameters(recurse=False):
                if name.startswith("b"):
                    weight[local].zero_()
                else:
                    weight[local].normal_(std=weight.shape[-1] ** -0.5, generator=generator)

    def gate_up_weight(self) -> torch.Tensor:
        """[e, 2F, H], gate rows first (not gated: [e, F, H]); differentiable."""
        if not self.separate:
            return local_part(self.w13)
        return self._joined_weight(local_part(self.w1), local_part(self.w3))

    def gate_up_bias(self) -> torch.Tensor | None:
        """[e, 2F], or None."""
        if self.b2 is None:
            return None
        if not self.separate:
            return local_part(self.b13)
        return self._joined_bias(local_part(self.b1), local_part(self.b3))

    def invalidate(self) -> None:
        """Build kept copies of the weights anew: call this after a change that torch's version counters do not show."""
        self._joined_weight.invalidate()
        self._joined_bias.invalidate()
        if self.prepared is not None:
            self.prepared.invalidate()

    @untraced("reads version counters")
    def look_at_shards(self) -> None:
        """Invalidate kept copies if the shards that FSDP gathers next have changed: gathered weights keep the version
        counter of the previous ones. Call it before a pass, while parameters are shards."""
        if not is_dtensor(self.w2):
            return
        shards = [each for each in self.parameters(recurse=False) if is_dtensor(each)]
        # An operation on the DTensor moves the DTensor's counter; one on its local tensor, the local tensor's.
        both = [part for shard in shards for part in (shard, shard.to_local())]
        now = [0 if part.is_inference() else part._version for part in both]
        if now != self._shards:
            self._shards = now
            self.invalidate()

    @torch.no_grad()
    def refresh(self) -> None:
        """Update outdated copies of the weights in place, where a captured CUDA graph reads them. Call it after the
        weights have changed, before the next replay."""
        w13, w2, *_ = self.parameters_now()
        if self.prepared is not None:
            self.prepared.refresh(w13, name="w13")
            self.prepared.refresh(w2, name="w2")

    def parameters_now(self) -> Parameters:
        """w13, w2, b13, b2 as the products take them; differentiable. For bf16 rows, weights are cast to bf16."""
        w13, w2 = self.gate_up_weight(), local_part(self.w2)
        if self.payload is None and w2.dtype != torch.bfloat16:
            w13, w2 = w13.to(torch.bfloat16), w2.to(torch.bfloat16)
        return w13, w2, self.gate_up_bias(), None if self.b2 is None else local_part(self.b2)

    def forward(
        self,
        x: torch.Tensor | RowScaled,
        routing: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        over: Exchange | None = None,
    ) -> torch.Tensor:
        """Apply the experts to local rows or, over an exchange, to tokens that are dispatched and combined.

        Arguments:
            x: [R, H] bf16 rows, with payload="mxfp8" an MXTensor or RowScaled as well. Over an exchange: [T, H] bf16;
                the caller has checked x, routing and weights as `EPAll2AllLayer.dispatch` does.
            routing: [e + 1] int32, first row of each expert's segment, then the end of the last. Over an exchange:
                experts of the tokens, [T, K] int32 or int64, -1 = dropped.
            weights: [R] float32, which multiply each row's result; None: ones. Over an exchange: [T, K] float32.

        Returns:
            [R, H] bf16; rows past the last segment are undefined. Over an exchange: [T, H], sums over k; collective,
            and so is the backward pass. Differentiable in x, weights and the parameters.

        Raises:
            InputError: shapes or dtypes that do not fit; or, during the capture of a CUDA graph, kept copies are older
                than the weights.
            What `EPAll2AllLayer.dispatch` and `combine` raise.
        """
        if over is None:
            if not isinstance(x, torch.Tensor | RowScaled):
                raise InputError(
                    f"x must be a tensor [R, {self.hidden}], an MXTensor or RowScaled, got {type(x).__name__}."
                )
            parameters = self.parameters_now()
            return expert_block(x, weights, *parameters, self.prepared, routing, None, self._settings(aligned=False))
        assert isinstance(x, torch.Tensor) and weights is not None, "the caller's"
        if operations.is_observed():
            return operations.moe(self, over.layer, x, routing, weights)
        low_latency = over.layer.config.low_latency
        try:
            own = self.local_parameters()
            self.check_parameters(own, over.layer.context.device)
            # The block takes separate parameters themselves, to see whether they change before the backward pass.
            joined = not self.separate or low_latency
            given: Params = own if not joined else self.parameters_now() if self.separate else self.joined(own)
        except Exception:
            over.layer.refuse()
            raise
        if low_latency:
            return self.low_latency_pass(over, x, routing, weights, given)
        return self.block_over(over, joined)(x, routing, weights, given)

    def block_over(self, over: Exchange, joined: bool = True) -> MoEBlock:
        """Dispatch, these experts, combine, of checked arguments. Its parameters are w13, w2, b13, b2, or with
        joined=False the module's."""
        block = ExpertBlock(self.prepared, self._settings(aligned=True), maker_of_arrivals(over.layer.config))
        experts: ExpertBlock | JoinedExperts = block if joined else JoinedExperts(self, block)
        landing = None if self.payload is None else "bf16" if self.precision == "exact" else "row"
        calls = (over.use, experts.before, experts.keeps_arrivals, block.kept)
        return MoEBlock(over.layer, experts, landing, landing, *calls, checked=True)

    def low_latency_pass(
        self, over: Exchange, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, parameters: Params
    ) -> torch.Tensor:
        """Result [T, H] for tokens, over a low-latency exchange; no gradient."""
        block = ExpertBlock(self.prepared, self._settings(aligned=False))
        with over.use("a pass of a MoE module"):
            rows, row_weights, desc = over.layer.dispatch(x, ids, weights)
            return over.layer.combine(block.forward(rows, row_weights, parameters, desc, keep=False)[0], desc)

    # --- parameters for the op of torch.library: the module's own, in the order of their names -------------------

    def local_parameters(self) -> list[torch.Tensor]:
        """This rank's parts of w13 (or w1, w3), w2, and the biases in the same order."""
        return [local_part(getattr(self, name)) for name in self._names]

    def joined(self, parameters: Sequence[torch.Tensor]) -> Parameters:
        """w13, w2, b13, b2 as the products take them, from `local_parameters`. No gradient."""
        if self.separate:
            w1, w3, w2, *biases = parameters
            w13 = self._joined_weight.values(w1, w3)
            b13 = self._joined_bias.values(*biases[:2]) if biases else None
        else:
            w13, w2, *biases = parameters
            b13 = biases[0] if biases else None
        if self.payload is None and w2.dtype != torch.bfloat16:
            w13, w2 = w13.to(torch.bfloat16), w2.to(torch.bfloat16)
        return w13, w2, b13, biases[-1] if biases else None

    def joined_needs(self, needs: Sequence[bool]) -> tuple[bool, ...]:
        """Whether w13, w2, b13 and b2 need gradients, given the needs of `local_parameters`."""
        count = len(needs) // (1 if self.b2 is None else 2)
        of_weights, of_biases = needs[:count], needs[count:] or [False]
        return any(of_weights[:-1]), of_weights[-1], any(of_biases[:-1]), of_biases[-1]

    def parted(
        self, grads: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Gradients of `local_parameters`, from those of w13, w2, b13 and b2."""
        found: list[torch.Tensor | None] = []
        for first, second in (grads[:2], grads[2:])[: 1 if self.b2 is None else 2]:
            halves = (None, None) if first is None else (each.contiguous() for each in first.chunk(2, 1))
            found += [*(halves if self.separate else (first,)), second]
        return [None if g is None else g.to(p.dtype) for g, p in zip(found, parameters, strict=True)]

    def own_parameters(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replace given weights by the module's own if these have a `main_grad` and the products take them uncast."""
        as_they_are = not self.separate and (self.payload is not None or self.w2.dtype == torch.bfloat16)
        found = []
        for name, given in zip(self._names, parameters, strict=True):
            own = local_part(getattr(self, name))
            found.append(own if as_they_are and name.startswith("w") and hasattr(own, "main_grad") else given.detach())
        return found

    def check_parameters(self, parameters: Sequence[torch.Tensor], device: torch.device) -> None:
        """Raise InputError if one of `local_parameters` was replaced by one that products do not take."""
        w2_dtype = parameters[self._names.index("w2")].dtype
        for name, value, wanted in zip(self._names, parameters, self._shapes, strict=True):
            if value.shape != wanted or value.device != device:
                raise InputError(
                    f"{name} of the experts must be {list(wanted)} on {device}, got {list(value.shape)} on "
                    f"{value.device}."
                )
            if isinstance(value, MXTensor):
                self._check_quantised(name)
                continue
            dense = value.is_contiguous() or (self.separate and name != "w2")  # these are copied
            if value.dtype not in _DTYPES or not dense:
                raise InputError(
                    f"{name} of the experts must be contiguous torch.bfloat16 or torch.float32, got {value.dtype} "
                    f"{list(value.shape)} with strides {list(value.stride())}."
                )
            if self.payload is None and name[0] == "w" and value.dtype != w2_dtype:
                raise InputError(
                    f"{name} of the experts is {value.dtype}, w2 {w2_dtype}: without a payload all weights have "
                    "one dtype. Cast one."
                )

    def _check_quantised(self, name: str) -> None:
        """Raise InputError unless an MXTensor can be this parameter."""
        if self.payload is None:
            raise InputError(
                f'{name} of the experts is an MXTensor, which payload=None does not multiply. Pass payload="mxfp8", or '
                f"{name}.dequantize()."
            )
        if self.separate and name != "w2":
            raise InputError(
                f"{name} of the experts is an MXTensor, but separate=True joins w1 and w3 as dense tensors. Pass "
                f"{name}.dequantize(), or make the module with separate=False and give it w13."
            )

    def _settings(self, aligned: bool) -> ExpertSettings:
        precision = None if self.payload is None else self.precision
        return _settings(self.activation, precision, aligned)

    def extra_repr(self) -> str:
        """Sizes and options other than the defaults."""
        last = self.first_expert + self.num_local_experts - 1
        text = f"{self.hidden}, {self.ffn}, experts {self.first_expert} to {last} of {self.num_experts}"
        kind = self.activation.kind + "" if self.activation.gated else self.activation.kind + ", not gated"
        how = "bf16" if self.payload is None else f"{self.payload}, {self.precision}"
        return f"{text}, {kind}, {how}"


@functools.cache
def _settings(activation: Activation, precision: str | None, aligned: bool) -> ExpertSettings:
    """Made once, because its checks take host time."""
    return ExpertSettings(activation, precision, aligned)


def check_precision(payload: Any, precision: Any) -> None:
    """Raise ConfigError unless rows of this payload can be multiplied in this precision."""
    if payload not in (None, "mxfp8"):
        raise ConfigError(f'payload is {payload!r}; rows travel as they are (None) or as "mxfp8".')
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}; choose from {', '.join(map(repr, PRECISIONS))}.")
    if payload is None and precision != "default":
        raise ConfigError(
            f"precision={precision!r} says how MXFP8 rows are multiplied, but payload=None sends bf16 ones. Pass "
            'payload="mxfp8", or leave precision out.'
        )


def check_sizes(hidden: int, ffn: int, payload: str | None) -> None:
    """Raise ConfigError for sizes that no product takes; the message names the nearest that fit."""
    step = 1 if payload is None else 32
    for name, size in (("hidden", hidden), ("ffn", ffn)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name} must be an integer of at least 1, got {size!r}.")
        if size % step:
            above = -(-size // step) * step
            nearest = f"{above - step} or {above}" if above > step else f"{above}"
            raise ConfigError(
                f'{name} is {size}, but payload="mxfp8" quantises whole blocks of 32: the nearest is {nearest}. Pad '
                "it, or pass payload=None."
            )


def _after_load(module: SwiGLUExperts, _: Any) -> None:
    """Invalidate kept copies: a state dict loaded into shards moves counters that gathered weights do not have."""
    module.invalidate()


def _fit_state_dict(
    module: SwiGLUExperts, state: dict[str, Any], prefix: str, _: Any, strict: bool, *rest: list[str]
) -> None:
    """Convert a state dict to the module's parameters: join w1 and w3 or split w13; select this rank's experts.

    Raises:
        InputError: the state dict has another number of experts.
    """
    for letter in "wb":
        names = [f"{prefix}{letter}{end}" for end in ("13", "1", "3")]
        both, first, second = names
        if not module.separate and first in state and both not in state:
            parts = [state.pop(first), *([state.pop(second)] if second in state else [])]
            state[both] = torch.cat(parts, 1)
        elif module.separate and both in state:
            state[first], state[second] = state.pop(both).chunk(2, 1)
    for name, own in module.named_parameters(recurse=False):
        given = state.get(prefix + name)
        if not isinstance(given, torch.Tensor) or is_dtensor(given) or is_dtensor(own):
            continue
        experts = given.shape[0] if given.dim() else 0
        if experts not in (module.num_local_experts, module.num_experts):
            raise InputError(
                f"{prefix}{name} of the state dict has {experts} experts; this rank has {module.num_local_experts} of "
                f"{module.num_experts}. Pass those of this rank, or all."
            )
        if experts != module.num_local_experts:
            state[prefix + name] = given[module.first_expert :][: module.num_local_experts]
