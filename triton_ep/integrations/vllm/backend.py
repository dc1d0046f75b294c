"""vLLM's all2all backends `triton_ep` and `triton_ep_low_latency`: vllm serve --all2all-backend triton_ep.

vLLM has no registry of all2all backends. Their names are a `Literal`, and the places that depend on a name compare it.
`register`, the plugin's entry point, adds our names to the `Literal` and answers at these places:

    ParallelConfig.use_sequence_parallel_moe, use_batched_dp_moe      as for DeepEP's backend of the same format
    FusedMoEParallelConfig.use_batched_activation_format              the same
    CompilationConfig.set_splitting_ops_for_v1                        no CUDA graphs with `triton_ep`: the host waits
    current_platform.get_device_communicator_cls                      the same class, with our manager (manager.py)
    maybe_make_prepare_finalize                                       our TritonEPPrepareAndFinalize

Every other name behaves as without this module. Source: vLLM 0.33.0, the files of these names.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

from triton_ep.errors import ConfigError, LaunchError

PEERS = {"triton_ep": "deepep_high_throughput", "triton_ep_low_latency": "deepep_low_latency"}
"""Our names, with vLLM's name for DeepEP in the same format."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Entry point of the plugin: add the backends of PEERS, and provide `deep_ep` where it is absent. Idempotent.

    vLLM calls it in every process, and ends with what it raises. If this version of vLLM lacks a name that the backends
    need, a warning names it, and vLLM refuses their names.
    """
    try:
        _add_backends()
    except (ImportError, AttributeError) as error:
        _log.warning("vLLM gets no all2all backend triton_ep, which needs a name that this version lacks: %s", error)
    try:
        from triton_ep.integrations.deep_ep import shim

        shim.register()
    except LaunchError as error:  # a process without a GPU, which makes no buffers
        _log.warning("deep_ep is not provided: %s", error)


def _add_backends() -> None:
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import compilation, parallel
    from vllm.platforms import current_platform

    names = get_args(parallel.All2AllBackend)
    if "triton_ep" in names:
        return
    config, platform = parallel.ParallelConfig, type(current_platform)
    # Look up every name before the first change.
    answers = [(config, name, _property(config, name)) for name in ("use_sequence_parallel_moe", "use_batched_dp_moe")]
    split, communicator = compilation.CompilationConfig.set_splitting_ops_for_v1, platform.get_device_communicator_cls
    field = config.__dataclass_fields__["all2all_backend"]

    widened = Literal[(*names, *PEERS)]  # type: ignore[valid-type]  # made here, not a type that can be checked
    parallel.All2AllBackend = config.__annotations__["all2all_backend"] = field.type = widened
    rebuild_dataclass(config, force=True)
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is not None:  # it may have read the names already
        arguments._compute_kwargs.cache_clear()
    for owner, name, answer in answers:
        setattr(owner, name, answer)
    compilation.CompilationConfig.set_splitting_ops_for_v1 = _without_graphs(split, compilation.CUDAGraphMode.NONE)
    platform.get_device_communicator_cls = classmethod(_communicator(communicator))


class _AsPeer:
    """A configuration as if it named another backend: attributes and properties of the original otherwise."""

    def __init__(self, config: Any, backend: str) -> None:
        self._config, self.all2all_backend = config, backend

    def __getattr__(self, name: str) -> Any:
        found = inspect.getattr_static(type(self._config), name, None)
        return found.fget(self) if isinstance(found, property) and found.fget else getattr(self._config, name)


def _property(owner: type, name: str) -> property:
    """The property of this name of `owner`, which answers for our backends as for their peers."""
    original = inspect.getattr_static(owner, name)
    if not isinstance(original, property) or original.fget is None:
        raise AttributeError(f"{owner.__name__}.{name} is not a property")
    get = original.fget

    def answer(self: Any) -> Any:
        peer = PEERS.get(self.all2all_backend)
        return get(self if peer is None else _AsPeer(self, peer))

    return property(answer, doc=original.__doc__)


def _without_graphs(split: Callable[..., None], none: Any) -> Callable[..., None]:
    """vLLM's last step of its settings for compilation; none: CUDAGraphMode.NONE."""

    @functools.wraps(split)
    def set_splitting_ops(self: Any, all2all_backend: str, data_parallel_size: int = 1) -> None:
        split(self, all2all_backend=all2all_backend, data_parallel_size=data_parallel_size)
        if all2all_backend == "triton_ep" and data_parallel_size > 1 and self.cudagraph_mode != none:
            _log.warning(
                "CUDA graphs are off: with --all2all-backend triton_ep the host waits for the number of rows of every "
                "dispatch. triton_ep_low_latency, for decoding, can be captured."
            )
            self.cudagraph_mode = none

    return set_splitting_ops


def _communicator(original: Callable[[], str]) -> Callable[[Any], str]:
    """The platform's query for the class of its communicators, by name."""

    def get_device_communicator_cls(cls: Any) -> str:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if config is None or config.parallel_config.all2all_backend not in PEERS:
            return original()
        from triton_ep.integrations.vllm import manager

        _extend_moe_layers()
        return manager.communicator_over(original())

    return get_device_communicator_cls


@functools.cache  # once in a process
def _extend_moe_layers() -> None:
    """Let vLLM's MoE layers use these backends. Only called where one of them is chosen."""
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    original = all2all_utils.maybe_make_prepare_finalize
    format_of_rows = _property(FusedMoEParallelConfig, "use_batched_activation_format")
    FusedMoEParallelConfig.use_batched_activation_format = format_of_rows

    @functools.wraps(original)
    def make(moe: Any, *given: Any, **named: Any) -> Any:
        parallel = moe.moe_parallel_config
        if not parallel.use_all2all_kernels or parallel.all2all_backend not in PEERS:
            return original(moe, *given, **named)
        if named.get("use_monolithic"):
            raise ConfigError(
                f"--all2all-backend {parallel.all2all_backend} needs experts that take rows, but vLLM has chosen ones "
                "that route by themselves. Choose others with --moe-backend."
            )
        manager = named.get("all2all_manager") or all2all_utils.get_ep_all2all_manager()
        sizes = {"hidden": moe.hidden_dim, "topk": moe.experts_per_token, "num_experts": moe.num_experts}
        return manager.get_handle({**sizes, "max_tokens": moe.max_num_tokens, "dtype": moe.in_dtype})

    # Modules that have imported the function keep it under their own names.
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})  # not the attribute: other packages import lazily
        if names.get("maybe_make_prepare_finalize") is original:
            names["maybe_make_prepare_finalize"] = make
