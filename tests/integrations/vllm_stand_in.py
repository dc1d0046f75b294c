"""A stand-in for the parts of vLLM that use a modular prepare and finalize, with the same names and call sequence.

Written after vllm/model_executor/layers/fused_moe/modular_kernel.py (FusedMoEKernelModularImpl.apply with its _prepare,
_fused_experts and _finalize), topk_weight_and_reduce.py, utils.py and vllm/v1/worker/ubatching.py. No vLLM code.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from triton_ep.distributed import current_heap
from triton_ep.testing import apply_expert

PACKAGE = "vllm.model_executor.layers.fused_moe"
UBATCH = SimpleNamespace(now=0, hooks=[])


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None


class FusedMoEPrepareAndFinalizeModular(ABC):
    """Has vLLM's abstract methods: a subclass that lacks one cannot be instantiated."""

    @property
    @abstractmethod
    def activation_format(self) -> Any: ...
    @abstractmethod
    def topk_indices_dtype(self) -> Any: ...
    @abstractmethod
    def max_num_tokens_per_rank(self) -> Any: ...
    @abstractmethod
    def num_dispatchers(self) -> Any: ...
    @abstractmethod
    def output_is_reduced(self) -> Any: ...
    @abstractmethod
    def prepare(self, *args: Any, **kwargs: Any) -> Any: ...
    @abstractmethod
    def finalize(self, *args: Any, **kwargs: Any) -> Any: ...


class FusedMoEExpertsModular(ABC):
    """Has vLLM's abstract methods."""

    @abstractmethod
    def activation_format(self) -> Any: ...
    @abstractmethod
    def workspace_shapes(self, *args: Any, **kwargs: Any) -> Any: ...
    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> Any: ...
    @abstractmethod
    def supports_expert_map(self) -> bool: ...
    @abstractmethod
    def apply(self, *args: Any, **kwargs: Any) -> None: ...

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool: ...
    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul() -> bool: ...
    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool: ...
    @staticmethod
    @abstractmethod
    def _supports_activation(activation: Any) -> bool: ...
    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool: ...


class Adapter:
    """Calls a FusedMoEExpertsModular as FusedMoEKernel does: buffers with its shapes, arguments by name."""

    def __init__(self, experts: Any, w1: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor) -> None:
        self.experts, self.w1, self.w2 = experts, w1, w2
        self.quant_config, self.reduce = experts.quant_config, experts.finalize_weight_and_reduce_impl()
        self.expert_map, self.device_map = expert_map, expert_map.to(current_heap().device)

    def apply(self, rows, scales, meta, ids, weights, expert_map) -> torch.Tensor:
        experts, hidden, width = self.w1.shape[0], self.w2.shape[1], self.w1.shape[1]
        shapes = self.experts.workspace_shapes(
            rows.shape[-2], width, hidden, ids.shape[1], expert_map.numel(), experts, meta
        )
        *work, output = (torch.full(shape, float("nan"), dtype=torch.bfloat16, device=rows.device) for shape in shapes)
        self.experts.apply(
            output=output, hidden_states=rows, w1=self.w1, w2=self.w2, topk_weights=weights, topk_ids=ids,
            activation="silu", global_num_experts=expert_map.numel(), expert_map=self.device_map, a1q_scale=scales,
            a2_scale=None, workspace13=work[0], workspace2=work[1], expert_tokens_meta=meta,
            apply_router_weight_on_input=False,
        )  # fmt: skip
        return output


def expert_map_of(rank: int, ranks: int, num_experts: int, round_robin: bool = False) -> torch.Tensor:
    """[E] int32, the place of each expert on this rank or -1, after determine_expert_map: the first ranks have one more
    expert if E is not a multiple of the ranks; in blocks, or expert i on rank i % ranks."""
    counts = [num_experts // ranks + (each < num_experts % ranks) for each in range(ranks)]
    first = sum(counts[:rank])
    own = range(rank, num_experts, ranks) if round_robin else range(first, first + counts[rank])
    out = torch.full((num_experts,), -1, dtype=torch.int32)
    out[list(own)] = torch.arange(counts[rank], dtype=torch.int32)
    return out


class TopKWeightAndReduceDelegate:
    def apply(self, **_: Any) -> torch.Tensor:
        raise RuntimeError("the prepare and finalize object is expected to do it")


class TopKWeightAndReduceNoOP:
    def apply(self, output, fused_expert_output, **_: Any) -> torch.Tensor:
        return fused_expert_output


class TopKWeightAndReduceContiguous:
    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input) -> torch.Tensor:
        rows = fused_expert_output.view(*topk_ids.shape, -1)
        if not apply_router_weight_on_input:
            rows = rows * topk_weights.unsqueeze(-1).to(rows.dtype)
        return rows.sum(1)


