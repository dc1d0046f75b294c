"""Decoding steps with two micro-batches: one computes while the rows of the other are in flight.

Each micro-batch has a low-latency layer of its own. `return_recv_hook=True` launches the sending half of a call; the
hook launches the receiving half. The other micro-batch computes between the two, all on one stream. Expert i multiplies
its rows by i, so a combined row must be x times the sum of its token's experts.

    python examples/05_overlap.py                         starts its own ranks
    torchrun --nproc-per-node 4 examples/05_overlap.py
    mpirun -np 4 python examples/05_overlap.py
"""

import torch
import torch.distributed as dist

from triton_ep import EPAll2AllLayer, EPAllToAllLayoutDesc, finalize_distributed, initialize_distributed
from triton_ep.distributed import current_heap, launched_by, run_ranks

STEPS, TOKENS, HIDDEN, TOPK, EXPERTS = 3, 8, 64, 2, 8  # TOKENS: per micro-batch


def apply_experts(rows: torch.Tensor, desc: EPAllToAllLayoutDesc, first: int) -> torch.Tensor:
    """Every row times the number of its expert; `first` is this rank's first expert. The host does not wait."""
    row = torch.arange(rows.shape[0], device=rows.device)
    expert = first + torch.searchsorted(desc.expert_offsets[1:], row.int(), right=True)
    return rows * expert[:, None].to(rows.dtype)


def main() -> None:
    rank, world_size = initialize_distributed()
    device = current_heap().device
    first = rank * EXPERTS // world_size
    draw = torch.Generator().manual_seed(rank)
    sizes = (dist.group.WORLD, TOKENS, HIDDEN, TOPK, rank, EXPERTS, world_size, world_size)
    options = {"low_latency": True, "capacity": world_size * TOKENS * TOPK}  # room for all assignments of all ranks

    with EPAll2AllLayer(*sizes, **options) as a, EPAll2AllLayer(*sizes, **options) as b:
        for step in range(STEPS):
            x_a, x_b = (torch.full((TOKENS, HIDDEN), step + n, dtype=torch.bfloat16, device=device) for n in (1, 2))
            ids_a, ids_b = (torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOPK)[1].int().to(device) for _ in "ab")

            rows_a, _, desc_a, arrived_a = a.dispatch(x_a, ids_a, return_recv_hook=True)
            rows_b, _, desc_b, arrived_b = b.dispatch(x_b, ids_b, return_recv_hook=True)
            arrived_a()
            y_a = apply_experts(rows_a, desc_a, first)  # rows of b are on their way
            out_a, returned_a = a.combine(y_a, desc_a, return_recv_hook=True)
            arrived_b()
            y_b = apply_experts(rows_b, desc_b, first)  # sums of a are on their way
            out_b, returned_b = b.combine(y_b, desc_b, return_recv_hook=True)
            returned_a()
            returned_b()

            for x, ids, out in ((x_a, ids_a, out_a), (x_b, ids_b, out_b)):
                assert torch.equal(out, x * ids.sum(1, keepdim=True)), f"step {step}: a combined row is wrong"

    told = f"rank {rank} of {world_size}: {STEPS} steps of 2 micro-batches, {TOKENS} tokens each, are right"
    print(f"{told}\n", end="", flush=True)  # one write per line, so that lines of ranks do not mix
    finalize_distributed()


if __name__ == "__main__":
    if launched_by() == "none":
        run_ranks(main)
    else:
        main()
