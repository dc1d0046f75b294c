"""Numbers that device and host code agree on, as plain integers: the host needs no Triton to know them.

Device code has the same names as compile-time constants, in the files named below.
"""

# transport.py: how bytes cross nodes.
P2P = 0
NVSHMEM = 1
NVSHMEM_SYMBOLS = ("nvshmemx_putmem_signal_block",)
"""Functions of NVSHMEM's device library that kernels call."""

# rows.py: what the rows of a dispatch are.
WORDS = 0
QUANTISE = 1
MX = 2

# intranode/dispatch.py: what the output rows of a dispatch are.
LANDING_WORDS = 0
"""Opaque words, as they travel."""
LANDING_MX = 1
"""Elements and their scale bytes, as they travel."""
LANDING_ROW = 2
"""Elements that share the largest scale of their row, a float32."""
LANDING_BF16 = 3
"""Values in bfloat16."""

# mxfp8.py: how a scale is chosen.
MODE_RCEIL = 0
MODE_FLOOR = 1
MODE_CEIL = 2
MODE_EVEN = 3
MODE_RCEIL_SATFINITE = 4

# experts/activation.py: what stands between the two products of an expert.
ACT_SILU = 0
ACT_GELU = 1
ACT_RELU = 2
ACT_RELU2 = 3

# experts/gate_up.py: how the activation leaves.
ACT_OUT_BF16 = 0
ACT_OUT_MX = 1
"""Elements and scales of MXFP8."""
ACT_OUT_MX_BF16 = 2
"""Values of MXFP8, in bf16."""

# tiles.py: rows of a tile of the tile table, words of one of its records, and which is where.
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
"""Tiles of rows that are computed together at most: they share the weights' tiles in L2."""

# buffers.py: the symmetric buffers, by their row in the table of addresses. What each holds, who writes and who reads
# it, is the table in triton_ep/context/layout.py, in the same order.
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
NUM_BUFFERS = 24

# tables.py: `report`, int32 [W, REPORT_WORDS], the part of `placement` with one record per rank. The host reads it as
# triton_ep.context.records.Report, whose fields have the same order.
REPORT_ROWS = 0
"""Output rows of that rank."""
REPORT_ARRIVALS = 1
"""Arrival rows of that rank: tokens that at least one of its experts gets."""
REPORT_TOKENS = 2
"""Tokens that it dispatches. From here on four words as the rank sent them at the end of its splits row."""
REPORT_BAD_ENTRY = 3
"""1 + index [T * K] of its first illegal expert id; 0 = none."""
REPORT_BAD_ID = 4
"""That id."""
REPORT_HOST_WORD = 5
"""HOST_* below."""
REPORT_FIRST_ARRIVAL = 6
"""First of the rows that arrive here from it."""
REPORT_ARRIVALS_HERE = 7
"""Number of them."""
REPORT_WORDS = 8
TAIL_WORDS = 4
"""At the end of a splits row: what REPORT_TOKENS to REPORT_HOST_WORD say of its rank."""

# tables.py: fields of `entries` [F, T, K].
ENTRY_KEPT = 0
ENTRY_OWNER = 1
ENTRY_DST_ROW = 2
ENTRY_STAGE_ROW = 3
ENTRY_NODE_SLOT = 4
ENTRY_PULL_RANK = 5
ENTRY_PULL_ROW = 6
ENTRY_PULL_PARTIAL = 7
"""With several nodes only."""

# tables.py: steps of a dispatch or combine.
STEPS = 8
"""Most steps of a call, after each of which other ranks may go on."""
PARTS = STEPS**2
"""Parts of a rank's tokens, in whose units steps begin and end."""


def partial_stride(hidden):
    """Elements from one row of partial sums to the next; for host and device, where it is compiled as it stands."""
    return (hidden + 7) // 8 * 8


