"""torchtitan's classes over triton_ep; `triton_ep.integrations.torchtitan` imports this module at first use."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, HybridEPTokenDispatcher

from triton_ep.errors import ConfigError
from triton_ep.integrations.arrived import ArrivedExperts
from triton_ep.integrations.torchtitan.dispatcher import TokenDispatch
from triton_ep.integrations.torchtitan.experts import grouped_mm

__all__ = ["TritonEPGroupedExperts", "TritonEPTokenDispatcher", "use_triton_ep"]


class TritonEPTokenDispatcher(TokenDispatch, BaseEPTokenDispatcher):
    """`TokenDispatch` as a torchtitan dispatcher, for `RoutedExperts.Config.token_dispatcher`."""

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        """Arguments of `TokenDispatch`. Derives from HybridEP's configuration, since torchtitan fills in its sizes."""

        dtype: torch.dtype = torch.bfloat16
        payload: str | None = None
        num_sm: int | None = None
        local_world_size: int | None = None
        timeout_s: float = 30.0
        enable_local_combine: bool = True

    def __init__(self, config: Config) -> None:
        TokenDispatch.__init__(self, **{f.name: getattr(config, f.name) for f in fields(config) if f.init})


def _after_load(experts: TritonEPGroupedExperts, _: Any) -> None:
    """Drop kept copies: loading into FSDP shards does not change the version counters of the gathered weights."""
    experts._experts.invalidate()


class TritonEPGroupedExperts(GroupedExperts):
    """torchtitan's SwiGLU experts as triton_ep's expert block: two products, with the activation in the first.

    Takes rows received in MXFP8 (`payload="mxfp8"`) without conversion, and keeps a joined copy of w1 and w3.
    Under torch.compile the experts are three `grouped_mm` products, which torch.compile can trace.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """recipe: "bf16" or "mxfp8"."""

        recipe: str = "bf16"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe = config.recipe
        self._experts = ArrivedExperts(config.recipe)
        self.register_load_state_dict_post_hook(_after_load)

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Returns [R, D] with the dtype of x_RD. x_RD may be an MXTensor, which the base class would cast."""
        if not torch.compiler.is_compiling():
            weights = (self.w1_EFD, self.w3_EFD), self.w2_EDF
            return self._experts(x_RD, num_tokens_per_expert_E, *weights).to(x_RD.dtype)
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        x = x_RD if x_RD.dtype == torch.bfloat16 else x_RD.bfloat16()
        gate = self._grouped_mm(A=x, B_t=w1.bfloat16().transpose(-2, -1), offs=ends)
        up = self._grouped_mm(A=x, B_t=w3.bfloat16().transpose(-2, -1), offs=ends)
        out = self._grouped_mm(A=F.silu(gate) * up, B_t=w2.bfloat16().transpose(-2, -1), offs=ends)
        return out.to(x_RD.dtype)

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return grouped_mm(A, B_t, offs, self.recipe)


def use_triton_ep(model_config: Any, *, recipe: str | None = "bf16", **options: Any) -> Any:
    """Make all routed experts of a model configuration use triton_ep, in place, before the model is built.

    Args:
        model_config: a torchtitan model configuration, or a `RoutedExperts.Config`.
        recipe: recipe of the experts' products; None leaves the experts unchanged.
        options: options of `TritonEPTokenDispatcher.Config`: payload, pad_multiple, non_blocking_capacity_factor, ...

    Returns:
        model_config.

    Raises:
        ConfigError: the configuration has no routed experts, or a payload with experts that cannot take it.
    """
    if recipe != "mxfp8" and options.get("payload") is not None:
        raise ConfigError(f'payload={options["payload"]!r} delivers quantised rows: pass recipe="mxfp8" as well.')
    found = [config for _, config, _, _ in model_config.traverse(RoutedExperts.Config)]
    if not found:
        raise ConfigError(f"{type(model_config).__qualname__} contains no RoutedExperts.Config to replace.")
    for config in found:
        dispatcher = config.token_dispatcher
        experts: Any = getattr(config, "inner_experts", None)
        sizes = {"num_experts": dispatcher.num_experts, "top_k": dispatcher.top_k}
        given = {name: getattr(dispatcher, name, None) for name in ("hidden_dim", "num_max_tokens_per_rank")}
        config.token_dispatcher = TritonEPTokenDispatcher.Config(**{**sizes, **given, **options})
        if recipe is None:
            continue
        if type(experts) is not GroupedExperts.Config:
            raise ConfigError(
                f"the experts are {type(experts).__qualname__}, not a plain GroupedExperts: pass recipe=None, and let "
                "their _grouped_mm call triton_ep.integrations.torchtitan.grouped_mm."
            )
        kept = {f.name: getattr(experts, f.name) for f in fields(experts) if f.init}
        config.inner_experts = TritonEPGroupedExperts.Config(**kept, recipe=recipe)
    return model_config
