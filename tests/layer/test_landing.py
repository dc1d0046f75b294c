"""`landing`: rows that travel as MXFP8 and are received with one scale per row, or as bfloat16; and the tile table."""

from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree

from tests.layer.cases import Case, full_scatter_indices, make_layer, workloads
from triton_ep import InputError, MXTensor, PeerFailed, autograd
from triton_ep.distributed import current_heap
from triton_ep.kernels.device import codes
from triton_ep.ops.row_scales import RowScaled
from triton_ep.reference import dispatch as dispatch_reference
from triton_ep.reference import experts as experts_reference
from triton_ep.reference import mxfp8 as mxfp8_reference

CASES = (
    Case("exact", tokens=(7, 5), hidden=128, topk=3, experts=3, payload="mxfp8"),
    Case("static_aligned", tokens=(6, 0, 9), hidden=160, experts=2, static=True, alignment=128, payload="mxfp8"),
    Case("local", tokens=(3, 9), hidden=160, topk=4, experts=4, local_combine=True, weights=False, payload="mxfp8"),
    Case("scatter", tokens=(4,), hidden=32, alignment=16, scatter=True, dtype=torch.float32, payload="mxfp8"),
    # A row of two tiles.
    Case("wide", tokens=(2, 3), hidden=8224, payload="mxfp8"),
    Case("all_dropped", tokens=(4, 3), hidden=32, routing="all_dropped", payload="mxfp8"),
)
LOCAL, WIDE = CASES[2], CASES[4]
OVERFLOW = Case("overflow", tokens=(12, 9), hidden=64, topk=2, experts=2, static=True, alignment=4, payload="mxfp8")

ON_GPUS = pytest.mark.on_gpus


