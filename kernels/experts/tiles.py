"""The tile table of segments of rows, for callers without a table from the placement of a dispatch.

Protocol      One program reads the offsets, writes the record of every tile, zeroes the others, then writes record 0.
Layout        device/tiles.py.
Memory order  Plain stores; kernels that read the table follow on the same stream.
Progress      No program waits.
Replay        Nothing is kept: a captured graph writes the table again from the current offsets.
"""

import triton.language as tl

from ..device.tiles import write_tile_table
from ..spec import ep_kernel


@ep_kernel(offs_ptr="*i32", table_ptr="*i32", num_warps=1)
def tile_table_kernel(
    offs_ptr,  # [num_segments + 1] int32
    table_ptr,  # out [1 + max_tiles, 4] int32
    num_rows,
    num_segments,
    max_tiles,
    SP: tl.constexpr,
):
    write_tile_table(table_ptr, offs_ptr, offs_ptr, num_rows, num_segments, max_tiles, SP, False)
