"""The tile table: the rows of every tile of a product over segments. Written once per routing, read by every tile.

A table is int32 [1 + max_tiles, 4]; codes.py names the words. Record 0 is (tiles, rows in use, 0, 0); the rows in use
end with the last segment. Record 1 + i is (expert, first row, rows, band) of tile i: 1 to 128 rows of one segment; all
tiles of a segment but the last have 128. Tiles come segment by segment. max_tiles = ceil(rows / 128) + segments
suffices for any segments; records past the last tile are zero, so that equal routings give equal tables.

The word `band` is 65536 * filled + 256 * height + place. The first `filled` rows of the tile are not padding; padding
rows are zero, and so are all their products. A band is a run of up to 8 tiles of one segment. A segment has as few
bands as possible, all of the same height except a shorter last one; this tile is number `place` of `height`. The tiles
of a band are computed together, one tile of columns of the weights after the other, so the weights are read from memory
once per band, and not for two experts at a time.

For example 300 rows of expert 0 and 128 of expert 2, none of them padding:

    (4, 428, 0, 0)
    (0, 0, 128, 65536 * 128 + 256 * 3 + 0)      the first of a band of 3
    (0, 128, 128, 65536 * 128 + 256 * 3 + 1)
    (0, 256, 44, 65536 * 44 + 256 * 3 + 2)
    (2, 300, 128, 65536 * 128 + 256 * 1 + 0)
"""

import triton
import triton.language as tl

from . import codes

TILE_ROWS = tl.constexpr(codes.TILE_ROWS)
TILE_WORDS = tl.constexpr(codes.TILE_WORDS)
_EXPERT = tl.constexpr(codes.TILE_EXPERT)
_FIRST_ROW = tl.constexpr(codes.TILE_FIRST_ROW)
_NUM_ROWS = tl.constexpr(codes.TILE_NUM_ROWS)
_BAND = tl.constexpr(codes.TILE_BAND)
_NUM_TILES = tl.constexpr(codes.TABLE_NUM_TILES)
_ROWS_IN_USE = tl.constexpr(codes.TABLE_ROWS_IN_USE)
_BAND_TILES = tl.constexpr(codes.BAND_TILES)
_CLEARED = tl.constexpr(256)


@triton.jit
def tiles_in_table(table_ptr, num_rows):
    """Number of tiles of a table; 0 if its rows do not fit into `num_rows` rows, which were allocated too early."""
    fits = tl.load(table_ptr + _ROWS_IN_USE) <= num_rows
    return tl.where(fits, tl.load(table_ptr + _NUM_TILES), 0)


@triton.jit
def rows_of_tile(table_ptr, tile):
    """(expert, first row, rows, rows that are not padding) of a tile."""
    record_ptr = table_ptr + (1 + tile) * TILE_WORDS
    filled = tl.load(record_ptr + _BAND) // 65536
    return tl.load(record_ptr + _EXPERT), tl.load(record_ptr + _FIRST_ROW), tl.load(record_ptr + _NUM_ROWS), filled


@triton.jit
def band_of_tile(table_ptr, tile):
    """(first tile, tiles) of the band of a tile."""
    band = tl.load(table_ptr + (1 + tile) * TILE_WORDS + _BAND)
    return tile - band % 256, band // 256 % 256


@triton.jit
def segment_rows(offs_ptr, num_rows, num_segments, SP: tl.constexpr):
    """First row and number of rows of every segment, [SP] each. SP is a power of two, at least `num_segments`.

    offs_ptr: [num_segments + 1] int32. Invalid offsets are clamped to the rows.
    """
    segment = tl.arange(0, SP)
    start = tl.load(offs_ptr + segment, mask=segment < num_segments, other=0)
    end = tl.load(offs_ptr + segment + 1, mask=segment < num_segments, other=0)
    start = tl.maximum(start, 0)
    return start, tl.maximum(tl.minimum(end, num_rows) - start, 0)


@triton.jit
def write_tile_records(table_ptr, starts, rows, filled, max_tiles):
    """Write the table of segments given in registers, [SP] each, in order. One program does this.

    filled: rows of each segment that are not padding.
    """
    tiles = tl.cdiv(rows, TILE_ROWS)
    before = tl.cumsum(tiles, 0) - tiles
    height = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, _BAND_TILES), 1))
    segment = tl.arange(0, starts.shape[0])[:, None]
    word = tl.arange(0, TILE_WORDS)
    for step in range(tl.max(tiles, 0)):
        tile = before + step
        # Segments that overlap would have more tiles than there is room for.
        alive = (step < tiles) & (tile < max_tiles)
        done = step * TILE_ROWS
        in_tile = tl.minimum(rows - done, TILE_ROWS)
        place = step % tl.maximum(height, 1)
        of_band = tl.minimum(tl.minimum(height, tiles - (step - place)), max_tiles - (tile - place))
        packed = tl.maximum(tl.minimum(filled - done, in_tile), 0) * 65536 + of_band * 256 + place
        # Store each record as one 16-byte word.
        record = tl.where(word[None, :] == _FIRST_ROW, (starts + done)[:, None], segment)
        record = tl.where(word[None, :] == _NUM_ROWS, in_tile[:, None], record)
        record = tl.where(word[None, :] == _BAND, packed[:, None], record)
        records = table_ptr + ((1 + tile) * TILE_WORDS)[:, None] + word[None, :]
        tl.store(records, record, mask=alive[:, None])
    num_tiles = tl.minimum(tl.sum(tiles), max_tiles)
    for left in range(num_tiles, max_tiles, _CLEARED):
        tile = left + tl.arange(0, _CLEARED)
        records = table_ptr + ((1 + tile) * TILE_WORDS)[:, None] + word[None, :]
        tl.store(records, tl.zeros([_CLEARED, TILE_WORDS], tl.int32), mask=(tile < max_tiles)[:, None])
    rows_in_use = tl.max(tl.where(rows > 0, starts + rows, 0), 0)
    of_table = tl.where(word == _NUM_TILES, num_tiles, tl.where(word == _ROWS_IN_USE, rows_in_use, 0))
    tl.store(table_ptr + word, of_table)


@triton.jit
def write_tile_table(
    table_ptr, offs_ptr, filled_ptr, num_rows, num_segments, max_tiles, SP: tl.constexpr, PADDED: tl.constexpr
):
    """Write the table of segments given by `offs_ptr` [num_segments + 1] int32 over `num_rows` rows. One program does
    this, after a barrier if it wrote any of these inputs itself.

    filled_ptr: with PADDED [num_segments] int32, rows of each segment before its padding.
    """
    starts, rows = segment_rows(offs_ptr, num_rows, num_segments, SP)
    filled = rows
    if PADDED:
        segment = tl.arange(0, SP)
        filled = tl.load(filled_ptr + segment, mask=segment < num_segments, other=0)
    write_tile_records(table_ptr, starts, rows, filled, max_tiles)