def mx_rows(rank: int, num_tokens: int, hidden: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [T, H] of every bit pattern, and scale bytes [T, H / 32], close to each other in most rows; extremes too."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    data = draw(0, 256, num_tokens, hidden)
    data = torch.where(data == 0xFF, 0x7F, data).to(torch.uint8)  # a NaN loses its sign
    # Scales differ by 0 to 21 steps within a row; from 19 on a block becomes all zero. Also values below and above the
    # range of bfloat16, and rows of zeros.
    lowest = torch.tensor([0, 3, 9, 90, 127, 200, 233])[draw(0, 7, num_tokens)]
    scale = lowest[:, None] + draw(0, 22, num_tokens, hidden // 32)
    scale = torch.where(draw(0, 40, num_tokens, hidden // 32) == 0, 255, scale)
    scale[::5] = scale[::5].clamp(max=150)
    return data.view(torch.float8_e4m3fn), scale.to(torch.uint8)


def _same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal values, and zeros with equal signs; any NaN equals any other."""
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)
    zero = want.float() == 0
    assert torch.equal(got.float().signbit()[zero], want.float().signbit()[zero])


def _check_rows(
    landing: str | None, got: object, data: torch.Tensor, scale: torch.Tensor, padding: torch.Tensor
) -> None:
    """Compare the first received rows with MXFP8 rows [R, H] in the format of `landing`; padding: [R]."""
    rows = data.shape[0]
    if landing == "row":
        assert isinstance(got, RowScaled)
        want, want_scale = experts_reference.rebase_rows(data, scale)
        want_scale = torch.where(padding, 1.0, want_scale)
        assert torch.equal(got.qdata[:rows].cpu().view(torch.uint8), want.view(torch.uint8))
        _same_bits(got.scale[:rows].cpu(), want_scale)
    elif landing == "bf16":
        assert isinstance(got, torch.Tensor) and not isinstance(got, MXTensor)
        _same_bits(got[:rows].cpu(), mxfp8_reference.dequantize(data, scale, torch.bfloat16))
    else:
        assert isinstance(got, MXTensor)
        assert torch.equal(got.qdata[:rows].cpu().view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(got.scale[:rows].cpu().view(torch.uint8), scale)


def _check_tiles(tiles: torch.Tensor, offsets: torch.Tensor, num_rows: int) -> None:
    """Compare the tile table of a dispatch with the table of its offsets [e + 1]."""
    want = experts_reference.tile_table(offsets)
    assert tiles.shape == (1 + -(-num_rows // 128) + len(offsets) - 1, 4) and tiles.dtype == torch.int32
    assert tiles[0].tolist() == [len(want), int(offsets[-1]), 0, 0]
    assert [tuple(record) for record in tiles[1 : 1 + len(want), :3].tolist()] == want


def _check_landing(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    device = current_heap().device
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        cfg = layer.config
        for call, landing in enumerate(("row", "bf16")):
            works = workloads(case, cfg.world_size, call)
            sent = [mx_rows(r, work.x.shape[0], case.hidden, call) for r, work in enumerate(works)]
            weights = [work.topk_weights for work in works] if case.weights else None
            idxs = [work.topk_idx for work in works]
            data, scale, want = [
                dispatch_reference.dispatch(list(part), idxs, weights, rank, cfg.num_experts, case.alignment)
                for part in (*zip(*sent, strict=True), [work.x for work in works])
            ]
            x = MXTensor.from_qdata_and_scales(*(part.to(device) for part in sent[rank]), case.dtype)
            scatter = full_scatter_indices(idxs[rank], cfg.num_experts).to(device) if case.scatter else None
            given = weights[rank].to(device) if case.weights else None
            got, recv_weights, desc = layer.dispatch(x, idxs[rank].to(device), given, scatter, landing=landing)
            padding, rows = want.src[:, 0] < 0, len(want.recv_x)
            _check_rows(landing, got, data.recv_x, scale.recv_x, padding)
            assert (recv_weights is None) is not case.weights
            if recv_weights is not None:
                assert torch.equal(recv_weights[:rows].cpu(), want.recv_weights)
            _check_tiles(desc.tiles.cpu(), want.expert_offsets, desc.num_recv_rows)
            for again in () if case.scatter else (landing, None):
                got, _ = layer.dispatch_again(x, desc, landing=again)
                _check_rows(again, got, data.recv_x, scale.recv_x, padding)
            # Combine works as for any other rows.
            y = torch.ones(desc.num_recv_rows, case.hidden, dtype=case.dtype, device=device)
            copies = ((idxs[rank] >= 0) & (idxs[rank] < cfg.num_experts)).sum(1)
            assert torch.equal(layer.combine(y, desc)[:, 0].cpu().long(), copies)
        layer.check()


@pytest.mark.plain
@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "case"),
    [
        *((1, 2, case) for case in CASES if case not in (LOCAL, WIDE)),
        # One rank shows what a row of two tiles needs; two nodes show sums of a rank's rows.
        (1, 1, WIDE),
        (2, 1, LOCAL),
        *(pytest.param(*at, marks=ON_GPUS) for at in ((1, 1, CASES[0]), (1, 2, WIDE), (1, 2, LOCAL), (2, 2, LOCAL))),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_rows_land_as_asked(run_ranks, nodes, ranks_per_node, case):
    """Received rows, padding included, equal the oracle's conversion bit for bit; the tile table describes them."""
    run_ranks(_check_landing, nodes, ranks_per_node, case)


def test_rows_land_as_asked_in_any_order(run_ranks):
    """The same in chaos mode, on two nodes."""
    run_ranks(_check_landing, 2, 1, replace(CASES[1], tokens=(3, 0)))


def _check_overflow(rank: int, nodes: int, ranks_per_node: int) -> None:
    case, device = OVERFLOW, current_heap().device
    with make_layer(case, rank, nodes, ranks_per_node, capacity=10) as layer:
        cfg = layer.config
        works = workloads(case, cfg.world_size, 0)
        sent = [mx_rows(r, work.x.shape[0], case.hidden, 5) for r, work in enumerate(works)]
        idxs = [work.topk_idx for work in works]
        data, scale = (
            dispatch_reference.dispatch(list(part), idxs, None, rank, cfg.num_experts, case.alignment)
            for part in zip(*sent, strict=True)
        )
        x = MXTensor.from_qdata_and_scales(*(part.to(device) for part in sent[rank]), case.dtype)
        for landing in ("row", "bf16"):
            got, _, desc = layer.dispatch(x, idxs[rank].to(device), landing=landing)
            assert int(desc.overflow) == len(data.src) - 10 > 0
            _check_rows(landing, got, data.recv_x[:10], scale.recv_x[:10], data.src[:10, 0] < 0)
            _check_tiles(desc.tiles.cpu(), desc.expert_offsets.cpu(), 10)
            assert int(desc.tiles[0, codes.TABLE_ROWS_IN_USE]) == 10


@pytest.mark.plain
def test_rows_beyond_the_capacity_are_left_out(run_ranks):
    """Rows that fit are the same as without overflow, and the tile table ends at the capacity."""
    run_ranks(_check_overflow, 1, 2)


def _check_calls(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = Case("calls", tokens=(5, 3), hidden=64, alignment=4, payload="mxfp8")
    device = current_heap().device
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        work = workloads(case, layer.config.world_size, 0)[rank]
        x, idx = work.x.to(device), work.topk_idx.to(device)
        plain, _, _ = layer.dispatch(x, idx, landing="row")
        split, _, _, hook = layer.dispatch(x, idx, landing="row", return_recv_hook=True)
        hook()
        aside, _, desc, event = layer.dispatch(x, idx, landing="row", async_finish=True)
        event.current_stream_wait()
        for other in (split, aside):
            assert torch.equal(other.qdata.view(torch.uint8), plain.qdata.view(torch.uint8))
            assert torch.equal(other.scale, plain.scale)
        for same in (_pytree.tree_map(lambda leaf: leaf, desc), autograd.dispatch(layer, x, idx)[2]):
            _check_tiles(same.tiles.cpu(), desc.expert_offsets.cpu(), desc.num_recv_rows)
        if rank == 0:
            with pytest.raises(InputError, match="landing is 'fp4'; rows land as 'mx', 'row', 'bf16', or None"):
                layer.dispatch(x, idx, landing="fp4")
        else:
            with pytest.raises(PeerFailed, match="rank 0 rejected"):
                layer.dispatch(x, idx, landing="row")
        if rank == 0:
            with pytest.raises(InputError, match="landing is 1"):
                layer.dispatch_again(x, desc, landing=1)
        else:
            layer.dispatch_again(x, desc, landing="bf16")
            with pytest.raises(PeerFailed, match="rank 0 rejected"):
                layer.check()
    with make_layer(replace(case, payload=None), rank, nodes, ranks_per_node) as layer:
        with pytest.raises(InputError, match="landing='mx' was asked of a layer with payload=None, low_latency=False"):
            layer.dispatch(x, idx, landing="mx")
        assert layer.dispatch(x, idx)[2].tiles is not None and layer.dispatch_compact(x, idx).layout_desc.tiles is None


@pytest.mark.plain
def test_landing_goes_with_the_other_options(run_ranks):
    """Hooks and events give the same rows; all ranks refuse unknown landings, and landings that the layer lacks."""
    run_ranks(_check_calls, 1, 2)
