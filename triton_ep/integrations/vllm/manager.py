"""vLLM's communicator and all2all manager for the backends of backend.py; needs vLLM.

One manager per expert-parallel group. It makes a TritonEPPrepareAndFinalize per MoE layer; those of equal sizes share
symmetric memory.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase
from vllm.utils.import_utils import resolve_obj_by_qualname

from triton_ep import distributed
from triton_ep.errors import ConfigError
from triton_ep.integrations.layer_pool import shared_pool
from triton_ep.integrations.vllm.classes import TritonEPPrepareAndFinalize
from triton_ep.layer import EPAll2AllLayer

__all__ = ["TritonEPAll2AllManager", "communicator_over"]


class TritonEPAll2AllManager(All2AllManagerBase):
    """What vLLM asks of an all2all backend. Collective over all ranks of the job: the first one joins triton_ep.

    Args:
        cpu_group, device_group: vLLM's two process groups of the expert-parallel ranks.
        parallel: vLLM's ParallelConfig. `all2all_backend`: triton_ep for the standard format, triton_ep_low_latency for
            the batched one. `distributed_timeout_seconds`: time limit of waits; None: 600 s, as vLLM's NCCL has.

    Raises:
        ConfigError: `device_group` is not a group of torch.distributed (elastic expert parallelism).
    """

    def __init__(self, cpu_group: Any, device_group: Any, parallel: Any) -> None:
        super().__init__(cpu_group)
        if not isinstance(device_group, torch.distributed.ProcessGroup):
            raise ConfigError(
                "--all2all-backend triton_ep needs a process group of torch.distributed, got "
                f"{type(device_group).__name__}: it does not support elastic expert parallelism."
            )
        if not distributed.is_initialized():
            distributed.initialize_distributed()
        self._options = {
            "batched": parallel.all2all_backend == "triton_ep_low_latency",
            "timeout_s": float(parallel.distributed_timeout_seconds or 600),
        }
        self._pool = shared_pool("vllm", device_group)
        self._num_sm: int | None = None
        self._made: list[TritonEPPrepareAndFinalize] = []

    def get_handle(self, kwargs: dict[str, Any]) -> TritonEPPrepareAndFinalize:
        """A TritonEPPrepareAndFinalize of these sizes: max_tokens, hidden, topk, num_experts, dtype."""
        made = TritonEPPrepareAndFinalize(self._pool.group, num_sm=self._num_sm, **self._options, **kwargs)
        self._made.append(made)
        return made

    def set_num_sms(self, num_sms: int) -> None:
        """Number of programs that send rows in layers made from now on."""
        self._num_sm = num_sms

    def max_sms_used(self) -> int | None:
        """That number; None: the default of triton_ep."""
        return self._num_sm

    def query_active_mask(self) -> torch.Tensor:
        """[W] int32 on the device: 1 for ranks whose rows or flags a kernel has waited for in vain, else 0. Waits."""
        missing = {rank for layer in self._layers() for rank in layer.context.missing_ranks()}
        mask = [int(rank in missing) for rank in range(self.world_size)]
        return torch.tensor(mask, dtype=torch.int32, device=self._pool.heap.device)

    def query_fault(self) -> torch.Tensor:
        """Bool on the device: whether a kernel has reported an error in the calls so far. Does not wait."""
        reported = [layer.context.reported() for layer in self._layers()]
        no_fault = torch.zeros((), dtype=torch.bool, device=self._pool.heap.device)
        return torch.stack([no_fault, *reported]).any()

    def _layers(self) -> list[EPAll2AllLayer]:
        return list(self._pool.layers.values())

    def destroy(self) -> None:
        """Free the symmetric memory. Collective."""
        while self._made:
            self._made.pop().close()


def communicator_over(name: str) -> str:
    """Name of a communicator like the platform's, which is given by name, with our manager for expert parallelism."""
    made = f"TritonEP{name.rpartition('.')[2]}"
    if made not in globals():
        base: Any = resolve_obj_by_qualname(name)

        class TritonEPCommunicator(base):
            def __init__(self, *args: Any, use_all2all: bool = False, **kwargs: Any) -> None:
                super().__init__(*args, use_all2all=False, **kwargs)  # it knows vLLM's own managers only
                self.use_all2all = self.is_ep_communicator and use_all2all
                if self.use_all2all:
                    parallel = get_current_vllm_config().parallel_config
                    self.all2all_manager = TritonEPAll2AllManager(self.cpu_group, self.device_group, parallel)

        TritonEPCommunicator.__doc__ = f"{base.__name__} with triton_ep's all2all manager."
        globals()[made] = TritonEPCommunicator
    return f"{__name__}.{made}"
