"""megatron.core.transformer.moe.fused_a2a: its autograd functions, helpers and names over triton_ep.

    megatron                                    here
    get_buffer(group, hidden_bytes)             integrations.deep_ep.Buffer: one per process, replaced when the group
                                                  changes or rows get longer
    fused_dispatch / FusedDispatch              Buffer.dispatch_rows; backward Buffer.combine with the gradient of the
                                                  probabilities
    fused_combine / FusedCombine                Buffer.combine; backward Buffer.dispatch with the handle, without a host
                                                  wait
    set_deepep_num_sms(n)                       Buffer.set_num_sms
    hybrid_ep_dispatch, ... HybridEPCombine     integrations.megatron.hybrid_ep
    TEGroupedMLP, GroupedMLP                    GroupedExperts, after any token dispatcher

Unmodified Megatron-Core uses `integrations.deep_ep.install()` instead. Source:
megatron/core/transformer/moe/fused_a2a.py; docs/how-to/megatron.md has the argument lists.
"""

from triton_ep.integrations.megatron.deep_ep import (
    FusedCombine,
    FusedDispatch,
    fused_combine,
    fused_dispatch,
    get_buffer,
    get_hidden_bytes,
    set_deepep_num_sms,
)
from triton_ep.integrations.megatron.experts import GroupedExperts
from triton_ep.integrations.megatron.hybrid_ep import (
    HybridEPCombine,
    HybridEPDispatch,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
    init_hybrid_ep_buffer,
    reset_hybrid_ep_buffer,
)

__all__ = [
    "HAVE_DEEP_EP",
    "HAVE_HYBRIDEP",
    "FusedCombine",
    "FusedDispatch",
    "GroupedExperts",
    "HybridEPCombine",
    "HybridEPDispatch",
    "fused_combine",
    "fused_dispatch",
    "get_buffer",
    "get_hidden_bytes",
    "hybrid_ep_combine",
    "hybrid_ep_dispatch",
    "init_hybrid_ep_buffer",
    "reset_hybrid_ep_buffer",
    "set_deepep_num_sms",
]

HAVE_DEEP_EP = True
HAVE_HYBRIDEP = True
