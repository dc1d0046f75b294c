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

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402

from triton_ep.kernels.spec import SPEC, KernelSpec  # noqa: E402  (kernels are decorated at import)

_DTYPES = {dtype.name: dtype for dtype in (tl.bfloat16, tl.float16, tl.float32)}

# What profilers of Triton want to be called at a launch: they get its own launch path.
_ENTER, _EXIT = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


def spec(name: str) -> KernelSpec:
    """KernelSpec of a kernel by its name; KeyError if there is none."""
    return SPEC[name]


class Launcher:
    """One kernel with its constexprs, ready to be launched any number of times.

    Triton's own launch path binds and inspects every argument at each call. This one asks it once per kind of
    arguments and keeps the compiled kernel that it answers with; from then on it looks at what decides the kind:
    the dtype of what pointers point to where the spec leaves it open, addresses that are no multiple of 16, and
    integers that the kernel is specialised by. Pointers come before integers.

    Args:
        name: of the kernel.
        constexprs: all of them.
        extern_libs: name and path of device bitcode, for variants that call NVSHMEM.
        num_warps: warps of a program on a GPU, where it is not the number of the spec.
        maxnreg: registers of a thread at most, where it is not the number of the spec.
    """

    def __init__(
        self,
        name: str,
        constexprs: Mapping[str, Any],
        extern_libs: Mapping[str, str] | None = None,
        num_warps: int | None = None,
        maxnreg: int | None = None,
    ) -> None:
        self.spec = spec(name)
        self.constexprs = _with_dtypes(constexprs)
        self.options: dict[str, Any] = {"num_warps": num_warps or self.spec.num_warps}
        if limit := maxnreg or self.spec.maxnreg:
            self.options["maxnreg"] = limit
        if extern_libs:
            self.options["extern_libs"] = dict(extern_libs)
        types = tuple(self.spec.arguments.values())
        self._num_args = len(types)
        self._num_pointers = sum(kind.startswith("*") for kind in types)
        self._typed = tuple(i for i, kind in enumerate(types) if "{" in kind)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        if not INTERPRETING:
            params = self.spec.kernel.params
            # Compiled kernels take their constexprs, too, in the order of the kernel's parameters.
            self._values = tuple(self.constexprs[p.name] for p in params if p.name in self.constexprs)
            numbers = range(self._num_pointers, self._num_args)
            self._special = tuple(i for i in numbers if not params[i].do_not_specialize)

    def __call__(self, grid: int, *args: Any, stream: torch.cuda.Stream | None = None) -> None:
        """Launch `grid` programs; a grid of 0 launches nothing.

        args: tensors, then ints, in the order of the kernel's spec.
        stream: where; None: the current stream. To name it here takes a fraction of making it current.

        Raises:
            EPError: what a hook raised inside an interpreted kernel (`PeerFailed`).
            LaunchError: an argument count that does not fit the spec.
        """
        if len(args) != self._num_args:
            raise LaunchError(f"{self.spec.name} takes {self._num_args} arguments, got {len(args)}.")
        if grid == 0:
            return
        if INTERPRETING:
            _interpret(self.spec, grid, args, self.constexprs)
            return
        device = torch._C._cuda_getDevice()
        addresses = [tensor.data_ptr() for tensor in args[: self._num_pointers]]
        unaligned = tuple([i for i, address in enumerate(addresses) if address & 15])
        kind = (device, unaligned, *[args[i].dtype for i in self._typed], *[args[i] for i in self._special])
        compiled = self._compiled.get(kind)
        if compiled is None or _ENTER.calls or _EXIT.calls:
            with torch.cuda.stream(stream):
                self._compiled[kind] = self.spec.kernel[(grid,)](*args, **self.constexprs, **self.options)
            return
        compiled.run(
            grid,
            1,
            1,
            torch._C._cuda_getCurrentRawStream(device) if stream is None else stream.cuda_stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *addresses,
            *args[self._num_pointers :],
            *self._values,
        )


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


def _with_dtypes(constexprs: Mapping[str, Any]) -> dict[str, Any]:
    """Constexprs as kernels take them: plans write dtypes by name."""
    return {name: _DTYPES[value] if isinstance(value, str) else value for name, value in constexprs.items()}


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