# calls.py: the host word that a rank tells with its splits, or with its low-latency rows.
HOST_REJECTED = 1
"""The host refused this rank's arguments."""
HOST_WEIGHTS = 2
"""This rank sends weights."""
HOST_SCATTER = 4
"""This rank's scatter indices are no sort of its entries."""
HOST_SCALED = 8
"""This rank sends one-byte rows with scales, of a layer without payload."""
HOST_AGAIN = 16
"""Rows go by the routing of an earlier dispatch, whose number stands above HOST_SHIFT."""
HOST_COMPACT = 32
"""Rows arrive one per (token, rank)."""
HOST_BACKWARD = 64
"""A gradient is sent: the call belongs to a backward pass."""
HOST_READS = 128
"""This rank's host looks at the host words of all ranks before anything else is sent."""
HOST_SHIFT = 8
"""Above are, with HOST_AGAIN, the low bits of the number of that dispatch."""
NEEDED_TOPK = 2**30
"""compute/map_slots.py: in the last slot of a token with n experts and fewer slots, NEEDED_TOPK + n. No expert has this
id, so the entry is dropped and reported with the splits of its rank; the hosts read n from the report."""

# calls.py: the tag of a combine; above COMBINE_SHIFT the low bits of the number of its dispatch.
COMBINE_WEIGHTS = 1
COMBINE_SLOTS = 2
COMBINE_BACKWARD = 4
COMBINE_SHIFT = 4
EPOCH_BITS = 20
"""Low bits of a dispatch's number that calls carry."""
TAG_BITS = COMBINE_SHIFT + EPOCH_BITS
"""Of flags that carry a tag: the low bits, below the count."""
MIXED_TAG = 2**TAG_BITS - 1
"""In place of the tag, for ranks of other nodes: the ranks of this node are in different combines."""

# buffers.py: words of the state array. The status record (waits.py) has four, what was told (LL_TOLD) two.
EPOCH_DISPATCH = 0
EPOCH_COMBINE = 1
EPOCH_BARRIER_ALL = 2
EPOCH_BARRIER_NODE = 3
TIMEOUT_US = 4
EPOCH_LL_DISPATCH = 5
EPOCH_LL_COMBINE = 6
LL_DISPATCH_SENT = 7
LL_TOLD = 8
STATUS = 10
PROGRAMS_DONE = 14
ALARM = 15
OVERFLOW_TOTAL = 16
PROGRAMS_COUNTED = 17
STATE_WORDS = 18
"""Behind them are as many words as there are ranks: the tag of each, plus one, where calls differ (calls.py)."""

# intranode/low_latency_dispatch.py: a flag of a low-latency dispatch, int64, one per source and parity of the call.
#
#     63        32 31        16 15        0
#     |  programs  | host word  |  tokens |
#
# The programs of a call add max_tokens to the upper half in all, so its bits count them since the layer was made; that
# of token 0 also adds to the lower half what it publishes now less what it published in the last call of this parity.
# With max_tokens = 4, of one parity: 3 tokens with weights (HOST_WEIGHTS = 2), then 1 token without, then 4 with:
#
#     call   added                        flag
#      1     (4 << 32) + 0x20003          0x00000004_00020003
#      3     (4 << 32) + 0x1 - 0x20003    0x00000008_00000001
#      5     (4 << 32) + 0x20004 - 0x1    0x0000000c_00020004
LL_WORD_SHIFT = 16
LL_COUNT_SHIFT = 32
"""Of a low-latency combine, too: its number, and its tag below."""

# waits.py: the status record, int64 [STATUS_WORDS] of the state array from STATUS on; its first word is what a wait
# waited for, or which calls differ; 0 = all is well. A rank that in its 7th dispatch waited in vain for the splits of
# rank 2, which was in its 6th, has (WAIT_SPLITS, 2, 7, 6).
STATUS_INDEX = 1
"""Index of the first missing flag in its buffer."""
STATUS_EXPECTED = 2
"""What was expected of it at least."""
STATUS_SEEN = 3
"""What it was."""
STATUS_WORDS = 4

# waits.py: what a wait waited for.
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

# calls.py: which calls differ, in place of what a wait waited for.
CALLS_DISPATCH = 11
CALLS_COMBINE = 12
CALLS_LL_DISPATCH = 13
CALLS_LL_COMBINE = 14

# waits.py again: signals of a kernel of the caller on this GPU; no other rank is waited for.
WAIT_SIGNALS = 15
