"""Numbers shared by device and host code, as plain integers, so the host can import them without Triton.

Device code defines the same names as compile-time constants, in the files named below.
"""

# transport.py: how bytes cross nodes.
P2P = 0
NVSHMEM = 1
NVSHMEM_SYMBOLS = ("nvshmemx_putmem_signal_block",)
"""Functions of NVSHMEM's device library that kernels call."""

# payload.py: payload of a dispatch.
WORDS = 0
QUANTISE = 1
MX = 2
QUANTISE_CHANNELS = 3
CHANNELS = 128
"""Values that share a scale with QUANTISE_CHANNELS."""
ROW_UNIT = 128
"""Bytes of which a row of elements and scales on the wire is a multiple. Stores to other GPUs travel in pieces of that
many bytes: where each warp's store begins inside of one, it needs five pieces for the bytes of four."""

# intranode/dispatch.py: form of the output rows of a dispatch.
LANDING_WORDS = 0
"""Opaque words, as on the wire."""
LANDING_MX = 1
"""Elements and their scale bytes, as on the wire."""
LANDING_ROW = 2
"""Elements with one float32 scale per row, the largest scale of the row."""
LANDING_BF16 = 3
"""Values in bfloat16."""

# mxfp8.py: how a scale is chosen.
MODE_RCEIL = 0
MODE_FLOOR = 1
MODE_CEIL = 2
MODE_EVEN = 3
MODE_RCEIL_SATFINITE = 4

# experts/activation.py: activation between the two products of an expert.
ACT_SILU = 0
ACT_GELU = 1
ACT_RELU = 2
ACT_RELU2 = 3

# experts/gate_up.py: form in which the activation is written.
ACT_OUT_BF16 = 0
ACT_OUT_MX = 1
"""Elements and scales of MXFP8."""
ACT_OUT_MX_BF16 = 2
"""Values rounded to MXFP8, stored in bf16."""

# tiles.py: rows of a tile, words of a record of the tile table, and the index of each word.
TILE_ROWS = 128
TILE_WORDS = 4
TILE_EXPERT = 0
TILE_FIRST_ROW = 1
TILE_NUM_ROWS = 2
TILE_BAND = 3
TABLE_NUM_TILES = 0
"""Of record 0."""
TABLE_ROWS_IN_USE = 1
"""Of record 0."""
BAND_TILES = 8
"""Most tiles of rows that are computed together, sharing the weights' tiles in L2."""

# buffers.py: the symmetric buffers, by their row in the table of addresses. The table in triton_ep/context/layout.py
# says, in the same order, what each buffer holds, who writes it and who reads it.
SPLITS = 0
SPLITS_FLAG = 1
STAGE_X = 2
STAGE_META = 3
ARRIVE_FLAG = 4
COMBINE_X = 5
COMBINE_WEIGHT = 6
STAGED_FLAG = 7
DONE_FLAG = 8
BARRIER_FLAG = 9
NODE_BARRIER_FLAG = 10
BARRIER_SCRATCH = 11
NET_SEND = 12
NET_RECV = 13
NET_FLAG = 14
PARTIAL_SEND = 15
PARTIAL_RECV = 16
PARTIAL_FLAG = 17
LL_STAGE_X = 18
LL_META = 19
LL_COUNTS = 20
LL_FLAG = 21
LL_COMBINE = 22
LL_COMBINE_FLAG = 23
LL_WEIGHTS = 24
LL_ROW_FLAG = 25
ENTERED_FLAG = 26
STAGE_SOURCE = 27
OVERRUN_FLAG = 28
ARRIVED = 29
NUM_BUFFERS = 30

# tables.py: `report`, int32 [W, REPORT_WORDS], the part of `placement` with one record per rank. The host reads it as
# triton_ep.context.records.Report, whose fields have the same order.
REPORT_ROWS = 0
"""Output rows of that rank."""
REPORT_ARRIVALS = 1
"""Staging rows of that rank: tokens that go to at least one of its experts."""
REPORT_TOKENS = 2
"""Tokens that the rank dispatches. First of the four words that the rank sent at the end of its splits row."""
REPORT_BAD_ENTRY = 3
"""1 + index [T * K] of the rank's first illegal expert id; 0 = none."""
REPORT_BAD_ID = 4
"""That id."""
REPORT_HOST_WORD = 5
"""HOST_* below."""
REPORT_SUMS = 6
"""Rows of sums in that rank's combine buffer."""
REPORT_ARRIVALS_HERE = 7
"""Staging rows on this rank of the tokens from that rank."""
REPORT_WORDS = 8
TAIL_WORDS = 4
"""Words at the end of a splits row: REPORT_TOKENS to REPORT_HOST_WORD of its rank."""

