"""Records of a dispatch (kernels/device/tables.py, triton_ep/context/records.py): their example, and rows of sums."""

import pytest
import torch
import torch.distributed as dist

from tests.layer.cases import Case, dispatch_and_check, make_layer, workloads
from triton_ep import EPAll2AllLayer
from triton_ep.context.layout import rows_of_sums
from triton_ep.context.records import Report, Reports
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
        assert list(Reports(desc.report.flatten().tolist(), 2)) == [
            Report(2, 2, 3, 0, 0, word, 3, 2),
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
        parts = {name: desc._part(name).tolist() for name in ("row", "bases", "sums", "first_arrivals")}
        assert parts == {
            "row": [0, 1, 1, 0, 1, 1, 2, 0, 2, 0, 0, word],
            "bases": [1, 1, 1, 3, 0, 0, 1, 2, 1, 2],
            "sums": [-1, -1, 1, -1, 1, 2],
            "first_arrivals": [0, 2],
        }
        bands = [65536 * filled + 256 * 1 + 0 for filled in (2, 1)]  # one tile each
        assert desc.tiles.tolist()[:3] == [[2, 3, 0, 0], [0, 0, 2, bands[0]], [1, 2, 1, bands[1]]]
    layer.finalize()


@pytest.mark.plain
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2)])
def test_records_of_a_dispatch_are_those_of_the_example(run_ranks, nodes, ranks_per_node):
    """Two ranks of two experts each have every number given in the documentation of the records."""
    run_ranks(_dispatch_example, nodes, ranks_per_node)


SUMMED = Case("summed", tokens=(7, 12, 0, 9), topk=4, experts=4, local_combine=True)


def _rows_of_sums(ids: list[torch.Tensor], adder: int, ranks_per_node: int, experts: int) -> list:
    """Where the sums lie that a rank adds up: for each node, the rows of each token of the rank's counterpart there, as
    (rank that sums, row) in the order of ranks."""
    first = adder // ranks_per_node * ranks_per_node
    found, row = [], 0
    for source in range(adder % ranks_per_node, len(ids), ranks_per_node):
        of_token = [[] for _ in ids[source]]
        for rank in range(first, first + ranks_per_node):
            for token, choices in enumerate(ids[source].tolist()):
                if rank in [expert // experts for expert in choices if expert >= 0]:
                    of_token[token].append((rank, row))
                    row += 1
        found.append(of_token)
    return found


def _check_sums(rank: int, nodes: int, ranks_per_node: int) -> None:
    with make_layer(SUMMED, rank, nodes, ranks_per_node) as layer:
        desc = dispatch_and_check(layer, SUMMED, 0).desc
        ids = [work.topk_idx for work in workloads(SUMMED, nodes * ranks_per_node, 0)]
        node, experts = rank // ranks_per_node, layer.config.num_experts_per_rank
        sizes = ranks_per_node, experts
        of_ranks = [_rows_of_sums(ids, each, *sizes) for each in range(len(ids))]
        counts = [sum(len(rows) for of_token in found for rows in of_token) for found in of_ranks]
        assert desc.report[:, codes.REPORT_SUMS].tolist() == counts
        assert sum(counts) == desc.arrivals_of_rank.sum()
        want = of_ranks[rank]
        listed = desc.entries[codes.ENTRY_PULL_ROW].tolist()
        assert [{row for row in rows if row >= 0} for rows in listed] == [
            {row for _, row in rows} for rows in want[node]
        ]
        for other in {*range(nodes)} - {node}:
            coming = [rows for rows in want[other] if rows]  # tokens for no rank of this node do not come here
            listed = desc.forward[:, other, : len(coming)].tolist()
            got = [{(r, row) for r, row in zip(*each, strict=True) if row >= 0} for each in zip(*listed, strict=True)]
            assert desc.tokens_from_node.tolist()[other] == len(coming) and got == [set(rows) for rows in coming]
        to_adder = desc._part("sums").tolist()[len(ids) : 2 * len(ids)]
        staged = 0
        for source in range(len(ids)):
            adder = node * ranks_per_node + source % ranks_per_node
            of_source = of_ranks[adder][source // ranks_per_node]
            mine = [row for rows in of_source for r, row in rows if r == rank]
            assert mine == [staged + to_adder[source] + number for number in range(len(mine))]
            staged += len(mine)


@pytest.mark.plain
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2), (2, 2), (3, 1)])
def test_sums_have_rows_of_their_own(run_ranks, nodes, ranks_per_node):
    """Ranks that store sums and ranks that add them up name the same rows, counted here from the expert ids of all
    ranks."""
    run_ranks(_check_sums, nodes, ranks_per_node)


def _check_most_sums(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = Case("most", topk=ranks_per_node, experts=1, static=True, local_combine=True, dtype=torch.float32)
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        tokens, ctx = layer.config.max_tokens, layer.context
        x = torch.randn(tokens, case.hidden, device=ctx.device)
        # All tokens of each local rank go to all ranks of one node.
        first = rank % ranks_per_node % nodes * ranks_per_node
        ids = torch.arange(first, first + ranks_per_node, dtype=torch.int32, device=ctx.device).repeat(tokens, 1)
        rows, _, desc = layer.dispatch(x, ids)
        most = rows_of_sums(layer.config)
        assert ctx.sizes.output_rows == most == nodes * ranks_per_node * tokens
        assert sorted(desc.report[:, codes.REPORT_SUMS].tolist()) == [0, 0, most, most]
        torch.testing.assert_close(layer.combine(rows, desc), ranks_per_node * x, rtol=0, atol=0)
        layer.check()


@pytest.mark.plain
def test_static_layers_have_room_for_the_most_sums(run_ranks):
    """Where every token that a rank may have to add up goes to all ranks of its node, they fill its combine buffer."""
    run_ranks(_check_most_sums, 2, 2)
