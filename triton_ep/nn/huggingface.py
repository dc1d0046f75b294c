"""Load and save weights of MoE layers under Hugging Face's names: DeepSeek-V2 and V3, Qwen3-MoE, Mixtral, gpt-oss.

    from safetensors import safe_open
    load_huggingface(moe, tensors, "model.layers.3.mlp.")

Letters: E experts over all ranks, e experts of this rank, H hidden, F ffn.

| layout | names below the prefix | models |
|---|---|---|
| gate, up, down | `experts.N.{gate,up,down}_proj.weight` | DeepSeek-V2, DeepSeek-V3, Qwen3-MoE |
| w1, w3, w2 | `experts.N.{w1,w3,w2}.weight` | Mixtral |
| fused | `experts.gate_up_proj` [E, 2F, H], `experts.down_proj` [E, H, F] | transformers 5 |
| interleaved | the same transposed, [E, H, 2F] with gate in even and up in odd columns; biases | gpt-oss |

The router is `gate.weight` or `router.weight` [E, H], its bias `router.bias`, DeepSeek-V3's correction bias
`gate.e_score_correction_bias`. FP8 weights with a scale per block of 128 x 128 (`.._scale_inv`, DeepSeek-V3) are
dequantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from triton_ep.distributed.dtensors import is_dtensor
from triton_ep.errors import InputError
from triton_ep.nn.moe import MoE
from triton_ep.nn.router import TopKRouter

SCALED_BLOCK = 128
"""Rows and columns of a block that shares one scale in an FP8 checkpoint."""


class _Names(NamedTuple):
    """Names of an expert's matrices: [F, H], [F, H], [H, F]."""

    gate: str
    up: str
    down: str


LAYOUTS = {"deepseek": _Names("gate_proj", "up_proj", "down_proj"), "mixtral": _Names("w1", "w3", "w2")}
"""Names by layout; Qwen3-MoE uses DeepSeek's."""
_FUSED = "experts.gate_up_proj"
_ROUTERS = {"weight": ("gate.weight", "router.weight"), "bias": ("router.bias",)}
_CORRECTION = ("gate.e_score_correction_bias",)


class _Source:
    """Tensors below a prefix, and the names of those already read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix
        self.names = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
        self.read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, dequantised if it has scales.

        Raises:
            InputError: the tensor is missing or has another shape.
        """
        if name not in self.names:
            raise InputError(f"the checkpoint has no {self.prefix}{name}.")
        value = self.tensors[self.prefix + name]
        self.read.add(name)
        if value.shape != shape:
            raise InputError(f"{self.prefix}{name} is {list(value.shape)}; this layer takes {list(shape)}.")
        scales = f"{name}_scale_inv"
        if scales in self.names:
            self.read.add(scales)
            value = _unscaled(value, self.tensors[self.prefix + scales])
        return value


