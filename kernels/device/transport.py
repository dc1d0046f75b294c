"""Move a block of bytes together with a flag to another node.

`NETWORK` is a constexpr of every kernel that may cross nodes: P2P stores through a mapped address (host
heap, or one node), or NVSHMEM's put-with-signal (any fabric NVSHMEM has a transport for). The unused branch is
never compiled, so a P2P kernel has no NVSHMEM symbol in it and needs no bitcode.

Only `*_block` functions are used: an NVSHMEM extern with scalar arguments runs in every thread of the
block, which is correct only for these functions.
"""

import triton
import triton.language as tl
from triton.language import core

from . import codes

P2P = tl.constexpr(codes.P2P)
NVSHMEM = tl.constexpr(codes.NVSHMEM)
# enum nvshmemi_op of NVSHMEM 3: NVSHMEM_SIGNAL_SET = 9.
_SIGNAL_SET = tl.constexpr(9)


@core.extern
def _putmem_signal_block(dest, source, nbytes, flag, value, op, pe, _semantic=None):
    i32, i64 = core.dtype("int32"), core.dtype("int64")
    return core.extern_elementwise(
        "",
        "",
        [dest, source, nbytes, flag, value, op, pe],
        {(i64, i64, i64, i64, i64, i32, i32): ("nvshmemx_putmem_signal_block", i32)},
        is_pure=False,
        _semantic=_semantic,
    )


@triton.jit
def put_signal(dest, source, nbytes, flag, value, pe, NETWORK: tl.constexpr, BLOCK: tl.constexpr):
    """Copy `nbytes` (a multiple of 4) from address `source` to `dest` at rank `pe`, then set `flag` there.

    All addresses are int64. The flag becomes visible only after the data; the source may be reused once
    this returns. All threads of the block call it, and must have written the source before.
    """
    tl.debug_barrier()
    if NETWORK == NVSHMEM:
        _putmem_signal_block(dest, source, nbytes, flag, value, tl.cast(_SIGNAL_SET, tl.int32), pe)
    else:
        words = (nbytes // 4).to(tl.int32)
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        dest_ptr = tl.multiple_of(dest.to(tl.pointer_type(tl.int32)), 16)
        offs = tl.arange(0, BLOCK)
        for start in range(0, words, BLOCK):
            mask = start + offs < words
            data = tl.load(source_ptr + start + offs, mask=mask)
            tl.store(dest_ptr + start + offs, data, mask=mask)
        # The barrier puts the stores of all warps before the release, which pairs with the acquire in `wait_flags`.
        tl.debug_barrier()
        tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), value, sem="release", scope="sys")
