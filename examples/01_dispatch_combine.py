"""Dispatch and combine with rows that carry their origin.

Rank r fills row t with (r, t, 1, 1, ...), so the owner of an expert can check that it received the right rows in
the right order. Expert i multiplies its rows by i, so a combined row must be x times the sum of its token's experts.

    python examples/01_dispatch_combine.py                         starts its own ranks, as 2 nodes
    torchrun --nproc-per-node 4 examples/01_dispatch_combine.py
    mpirun -np 4 python examples/01_dispatch_combine.py
"""

import torch
import torch.distributed as dist

from triton_ep import EPAll2AllLayer, finalize_distributed, initialize_distributed
from triton_ep.distributed import current_heap, launched_by, run_ranks

TOKENS, HIDDEN, TOPK, EXPERTS = 16, 64, 2, 8


def experts_of(rank: int) -> torch.Tensor:
    """[T, K] int32: the experts of a rank's tokens. Every rank can compute them for any rank."""
    first = torch.arange(TOKENS) * (rank + 1) % EXPERTS
    return torch.stack([first, (first + 1 + rank % 3) % EXPERTS], dim=1).int()


def main() -> None:
    rank, world_size = initialize_distributed()
    local_world_size = max(world_size // 2, 1)  # 2 virtual nodes, whatever the host
    device = current_heap().device
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    x[:, 0], x[:, 1] = rank, torch.arange(TOKENS)
    topk_idx = experts_of(rank).to(device)

    layer = EPAll2AllLayer(
        dist.group.WORLD,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        topk=TOPK,
        num_tot_experts=EXPERTS,
        local_world_size=local_world_size,
    )
    recv_x, _, layout_desc = layer.dispatch(x, topk_idx)

    mine = range(rank * EXPERTS // world_size, (rank + 1) * EXPERTS // world_size)
    expected = [  # expert-major; within an expert by source rank, then by token
        (source, int(token))
        for expert in mine
        for source in range(world_size)
        for token in (experts_of(source) == expert).any(1).nonzero()
    ]
    assert [tuple(row) for row in recv_x[:, :2].int().tolist()] == expected, "a row is missing or out of place"

    expert = torch.repeat_interleave(torch.tensor(mine, device=device), layout_desc.num_recv_tokens_per_expert)
    combined = layer.combine(recv_x * expert[:, None].to(recv_x.dtype), layout_desc)
    assert torch.equal(combined, x * topk_idx.sum(1, keepdim=True)), "a combined row is wrong"

    told = f"rank {rank} of {world_size}: {len(recv_x)} rows for experts {list(mine)}, {TOKENS} tokens back"
    print(f"{told}\n", end="", flush=True)  # one write per line, so that lines of ranks do not mix
    layer.finalize()
    finalize_distributed()


if __name__ == "__main__":
    if launched_by() == "none":
        run_ranks(main)
    else:
        main()
