"""`dispatch_again`: send other rows by the routing of an earlier dispatch, without reading the row count."""

import pytest
import torch

from tests.layer.cases import Case, make_layer, start_dispatch, workloads
from triton_ep import MXTensor
from triton_ep.distributed import current_heap
from triton_ep.errors import InputError, PeerFailed, StaleHandleError

CASES = (
    Case("exact", topk=4, experts=4, alignment=16, tokens=(9, 0, 7, 12)),
    Case("exact_local", topk=4, experts=4, local_combine=True, calls=1),
    Case("static", topk=3, experts=2, static=True, tokens=(5, 3)),
    Case("mxfp8", topk=4, experts=4, payload="mxfp8"),
)


def _check_again(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        ctx, device = layer.context, current_heap().device
        world_size, read_backs = layer.config.world_size, []
        read_back = ctx.read_back
        ctx.read_back = lambda *given: read_backs.append(1) or read_back(*given)
        first, second = workloads(case, world_size, 0), workloads(case, world_size, len(case.tokens))
        x, weights = second[rank].x.to(device), second[rank].topk_weights.to(device)
        assert (x.shape == first[rank].x.shape and not torch.equal(x, first[rank].x.to(device))) or not x.numel()
        _, _, desc = start_dispatch(layer, case, first)
        want_x, want_weights, other = layer.dispatch(x, desc.topk_indices_tensor, weights)
        layer.dispatch(x, torch.full_like(desc.topk_indices_tensor, -1))  # another routing in between
        waited = len(read_backs)
        recv_x, recv_weights = layer.dispatch_again(x, desc, weights)
        assert len(read_backs) == waited and bool(waited) is not case.static
        rows = int(desc.expert_offsets[-1])
        for want, seen in ((want_x, recv_x), (want_weights, recv_weights)):
            assert want.shape == seen.shape
            if isinstance(want, MXTensor):
                assert torch.equal(want.scale.view(torch.uint8)[:rows], seen.scale.view(torch.uint8)[:rows])
                want, seen = want.qdata.view(torch.uint8), seen.qdata.view(torch.uint8)
            assert torch.equal(want[:rows], seen[:rows])
        assert layer.dispatch_again(x, desc)[1] is None
        y = torch.ones(desc.num_recv_rows, case.hidden, dtype=case.dtype, device=device)
        assert torch.equal(layer.combine(y, desc, recv_weights), layer.combine(y, other, want_weights))
        layer.check()


@pytest.mark.plain  # the kernels of dispatch
@pytest.mark.parametrize(
    "nodes, ranks_per_node, case",
    [*((1, 2, case) for case in CASES[1:]), (2, 1, CASES[0])],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_rows_go_where_they_went_before(run_ranks, nodes, ranks_per_node, case):
    """The same bits as a dispatch with the same ids, and the host reads no count."""
    run_ranks(_check_again, nodes, ranks_per_node, case)


def _check_mistakes(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = Case("again", tokens=(6,), topk=2, experts=2)
    with make_layer(case, rank, nodes, ranks_per_node) as layer, make_layer(case, rank, nodes, ranks_per_node) as other:
        works = workloads(case, layer.config.world_size, 0)
        _, _, desc = start_dispatch(layer, case, works)
        x = works[rank].x.to(current_heap().device)
        with pytest.raises(StaleHandleError, match="another layer"):
            other.dispatch_again(x, desc)
        with pytest.raises(InputError, match="the descriptor that dispatch returned"):
            layer.dispatch_again(x, x)
        if rank == 0:
            with pytest.raises(InputError, match="input has 5 rows on rank 0, but the dispatch whose routing"):
                layer.dispatch_again(x[:5].contiguous(), desc)
        else:
            layer.dispatch_again(x, desc)
            with pytest.raises(PeerFailed, match="rank 0 rejected"):
                layer.check()
        recv_x, _ = layer.dispatch_again(x, desc)
        assert torch.equal(recv_x, start_dispatch(layer, case, works)[0])


@pytest.mark.plain
def test_mistakes_are_told(run_ranks):
    """A wrong descriptor or shape is refused before rows are sent; `check` reports it on the other ranks."""
    run_ranks(_check_mistakes, 1, 2)
