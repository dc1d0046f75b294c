"""vLLM with --all2all-backend triton_ep: its own settings, groups and choice of classes; skipped where it is absent.

    pip install --no-deps vllm==0.33.0 and the packages that it imports (`make peers`)

All of vLLM is loaded unchanged, as for CPUs. Experts multiply by their own number, in float32, against a dense sum.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations import vllm_batches as batches
from triton_ep.errors import ConfigError, WaitTimeout
from triton_ep.integrations.vllm import backend

# Import vLLM in the ranks only: it registers ops and settings for the whole process.
_ABSENT = [name for name in ("vllm", "msgspec", "transformers") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(bool(_ABSENT), reason=f"vLLM with its dependencies is not installed: {', '.join(_ABSENT)}"),
]


LIMIT_S = 8
"""Time limit of waits; every call before the last takes a fraction of it."""


def _settings(name: str, rank: int, ranks: int) -> Any:
    """VllmConfig of one data-parallel rank."""
    from vllm.config import DeviceConfig, ParallelConfig, SchedulerConfig, VllmConfig

    sizes = {"max_model_len": batches.MOST, "max_num_batched_tokens": batches.MOST, "max_num_seqs": 1}
    parallel = ParallelConfig(
        all2all_backend=name,
        data_parallel_size=ranks,
        data_parallel_rank=rank,
        enable_expert_parallel=True,
        distributed_timeout_seconds=LIMIT_S,
    )
    scheduler = SchedulerConfig(is_encoder_decoder=False, **sizes)
    return VllmConfig(parallel_config=parallel, scheduler_config=scheduler, device_config=DeviceConfig(device="cpu"))


def _moe(settings: Any) -> Any:
    """FusedMoEConfig of a layer, as vLLM's layer makes it."""
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    ranks = settings.parallel_config.data_parallel_size
    parallel = config.FusedMoEParallelConfig.make(1, 1, ranks, 1, settings.parallel_config)
    return config.FusedMoEConfig(
        num_experts=batches.EXPERTS * ranks,
        experts_per_token=batches.TOPK,
        hidden_dim=batches.HIDDEN,
        intermediate_size=32,
        num_local_experts=batches.EXPERTS,
        num_logical_experts=batches.EXPERTS * ranks,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        max_num_tokens=settings.scheduler_config.max_num_batched_tokens,
    )


def _check(rank: int, nodes: int, ranks_per_node: int, name: str) -> None:
    ranks = nodes * ranks_per_node
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import config, modular_kernel, topk_weight_and_reduce
    from vllm.model_executor.layers.fused_moe.all2all_utils import get_ep_all2all_manager
    from vllm.model_executor.layers.fused_moe.oracle import unquantized  # before the plugin's part for layers
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    settings = _settings(name, rank, ranks)
    with set_current_vllm_config(settings):
        parallel_state.init_distributed_environment(1, 0, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        manager = get_ep_all2all_manager()
        moe = _moe(settings)
        batched = name == "triton_ep_low_latency"
        assert moe.moe_parallel_config.use_batched_activation_format is batched
        # With tables for round robin vLLM would not place experts in blocks, which experts without a map rely on.
        assert not moe.moe_parallel_config.needs_round_robin_routing_tables
        quant = config.FusedMoEQuantConfig.make()
        made = unquantized.maybe_make_prepare_finalize(moe, quant, allow_new_interface=True)
        with pytest.raises(ConfigError, match="--moe-backend"):
            unquantized.maybe_make_prepare_finalize(moe, quant, allow_new_interface=True, use_monolithic=True)
        assert type(made).__name__ == "TritonEPPrepareAndFinalize" and made.max_tokens == batches.MOST
        slabs = {"max_num_tokens": batches.MOST, "num_dispatchers": ranks} if batched else {}
        experts = batches.numbered_experts(
            modular_kernel, topk_weight_and_reduce, moe, batched, quant_config=quant, **slabs
        )
        kernel = modular_kernel.FusedMoEKernel(made, experts)
        batches.check(kernel, rank, ranks, quantised=False)
    assert not manager.query_fault() and manager.query_active_mask().tolist() == [0] * ranks
    if rank == 0:  # rank 1 does not come
        with pytest.raises(WaitTimeout, match=f"waited {LIMIT_S} s .* missing rank 1"):
            batches.check(kernel, rank, ranks, quantised=False)
        assert manager.query_fault() and manager.query_active_mask().tolist() == [0, 1]
    dist.barrier()
    manager.destroy()
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("name", list(backend.PEERS))
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_its_layers_use_these_backends(run_ranks, nodes, ranks_per_node, name):
    """From the settings to the sums: groups, manager, prepare and finalize, in the format of the backend."""
    run_ranks(_check, nodes, ranks_per_node, name)


def _check_names(rank: int, nodes: int, ranks_per_node: int) -> None:
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    from vllm.config.compilation import CompilationConfig, CUDAGraphMode
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import AsyncEngineArgs, get_kwargs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    get_kwargs(ParallelConfig)  # a front end may have read vLLM's names before the plugin was loaded
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())  # loads plugins
    backend.register()  # in every process, perhaps twice
    for name in backend.PEERS:
        assert parser.parse_args(["--all2all-backend", name]).all2all_backend == name
    with pytest.raises(SystemExit):
        parser.parse_args(["--all2all-backend", "triton_ep_lowlatency"])
    with pytest.raises(ValueError, match="triton_ep_low_latency"):
        ParallelConfig(all2all_backend="triton_ep_lowlatency")

    def settings(name: str) -> Any:
        sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2}
        return ParallelConfig(all2all_backend=name, enable_expert_parallel=True, **sizes)

    for name, peer in {**backend.PEERS, "allgather_reducescatter": "allgather_reducescatter"}.items():
        mine, others = settings(name), settings(peer)
        for query in ("use_batched_dp_moe", "use_sequence_parallel_moe", "use_all2all"):
            assert getattr(mine, query) == getattr(others, query), (name, query)
        graphs = CompilationConfig(mode=3, cudagraph_mode=CUDAGraphMode.FULL)
        graphs.set_splitting_ops_for_v1(all2all_backend=name, data_parallel_size=2)
        assert (graphs.cudagraph_mode == CUDAGraphMode.NONE) == (name == "triton_ep")
    assert settings("triton_ep_low_latency").use_batched_dp_moe and not settings("triton_ep").use_batched_dp_moe
    # Without one of these backends in the current settings vLLM's own class.
    assert current_platform.get_device_communicator_cls().startswith("vllm.")


def test_its_settings_and_command_line_know_these_backends(run_ranks):
    """Both names, and no others; what depends on the name is as for DeepEP's backends; other names are untouched."""
    run_ranks(_check_names, 1, 1)
