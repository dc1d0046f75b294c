"""vLLM's modular MoE kernels over EPAll2AllLayer: prepare (dispatch) and finalize (combine), in both formats.

    vLLM                                       here
    FusedMoEPrepareAndFinalizeModular          TritonEPPrepareAndFinalize, over PrepareFinalize, which needs no vLLM
    activation_format Standard                 rows [R, H] by expert; topk_ids and topk_weights [R, 1], one expert a row
    activation_format BatchedExperts           rows [e, M * ranks, H], each expert's at the start of its slab
    ExpertTokensMetadata                       layout_desc.num_recv_tokens_per_expert, on the device
    prepare / prepare_async                    layer.dispatch / its halves: (hook, receiver)
    finalize / finalize_async                  layer.combine, weights and sum in float32 / its halves
    TopKWeightAndReduceDelegate                weights are applied by combine
    defer_input_quant, quant_config            rows travel in bf16, and vLLM's function quantises the received rows;
                                                 quant_dtype "mxfp8": quantised before sending, half the bytes
    micro-batches (dual batch overlap)         one layer each, created at first use
    expert_map                                 any placement, read by the first call: vllm/placement.py

    FusedMoEExpertsModular                     TritonEPExperts, over Experts: triton_ep's expert block

`TritonEPPrepareAndFinalize` and `TritonEPExperts` derive from vLLM's classes and need it installed; `PrepareFinalize`
and `Experts` do not. backend.py and manager.py make `--all2all-backend triton_ep` of them.
Source: vllm/model_executor/layers/fused_moe/modular_kernel.py and prepare_finalize/; docs/how-to/vllm.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton_ep.integrations.vllm.experts import Experts
    from triton_ep.integrations.vllm.prepare_finalize import PrepareFinalize

__all__ = ["Experts", "PrepareFinalize"]

# Imported at first use: vLLM's plugin is loaded in processes that need neither kernels nor these classes.
_MODULES = {
    "Experts": "experts",
    "PrepareFinalize": "prepare_finalize",
    "TritonEPExperts": "classes",
    "TritonEPPrepareAndFinalize": "classes",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
