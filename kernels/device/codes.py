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

# mxfp8.py: how a scale is chosen.
MODE_RCEIL = 0
MODE_FLOOR = 1
MODE_CEIL = 2
MODE_EVEN = 3
MODE_RCEIL_SATFINITE = 4

# buffers.py: two of the symmetric buffers.
BARRIER_FLAG = 9
NODE_BARRIER_FLAG = 10

# buffers.py: words of the state array. The status record (waits.py) has four, LL_TOLD two.
EPOCH_DISPATCH = 0
EPOCH_COMBINE = 1
EPOCH_BARRIER_ALL = 2
EPOCH_BARRIER_NODE = 3
TIMEOUT_US = 4
EPOCH_LL_DISPATCH = 5
EPOCH_LL_COMBINE = 6
LL_DISPATCH_SENT = 7
LL_COMBINE_SENT = 8
LL_TOLD = 9
STATUS = 11
PROGRAMS_DONE = 15
ALARM = 16
OVERFLOW_TOTAL = 17
STATE_WORDS = 18

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
