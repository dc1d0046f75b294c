"""Kernels that start before the kernel ahead of them on their stream has ended (programmatic dependent launch, sm_90
and later).

A kernel that is launched early (`early` of a `Launcher`) starts when every program of the kernel ahead has called
`let_next_start`, or has ended. It sees the stores of that kernel after `await_previous`, and must call that before it
ends: whatever comes next on the stream waits for this kernel only.

For example, the push calls `let_next_start`, and the kernel that lays rows out, launched early, starts when the push
has started: then its programs, which wait for rows, cannot take the places of the programs that send them. It waits
for flags, not for the end of the push, and calls `await_previous` last. The kernel that gives rows their places, behind
the one that exchanges counts, does the same. Low-latency kernels read what the kernel ahead has stored, so they call it
first: only their start overlaps its end.

Interpreted kernels run one after the other: both functions do nothing.
"""

import triton

from .spin import INTERPRET

if INTERPRET.value:

    @triton.jit
    def let_next_start():
        """Nothing."""

    @triton.jit
    def await_previous():
        """Nothing."""

else:
    from .bulk import run_assembly

    @triton.jit
    def let_next_start():
        """Let the next kernel on the stream start, if it is launched early."""
        run_assembly("mov.u32 $0, 0; griddepcontrol.launch_dependents;")

    @triton.jit
    def await_previous():
        """Wait until the kernel ahead on the stream has ended; return at once if this one was not launched early."""
        run_assembly("mov.u32 $0, 0; griddepcontrol.wait;")
