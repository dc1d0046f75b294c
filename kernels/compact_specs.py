"""KernelSpecs of what front doors need beside expert-major rows: compact rows, slabs, where tokens go, routing maps."""

from __future__ import annotations

from .compute import map_slots, slab, token_layout
from .intranode import compact
from .kernel_spec import KernelSpec, Variant

_ROWS = {"ROWS": 1, "BLOCK_H": 2048}
_ARRIVALS = {"TOPK": 8, "KP": 8, "SOURCES": 8, "SENDERS": 32}

COMPACT_SPECS: tuple[KernelSpec, ...] = (
    KernelSpec(
        compact.compact_rows_kernel,
        "recv_x_ptr:*{WORD} recv_scale_ptr:*u8 recv_idx_ptr:*{IDX} recv_weights_ptr:*fp32 placement_ptr:*i32 "
        "state_ptr:*i64 tables_ptr:*i64 row_words:i32 row_limit:i32 rank:i32 num_ranks:i32 ranks_per_node:i32 "
        "experts_per_rank:i32 num_senders:i32",
        tuple(
            Variant(
                {"HAS_SCALES": scales, "HAS_IDX": idx, "HAS_WEIGHTS": weights, **_ARRIVALS, **_ROWS},
                {"WORD": "i64", "IDX": dtype},
                ("row_words",),
            )
            for idx, weights, dtype in ((True, True, "i64"), (True, False, "i32"), (False, False, "i32"))
            for scales in (False, True)
        ),
        maxnreg=128,  # as the expand kernel: fits beside the push, for which it waits
    ),
    KernelSpec(
        token_layout.token_layout_kernel,
        "topk_idx_ptr:*{IDX} counts_ptr:*i32 in_rank_ptr:*u8 num_tokens:i32 num_experts:i32 num_ranks:i32 "
        "experts_per_rank:i32 ranks_per_node:i32",
        tuple(Variant({"TOPK": 8, "KP": 8, "GP": 8, "BLOCK_T": 16}, {"IDX": idx}) for idx in ("i32", "i64")),
    ),
    KernelSpec(
        map_slots.map_slots_kernel,
        "map_ptr:*u8 probs_ptr:*fp32 ids_ptr:*i32 weights_ptr:*fp32 excess_ptr:*i32 num_tokens:i32 num_experts:i32 "
        "topk:i32",
        tuple(
            Variant({"HAS_PROBS": probs, "COUNT_EXCESS": excess, "KP": 8, "BLOCK_T": 4, "BLOCK_E": 256})
            for probs in (True, False)
            for excess in (True, False)
        ),
    ),
    KernelSpec(
        slab.slab_rows_kernel,
        "source_ptr:*{WORD} dest_ptr:*{WORD} offsets_ptr:*i32 counts_ptr:*i32 num_experts:i32 slab_rows:i32 "
        "row_words:i32",
        tuple(Variant({"PACK": pack, **_ROWS}, {"WORD": "i64"}, ("row_words",)) for pack in (True, False)),
    ),
)
"""What those kernels compile to."""
