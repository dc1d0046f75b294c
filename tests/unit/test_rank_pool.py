"""What a pool of ranks promises: results by rank, errors with their origin, no hang, nothing left behind."""

import torch


def _sum_of_ranks(rank, nodes, ranks_per_node):
    total = torch.tensor([rank])
    torch.distributed.all_reduce(total)
    return rank, nodes, ranks_per_node, int(total)


def test_every_rank_runs_and_answers(run_ranks):
    """Results come back by rank, the ranks form one job."""
    assert run_ranks(_sum_of_ranks, 2, 2) == [(rank, 2, 2, 6) for rank in range(4)]
