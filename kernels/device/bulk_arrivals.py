"""Copy arrived rows to output rows by bulk copies (bulk.py), where they need no conversion.

A program copies the items of an `ArrivedRows` whose number it has, modulo the programs, one row each. A row goes to the
output rows of its assignments, or to the output row of its own number.
"""

import triton
import triton.language as tl

from .arrivals import bytes_of_rows, place_of, row_from_there, stage_sources
from .buffers import STAGE_META, own_buffer
from .bulk import LANES, await_row, begin_rows, end_row, load_row, store_row, wait_left
from .groups import my_first
from .payload import MX, WORDS, wire_of


@triton.jit
def _row_of(job, arrived, n, arrivals, own, row_limit, rows_ptr, stage_source_ptr, row_bytes):
    """Item n of this program: its staging row, whether that arrived, and the address of the row. own: as below."""
    item = my_first(arrived.first, 0) + n * tl.num_programs(0)
    row, end = place_of(job, arrived, item, 1, arrivals.LWP)
    here = row < tl.minimum(end, row_limit)
    at = row_from_there(arrivals, own, stage_source_ptr, row, item, here)
    return row, here, rows_ptr + at.to(tl.int64) * row_bytes


@triton.jit
def copy_arrived(
    job,
    out,  # Output
    arrived,  # ArrivedRows, in tiles of one row
    arrivals,  # Arrivals
    own,  # OwnRows: `arrived` are these rows; None: they are staged
    row_limit,  # staging rows from this one on are left out
    choices,  # Choices; None: each row goes to the output row of its number
    kept_ptr,  # each row also goes to the row of its number here; None: it does not
    ring,
    base,
):
    """Copy this program's share, of which the last rows may still be on their way."""
    HAS_SCALES: tl.constexpr = ring.SCALE_BYTES > 0
    DATA: tl.constexpr = 32 * ring.SCALE_BYTES if HAS_SCALES else ring.ROW_BYTES
    wire = wire_of(out.row_words, out.recv_x_ptr.dtype.element_ty, MX if HAS_SCALES else WORDS)
    rows_ptr = bytes_of_rows(job, own).to(tl.int64)
    stage_source_ptr = stage_sources(job)
    stage_rows_ptr = own_buffer(job, STAGE_META, tl.int32)
    lanes = tl.arange(0, LANES)
    count = tl.cdiv(tl.maximum(arrived.end - my_first(arrived.first, 0), 0), tl.num_programs(0))
    begin_rows(ring, base)
    # Iteration n stores the row that was loaded SLOTS - 1 iterations before, then starts to load row n.
    for n in range(count + ring.SLOTS - 1):
        number = n - (ring.SLOTS - 1)
        if number >= 0:
            row, here, source = _row_of(
                job, arrived, number, arrivals, own, row_limit, rows_ptr, stage_source_ptr, wire.row_bytes
            )
            if choices is None:
                dst = tl.where(here & (lanes == 0), row, -1)
            else:
                meta = row.to(tl.int64) * (2 * choices.KP) + lanes
                dst = tl.load(stage_rows_ptr + meta, mask=here & (lanes < choices.TOPK), other=-1)
            await_row(ring, base, number)
            at = dst.to(tl.int64)
            to = tl.where(dst >= 0, out.recv_x_ptr.to(tl.int64) + at * DATA, 0)
            store_row(ring, base, number, source, source, False, to, 0, DATA, False)
            if HAS_SCALES:
                to = tl.where(dst >= 0, out.recv_scale_ptr.to(tl.int64) + at * ring.SCALE_BYTES, 0)
                store_row(ring, base, number, source, source, False, to, DATA, ring.SCALE_BYTES, False)
            if kept_ptr is not None:
                kept = kept_ptr.to(tl.int64) + row.to(tl.int64) * DATA
                to = tl.where(here & (lanes == 0), kept, 0)
                store_row(ring, base, number, source, source, False, to, 0, DATA, False)
            end_row()
        if n < count:
            _, here, source = _row_of(
                job, arrived, n, arrivals, own, row_limit, rows_ptr, stage_source_ptr, wire.row_bytes
            )
            wait_left(1)
            load_row(ring, base, n, source, source, False, here)
