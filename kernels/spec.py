"""KernelSpec: what a launch needs to know of a kernel. The JIT, the ahead-of-time build and the compile gate read it.

A spec lists the run-time arguments with their types, the warps, and *variants*: representative choices of
types and constexprs that the compile gate builds for every architecture without a GPU.

Type letters: `*i32` and so on are pointers; `{TOKEN}`, `{WORD}`, `{IDX}` stand for the dtype of tokens, of
payload words and of expert ids, and are filled in by a variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton.language as tl

from .compact_specs import COMPACT_SPECS
from .compute import mxfp8, routing
from .compute.gemm_specs import GEMM_SPECS
from .compute.mx_specs import MX_SPECS
from .compute.nvfp4_specs import NVFP4_SPECS
from .device.buffers import (
    BARRIER_FLAG,
    EPOCH_BARRIER_ALL,
    EPOCH_BARRIER_NODE,
    NODE_BARRIER_FLAG,
)
from .device.codes import LANDING_BF16, LANDING_MX, LANDING_ROW, LANDING_WORDS, NVSHMEM_SYMBOLS
from .device.mxfp8 import MODE_CEIL, MODE_EVEN, MODE_FLOOR, MODE_RCEIL, MODE_RCEIL_SATFINITE
from .device.rows import MX, QUANTISE, WORDS
from .device.transport import NVSHMEM, P2P
from .experts.backward_specs import BACKWARD_SPECS
from .experts.specs import EXPERT_SPECS
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
_SENDERS = {"LWP": 8, "SENDERS": 32}
_CHUNKS = {"MAX_CHUNKS": 256, "CHUNK": 16}
_WORD = {"WORD": "i64"}
_TOKEN = {"TOKEN": "bf16"}
_NETWORKS = (P2P.value, NVSHMEM.value)


def _payload(*constexprs: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    merged: dict[str, Any] = dict(extra)
    for part in constexprs:
        merged.update(part)
    return merged


_MX = (
    ("bf16", MODE_RCEIL, False),
    ("fp32", MODE_FLOOR, True),
    ("bf16", MODE_RCEIL_SATFINITE, False),
    ("fp16", MODE_EVEN, False),
    ("bf16", MODE_CEIL, True),
)
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
        "topk_idx_ptr:*{IDX} entries_ptr:*i32 chunks_ptr:*i32 num_tokens:i32 num_experts:i32 num_ranks:i32 "
        "experts_per_rank:i32 ranks_per_node:i32",
        tuple(Variant({**_K8, "BLOCK_T": 16, "BLOCK_C": 256, "OTHERS": 16}, {"IDX": t}) for t in ("i32", "i64")),
        num_warps=8,
    ),
    KernelSpec(
        splits.splits_kernel,
        f"chunks_ptr:*i32 placement_ptr:*i32 bad_scatter_ptr:*i32 routed_ptr:*i32 {_STATE} num_chunks:i32 "
        "num_tokens:i32 host_word:i32 rank:i32 num_ranks:i32 experts_per_rank:i32 ranks_per_node:i32 alignment:i32 "
        "recv_capacity:i32",
        tuple(
            Variant(
                {
                    "HAS_SCATTER": s,
                    "NETWORK": n,
                    "WP": 8,
                    "LWP": 8,
                    "EP": 32,
                    "OWNERS": 8,
                    "BLOCK_N": 256,
                    "BLOCK_C": 16,
                    "BLOCK": 512,
                }
            )
            for n in _NETWORKS
            for s in (False, True)
        ),
        num_warps=8,
    ),
    KernelSpec(
        routing.routing_slots_kernel,
        f"entries_ptr:*i32 scatter_idx_ptr:*{{IDX}} weights_ptr:*fp32 chunks_ptr:*i32 placement_ptr:*i32 "
        f"push_addrs_ptr:*i64 {_STATE} num_tokens:i32 rank:i32 num_ranks:i32 experts_per_rank:i32 ranks_per_node:i32 "
        "row_bytes:i32 recv_capacity:i32 stage_capacity:i32",
        tuple(
            Variant({**_K8, "LWP": 8, "EP": 32, "BLOCK_T": 16, "HAS_SCATTER": s, "HAS_WEIGHTS": w}, {"IDX": "i32"})
            for s in (False, True)
            for w in (False, True)
        ),
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
                    "NETWORK": n,
                    "WP": 8,
                    "LWP": 8,
                }
            )
            for n in _NETWORKS
            for epoch, flag in (
                (EPOCH_BARRIER_ALL, BARRIER_FLAG),
                (EPOCH_BARRIER_NODE, NODE_BARRIER_FLAG),
            )
        ),
        num_warps=1,
    ),
    KernelSpec(
        dispatch.dispatch_push_kernel,
        f"x_ptr:*{{WORD}} scale_ptr:*u8 push_addrs_ptr:*i64 placement_ptr:*i32 {_STATE} num_tokens:i32 row_words:i32 "
        f"experts_per_rank:i32 {_WHERE}",
        tuple(
            Variant(
                {"TOPK": 8, **_SENDERS, **tile, "PAYLOAD": p.value, "BLOCK_T": 16, "STEP_CHUNKS": 16},
                _WORD,
                ("row_words",),
                num_warps=warps,
            )
            for p, tile, warps in ((WORDS, _ROW, 16), (MX, {"ROWS": 2, "BLOCK_H": 1024}, 8))
        ),
        num_warps=16,
        maxnreg=64,  # fits beside programs of the next kernel, which wait for it
    ),
    KernelSpec(
        dispatch.dispatch_expand_kernel,
        "recv_x_ptr:*{WORD} recv_scale_ptr:*{SCALE} recv_weights_ptr:*fp32 copy_rows_ptr:*i32 placement_ptr:*i32 "
        f"{_STATE} row_words:i32 {_WHERE} experts_per_rank:i32 stage_capacity:i32 num_senders:i32",
        tuple(
            Variant(
                _payload(
                    _K8,
                    {"SOURCES": 8, "SENDERS": 32},
                    {"ROWS": 1, "BLOCK_H": block, "TILES": 1},
                    LANDING=landing,
                    HAS_WEIGHTS=w,
                    HAS_PADDING=w,
                    KEEP_COPY_ROWS=w,
                ),
                {"WORD": word, "SCALE": scale},
                ("row_words",),
            )
            for landing, block, word, scale in (
                (LANDING_WORDS, 2048, "i64", "u8"),
                (LANDING_MX, 1024, "i64", "u8"),
                (LANDING_ROW, 2048, "i32", "fp32"),
                (LANDING_BF16, 2048, "i64", "u8"),
            )
            for w in (False, True)
        ),
        maxnreg=128,
    ),
    KernelSpec(
        floor.floor_push_kernel,
        "source_ptr:*{WORD} addrs_ptr:*i64 num_rows:i32 row_words:i32 rank:i32 num_ranks:i32",
        (Variant({"BLOCK": 2048}, _WORD, ("row_words",)),),
        num_warps=32,
    ),
    KernelSpec(
        internode_dispatch.internode_send_kernel,
        "x_ptr:*{WORD} scale_ptr:*u8 entries_ptr:*i32 weights_ptr:*fp32 chunks_ptr:*i32 placement_ptr:*i32 "
        f"{_STATE} num_tokens:i32 max_tokens:i32 row_words:i32 experts_per_rank:i32 {_WHERE}",
        tuple(
            Variant(
                _payload(_K8, _CHUNKS, _ROW, PAYLOAD=p.value, HAS_WEIGHTS=True, BLOCK_T=16, NETWORK=n),
                _WORD,
                ("row_words",),
            )
            for p in (WORDS, MX)
            for n in _NETWORKS
        ),
        num_warps=16,
    ),
    KernelSpec(
        internode_dispatch.internode_forward_kernel,
        f"word_ptr:*{{WORD}} placement_ptr:*i32 forward_ptr:*i32 {_STATE} max_tokens:i32 row_words:i32 "
        f"stage_capacity:i32 experts_per_rank:i32 {_WHERE}",
        tuple(
            Variant(
                _payload(k, _SENDERS, _CHUNKS, _ROW, HAS_WEIGHTS=w, REDUCED=w, STEP_CHUNKS=16), _WORD, ("row_words",)
            )
            for k, w in ((_K8, False), (_K8, True), ({"TOPK": 1, "KP": 1}, True))
        ),
        num_warps=16,
    ),
    KernelSpec(
        combine.combine_stage_kernel,
        f"y_ptr:*{{WORD}} weights_ptr:*fp32 placement_ptr:*i32 {_STATE} row_words:i32 row_capacity:i32 "
        f"experts_per_rank:i32 {_WHERE} call:i32",
        tuple(Variant(_payload(_FLAGS, _ROW, HAS_WEIGHTS=w, WP=8), _WORD, ("row_words",)) for w in (False, True)),
        num_warps=16,
    ),
    KernelSpec(
        combine.combine_free_kernel,
        f"{_STATE} rank:i32 num_ranks:i32",
        (Variant({"WP": 8}),),
        num_warps=1,
    ),
    KernelSpec(
        combine.combine_publish_kernel,
        f"placement_ptr:*i32 {_STATE} experts_per_rank:i32 {_WHERE} call:i32",
        (Variant(_FLAGS),),
        num_warps=1,
    ),
    KernelSpec(
        combine.combine_reduce_kernel,
        f"y_ptr:*{{TOKEN}} weights_ptr:*fp32 copy_rows_ptr:*i32 placement_ptr:*i32 {_STATE} hidden:i32 "
        f"row_capacity:i32 experts_per_rank:i32 {_WHERE} num_steps:i32 call:i32",
        tuple(
            Variant(_payload({"TOPK": k}, _FLAGS, {**_SUM, "ROWS": 1}, HAS_WEIGHTS=w, WP=8), _TOKEN, ("hidden",), warps)
            for w, k, warps in ((False, 8, None), (True, 8, None), (False, 1, 16))  # 1: of compact rows
        ),
        num_warps=32,
    ),
    KernelSpec(
        internode_combine.combine_partial_kernel,
        f"like_x_ptr:*{{TOKEN}} placement_ptr:*i32 forward_ptr:*i32 {_STATE} max_tokens:i32 hidden:i32 "
        f"row_capacity:i32 experts_per_rank:i32 {_WHERE} num_stage_programs:i32 call:i32",
        tuple(
            Variant(
                _payload(
                    {"TOPK": 8, "REDUCED": n == P2P.value, "PARTIAL_DTYPE": dtype, "NETWORK": n},
                    _FLAGS,
                    _CHUNKS,
                    {**_SUM, "ROWS": 1},
                    HAS_WEIGHTS=True,
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
        f"out_ptr:*{{TOKEN}} entries_ptr:*i32 placement_ptr:*i32 {_STATE} num_tokens:i32 max_tokens:i32 hidden:i32 "
        f"row_capacity:i32 experts_per_rank:i32 {_WHERE} num_stage_programs:i32 num_steps:i32 call:i32",
        tuple(
            Variant(
                _payload(
                    {"NNP": nodes, "PARTIAL_DTYPE": tl.float32, "BLOCK_T": 16},
                    {**_FLAGS, **ranks},
                    _CHUNKS,
                    {**_SUM, "ROWS": 1},
                    HAS_WEIGHTS=not reduced,
                    REDUCED=reduced,
                    NETWORK=network,
                ),
                _TOKEN,
                ("hidden",),
            )
            for nodes, reduced, network, ranks in (
                (1, True, P2P.value, {"TOPK": 8}),
                (1, False, P2P.value, {"TOPK": 8}),
                (2, False, NVSHMEM.value, {"TOPK": 8}),
                (2, True, P2P.value, {"TOPK": 3, "LWP": 2}),  # the last batch of a token's rows is not full
            )
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
                _payload(_LOW_LATENCY, payload, HAS_WEIGHTS=w, EP=32, BLOCK_N=1024),
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
                    ROWS=1,
                    TILES=1,
                    BLOCK_H=h,
                ),
                _WORD,
                ("row_words",),
            )
            for s, h in ((False, 2048), (True, 1024))
            for w, p in ((True, False), (False, True))
        ),
        num_warps=4,
    ),
    KernelSpec(
        low_latency_combine.low_latency_reduce_kernel,
        f"y_ptr:*{{TOKEN}} weights_ptr:*fp32 copy_rows_ptr:*i32 placement_ptr:*i32 {_STATE} max_tokens:i32 hidden:i32 "
        "experts_per_rank:i32 rank:i32 num_ranks:i32 call:i32",
        tuple(
            Variant(
                {"TOPK": 8, "WP": 8, "HAS_WEIGHTS": w, "ROWS": 1, "TILES": 1, "BLOCK_H": 8192},
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
        (Variant(_payload(_LOW_LATENCY, PARTS=2, ROWS=1, BLOCK_H=4096), _TOKEN, ("hidden",)),),
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
            for t, mode, e in _MX[:3]
        ),
    ),
    KernelSpec(
        mxfp8.quantize_both_kernel,
        "x_ptr:*{TOKEN} offsets_ptr:*i32 row_elements_ptr:*{ELEMENT} row_scale_ptr:*u8 "
        "column_elements_ptr:*{ELEMENT} column_scale_ptr:*u8 num_rows:i32 hidden:i32 num_groups:i32 "
        "num_scale_rows:i32",
        tuple(
            Variant({**_mx(mode, e), **_MX_COLUMNS, "HAS_OFFSETS": not e}, _mx_types(t, e), ("hidden",))
            for t, mode, e in _MX[:3]
        ),
    ),
    KernelSpec(
        mxfp8.dequantize_columns_kernel,
        "elements_ptr:*{ELEMENT} scale_ptr:*u8 offsets_ptr:*i32 out_ptr:*{TOKEN} num_rows:i32 hidden:i32 "
        "num_groups:i32",
        (Variant({**_MX_COLUMNS, "HAS_OFFSETS": True}, _mx_types("bf16", False), ("hidden",)),),
    ),
    *GEMM_SPECS,
    *EXPERT_SPECS,
    *COMPACT_SPECS,
    *MX_SPECS,
    *NVFP4_SPECS,
    *BACKWARD_SPECS,
)
"""Every kernel of the package."""

SPEC = {spec.name: spec for spec in SPECS}

__all__ = ["NVSHMEM_SYMBOLS", "SPEC", "SPECS", "KernelSpec", "Variant", "uses_nvshmem"]
