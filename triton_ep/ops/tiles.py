"""The tile table of rows in segments (kernels/device/tiles.py), which directs the products over these rows."""

from __future__ import annotations

import torch

from triton_ep.errors import InputError
from triton_ep.kernels.device.codes import TILE_WORDS
from triton_ep.ops import library
from triton_ep.runtime import launch as runtime
from triton_ep.runtime.plans import Plan
from triton_ep.runtime.plans.experts import max_tiles, segments_power


def check_offsets(offs: torch.Tensor, num_experts: int | None = None, device: torch.device | None = None) -> None:
    """Raise InputError unless `offs` is [E + 1] int32, with E = `num_experts` and on `device` where these are given."""
    wanted = "E" if num_experts is None else str(num_experts)
    if not isinstance(offs, torch.Tensor) or offs.dim() != 1 or offs.dtype != torch.int32 or offs.shape[0] < 2:
        what = f"{offs.dtype} {list(offs.shape)}" if isinstance(offs, torch.Tensor) else f"a {type(offs).__name__}"
        raise InputError(
            f"offs must be a tensor [{wanted} + 1] int32, starts of segments and the end of the last; it is {what}."
        )
    if num_experts is not None and offs.shape[0] != num_experts + 1:
        raise InputError(f"offs has {offs.shape[0]} entries; {num_experts} experts need {num_experts + 1}.")
    if device is not None and offs.device != device:
        raise InputError(f"offs is on {offs.device}, the rows are on {device}: move one of them.")


def _like(offs: torch.Tensor, num_rows: int) -> torch.Tensor:
    return offs.new_empty((1 + max_tiles(num_rows, offs.shape[0] - 1), TILE_WORDS))


@library.op("(Tensor offs, SymInt num_rows) -> Tensor", _like)
def _tile_table(offs: torch.Tensor, num_rows: int) -> torch.Tensor:
    offs = offs.contiguous()
    table = _like(offs, num_rows)
    experts = offs.shape[0] - 1
    runtime.launch(
        Plan("tile_table_kernel", {"SP": segments_power(experts)}),
        1,
        offs_ptr=offs,
        table_ptr=table,
        num_rows=num_rows,
        num_segments=experts,
        max_tiles=table.shape[0] - 1,
    )
    return table


def tile_table(offs: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[1 + ceil(num_rows / 128) + E, 4] int32: (tiles, rows in use, 0, 0), then (expert, first row, rows, band).

    offs: [E + 1] int32 on the device, first row of each segment, then the end of the last. The host does not read it.
    num_rows: rows for which there is room. A tile holds 1 to 128 rows of one segment; records past the last tile are
    zero.

    Raises:
        InputError: another shape or dtype of `offs`.
    """
    check_offsets(offs)
    table: torch.Tensor = _tile_table(offs, num_rows)
    return table
