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


class Launcher:
    """One kernel with its constexprs, ready to be launched any number of times on the current stream.

    Triton's own launch path binds and inspects every argument at each call. This one asks it once per kind of
    arguments and keeps the compiled kernel that it answers with; from then on it looks at what decides the kind:
    the dtype of what pointers point to where the spec leaves it open, addresses that are no multiple of 16, and
    integers that the kernel is specialised by.

    Args:
        name: of the kernel.
        constexprs: all of them.
        extern_libs: name and path of device bitcode, for variants that call NVSHMEM.
        num_warps: warps of a program on a GPU, where it is not the number of the spec.
    """

    def __init__(
        self,
        name: str,
        constexprs: Mapping[str, Any],
        extern_libs: Mapping[str, str] | None = None,
        num_warps: int | None = None,
    ) -> None:
        self.spec = spec(name)
        self.constexprs = dict(constexprs)
        self.options: dict[str, Any] = {"num_warps": num_warps or self.spec.num_warps}
        if extern_libs:
            self.options["extern_libs"] = dict(extern_libs)
        types = tuple(self.spec.arguments.values())
        self._is_pointer = tuple(kind.startswith("*") for kind in types)
        params = self.spec.kernel.params if not INTERPRETING else ()
        self._decides = tuple(
            "{" in kind if pointer else not param.do_not_specialize
            for kind, pointer, param in zip(types, self._is_pointer, params, strict=False)
        )
        # Compiled kernels take their constexprs, too, in the order of the kernel's parameters.
        self._values = tuple(self.constexprs[p.name] for p in params if p.name in self.constexprs)
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: int, *args: Any) -> None:
        """Launch `grid` programs; a grid of 0 launches nothing.

        args: tensors and ints in the order of the kernel's spec.

        Raises:
            EPError: what a hook raised inside an interpreted kernel (`PeerFailed`).
            LaunchError: an argument count that does not fit the spec.
        """
        if len(args) != len(self._is_pointer):
            raise LaunchError(f"{self.spec.name} takes {len(self._is_pointer)} arguments, got {len(args)}.")
        if grid == 0:
            return
        if INTERPRETING:
            _interpret(self.spec, grid, args, self.constexprs)
            return
        device = torch.cuda.current_device()
        kind: list[Any] = [device]
        values: list[int] = []
        unaligned = 0
        for arg, is_pointer, decides in zip(args, self._is_pointer, self._decides, strict=True):
            if is_pointer:
                address = arg.data_ptr()
                values.append(address)
                unaligned = 2 * unaligned + (address % 16 != 0)
                if decides:
                    kind.append(arg.dtype)
            else:
                values.append(arg)
                if decides:
                    kind.append(arg)
        kind.append(unaligned)
        compiled = self._compiled.get(key := tuple(kind))
        if compiled is None:
            self._compiled[key] = self.spec.kernel[(grid,)](*args, **self.constexprs, **self.options)
            return
        compiled[(grid, 1, 1)](*values, *self._values, stream=torch.cuda.current_stream(device).cuda_stream)


def launch(
    name: str, grid: int, args: Sequence[Any], constexprs: Mapping[str, Any], num_warps: int | None = None
) -> None:
    """Launch `grid` programs of a kernel on the current stream, by Triton's own path; a grid of 0 launches nothing.

    args: tensors, tensor descriptors and ints in the order of the kernel's spec.
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
    kernel_spec.kernel[(grid,)](*args, **constexprs, num_warps=num_warps or kernel_spec.num_warps)


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
