"""Former name of the HybridEP half of `triton_ep.integrations.megatron`."""

from triton_ep.integrations.megatron.hybrid_ep import (
    HybridEPCombine,
    HybridEPDispatch,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
    init_hybrid_ep_buffer,
    reset_hybrid_ep_buffer,
)

__all__ = [
    "HybridEPCombine",
    "HybridEPDispatch",
    "hybrid_ep_combine",
    "hybrid_ep_dispatch",
    "init_hybrid_ep_buffer",
    "reset_hybrid_ep_buffer",
]
