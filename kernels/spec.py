"""KernelSpec: what a launch needs to know of a kernel. The JIT, the compile gate and the docs all read it.

A spec lists the run-time arguments with their types, the warps, and *variants*: representative choices of
types and constexprs that the compile gate builds for every architecture without a GPU.

Type letters: `*i32` and so on are pointers; `{TOKEN}`, `{WORD}`, `{IDX}` stand for the dtype of tokens, of
payload words and of expert ids, and are filled in by a variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton.language as tl

from .compute import mxfp8, routing
from .compute.gemm_specs import GEMM_SPECS
from .device.buffers import (
    BARRIER_FLAG,
    DONE_FLAG,
    EPOCH_BARRIER_ALL,
    EPOCH_BARRIER_NODE,
    EPOCH_COMBINE,
    NODE_BARRIER_FLAG,
)
from .device.mxfp8 import MODE_CEIL, MODE_EVEN, MODE_FLOOR, MODE_RCEIL
from .device.rows import MX, QUANTISE, WORDS
from .device.transport import NVSHMEM, NVSHMEM_SYMBOLS, P2P
from .internode import barrier, splits
from .internode import combine as internode_combine
from .internode import dispatch as internode_dispatch
from .intranode import combine, dispatch, floor, low_latency_combine, low_latency_dispatch
from .kernel_spec import KernelSpec, Variant, uses_nvshmem

_STATE = "state_ptr:*i64 tables_ptr:*i64"
_WHERE = "rank:i32 num_ranks:i32 ranks_per_node:i32"
_ROW = {"ROWS": 2, "BLOCK_H": 2048}
_SUM = {"ROWS": 2, "BLOCK_H": 8192}
_K8 = {"TOPK": 8, "KP": 8}
_LOW_LATENCY = {**_K8, "WP": 8}
_FLAGS = {"LWP": 8, "MAX_PROGRAMS": 128}
_CHUNKS = {"MAX_CHUNKS": 256, "CHUNK": 16}
_WORD = {"WORD": "i64"}
_TOKEN = {"TOKEN": "bf16"}
_PAYLOADS = (
    ({"PAYLOAD": WORDS.value, **_ROW}, _WORD),
    ({"PAYLOAD": QUANTISE.value, "ROWS": 1, "BLOCK_H": 8192}, {"WORD": "bf16"}),
    ({"PAYLOAD": MX.value, **_ROW}, _WORD),
)
_NETWORKS = (P2P.value, NVSHMEM.value)


def _payload(*constexprs: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    merged: dict[str, Any] = dict(extra)
    for part in constexprs:
        merged.update(part)
    return merged


_MX = (("bf16", MODE_RCEIL, False), ("fp32", MODE_FLOOR, True), ("fp16", MODE_EVEN, False), ("bf16", MODE_CEIL, True))
_MX_COLUMNS = {"GP": 64, "BLOCK_H": 128, "STEPS": 4}


def _mx(mode: Any, e5m2: bool) -> dict[str, Any]:
    """What a quantising kernel is compiled for."""
    return {"MODE": mode.value, "E5M2": e5m2}


def _mx_types(token: str, e5m2: bool) -> dict[str, str]:
    """Types of high-precision values and of MXFP8 elements."""
    return {"TOKEN": token, "ELEMENT": "fp8e5" if e5m2 else "fp8e4nv"}


SPECS: tuple[KernelSpec, ...] = (
    KernelSpec(
        routing.routing_count_kernel,
        "topk_idx_ptr:*{IDX} kept_idx_ptr:*i32 owner_ptr:*i32 entry_slot_ptr:*i32 rank_slot_ptr:*i32 "
        "node_slot_ptr:*i32 chunk_counts_ptr:*i32 chunk_bad_ptr:*i32 num_tokens:i32 num_experts:i32 num_ranks:i32 "
        "experts_per_rank:i32 ranks_per_node:i32",
        tuple(Variant({**_K8, "BLOCK_T": 16, "BLOCK_C": 256}, {"IDX": t}) for t in ("i32", "i64")),
        num_warps=16,  # its comparison tables do not fit the registers of fewer
    ),
    KernelSpec(
        routing.routing_scan_kernel,
        "chunk_counts_ptr:*i32 chunk_bad_ptr:*i32 row_ptr:*i32 num_chunks:i32 num_columns:i32 row_length:i32 "
        "num_tokens:i32 host_error:i32",
        (Variant({"BLOCK_N": 256, "BLOCK_C": 16}),),
    ),
    KernelSpec(
        routing.routing_offsets_kernel,
        "state_ptr:*i64 tables_ptr:*i64 bases_ptr:*i32 "
        "expert_offsets_ptr:*i32 num_recv_ptr:*i32 overflow_ptr:*i32 tokens_from_node_ptr:*i32 report_ptr:*i32 "
        "rank:i32 num_ranks:i32 experts_per_rank:i32 ranks_per_node:i32 row_length:i32 "
        "alignment:i32 recv_capacity:i32",
        (Variant({"WP": 8, "EP": 32, "BLOCK_E": 256}),),
    ),
    KernelSpec(
        routing.routing_slots_kernel,
        "kept_idx_ptr:*i32 scatter_idx_ptr:*i32 chunk_counts_ptr:*i32 bases_ptr:*i32 "
        "dst_row_ptr:*i32 stage_row_ptr:*i32 node_slot_ptr:*i32 node_token_ptr:*i32 "
        "num_tokens:i32 max_tokens:i32 num_ranks:i32 experts_per_rank:i32 ranks_per_node:i32 "
        "recv_capacity:i32 stage_capacity:i32",
        tuple(Variant({**_K8, "BLOCK_T": 16, "HAS_SCATTER": s}) for s in (False, True)),
    ),
    KernelSpec(
        splits.splits_exchange_kernel,
        f"row_ptr:*i32 {_STATE} {_WHERE} row_length:i32",
        tuple(Variant({"NETWORK": n, "WP": 8, "LWP": 8, "BLOCK": 512}) for n in _NETWORKS),
        num_warps=8,
    ),
    KernelSpec(
        barrier.barrier_kernel,
        f"{_STATE} {_WHERE}",
        tuple(
            Variant(
                {
                    "EPOCH": epoch.value,
                    "FLAG_BUFFER": flag.value,
                    "SAME_NODE_ONLY": flag is NODE_BARRIER_FLAG,
                    "WAIT": flag is not DONE_FLAG,
                    "NETWORK": n,
                    "WP": 8,
                    "LWP": 8,
                }
            )
            for n in _NETWORKS
            for epoch, flag in (
                (EPOCH_BARRIER_ALL, BARRIER_FLAG),
                (EPOCH_BARRIER_NODE, NODE_BARRIER_FLAG),
                (EPOCH_COMBINE, DONE_FLAG),
            )
        ),
        num_warps=1,
    ),
    KernelSpec(
        dispatch.dispatch_push_kernel,
        "x_ptr:*{WORD} scale_ptr:*u8 owner_ptr:*i32 dst_row_ptr:*i32 stage_row_ptr:*i32 weights_ptr:*fp32 "
        f"chunk_counts_ptr:*i32 {_STATE} num_tokens:i32 row_words:i32 stage_capacity:i32 experts_per_rank:i32 {_WHERE}",
        tuple(
            Variant(
                _payload(_K8, _FLAGS, payload, HAS_WEIGHTS=w, BLOCK_T=16, STEP_CHUNKS=16),
                words,
                ("row_words",),
                num_warps=8 if payload["PAYLOAD"] == QUANTISE.value else None,
            )
            for payload, words in _PAYLOADS
            for w in (False, True)
        ),
        num_warps=16,
    ),
    KernelSpec(
        dispatch.dispatch_expand_kernel,
        "recv_x_ptr:*{WORD} recv_scale_ptr:*u8 recv_weights_ptr:*fp32 copy_rows_ptr:*i32 "
        f"expert_offsets_ptr:*i32 num_recv_ptr:*i32 report_ptr:*i32 {_STATE} row_words:i32 "
        f"{_WHERE} experts_per_rank:i32 stage_capacity:i32 num_senders:i32",
        tuple(
            Variant(
                _payload(_K8, _FLAGS, _ROW, HAS_SCALES=s, HAS_WEIGHTS=w, HAS_PADDING=w, KEEP_COPY_ROWS=w),
                _WORD,
                ("row_words",),
            )
            for s in (False, True)
            for w in (False, True)
        ),
        num_warps=8,
    ),
    KernelSpec(
        floor.floor_push_kernel,
        "source_ptr:*{WORD} addrs_ptr:*i64 num_rows:i32 row_words:i32 rank:i32 num_ranks:i32",
        (Variant({"BLOCK": 2048}, _WORD, ("row_words",)),),
        num_warps=32,
    ),
    KernelSpec(
        internode_dispatch.internode_send_kernel,
        "x_ptr:*{WORD} scale_ptr:*u8 owner_ptr:*i32 dst_row_ptr:*i32 stage_row_ptr:*i32 weights_ptr:*fp32 "
        f"node_token_ptr:*i32 tokens_per_node_ptr:*i32 {_STATE} num_tokens:i32 max_tokens:i32 row_words:i32 "
        f"{_WHERE}",
        tuple(
            Variant(_payload(_K8, _CHUNKS, payload, HAS_WEIGHTS=True, NETWORK=n), words, ("row_words",))
            for payload, words in _PAYLOADS
            for n in _NETWORKS
        ),
        num_warps=16,
    ),
    KernelSpec(
        internode_dispatch.internode_forward_kernel,
        "word_ptr:*{WORD} tokens_from_node_ptr:*i32 owner_table_ptr:*i32 dst_row_table_ptr:*i32 "
        f"stage_row_table_ptr:*i32 {_STATE} max_tokens:i32 row_words:i32 "
        f"stage_capacity:i32 {_WHERE}",
        (Variant(_payload(_K8, _FLAGS, _CHUNKS, _ROW, HAS_WEIGHTS=True), _WORD, ("row_words",)),),
        num_warps=16,
    ),
    KernelSpec(
        combine.combine_stage_kernel,
        f"y_ptr:*{{WORD}} weights_ptr:*fp32 num_rows_ptr:*i32 {_STATE} row_words:i32 row_capacity:i32 {_WHERE}",
        tuple(Variant(_payload(_FLAGS, _ROW, HAS_WEIGHTS=w, WP=8), _WORD, ("row_words",)) for w in (False, True)),
        num_warps=16,
    ),
    KernelSpec(
        combine.combine_reduce_kernel,
        f"y_ptr:*{{TOKEN}} weights_ptr:*fp32 copy_rows_ptr:*i32 report_ptr:*i32 {_STATE} hidden:i32 "
        f"row_capacity:i32 {_WHERE}",
        tuple(
            Variant(_payload({"TOPK": 8}, _FLAGS, _SUM, HAS_WEIGHTS=w, WP=8), _TOKEN, ("hidden",))
            for w in (False, True)
        ),
        num_warps=16,
    ),
    KernelSpec(
        internode_combine.combine_partial_kernel,
        "like_x_ptr:*{TOKEN} tokens_from_node_ptr:*i32 owner_table_ptr:*i32 row_table_ptr:*i32 "
        f"{_STATE} max_tokens:i32 hidden:i32 row_capacity:i32 "
        f"{_WHERE} num_stage_programs:i32",
        tuple(
            Variant(
                _payload(
                    {"TOPK": 8}, _FLAGS, _CHUNKS, {**_SUM, "ROWS": 1}, HAS_WEIGHTS=True, PARTIAL_DTYPE=dtype, NETWORK=n
                ),
                _TOKEN,
                ("hidden",),
            )
            for n, dtype in zip(_NETWORKS, (tl.float32, tl.bfloat16), strict=True)
        ),
        num_warps=32,
    ),
    KernelSpec(
        combine.combine_pull_kernel,
        f"out_ptr:*{{TOKEN}} owner_ptr:*i32 row_ptr:*i32 node_slot_ptr:*i32 tokens_per_node_ptr:*i32 {_STATE} "
        "num_tokens:i32 max_tokens:i32 hidden:i32 row_capacity:i32 "
        f"{_WHERE} num_stage_programs:i32",
        tuple(
            Variant(
                _payload({"TOPK": 8}, _FLAGS, _CHUNKS, tile, HAS_WEIGHTS=w, NNP=nodes, PARTIAL_DTYPE=tl.float32),
                _TOKEN,
                ("hidden",),
            )
            for nodes, w, tile in ((1, False, _SUM), (2, True, {**_SUM, "ROWS": 1}))
        ),
        num_warps=32,
    ),
    KernelSpec(
        low_latency_dispatch.low_latency_push_kernel,
        "x_ptr:*{WORD} scale_ptr:*u8 topk_idx_ptr:*{IDX} weights_ptr:*fp32 kept_idx_ptr:*i32 "
        f"{_STATE} num_tokens:i32 max_tokens:i32 row_words:i32 experts_per_rank:i32 rank:i32 num_ranks:i32 "
        "host_word:i32",
        tuple(
            Variant(
                _payload(_LOW_LATENCY, payload, HAS_WEIGHTS=w, BLOCK_N=1024, EARLY=w),
                {**words, "IDX": idx},
                ("row_words",),
            )
            for payload, words in (
                ({"PAYLOAD": WORDS.value, "TILES": 1, "BLOCK_H": 2048}, _WORD),
                ({"PAYLOAD": QUANTISE.value, "TILES": 1, "BLOCK_H": 8192}, {"WORD": "bf16"}),
                ({"PAYLOAD": MX.value, "TILES": 1, "BLOCK_H": 1024}, _WORD),
            )
            for w, idx in ((True, "i32"), (False, "i64"))
        ),
        num_warps=8,
    ),
    KernelSpec(
        low_latency_dispatch.low_latency_expand_kernel,
        "recv_x_ptr:*{WORD} recv_scale_ptr:*u8 recv_weights_ptr:*fp32 copy_rows_ptr:*i32 small_ptr:*i32 "
        f"{_STATE} row_words:i32 max_tokens:i32 experts_per_rank:i32 capacity:i32 alignment:i32 rank:i32 num_ranks:i32",
        tuple(
            Variant(
                _payload(
                    _LOW_LATENCY,
                    HAS_SCALES=s,
                    HAS_WEIGHTS=w,
                    HAS_PADDING=p,
                    EP=32,
                    ROWS=2,
                    TILES=1,
                    BLOCK_H=h,
                    BY_LOAD=w,
                    EARLY=w,
                ),
                _WORD,
                ("row_words",),
            )
            for s, h in ((False, 2048), (True, 1024))
            for w, p in ((True, False), (False, True))
        ),
        num_warps=8,
    ),
    KernelSpec(
        low_latency_combine.low_latency_reduce_kernel,
        f"y_ptr:*{{TOKEN}} weights_ptr:*fp32 copy_rows_ptr:*i32 {_STATE} max_tokens:i32 hidden:i32 rank:i32 "
        "num_ranks:i32",
        tuple(
            Variant(
                {"TOPK": 8, "WP": 8, "HAS_WEIGHTS": w, "ROWS": 1, "TILES": 1, "BLOCK_H": 8192, "EARLY": w},
                _TOKEN,
                ("hidden",),
            )
            for w in (False, True)
        ),
        num_warps=8,
    ),
    KernelSpec(
        low_latency_combine.low_latency_sum_kernel,
        f"out_ptr:*{{TOKEN}} kept_idx_ptr:*i32 {_STATE} num_tokens:i32 max_tokens:i32 hidden:i32 "
        "experts_per_rank:i32 rank:i32 num_ranks:i32",
        tuple(
            Variant(_payload(_LOW_LATENCY, PARTS=2, ROWS=1, BLOCK_H=4096, BY_LOAD=e, EARLY=e), _TOKEN, ("hidden",))
            for e in (False, True)
        ),
        num_warps=8,
    ),
    KernelSpec(
        mxfp8.quantize_rows_kernel,
        "x_ptr:*{TOKEN} elements_ptr:*{ELEMENT} scale_ptr:*u8 num_blocks:i32",
        tuple(Variant({**_mx(mode, e), "BLOCKS": 128}, _mx_types(t, e)) for t, mode, e in _MX),
    ),
    KernelSpec(
        mxfp8.dequantize_rows_kernel,
        "elements_ptr:*{ELEMENT} scale_ptr:*u8 out_ptr:*{TOKEN} num_blocks:i32",
        tuple(Variant({"BLOCKS": 128}, _mx_types(t, e)) for t, e in (("bf16", False), ("fp32", True))),
    ),
    KernelSpec(
        mxfp8.quantize_columns_kernel,
        "x_ptr:*{TOKEN} offsets_ptr:*i32 elements_ptr:*{ELEMENT} scale_ptr:*u8 num_rows:i32 hidden:i32 "
        "num_groups:i32 num_scale_rows:i32",
        tuple(
            Variant({**_mx(mode, e), **_MX_COLUMNS, "HAS_OFFSETS": not e}, _mx_types(t, e), ("hidden",))
            for t, mode, e in _MX[:2]
        ),
    ),
    KernelSpec(
        mxfp8.quantize_both_kernel,
        "x_ptr:*{TOKEN} offsets_ptr:*i32 row_elements_ptr:*{ELEMENT} row_scale_ptr:*u8 "
        "column_elements_ptr:*{ELEMENT} column_scale_ptr:*u8 num_rows:i32 hidden:i32 num_groups:i32 "
        "num_scale_rows:i32",
        tuple(
            Variant({**_mx(mode, e), **_MX_COLUMNS, "HAS_OFFSETS": not e}, _mx_types(t, e), ("hidden",))
            for t, mode, e in _MX[:2]
        ),
    ),
    KernelSpec(
        mxfp8.dequantize_columns_kernel,
        "elements_ptr:*{ELEMENT} scale_ptr:*u8 offsets_ptr:*i32 out_ptr:*{TOKEN} num_rows:i32 hidden:i32 "
        "num_groups:i32",
        (Variant({**_MX_COLUMNS, "HAS_OFFSETS": True}, _mx_types("bf16", False), ("hidden",)),),
    ),
    *GEMM_SPECS,
)
"""Every kernel of the package."""

SPEC = {spec.name: spec for spec in SPECS}

__all__ = ["NVSHMEM_SYMBOLS", "SPEC", "SPECS", "KernelSpec", "Variant", "uses_nvshmem"]
