"""MoE layers as torch modules: router, experts, and the exchange between ranks, shared by all layers of a model.

    import triton_ep
    from triton_ep.nn import MoE, finalize_exchanges

    triton_ep.initialize_distributed()
    moe = MoE(7168, 2048, num_experts=256, topk=8, max_tokens=4096, payload="mxfp8")
    y = moe(x)                  # [..., 7168] bf16; collective, and so is the backward pass
    finalize_exchanges()        # at the end, on all ranks

docs/how-to/train-a-moe-layer.md shows training, docs/reference/nn.md has every argument.
"""

from triton_ep.nn.checkpoints import sharded_state_dict
from triton_ep.nn.exchanges import finalize_exchanges, new_exchange
from triton_ep.nn.gradients import clip_grad_norm_
from triton_ep.nn.huggingface import huggingface_state, load_huggingface
from triton_ep.nn.memory import MemoryEstimate, estimate_memory
from triton_ep.nn.moe import MoE
from triton_ep.nn.router import TopKRouter
from triton_ep.nn.sharding import expert_placement
from triton_ep.nn.swiglu_experts import SwiGLUExperts

__all__ = [
    "MemoryEstimate",
    "MoE",
    "SwiGLUExperts",
    "TopKRouter",
    "clip_grad_norm_",
    "estimate_memory",
    "expert_placement",
    "finalize_exchanges",
    "huggingface_state",
    "load_huggingface",
    "new_exchange",
    "sharded_state_dict",
]
