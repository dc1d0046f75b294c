"""Calls that torch.compile must not trace.

Only traced code imports this module, because torch's decorator imports the compiler, which takes a second.
"""

from __future__ import annotations

import torch

from triton_ep.nn.swiglu_experts import SwiGLUExperts


@torch.compiler.disable
def look_at_shards(experts: SwiGLUExperts) -> None:
    """`SwiGLUExperts.look_at_shards`, which reads version counters."""
    experts.look_at_shards()
