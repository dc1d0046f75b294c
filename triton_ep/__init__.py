"""Expert parallelism in Triton over symmetric memory: dispatch tokens to their experts and combine the results.

The public names below are loaded at first use (PEP 562): `import triton_ep` itself needs neither torch nor
Triton, so tools can inspect or build the package on a machine that has neither.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any


def _find_siblings() -> None:
    """Let a checkout that was never installed import `triton_ep.kernels` and `triton_ep.aot`.

    The two folders are next to `triton_ep/`; a build of the package maps them below it (pyproject.toml,
    `tool.setuptools.package-dir`), so that nothing named `kernels` or `aot` lands at the top of site-packages.
    """
    package = Path(__file__).resolve().parent
    if not (package / "kernels").is_dir() and (package.parent / "kernels" / "__init__.py").is_file():
        __path__.append(str(package.parent))


_find_siblings()

__version__ = "0.1.0"

if TYPE_CHECKING:
    from triton_ep.config import EPConfig
    from triton_ep.context.context import DispatchCombineContext
    from triton_ep.context.descriptor import EPAllToAllLayoutDesc
    from triton_ep.context.overlap import EPEvent
    from triton_ep.distributed import finalize_distributed, initialize_distributed, is_initialized
    from triton_ep.errors import (
        AotArchMismatch,
        AotCorrupted,
        AotMiss,
        AotNvshmemMismatch,
        CallMismatch,
        CapacityError,
        ConfigError,
        EPError,
        FinalizedError,
        HeapError,
        InputError,
        LaunchError,
        PeerFailed,
        StaleHandleError,
        WaitTimeout,
    )
    from triton_ep.exchange.barrier import BarrierAllContext
    from triton_ep.layer import EPAll2AllLayer
    from triton_ep.mx.tensor import MXTensor

__all__ = [
    "AotArchMismatch",
    "AotCorrupted",
    "AotMiss",
    "AotNvshmemMismatch",
    "BarrierAllContext",
    "CallMismatch",
    "CapacityError",
    "ConfigError",
    "DispatchCombineContext",
    "EPAll2AllLayer",
    "EPAllToAllLayoutDesc",
    "EPConfig",
    "EPError",
    "EPEvent",
    "FinalizedError",
    "HeapError",
    "InputError",
    "LaunchError",
    "MXTensor",
    "PeerFailed",
    "StaleHandleError",
    "WaitTimeout",
    "finalize_distributed",
    "initialize_distributed",
    "is_initialized",
]

_HOME = {
    "BarrierAllContext": "exchange.barrier",
    "DispatchCombineContext": "context.context",
    "EPAll2AllLayer": "layer",
    "EPAllToAllLayoutDesc": "context.descriptor",
    "EPConfig": "config",
    "EPEvent": "context.overlap",
    "MXTensor": "mx.tensor",
    "finalize_distributed": "distributed",
    "initialize_distributed": "distributed",
    "is_initialized": "distributed",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value  # later look-ups skip this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
