"""GroupedExperts: the experts of a Megatron MoE layer, after any of its token dispatchers."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.nn.expert_block import expert_block
from triton_ep.nn.swiglu_experts import SwiGLUExperts


class GroupedExperts(SwiGLUExperts):
    """`triton_ep.nn.SwiGLUExperts` on received rows, with the call signature of Megatron-Core's grouped MLPs.

    Megatron sets `main_grad` on parameters; gradients of the weights are added to it. All parameters have
    `allreduce = False`, which tells Megatron's data parallelism that they differ between expert-parallel ranks.
    """

    def __init__(self, hidden: int, ffn: int, num_local_experts: int, **options: Any) -> None:
        super().__init__(hidden, ffn, num_local_experts, **options)
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Expert outputs of the rows times their probabilities, and None for the bias. Differentiable.

        Arguments:
            permuted_local_hidden_states: [R, H] bf16, ordered by expert.
            tokens_per_expert: [e] integers, on the host or the device.
            permuted_probs: [R] floating-point; None: ones.

        Raises:
            InputError: counts for another number of experts.
        """
        rows = permuted_local_hidden_states
        counts = torch.as_tensor(tokens_per_expert)
        if counts.shape != (self.num_local_experts,):
            raise InputError(f"tokens_per_expert must be [{self.num_local_experts}], got {list(counts.shape)}.")
        ends = torch.cumsum(counts, 0, dtype=torch.int32).to(rows.device, non_blocking=True)
        offs = torch.nn.functional.pad(ends, (1, 0))
        weights = None if permuted_probs is None else permuted_probs.float().contiguous()
        settings = self._settings(aligned=False)
        return expert_block(rows, weights, *self.parameters_now(), self.prepared, offs, None, settings), None
