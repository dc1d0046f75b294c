"""How a kernel gets launched: interpreted on the CPU, or compiled on the GPU. The only switch.

Which of the two is decided once per process, when this module is imported, and before triton is: Triton
decides it when a kernel is decorated. TRITON_INTERPRET in the environment wins; without it, a machine with
a GPU compiles and a machine without one interprets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from triton_ep.environment import read_environment
from triton_ep.errors import EPError, LaunchError


def _choose_interpreter() -> bool:
    asked = read_environment().triton_interpret
    interpret = asked if asked is not None else not torch.cuda.is_available()
    if interpret and not asked:
        if "triton" in sys.modules:
            raise LaunchError(
                "triton was imported before triton_ep on a machine without a GPU, so its kernels can neither be "
                "compiled nor interpreted any more. Import triton_ep first, or set TRITON_INTERPRET=1."
            )
        os.environ["TRITON_INTERPRET"] = "1"
    return interpret


INTERPRETING = _choose_interpreter()
"""True if kernels of this process run in Triton's interpreter, on CPU tensors."""

if INTERPRETING:
    from triton_ep import interpreter

    interpreter.install()

from triton_ep.kernels.spec import SPEC, KernelSpec  # noqa: E402  (kernels are decorated at import)


def spec(name: str) -> KernelSpec:
    """KernelSpec of a kernel by its name; KeyError if there is none."""
    return SPEC[name]


def launch(
    name: str,
    grid: int,
    args: Sequence[Any],
    constexprs: Mapping[str, Any],
    extern_libs: Mapping[str, str] | None = None,
    num_warps: int | None = None,
) -> None:
    """Launch `grid` programs of a kernel on the current stream; a grid of 0 launches nothing.

    args: tensors and ints in the order of the kernel's spec.
    extern_libs: name and path of device bitcode, for variants that call NVSHMEM.
    num_warps: warps of a program on a GPU, where it is not the number of the spec.

    Raises:
        EPError: what a hook raised inside an interpreted kernel (`PeerFailed`).
        LaunchError: an argument count that does not fit the spec.
    """
    kernel_spec = spec(name)
    if len(args) != len(kernel_spec.arguments):
        raise LaunchError(f"{name} takes {len(kernel_spec.arguments)} arguments, got {len(args)}.")
    if grid == 0:
        return
    if INTERPRETING:
        _interpret(kernel_spec, grid, args, constexprs)
        return
    options: dict[str, Any] = {"num_warps": num_warps or kernel_spec.num_warps}
    if extern_libs:
        options["extern_libs"] = dict(extern_libs)
    kernel_spec.kernel[(grid,)](*args, **constexprs, **options)


def _interpret(kernel_spec: KernelSpec, grid: int, args: Sequence[Any], constexprs: Mapping[str, Any]) -> None:
    try:
        kernel_spec.kernel[(grid,)](*args, **constexprs)
    except Exception as error:
        # The interpreter wraps what a kernel raises; our own errors must reach the caller as they are.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, EPError):
            cause = cause.__cause__
        if cause is not None:
            raise cause from None
        raise
