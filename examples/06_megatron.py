"""A mixture-of-experts layer over fused_dispatch and fused_combine, as Megatron's flex dispatcher calls them.

A row arrives once per rank, with the ids and probabilities of its experts there; the experts permute and sum the rows.
Checks outputs, and gradients of tokens and probabilities, against the same layer computed densely by torch. Products
and sums of the small integers are exact, so every bit must agree.

    python examples/06_megatron.py                         starts its own ranks
    torchrun --nproc-per-node 4 examples/06_megatron.py
    mpirun -np 4 python examples/06_megatron.py
"""

import torch
import torch.distributed as dist

from triton_ep import finalize_distributed, initialize_distributed
from triton_ep.distributed import current_heap, launched_by, run_ranks
from triton_ep.integrations import deep_ep
from triton_ep.integrations.megatron import fused_combine, fused_dispatch

TOKENS, HIDDEN, TOPK, EXPERTS = 24, 64, 2, 8


def apply(expert: int, rows: torch.Tensor) -> torch.Tensor:
    """An expert: its number plus one, times the row."""
    return rows * (expert + 1)


def moe(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, rank: int) -> torch.Tensor:
    """[T, H] to [T, H], with expert parallelism."""
    rows, row_ids, row_probs, tokens_per_expert, handle = fused_dispatch(x, ids, probs, EXPERTS, dist.group.WORLD)
    out = torch.zeros_like(rows, dtype=torch.float32)
    for local, count in enumerate(tokens_per_expert.tolist()):
        row, k = torch.nonzero(row_ids == local, as_tuple=True)  # in the order of source rank and token
        assert row.numel() == count
        result = apply(rank * len(tokens_per_expert) + local, rows[row].float())
        out = out.index_add(0, row, result * row_probs[row, k].unsqueeze(1))
    combined, _ = fused_combine(out.to(rows.dtype), dist.group.WORLD, handle)
    return combined


def dense(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """The same layer, computed by this rank alone."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for k in range(TOPK):
        out = out + apply(ids[:, k : k + 1], x.float()) * probs[:, k : k + 1]
    return out.to(x.dtype)


def main() -> None:
    rank, world_size = initialize_distributed()
    device = current_heap().device
    generator = torch.Generator().manual_seed(rank)
    num_tokens = TOKENS + rank  # ranks may have different numbers of tokens

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(device)

    x, grad = (integers(num_tokens, HIDDEN).bfloat16() for _ in range(2))
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOPK, 1).indices.to(device)
    probs = torch.tensor([0.75, 0.25]).expand(num_tokens, TOPK).contiguous().to(device)

    results = []
    for function in (lambda x, p: moe(x, ids, p, rank), lambda x, p: dense(x, ids, p)):
        leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
        out = function(*leaves)
        out.backward(grad)
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for name, seen, expected in zip(("output", "dx", "dprobs"), *results, strict=True):
        assert torch.equal(seen, expected), f"{name} differs from the dense layer's"
    print(
        f"rank {rank} of {world_size}: {num_tokens} tokens, the bits of the dense layer, forward and backward",
        flush=True,
    )
    deep_ep.release()
    finalize_distributed()


if __name__ == "__main__":
    run_ranks(main) if launched_by() == "none" else main()
