"""How programs share the tiles of a product (kernels/experts/turns.py)."""

import pytest
import torch
import triton
import triton.language as tl

from triton_ep.ops.tiles import tile_table
from triton_ep.runtime.launch import INTERPRETING  # before the kernels: decides how they run

# isort: split
from triton_ep.kernels.experts.products import table_tiles
from triton_ep.kernels.experts.turns import ask_in_turn, following, turns_of, unit_tile, whole_tiles

DEVICE = "cpu" if INTERPRETING else "cuda"


@triton.jit
def _share(taken_ptr, computed_ptr, turns_ptr, units):
    """computed: how often each unit was computed. turns: of each program, those in which it computed one."""
    fixed, most = turns_of(units)
    unit = tl.program_id(0)
    for turn in tl.range(0, most):
        if unit < units:
            ticket = ask_in_turn(taken_ptr, turn, fixed, most)
            tl.atomic_add(computed_ptr + unit, 1, sem="relaxed")
            tl.atomic_add(turns_ptr + tl.program_id(0), 1, sem="relaxed")
            unit = following(unit, ticket, turn, fixed)


@pytest.mark.parametrize("programs", [1, 2, 3, 8])
@pytest.mark.parametrize("units", [0, 1, 2, 7, 8, 9, 31, 64, 101])
def test_each_unit_is_computed_once(units: int, programs: int) -> None:
    """Also if programs run one after the other, as in the interpreter, where the first ones take all that they can."""
    taken = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    computed = torch.zeros(128, dtype=torch.int32, device=DEVICE)
    turns = torch.zeros(programs, dtype=torch.int32, device=DEVICE)
    _share[(programs,)](taken, computed, turns, units, num_warps=4)
    assert computed[:units].eq(1).all() and computed[units:].eq(0).all()
    per_program = -(-units // programs)
    fixed = units // programs * 3 // 4
    assert int(turns.sum()) == units
    assert int(turns.min()) >= fixed and int(turns.max()) <= 2 * per_program - fixed


def test_a_free_program_takes_what_others_would_have() -> None:
    """Of 64 units four programs have 13 each; in the interpreter the first two take all of the other 12."""
    if not INTERPRETING:
        pytest.skip("which program is free depends on time")
    turns = torch.zeros(4, dtype=torch.int32)
    zeros = torch.zeros(64, dtype=torch.int32)
    _share[(4,)](zeros[:1].clone(), zeros, turns, 64, num_warps=4)
    assert turns.tolist() == [20, 18, 13, 13]


@triton.jit
def _rows_of_units(tiles_ptr, out_ptr, num_rows, tiles_n):
    """out [num_rows, tiles_n, 2]: how often a row is computed, and how often as one that may be padding."""
    num_tiles = table_tiles(tiles_ptr, num_rows, 128) * tiles_n
    whole = whole_tiles(num_tiles)
    within = tl.arange(0, 128)
    for unit in tl.range(tl.program_id(0), 2 * num_tiles - whole, tl.num_programs(0)):
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
