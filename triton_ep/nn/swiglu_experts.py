"""SwiGLUExperts: the experts of one rank, two grouped products with the activation between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from triton_ep.errors import ConfigError, InputError
from triton_ep.nn.joined import Joined
from triton_ep.reference.experts import Activation
from triton_ep.reference.experts import experts as experts_reference

PRECISIONS = ("default", "fast", "exact")


class SwiGLUExperts(nn.Module):
    """Experts of this rank: act(x w1^T) * (x w3^T), times w2^T, for rows in segments, one segment per expert.

    Letters: e experts of this rank, H hidden, F ffn, R rows.

    Arguments:
        hidden, ffn: H, F.
        num_local_experts: e.
        first_expert, num_experts: number of the first of them, and how many there are over all ranks: checkpoints may
            hold all experts, and initial values do not depend on how many ranks there are. None: e.
        payload, precision: as of `MoE`.
        prepared: which quantised copies of the weights are kept, with payload="mxfp8": "both" (2 bytes per weight), for
            the forward pass only ("fprop", 1 byte; those for the backward pass are made each time), or "none".
        activation: "silu", "gelu" (by the error function), "relu" or "relu2" (its square).
        gated: False: act(x w1^T) alone; w13 is then [e, F, H].
        limit: x w1^T is clamped from above, x w3^T from both sides; None: neither.
        alpha: of silu: g * sigmoid(alpha * g). up_offset: added to x w3^T. (gpt-oss: limit=7, alpha=1.702, up_offset=1)
        bias: there are biases, b13 [e, 2F] and b2 [e, H].
        separate: w1 and w3 [e, F, H] are parameters of their own (b1, b3 too) in place of w13, as existing checkpoints
            and optimizers have them. Both products of a row are one, so a copy as w13 is kept beside them.
        dtype, device: of the parameters.

    State dicts may have w13, or w1 and w3, and all experts in place of this rank's: what fits is made of them.

    Raises:
        ConfigError: options that do not go together.
    """

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
        if separate and not gated:
            raise ConfigError("separate=True parts w13 of gated experts; with gated=False there is no w3.")
        self.hidden, self.ffn, self.num_local_experts = hidden, ffn, num_local_experts
        self.first_expert = first_expert
        self.num_experts = num_local_experts if num_experts is None else num_experts
        self.payload, self.precision, self.separate = payload, precision, separate
        self.activation = Activation(activation, gated, limit, alpha, up_offset)
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
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normally distributed weights with a variance of 1 / columns, zero biases.

        One number comes from torch's generator, and what every expert gets follows from that and the expert's number:
        ranks that were seeded alike begin with other experts, and together with the same, however many they are.
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
            return _local(self.w13)
        return self._joined_weight(_local(self.w1), _local(self.w3))

    def gate_up_bias(self) -> torch.Tensor | None:
        """[e, 2F], or None."""
        if self.b2 is None:
            return None
        if not self.separate:
            return _local(self.b13)
        return self._joined_bias(_local(self.b1), _local(self.b3))

    def invalidate(self) -> None:
        """The weights have changed, and torch's version counters do not show it: make what is kept of them anew."""
        self._joined_weight.invalidate()
        self._joined_bias.invalidate()

    def forward(
        self, rows: torch.Tensor, expert_offsets: torch.Tensor, row_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[R, H] of rows [R, H]; differentiable in rows, row_weights and the parameters.

        Arguments:
            rows: bf16, or an MXTensor, as a dispatch gives them.
            expert_offsets: [e + 1] int32, first row of each expert's segment, then the end of the last.
            row_weights: [R] float32, which multiply each row's result; None: ones.

        Rows behind the last segment are neither read nor written: what stands there in the result has no meaning.
        """
        b2 = None if self.b2 is None else _local(self.b2)
        w13, w2, b13 = self.gate_up_weight(), _local(self.w2), self.gate_up_bias()
        values = rows.dequantize() if hasattr(rows, "dequantize") and type(rows) is not torch.Tensor else rows
        f = [None if t is None else t.float() for t in (w13, w2, b13, b2)]
        weights = None if row_weights is None else row_weights
        y = experts_reference(values.float(), f[0], f[1], expert_offsets, weights, self.activation, f[2], f[3])
        return y.to(values.dtype)

    def extra_repr(self) -> str:
        """Sizes, and what is not the default."""
        last = self.first_expert + self.num_local_experts - 1
        text = f"{self.hidden}, {self.ffn}, experts {self.first_expert} to {last} of {self.num_experts}"
        kind = self.activation.kind + "" if self.activation.gated else self.activation.kind + ", not gated"
        how = "bf16" if self.payload is None else f"{self.payload}, {self.precision}"
        return f"{text}, {kind}, {how}"


def check_precision(payload: Any, precision: Any) -> None:
    """Raise ConfigError unless rows that travel like this can be multiplied like that."""
    if payload not in (None, "mxfp8"):
        raise ConfigError(f'payload is {payload!r}; rows travel as they are (None) or as "mxfp8".')
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}; there are {', '.join(map(repr, PRECISIONS))}.")
    if payload is None and precision != "default":
        raise ConfigError(
            f"precision={precision!r} says how MXFP8 rows are multiplied, but payload=None sends bf16 ones. Pass "
            'payload="mxfp8", or leave precision out.'
        )


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _fit_state_dict(
    module: SwiGLUExperts, state: dict[str, Any], prefix: str, _: Any, strict: bool, *rest: list[str]
) -> None:
    """Make the module's parameters of what a state dict has: w13 of w1 and w3, or the other way; its experts of all.

    Raises:
        InputError: another number of experts.
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
        if not isinstance(given, torch.Tensor) or isinstance(given, DTensor) or isinstance(own, DTensor):
            continue
        experts = given.shape[0] if given.dim() else 0
        if experts not in (module.num_local_experts, module.num_experts):
            raise InputError(
                f"{prefix}{name} of the state dict has {experts} experts; this rank has {module.num_local_experts} of "
                f"{module.num_experts}. Pass those of this rank, or all."
            )
        if experts != module.num_local_experts:
            state[prefix + name] = given[module.first_expert :][: module.num_local_experts]