def moe_kernel_quantize_input(
    A, A_scale, quant_dtype=None, per_act_token_quant=False, block_shape=None, is_scale_swizzled=True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 with a float32 scale from the largest value, of each row or of all rows."""
    amax = A.float().abs().amax(1, keepdim=True) if per_act_token_quant else A.float().abs().amax()
    scale = amax.clamp(min=2.0**-20) / 448 if A_scale is None else A_scale
    return (A.float() / scale).to(quant_dtype), scale if per_act_token_quant else scale.view(1)


class Experts:
    """Every row times the scale of its expert (`apply_expert`); `reduce` determines who applies the weights."""

    def __init__(self, quant_config: Any, reduce: Any, expert_map: torch.Tensor) -> None:
        self.quant_config, self.reduce = quant_config, reduce
        self.expert_map, self.device_map = expert_map, expert_map.to(current_heap().device)
        self.own = [int((expert_map == at).nonzero()) for at in range(int(expert_map.amax()) + 1)]

    def apply(self, rows, scales, meta, topk_ids, topk_weights, expert_map) -> torch.Tensor:
        if scales is not None and scales.dtype == torch.uint8:
            scales = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
        x = rows if scales is None else (rows.float() * scales).bfloat16()
        out = torch.full_like(x, float("nan"))  # places past the rows must not count
        if x.dim() == 3:
            for local, count in enumerate(meta.expert_num_tokens.tolist()):
                out[local, :count] = apply_expert(x[local, :count], self.own[local])
            return out
        ids = topk_ids[:, 0].cpu()
        if (expert_map >= 0).all():  # a single rank has all experts
            assert (ids < expert_map.shape[0]).all()
        else:
            assert ((ids >= 0) & (ids < expert_map.shape[0])).all()
            ids = torch.where(expert_map[ids.long()] < 0, -1, ids)
        counts = torch.bincount(expert_map[ids[ids >= 0].long()], minlength=len(self.own))
        assert counts.tolist() == meta.expert_num_tokens.tolist()
        out[(ids >= 0).to(x.device)] = apply_expert(x[(ids >= 0).to(x.device)], ids[ids >= 0])
        if isinstance(self.reduce, TopKWeightAndReduceNoOP):
            out = (out.float() * topk_weights).to(out.dtype)
        return out


def kernel(
    prepare_finalize, experts, x, topk_weights, topk_ids, num_experts, on_input=False, whole=False
) -> torch.Tensor:
    """FusedMoEKernel.apply for one micro-batch."""
    output = torch.empty_like(x)
    expert_map = experts.expert_map
    arguments = (x, topk_weights, topk_ids, num_experts, experts.device_map, on_input, experts.quant_config)
    if prepare_finalize.supports_async() and not whole:
        ret = prepare_finalize.prepare_async(*arguments, defer_input_quant=False)
        hook, receiver = ret if isinstance(ret, tuple) else (None, ret)
        if hook is not None:
            hook()
        rows, scales, meta, ids, weights = receiver()
    else:
        rows, scales, meta, ids, weights = prepare_finalize.prepare(*arguments, defer_input_quant=False)
    ids = topk_ids if ids is None else ids
    weights = topk_weights if weights is None else weights
    fused = experts.apply(rows, scales, meta, ids, weights, expert_map)
    if whole:
        prepare_finalize.finalize(output, fused, weights, ids, on_input, experts.reduce)
        return output
    ret = prepare_finalize.finalize_async(output, fused, weights, ids, on_input, experts.reduce)
    hook, receiver = ret if isinstance(ret, tuple) else (None, ret)
    if hook is not None:
        hook()
    receiver()
    return output


def _run_hooks() -> None:
    while UBATCH.hooks:
        UBATCH.hooks.pop()()


@contextmanager
def installed() -> Iterator[None]:
    """Make `import vllm...` find this stand-in inside the block."""
    contents = {
        f"{PACKAGE}.modular_kernel": (
            FusedMoEActivationFormat,
            ExpertTokensMetadata,
            FusedMoEPrepareAndFinalizeModular,
            FusedMoEExpertsModular,
        ),
        f"{PACKAGE}.topk_weight_and_reduce": (TopKWeightAndReduceDelegate,),
        f"{PACKAGE}.utils": (moe_kernel_quantize_input,),
        "vllm.v1.worker.ubatching": (),
    }
    names = {".".join(name.split(".")[: end + 1]) for name in contents for end in range(name.count(".") + 1)}
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        if "." in name:
            setattr(modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    for name, members in contents.items():
        for member in members:
            setattr(modules[name], member.__name__, member)
    modules["vllm.v1.worker.ubatching"].dbo_current_ubatch_id = lambda: UBATCH.now
    modules["vllm.v1.worker.ubatching"].dbo_maybe_run_recv_hook = _run_hooks
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [*names, "triton_ep.integrations.vllm.classes"]:
            sys.modules.pop(name, None)