# tables.py: fields of `entries` [F, T, K].
ENTRY_KEPT = 0
ENTRY_OWNER = 1
ENTRY_DST_ROW = 2
ENTRY_STAGE_ROW = 3
ENTRY_NODE_SLOT = 4
ENTRY_PULL_ROW = 5
ENTRY_PULL_PARTIAL = 6
"""Only with several nodes."""

MOST_WATCHED = 2048
"""Flags in a poll: more would take a program's registers."""

# tables.py: steps of a dispatch or combine.
STEPS = 8
"""Most steps of a call. After each step, ranks that wait for its rows may go on."""
PARTS = STEPS**2
"""Parts of a rank's tokens. Steps begin and end at multiples of a part."""
DISPATCH_BOUNDS = (0, 6, 16, 28, 40, 50, 58, 62, PARTS)
"""Parts sent after 0 to STEPS steps of a dispatch. The first step is short, because rows can be laid out only after it;
the last is shorter, because its rows are laid out after everything else is done."""
EXPERTS_BOUNDS = (0, 20, 38, 48, 56, 59, 62, 63, PARTS)
"""The same if small programs send rows that are laid out for each expert. They are laid out faster than they come, so
steps may become shorter towards the end, where what is left to be laid out counts."""
COMPACT_BOUNDS = (0, 24, 34, 42, 54, 58, 61, 63, PARTS)
"""The same of compact rows, in five steps: 24, 18, 12, 7 and 3 parts."""
STEPS_OF_COMPACT = 5
"""Most steps of compact rows. A step costs each program a microsecond or two in which it sends nothing."""
SENT_EVENLY = 0
"""Bounds of a push: DISPATCH_BOUNDS."""
SENT_TO_EXPERTS = 1
"""EXPERTS_BOUNDS."""
SENT_COMPACT = 2
"""COMPACT_BOUNDS."""
COMBINE_BOUNDS = (0, 8, 20, 32, 42, 51, 58, 62, PARTS)
"""The same for rows that a combine stages, and then pulls."""
BOUND_BITS = 7


def packed_bounds(bounds: tuple[int, ...]) -> int:
    """Bounds as one number, BOUND_BITS for each, the first in the lowest bits."""
    return sum(bound << BOUND_BITS * step for step, bound in enumerate(bounds))


def partial_stride(hidden):
    """Elements from one row of partial sums to the next. Host code calls it; device code compiles the same source."""
    return (hidden + 7) // 8 * 8


# bulk.py: rows in shared memory.
LANES = 32
"""Threads of the one warp of a program that copies rows in bulk: most destinations of a row."""


def slot_bytes(row_bytes):
    """Bytes of shared memory from one row to the next."""
    return (row_bytes + 127) // 128 * 128


