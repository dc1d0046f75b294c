"""vLLM's class over triton_ep; `triton_ep.integrations.vllm` imports this module at first use."""

from __future__ import annotations

from typing import Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_maybe_run_recv_hook

from triton_ep.integrations.vllm.experts import Experts
from triton_ep.integrations.vllm.prepare_finalize import PrepareFinalize

__all__ = ["TritonEPExperts", "TritonEPPrepareAndFinalize"]

# The base class of experts, under its present or its earlier name.
_ExpertsBase: Any = getattr(mk, "FusedMoEExpertsModular", None) or mk.FusedMoEPermuteExpertsUnpermute


class TritonEPExperts(Experts, _ExpertsBase):
    """`Experts` as vLLM's modular experts: the second argument of `FusedMoEKernel`."""

    def __init__(self, prepare_finalize: PrepareFinalize, quant_config: Any, moe_config: Any = None) -> None:
        from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

        self.moe_config = moe_config  # vLLM's kernel reads it
        delegate = TopKWeightAndReduceDelegate()
        Experts.__init__(self, prepare_finalize, quant_config, formats=mk.FusedMoEActivationFormat, delegate=delegate)


class TritonEPPrepareAndFinalize(PrepareFinalize, mk.FusedMoEPrepareAndFinalizeModular):
    """`PrepareFinalize` as vLLM's modular prepare and finalize: the first argument of `FusedMoEKernel`."""

    def __init__(self, group: Any, **sizes: Any) -> None:
        formats = (mk.FusedMoEActivationFormat, mk.ExpertTokensMetadata)
        PrepareFinalize.__init__(
            self,
            group,
            formats=formats,
            micro_batch=dbo_current_ubatch_id,
            quantize=moe_kernel_quantize_input,
            **sizes,
        )

    def _before_combine(self) -> None:
        """Run the receiving half that another micro-batch has left pending."""
        dbo_maybe_run_recv_hook()
