"""Wait for the caller's kernel that writes expert outputs and raises signals, on another stream of this GPU.

Protocol      1 wait until the signal of every non-empty block of rows is at least `expected`
Layout        signals [e, n] int32, one per expert and block of `block_rows` rows of its slab; num_rows [e] int32, rows
              of each expert. Without blocks: signals [e], one per expert, raised also for experts without rows.
Memory order  The acquire pairs with the release by which the caller's kernel raises a signal, so later kernels on this
              stream see the rows that the caller's kernel stored before.
Progress      One program. It waits for a kernel that may run concurrently on the same GPU; that kernel waits for
              nothing on this stream.
Replay        The caller owns the signals, and clears them before the kernel that raises them.
"""

import triton.language as tl

from ..device.job import Job, is_local_expert
from ..device.waits import WAIT_SIGNALS, wait_flags
from ..spec import ep_kernel


@ep_kernel(signals_ptr="*i32", num_rows_ptr="*i32")
def wait_signals_kernel(
    job: Job,
    signals_ptr,  # [e, blocks] int32
    num_rows_ptr,  # [e] int32; not read unless BY_BLOCKS
    blocks,  # blocks per expert
    block_rows,
    expected,
    BY_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,  # signals at a time
):
    for first in range(0, job.experts_per_rank * blocks, BLOCK):
        signal = first + tl.arange(0, BLOCK)
        awaited = is_local_expert(job, signal // blocks)
        if BY_BLOCKS:
            num_rows = tl.load(num_rows_ptr + signal // blocks, mask=awaited, other=0)
            awaited = awaited & (signal % blocks * block_rows < num_rows)
        wait_flags(job, signals_ptr + signal, awaited, tl.cast(expected, tl.int64), WAIT_SIGNALS, first)