def ring_bytes(slots, row_bytes):
    """Bytes of shared memory of `slots` rows, with a barrier of 8 bytes for each; a multiple of 16."""
    return slots * ((row_bytes + 127) // 128 * 128) + (8 * slots + 15) // 16 * 16


# calls.py: the host word that a rank publishes with its splits, or with its low-latency rows.
HOST_REJECTED = 1
"""The host rejected this rank's arguments."""
HOST_WEIGHTS = 2
"""This rank sends weights."""
HOST_SCATTER = 4
"""This rank's scatter indices do not sort its entries."""
HOST_SCALED = 8
"""This rank sends one-byte rows with scales through a layer without payload."""
HOST_AGAIN = 16
"""Rows follow the routing of an earlier dispatch; the bits from HOST_SHIFT on hold its number."""
HOST_COMPACT = 32
"""Output rows are compact: one per (token, rank)."""
HOST_BACKWARD = 64
"""The rows are gradients: the call belongs to a backward pass."""
HOST_READS = 128
"""This rank's host reads the host words of all ranks before anything else is sent."""
HOST_SHIFT = 8
"""First bit, with HOST_AGAIN, of the low bits of that dispatch's number."""
NEEDED_TOPK = 2**30
"""compute/map_slots.py: the last slot of a token with n experts and fewer slots holds NEEDED_TOPK + n. No expert has
this id, so the entry is dropped and reported with the splits of its rank; the hosts read n from the report."""

# calls.py: the tag of a combine; the bits from COMBINE_SHIFT on are the low bits of the number of its dispatch.
COMBINE_WEIGHTS = 1
COMBINE_SLOTS = 2
COMBINE_BACKWARD = 4
COMBINE_TOKEN_WEIGHTS = 8
"""The weights are per token, and travel in the call."""
COMBINE_BESIDE = 16
"""The kernels run next to products, so they have another number of programs."""
COMBINE_SHIFT = 5
EPOCH_BITS = 20
"""Number of low bits of a dispatch's number that calls carry."""
TAG_BITS = COMBINE_SHIFT + EPOCH_BITS
"""Low bits of a flag that hold its tag; the count is above them."""
MIXED_TAG = 2**TAG_BITS - 1
"""Sent to other nodes in place of a tag: the ranks of this node are in different combines."""

# buffers.py: words of the state array. The status record (waits.py) has four words.
EPOCH_DISPATCH = 0
EPOCH_COMBINE = 1
EPOCH_BARRIER_ALL = 2
EPOCH_BARRIER_NODE = 3
TIMEOUT_US = 4
EPOCH_LL_DISPATCH = 5
EPOCH_LL_COMBINE = 6
STATUS = 7
PROGRAMS_DONE = 11
ALARM = 12
OVERFLOW_TOTAL = 13
PROGRAMS_COUNTED = 14
EPOCH_PLACED = 15
STATE_WORDS = 16
"""One word per rank follows: if calls differ, 1 + the tag of that rank (calls.py)."""

# intranode/low_latency_dispatch.py: a flag of a low-latency dispatch, int64, one per source and parity of the call.
#
#     63         32 31        16 15        0
#     | call number | host word  |  tokens |
#
# In call 7, a rank that sends 3 tokens with weights (HOST_WEIGHTS = 2) publishes 0x00000007_00020003.
LL_WORD_SHIFT = 16
LL_CALL_SHIFT = 32
"""Also in the words of a low-latency combine: the call's number from this bit on, below it a flag's tag or a weight."""

# intranode/low_latency_combine.py: what a launch does, and whose weights multiply the rows.
LL_SENDS = 1
LL_RECEIVES = 2
LL_NO_WEIGHTS = 0
LL_ROW_WEIGHTS = 1
LL_TOKEN_WEIGHTS = 2
"""Those of the tokens, which the kernel brings to the rows."""

# waits.py: the status record, int64 [STATUS_WORDS] of the state array from STATUS on. Its first word says which wait
# expired (WAIT_*) or which calls differ (CALLS_*); 0 = no failure. A rank that in its 7th dispatch waited in vain for
# the splits of rank 2, which was in its 6th, has (WAIT_SPLITS, 2, 7, 6).
STATUS_INDEX = 1
"""Index of the first missing flag in its buffer."""
STATUS_EXPECTED = 2
"""Least value expected of that flag."""
STATUS_SEEN = 3
"""Its value when the wait expired."""
STATUS_WORDS = 4

# waits.py: which wait expired.
WAIT_SPLITS = 1
WAIT_ARRIVALS = 2
WAIT_NETWORK_ROWS = 3
WAIT_COMBINE_FREE = 4
WAIT_COMBINE_STAGED = 5
WAIT_NETWORK_PARTIALS = 6
WAIT_BARRIER = 7
WAIT_NODE_BARRIER = 8
WAIT_LL_ROWS = 9
WAIT_LL_PARTIALS = 10

# calls.py: which calls differ; in the same word as WAIT_*.
CALLS_DISPATCH = 11
CALLS_COMBINE = 12
CALLS_LL_DISPATCH = 13
CALLS_LL_COMBINE = 14

# waits.py again.
# A wait for signals of the caller's kernel on this GPU, not for another rank.
WAIT_SIGNALS = 15
WAIT_COMBINE_ENTERED = 16

# overruns.py: copy engines of the rank in the record's second word may have overwritten rows that were still read.
OVERRUN = 17
