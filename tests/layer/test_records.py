"""The example of a dispatch's records in kernels/device/tables.py and triton_ep/context/records.py."""

import pytest
import torch
import torch.distributed as dist

from triton_ep import EPAll2AllLayer
from triton_ep.context.records import Report, read_reports
from triton_ep.distributed import current_heap
from triton_ep.kernels.device import codes


def _dispatch_example(rank: int, nodes: int, ranks_per_node: int) -> None:
    device = current_heap().device
    layer = EPAll2AllLayer(dist.group.WORLD, 8, 32, 1, rank, 4, ranks_per_node, nodes * ranks_per_node, num_sm=2)
    ids = torch.tensor([[0], [2], [3]] if rank == 0 else [[2], [1]], dtype=torch.int32, device=device)
    x = torch.ones(ids.shape[0], 32, dtype=torch.bfloat16, device=device)
    _, _, desc = layer.dispatch(x, ids, torch.ones(ids.shape, device=device))
    if rank == 1:
        word = codes.HOST_WEIGHTS | codes.HOST_READS
        assert read_reports(desc.report.flatten().tolist(), 2) == [
            Report(2, 2, 3, 0, 0, word, 0, 2),
            Report(3, 3, 2, 0, 0, word, 2, 1),
        ]
        fields = {
            codes.ENTRY_KEPT: [2, 1],
            codes.ENTRY_OWNER: [1, 0],
            codes.ENTRY_DST_ROW: [1, 1],
            codes.ENTRY_STAGE_ROW: [2, 1],
            codes.ENTRY_NODE_SLOT: [0, 1],
            codes.ENTRY_PULL_ROW: [1, 0],
        }
        assert [desc.entries[field].flatten().tolist() for field in fields] == list(fields.values())
        assert desc.expert_offsets.tolist() == [0, 2, 3]
        assert desc.num_recv_tokens_per_expert.tolist() == [2, 1]
        assert desc.tokens_from_node.tolist() == [2] and desc.tokens_per_node.tolist() == [2]
        parts = {name: desc._part(name).tolist() for name in ("row", "bases", "sums")}
        assert parts == {
            "row": [0, 1, 1, 0, 1, 1, 2, 0, 2, 0, 0, word],
            "bases": [1, 1, 1, 3, 0, 0, 1, 2, 1, 2],
            "sums": [-1, -1, 1, -1],
        }
        bands = [65536 * filled + 256 * 1 + 0 for filled in (2, 1)]  # one tile each
        assert desc.tiles.tolist()[:3] == [[2, 3, 0, 0], [0, 0, 2, bands[0]], [1, 2, 1, bands[1]]]
    layer.finalize()


@pytest.mark.plain
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2)])
def test_records_of_a_dispatch_are_those_of_the_example(run_ranks, nodes, ranks_per_node):
    """Two ranks of two experts each have every number given in the documentation of the records."""
    run_ranks(_dispatch_example, nodes, ranks_per_node)
