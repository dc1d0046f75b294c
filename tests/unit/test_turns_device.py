"""How programs share the tiles of a product (kernels/experts/turns.py)."""

import pytest
import torch
import triton
import triton.language as tl

from triton_ep.ops.tiles import tile_table
from triton_ep.runtime.launch import INTERPRETING  # before the kernels: decides how they run

# isort: split
from triton_ep.kernels.experts.products import table_tiles
from triton_ep.kernels.experts.turns import answer, ask, ask_in_turn, following, turns_of, unit_tile, units_of

DEVICE = "cpu" if INTERPRETING else "cuda"


@triton.jit
def _compute(computed_ptr, turns_ptr, tile):
    tl.atomic_add(computed_ptr + tile, 1, sem="relaxed")
    tl.atomic_add(turns_ptr + tl.program_id(0), 1, sem="relaxed")


@triton.jit
def _share(taken_ptr, computed_ptr, turns_ptr, tiles, COUNTED: tl.constexpr):
    """computed: how often each tile was computed. turns: how many tiles each program computed."""
    tile = tl.program_id(0)
    if COUNTED:
        fixed, most = turns_of(tiles)
        for turn in tl.range(0, most):
            if tile < tiles:
                ticket = ask_in_turn(taken_ptr, turn, fixed, most)
                _compute(computed_ptr, turns_ptr, tile)
                tile = following(tile, ticket, turn, fixed)
    else:
        while tile < tiles:
            _compute(computed_ptr, turns_ptr, tile)
            tile = tl.num_programs(0) + answer(ask(taken_ptr, True))


def _shared(tiles: int, programs: int, counted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    taken, computed, turns = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (1, 128, programs))
    _share[(programs,)](taken, computed, turns, tiles, counted, num_warps=4)
    return computed, turns


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("programs", [1, 2, 3, 8])
@pytest.mark.parametrize("tiles", [0, 1, 2, 7, 8, 9, 31, 64, 101])
def test_each_tile_is_computed_once(tiles: int, programs: int, counted: bool) -> None:
    """Also if programs run one after the other, as in the interpreter, where the first ones take all that they can."""
    computed, turns = _shared(tiles, programs, counted)
    assert computed[:tiles].eq(1).all() and computed[tiles:].eq(0).all()
    assert int(turns.sum()) == tiles
    if counted:
        fixed = tiles // programs * 3 // 4
        assert int(turns.min()) >= fixed and int(turns.max()) <= 2 * -(-tiles // programs) - fixed


@pytest.mark.parametrize(("counted", "expected"), [(True, [20, 18, 13, 13]), (False, [61, 1, 1, 1])])
def test_a_free_program_takes_what_others_would_have(counted: bool, expected: list[int]) -> None:
    """Of 64 tiles four programs have 13 each, or one each; in the interpreter the first ones take all others."""
    if not INTERPRETING:
        pytest.skip("which program is free depends on time")
    assert _shared(64, 4, counted)[1].tolist() == expected


@triton.jit
def _rows_of_units(tiles_ptr, out_ptr, num_rows, tiles_n):
    """out [num_rows, tiles_n, 2]: how often a row is computed, and how often as one that may be padding."""
    num_tiles = table_tiles(tiles_ptr, num_rows, 128) * tiles_n
    units, whole = units_of(num_tiles)
    within = tl.arange(0, 128)
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0)):
        _, row, end, filled, tile_n = unit_tile(tiles_ptr, unit, whole, tiles_n, 128)
        rows = row + within
        at = out_ptr + (rows * tiles_n + tile_n) * 2
        tl.atomic_add(at, 1, mask=rows < end, sem="relaxed")
        # A kernel skips the lower half of a unit if it is not filled.
        computed = (rows < end) & ((within < 64) | (row + 64 < filled))
        tl.atomic_add(at + 1, 1, mask=computed, sem="relaxed")


@pytest.mark.parametrize("programs", [1, 2, 5, 8, 64])
def test_units_cover_each_row_once(programs: int) -> None:
    """Of 12 tiles 5 programs cut the last two, 8 the last four, 64 all."""
    lengths = torch.tensor([300, 0, 128, 64, 1])
    offs = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int().to(DEVICE)
    num_rows, tiles_n = int(lengths.sum()), 2
    out = torch.zeros(num_rows, tiles_n, 2, dtype=torch.int32, device=DEVICE)
    _rows_of_units[(programs,)](tile_table(offs, num_rows), out, num_rows, tiles_n, num_warps=4)
    assert out.eq(1).all()