@torch.no_grad()
def load_huggingface(moe: MoE, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> list[str]:
    """Copy a layer's weights from a Hugging Face checkpoint into a MoE module; experts of this rank only.

    Arguments:
        moe: a gated module of the checkpoint's sizes, without FSDP.
        tensors: the checkpoint's tensors by name. Only the needed names below `prefix` are read, so a mapping that
            reads a file at every access will do.
        prefix: prefix of the layer, for instance "model.layers.3.mlp." ("model.layers.3.block_sparse_moe.").

    Returns:
        Names below the prefix that this module does not use (shared experts), without the prefix, sorted.

    Raises:
        InputError: a tensor is missing or has another shape; the experts are not gated or are sharded by FSDP; only one
            of module and checkpoint has a bias.
    """
    experts = moe.experts
    if not experts.activation.gated:
        raise InputError("checkpoints have gated experts; this module was made with gated=False.")
    if any(is_dtensor(parameter) for parameter in experts.parameters()):
        raise InputError("the experts are sharded already; load them before fully_shard.")
    source = _Source(tensors, prefix)
    if _FUSED in source:
        _load_fused(moe, source)
    else:
        _load_by_expert(moe, source)
    if isinstance(moe.router, TopKRouter):
        _load_router(moe.router, source)
    return sorted(source.names - source.read)


@torch.no_grad()
def huggingface_state(moe: MoE, layout: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """State dict of this rank's experts and the router under Hugging Face's names: the inverse of `load_huggingface`.

    Arguments:
        layout: "deepseek" (also Qwen3-MoE's) or "mixtral".

    Returns:
        Views of the parameters, for the checkpoint file of each rank; every rank returns the router's.

    Raises:
        InputError: another layout, or experts that the layout cannot hold.
    """
    experts = moe.experts
    if layout not in LAYOUTS:
        raise InputError(f"layout is {layout!r}; choose from {', '.join(map(repr, LAYOUTS))}.")
    act = experts.activation
    if not act.gated or experts.b2 is not None or (act.limit, act.alpha, act.up_offset) != (None, 1.0, 0.0):
        raise InputError(f"layout {layout!r} has gated experts without biases, limit, alpha and up_offset.")
    if isinstance(moe.router, TopKRouter) and moe.router.bias is not None:
        raise InputError(f"layout {layout!r} has a router without bias; this one was made with bias=True.")
    if any(is_dtensor(parameter) for parameter in experts.parameters()):
        raise InputError("the experts are sharded by FSDP; gather them first (DTensor.full_tensor).")
    state = {}
    for local in range(experts.num_local_experts):
        gate, up = _gate_up(moe, local)
        matrices = (gate, up, experts.w2[local])
        for name, value in zip(LAYOUTS[layout], matrices, strict=True):
            state[f"{prefix}experts.{experts.first_expert + local}.{name}.weight"] = value.detach()
    if isinstance(moe.router, TopKRouter):
        state[f"{prefix}gate.weight"] = moe.router.weight.detach()
        if moe.router.expert_bias is not None:
            state[f"{prefix}{_CORRECTION[0]}"] = moe.router.expert_bias
    return state


def _gate_up(moe: MoE, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w1 and w3 of one expert of this rank, [F, H] each, as views of the parameters."""
    experts = moe.experts
    if experts.separate:
        return experts.w1[local], experts.w3[local]
    gate, up = experts.w13[local].chunk(2)
    return gate, up


def _load_by_expert(moe: MoE, source: _Source) -> None:
    experts = moe.experts
    hidden, ffn, first = experts.hidden, experts.ffn, experts.first_expert
    if experts.b2 is not None:
        raise InputError("the checkpoint's experts have no biases; make the module with bias=False.")
    names = next((each for each in LAYOUTS.values() if f"experts.0.{each.gate}.weight" in source), LAYOUTS["deepseek"])
    leaves = {f"{name}.weight" for name in names}
    of_experts = {name for name in source.names if _is_expert(name, leaves)}
    found = max((int(name.split(".")[1]) for name in of_experts), default=-1) + 1
    if of_experts and found != experts.num_experts:
        raise InputError(
            f"the checkpoint below {source.prefix!r} has {found} experts; this layer has {experts.num_experts}."
        )
    for local in range(experts.num_local_experts):
        gate, up = _gate_up(moe, local)
        of_expert = f"experts.{first + local}."
        gate.copy_(source(f"{of_expert}{names.gate}.weight", (ffn, hidden)))
        up.copy_(source(f"{of_expert}{names.up}.weight", (ffn, hidden)))
        experts.w2[local].copy_(source(f"{of_expert}{names.down}.weight", (hidden, ffn)))
    source.read |= of_experts  # experts of other ranks count as used, too


def _is_expert(name: str, leaves: set[str]) -> bool:
    parts = name.removesuffix("_scale_inv").split(".", 2)
    return len(parts) == 3 and parts[0] == "experts" and parts[1].isdigit() and parts[2] in leaves


def _load_fused(moe: MoE, source: _Source) -> None:
    """All experts in one tensor. gpt-oss has biases, and its matrices are transposed with gate and up interleaved."""
    experts = moe.experts
    hidden, ffn, all_experts = experts.hidden, experts.ffn, experts.num_experts
    mine = slice(experts.first_expert, experts.first_expert + experts.num_local_experts)
    by_turns = f"{_FUSED}_bias" in source
    if by_turns != (experts.b2 is not None):
        raise InputError(f"the checkpoint's experts {'have' if by_turns else 'lack'} biases: pass bias={by_turns}.")
    if by_turns:
        both = source(_FUSED, (all_experts, hidden, 2 * ffn))[mine].transpose(1, 2)
        gate, up = both[:, ::2], both[:, 1::2]
        down = source("experts.down_proj", (all_experts, ffn, hidden))[mine].transpose(1, 2)
        bias = source(f"{_FUSED}_bias", (all_experts, 2 * ffn))[mine]
        for target, value in zip(_gate_up_bias(moe), (bias[:, ::2], bias[:, 1::2]), strict=True):
            target.copy_(value)
        assert experts.b2 is not None, "checked above"
        experts.b2.copy_(source("experts.down_proj_bias", (all_experts, hidden))[mine])
    else:
        gate, up = source(_FUSED, (all_experts, 2 * ffn, hidden))[mine].chunk(2, 1)
        down = source("experts.down_proj", (all_experts, hidden, ffn))[mine]
    for local in range(experts.num_local_experts):
        own_gate, own_up = _gate_up(moe, local)
        own_gate.copy_(gate[local])
        own_up.copy_(up[local])
    experts.w2.copy_(down)


def _gate_up_bias(moe: MoE) -> tuple[torch.Tensor, torch.Tensor]:
    experts = moe.experts
    if experts.separate:
        return experts.b1, experts.b3
    first, second = experts.b13.chunk(2, 1)
    return first, second


def _load_router(router: TopKRouter, source: _Source) -> None:
    shapes = {"weight": (router.num_experts, router.hidden), "bias": (router.num_experts,)}
    for name, of_checkpoint in _ROUTERS.items():
        own = getattr(router, name)
        found = next((each for each in of_checkpoint if each in source), None)
        if own is not None:
            own.copy_(source(found or of_checkpoint[0], shapes[name]))
        elif found is not None:
            raise InputError(f"the checkpoint's router has {found}; make this one with bias=True.")
    if router.expert_bias is not None:
        router.expert_bias.copy_(source(_CORRECTION[0], shapes["bias"]))
    elif _CORRECTION[0] in source:
        raise InputError(f"the checkpoint's router has {_CORRECTION[0]}; make this one with correction_bias=True.")


def _unscaled(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantise an FP8 matrix with a scale per block of 128 x 128 to float32."""
    rows, columns = value.shape
    scale = scale.float().repeat_interleave(SCALED_BLOCK, 0)[:rows].repeat_interleave(SCALED_BLOCK, 1)[:, :columns]
    return value.float() * scale
