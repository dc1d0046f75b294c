"""MXFP8 on the wire: the same dispatch in bf16 and with payload="mxfp8", compared.

Dispatch quantises a row as it sends it: e4m3 elements, and one power-of-two scale (e8m0, a byte) per 32 of them.
Rows arrive as an MXTensor, which the grouped GEMM reads directly; combine stays in bf16. Prints and asserts the bytes
per row and over the links, the error of rows and of combined results, and the parts of the received MXTensor.

    python examples/02_mxfp8.py                         starts its own ranks
    torchrun --nproc-per-node 4 examples/02_mxfp8.py
    mpirun -np 4 python examples/02_mxfp8.py
"""

import torch
import torch.distributed as dist

from triton_ep import EPAll2AllLayer, MXTensor, finalize_distributed, initialize_distributed
from triton_ep.distributed import current_heap, launched_by, local_world_size, run_ranks
from triton_ep.ops.grouped_gemm import grouped_gemm

TOKENS, HIDDEN, TOPK, EXPERTS = 32, 512, 2, 8
PIECE = 128  # bytes of which a row on the wire has a multiple


def sqnr(exact: torch.Tensor, seen: torch.Tensor) -> float:
    """Signal-to-noise ratio in dB; infinite if nothing differs."""
    noise = (exact.double() - seen.double()).square().sum()
    return 10 * torch.log10(exact.double().square().sum() / noise).item()


def sent_rows(topk_idx: torch.Tensor, rank: int, world_size: int) -> int:
    """Rows that leave this rank, on one node: each token goes once to every other rank that owns one of its experts."""
    owner = topk_idx * world_size // EXPERTS
    return sum(int((owner == peer).any(1).sum()) for peer in range(world_size) if peer != rank)


def main() -> None:
    rank, world_size = initialize_distributed()
    device = current_heap().device
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(device)
    weights, topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).softmax(1).topk(TOPK)
    weights, topk_idx = weights.to(device), topk_idx.int().to(device)
    expert_w = torch.randn(EXPERTS // world_size, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5  # [e, N, K]
    expert_w_t = expert_w.bfloat16().to(device).transpose(-2, -1)

    def make_layer(payload: str | None) -> EPAll2AllLayer:
        sizes = (dist.group.WORLD, TOKENS, HIDDEN, TOPK, rank, EXPERTS, local_world_size(), world_size)
        return EPAll2AllLayer(*sizes, payload=payload)

    with make_layer(None) as bf16_layer, make_layer("mxfp8") as mx_layer:
        rows, row_weights, desc = bf16_layer.dispatch(x, topk_idx, weights)
        mx_rows, mx_row_weights, mx_desc = mx_layer.dispatch(x, topk_idx, weights)

        # Received: the same rows in the same order, as elements and scales.
        assert torch.equal(desc.expert_offsets, mx_desc.expert_offsets) and torch.equal(row_weights, mx_row_weights)
        assert isinstance(mx_rows, MXTensor) and mx_rows.shape == rows.shape and mx_rows.dtype == torch.bfloat16
        assert mx_rows.qdata.dtype == torch.float8_e4m3fn and mx_rows.scale.dtype == torch.float8_e8m0fnu
        expected = MXTensor.to_mx(rows)  # the result of quantising the bf16 rows after they arrive
        assert torch.equal(mx_rows.qdata.view(torch.uint8), expected.qdata.view(torch.uint8))
        assert torch.equal(mx_rows.scale.view(torch.uint8), expected.scale.view(torch.uint8))

        # Cost: bytes, and rounding to 4 significant bits.
        row_bytes, mx_row_bytes = HIDDEN * 2, HIDDEN + HIDDEN // 32
        sent_bytes = -(-mx_row_bytes // PIECE) * PIECE
        assert mx_rows.qdata[0].nbytes + mx_rows.scale[0].nbytes == mx_row_bytes
        blocks = rows.float().view(-1, 32)
        error = (mx_rows.dequantize(torch.float32).view(-1, 32) - blocks).abs()
        worst = (error.amax(1) / blocks.abs().amax(1)).max().item()
        row_db = sqnr(rows, mx_rows.dequantize())
        assert worst <= 2**-4, f"an element is off by {worst} of its block's largest"
        assert row_db > 30, f"rows have {row_db} dB"

        # Experts read the MXTensor directly; combine returns their bf16 results.
        out = grouped_gemm(rows, expert_w_t, desc.expert_offsets)
        mx_out = grouped_gemm(mx_rows, expert_w_t, mx_desc.expert_offsets)
        combined = bf16_layer.combine(out, desc, weights=row_weights)
        mx_combined = mx_layer.combine(mx_out, mx_desc, weights=mx_row_weights)
        combined_db = sqnr(combined, mx_combined)
        assert combined_db > 28, f"combined rows have {combined_db} dB"

    sent = sent_rows(topk_idx, rank, world_size)
    told = (
        f"rank {rank} of {world_size}: sent {sent} rows in {sent * sent_bytes} bytes, not {sent * row_bytes}; "
        f"received {len(rows)} with {row_db:.1f} dB, max relative error {worst:.3f}; combined {combined_db:.1f} dB\n"
    )
    if rank == 0:
        told += (
            f"a row of {HIDDEN}: {row_bytes} bytes in bf16, {mx_row_bytes} in MXFP8, {sent_bytes} on the wire\n"
            f"received: qdata {list(mx_rows.qdata.shape)} {mx_rows.qdata.dtype}\n"
            f"          scale {list(mx_rows.scale.shape)} {mx_rows.scale.dtype}\n"
            f"          expert_offsets {mx_desc.expert_offsets.tolist()}\n"
        )
    print(told, end="", flush=True)  # one write, so that lines of ranks do not mix
    finalize_distributed()


if __name__ == "__main__":
    run_ranks(main) if launched_by() == "none" else main()
