"""The tile table: which rows every tile of a product over segments has. Written once per routing, read by every tile.

A table is int32 [1 + max_tiles, 4]. Record 0 is (tiles, rows in use, 0, 0), the rows in use being those before the end
of the last segment. Record 1 + i is (expert, first row, rows, 0) of tile i: 1 to 128 rows of one segment; of the tiles
of a segment all but the last have 128. Tiles come segment by segment. max_tiles = ceil(rows / 128) + segments suffices
for any segments; records behind the last tile are zero, so that equal routings give equal tables.
"""

import triton
import triton.language as tl

from . import codes

TILE_ROWS = tl.constexpr(codes.TILE_ROWS)
TILE_WORDS = tl.constexpr(codes.TILE_WORDS)
_CLEARED = tl.constexpr(256)


@triton.jit
def segment_rows(offs_ptr, num_rows, num_segments, SP: tl.constexpr):
    """First row and number of rows of every segment, [SP] each, a power of two of at least `num_segments`.

    offs_ptr: [num_segments + 1] int32. Offsets that make no sense are cut to the rows.
    """
    segment = tl.arange(0, SP)
    start = tl.load(offs_ptr + segment, mask=segment < num_segments, other=0)
    end = tl.load(offs_ptr + segment + 1, mask=segment < num_segments, other=0)
    start = tl.maximum(start, 0)
    return start, tl.maximum(tl.minimum(end, num_rows) - start, 0)


@triton.jit
def write_tile_records(table_ptr, starts, rows, max_tiles):
    """Write the table of segments that stand in registers, [SP] each, in order. By one program."""
    tiles = tl.cdiv(rows, TILE_ROWS)
    before = tl.cumsum(tiles, 0) - tiles
    segment = tl.arange(0, starts.shape[0])[:, None]
    word = tl.arange(0, TILE_WORDS)
    for step in range(tl.max(tiles, 0)):
        tile = before + step
        # Segments that overlap would have more tiles than there is room for.
        alive = (step < tiles) & (tile < max_tiles)
        done = step * TILE_ROWS
        # One record, 16 bytes, at a time.
        first = tl.where(word[None, :] == 0, segment, (starts + done)[:, None])
        last = tl.where(word[None, :] == 2, tl.minimum(rows - done, TILE_ROWS)[:, None], 0)
        records = table_ptr + ((1 + tile) * TILE_WORDS)[:, None] + word[None, :]
        tl.store(records, tl.where(word[None, :] < 2, first, last), mask=alive[:, None])
    num_tiles = tl.minimum(tl.sum(tiles), max_tiles)
    for left in range(num_tiles, max_tiles, _CLEARED):
        tile = left + tl.arange(0, _CLEARED)
        records = table_ptr + ((1 + tile) * TILE_WORDS)[:, None] + word[None, :]
        tl.store(records, tl.zeros([_CLEARED, TILE_WORDS], tl.int32), mask=(tile < max_tiles)[:, None])
    rows_in_use = tl.max(tl.where(rows > 0, starts + rows, 0), 0)
    tl.store(table_ptr + word, tl.where(word == 0, num_tiles, tl.where(word == 1, rows_in_use, 0)))


@triton.jit
def write_tile_table(table_ptr, offs_ptr, num_rows, num_segments, max_tiles, SP: tl.constexpr):
    """Write the table of segments given by `offs_ptr` [num_segments + 1] int32 over `num_rows` rows. By one program.

    What wrote the offsets in the same program must stand before a barrier.
    """
    starts, rows = segment_rows(offs_ptr, num_rows, num_segments, SP)
    write_tile_records(table_ptr, starts, rows, max_tiles)
