"""HybridEPBuffer: DeepEP's HybridEP interface over EPAll2AllLayer. Rows arrive grouped by expert, padded, in one step.

    HybridEP                                    here
    HybridEPBuffer(group, hidden_dim, max_num_  layers over `group`, created when a call first needs one: by dtype,
      of_tokens_per_rank, num_local_experts)      experts per token, `pad_multiple` and budget
    dispatch_with_permute(...)                  layer.dispatch of the expert ids in the routing map, `alignment` =
                                                  pad_multiple
    non_blocking=True, num_permuted_tokens=n    layer with `capacity=n`: no host synchronisation, CUDA graphs
    dispatch_with_permute(..., handle=)         layer.dispatch_again
    combine_with_unpermute(hidden, handle)      layer.combine, a plain sum in float32
    ... probs=                                  one float32 per row, sent back to its (token, expert)
    dispatch, combine                           layer.dispatch_compact, layer.combine: one row per (token, rank)
    hidden of uint8 or e4m3, scaling_factor     layer.dispatch_scaled
    handle[3], [4], [7], [10]                   rows before permutation, their local experts, rows per expert without
                                                  padding, and the overflow count; computed when read
    fuse_permute_dispatch, num_blocks_*, ...    accepted without effect: the bits are the same

Source: deep_ep/hybrid_ep_buffer.py of DeepEP's branch hybrid-ep. docs/how-to/hybrid-ep.md has the details.
"""

from triton_ep.integrations.hybrid_ep.buffer import HybridEPBuffer
from triton_ep.integrations.hybrid_ep.maps import indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
