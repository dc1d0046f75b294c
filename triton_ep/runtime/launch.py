"""How a kernel gets launched: interpreted on the CPU, compiled on the GPU, or taken from an ahead-of-time library.

Whether kernels are interpreted is decided once per process, when this module is imported, and before triton is: Triton
decides it when a kernel is decorated. TRITON_INTERPRET in the environment wins; without it, a machine with a GPU
compiles and a machine without one interprets. Where kernels are compiled, Triton is imported when the first of them is:
a process that takes all of its kernels from a library (triton_ep/aot) has no compiler in it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import or_
from pathlib import Path
from typing import Any

import torch

from triton_ep.errors import AotMiss, ConfigError, EPError, LaunchError
from triton_ep.runtime.cubins import Aot, Kernel, choose
from triton_ep.runtime.environment import read_environment
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import Plan


def _choose_interpreter() -> bool:
    wanted = read_environment().triton_interpret
    interpret = wanted if wanted is not None else not torch.cuda.is_available()
    if interpret and not wanted:
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
    from triton_ep.runtime import interpreter

    interpreter.install()

ExternLibs = Mapping[str, str] | Callable[[], Mapping[str, str] | None] | None
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


# A call looks at every address; done in C, that takes a third of the time.
_ADDRESS = torch.Tensor.data_ptr


@functools.cache
def _specs() -> Mapping[str, Any]:
    """KernelSpecs by name. Loads Triton, and the kernels, which are declared at import."""
    from triton_ep.kernels.spec import all_kernels

    return all_kernels()


@functools.cache
def _triton() -> tuple[Mapping[str, Any], Any, Any]:
    """Dtypes by name, and what profilers of Triton want to be called at a launch: they get its own launch path."""
    import triton.language as tl
    from triton import knobs

    dtypes = {dtype.name: dtype for dtype in (tl.bfloat16, tl.float16, tl.float32)}
    return dtypes, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


if INTERPRETING:
    _specs()  # with the launchers' import, before ranks are forked


def spec(name: str) -> Any:
    """KernelSpec of a kernel by its name; KeyError if there is none."""
    return _specs()[name]


def architecture() -> str:
    """Of the current GPU, as cubins are named: "sm_90"."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def aot_for(mode: str | bool | None, folder: Path | str | None, heap: Any = None) -> Aot | None:
    """Where kernels come from: the library of `folder`; None: the JIT, or the interpreter.

    mode: "require" (also True) or "prefer"; None (also False): what TRITON_EP_AOT says.
    folder: None: TRITON_EP_AOT_DIR, else the one inside the package.
    heap: for kernels that call NVSHMEM.

    Raises:
        ConfigError: another mode.
        AotMiss: there is no library, or kernels are interpreted; not with "prefer".
        AotArchMismatch: there is none for this GPU; not with "prefer".
        AotCorrupted: its index cannot be read.
    """
    if not isinstance(mode, bool | str | None):
        raise ConfigError(f'aot is of type {type(mode).__name__}; it is "require", "prefer" or None.')
    if not isinstance(folder, str | os.PathLike | None):
        raise ConfigError(f"aot_dir is of type {type(folder).__name__}; it is the path of a folder, or None.")
    mode = "require" if mode is True else mode or read_environment().aot
    if mode not in (None, "require", "prefer"):
        raise ConfigError(f'aot is {mode!r}; it is "require", "prefer" or None.')
    if mode is None:
        return None
    if INTERPRETING:
        if mode == "prefer":
            return None
        raise AotMiss(
            "kernels of this process are interpreted on CPU ranks, for which nothing can be built ahead of time. Pass "
            'aot="prefer", or use_aot=False and no TRITON_EP_AOT.'
        )
    return choose(mode, folder, architecture, heap)


@functools.cache
def default_aot() -> Aot | None:
    """The library for launches that no layer makes."""
    return aot_for(None, None)


@dataclass(frozen=True)
class Boxes:
    """A row-major matrix that a kernel reads in boxes, by TMA where there is one.

    Attributes:
        base: where it starts.
        shape, strides: in elements; the last stride is 1.
        block_shape: of a box.
    """

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]

    @property
    def type(self) -> str:
        """Triton's name for the type of its descriptor."""
        return f"tensordesc<{_TYPES[self.base.dtype]}[{','.join(map(str, self.block_shape))}]>"

    def descriptor(self) -> Any:
        """As the JIT and the interpreter take it."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape)


class Launcher:
    """One kernel with its constexprs, ready to be launched any number of times.

    Triton's own launch path binds and inspects every argument at each call. This one asks it once per kind of
    arguments and keeps the compiled kernel that it answers with; from then on it looks at what decides the kind:
    the dtype of what pointers point to where the spec leaves it open, addresses that are no multiple of 16, and
    integers that the kernel is specialised by. Pointers come before integers. A library of compiled kernels is asked
    in the same way, by the same kinds.

    Args:
        name: of the kernel.
        constexprs: all of them; dtypes by name ("fp32").
        extern_libs: name and path of device bitcode, for variants that call NVSHMEM, or what returns them.
        num_warps: warps of a program on a GPU, where it is not the number of the spec.
        maxnreg: registers of a thread at most, where it is not the number of the spec.
        aot: library to take the kernel from; None: the JIT, or the interpreter.

    Raises:
        AotMiss: the library has no variant of the kernel, and nothing else is allowed.
    """

    def __init__(
        self,
        name: str,
        constexprs: Mapping[str, Any],
        extern_libs: ExternLibs = None,
        num_warps: int | None = None,
        maxnreg: int | None = None,
        aot: Aot | None = None,
    ) -> None:
        self.name = name
        self.constexprs = dict(constexprs)
        self.plan = Plan(name, self.constexprs, num_warps, maxnreg)
        self._extern_libs = extern_libs
        self._compiled: dict[Any, Any] = {}
        self._aot = aot
        info = None if self._aot is None else self._aot.info(name)
        if info is None:
            self._aot = None
            self._use_jit()
            self._set_arguments(self.spec.arguments, self._specialised)
        else:
            self._set_arguments(dict(info["arguments"]), info["specialised"])

    @classmethod
    def of(cls, plan: Plan, extern_libs: ExternLibs = None, aot: Aot | None = None) -> Launcher:
        """The launcher of a plan (triton_ep/plans)."""
        return cls(plan.kernel, plan.constexprs, extern_libs, plan.num_warps, plan.maxnreg, aot)

    def _set_arguments(self, arguments: Mapping[str, str], specialised: Sequence[str]) -> None:
        self._names = tuple(arguments)
        self._types = types = tuple(arguments.values())
        self._num_args = len(types)
        self._num_pointers = sum(kind[0] in "*{" for kind in types)
        self._typed = tuple(i for i, kind in enumerate(types) if "{" in kind)
        self._special = tuple(i for i, argument in enumerate(arguments) if argument in specialised)
        self._kinds = bool(self._typed or self._special)

    def _use_jit(self) -> None:
        """Load Triton and the kernel, and what it is compiled with."""
        self.spec = spec(self.name)
        dtypes, self._enter, self._exit = _triton()
        values = self.constexprs.items()
        self.constexprs = {name: dtypes[value] if isinstance(value, str) else value for name, value in values}
        self.options: dict[str, Any] = {"num_warps": self.plan.num_warps or self.spec.num_warps}
        if limit := self.plan.maxnreg or self.spec.maxnreg:
            self.options["maxnreg"] = limit
        libs = self._extern_libs() if callable(self._extern_libs) else self._extern_libs
        if libs:
            self.options["extern_libs"] = dict(libs)
        self._specialised: tuple[str, ...] = ()
        if not INTERPRETING:
            self._specialised = self.spec.specialised
            # Compiled kernels take their constexprs, too, in the order of the kernel's parameters.
            params = self.spec.kernel.params
            self._values = tuple(self.constexprs[p.name] for p in params if p.name in self.constexprs)

    def __call__(self, grid: int, *args: Any, stream: torch.cuda.Stream | None = None) -> None:
        """Launch `grid` programs; a grid of 0 launches nothing.

        args: tensors, then ints, in the order of the kernel's spec.
        stream: where; None: the current stream. To name it here takes a fraction of making it current.

        Raises:
            EPError: what a hook raised inside an interpreted kernel (`PeerFailed`).
            LaunchError: an argument count that does not fit the spec; the driver refused.
            AotMiss: the library lacks the variant. AotCorrupted, AotArchMismatch, AotNvshmemMismatch: it is there, but
                cannot be used.
        """
        if len(args) != self._num_args:
            raise LaunchError(f"{self.name} takes {self._num_args} arguments, got {len(args)}.")
        if grid == 0:
            return
        if INTERPRETING:
            _interpret(self.spec, grid, args, self.constexprs)
            return
        device = torch._C._cuda_getDevice()
        count = self._num_pointers
        addresses = list(map(_ADDRESS, args[:count]))
        unaligned: tuple[int, ...] = ()
        if functools.reduce(or_, addresses, 0) & 15:
            unaligned = tuple([i for i, address in enumerate(addresses) if address & 15])
        kind: Any = device
        if unaligned or self._kinds:
            kind = (device, unaligned, *[args[i].dtype for i in self._typed], *[args[i] for i in self._special])
        compiled = self._compiled.get(kind)
        if self._aot is not None:
            if compiled is None and (compiled := self._look_up(args, unaligned)) is not None:
                self._compiled[kind] = compiled
            if compiled is not None:
                kernel, ones = compiled
                addresses += args[count:] if not ones else [args[i] for i in range(count, len(args)) if i not in ones]
                where = torch._C._cuda_getCurrentRawStream(device) if stream is None else stream.cuda_stream
                kernel.run(grid, where, addresses)
                return
            self._aot = None  # from here on the JIT compiles this one
            self._compiled.clear()
            self._use_jit()
            compiled = None
        if compiled is None or self._enter.calls or self._exit.calls:
            with torch.cuda.stream(stream):
                made = self.spec.kernel[(grid,)](*args, **self.constexprs, **self.options)
            self._compiled[kind] = made.run, made.function, made.packed_metadata
            return
        run, function, metadata = compiled
        run(
            grid,
            1,
            1,
            torch._C._cuda_getCurrentRawStream(device) if stream is None else stream.cuda_stream,
            function,
            metadata,
            None,
            None,
            None,
            *addresses,
            *args[count:],
            *self._values,
        )

    def _look_up(self, args: Sequence[Any], unaligned: Sequence[int]) -> tuple[Kernel, tuple[int, ...]] | None:
        """The library's kernel for these arguments, and the positions of integers that it does not take."""
        types = {}
        for i, (name, declared) in enumerate(zip(self._names, self._types, strict=True)):
            actual = declared
            if isinstance(args[i], Boxes):
                actual = args[i].type
            elif isinstance(args[i], torch.Tensor):
                actual = f"*{_TYPES.get(args[i].dtype, args[i].dtype)}"
            elif not -(2**31) <= args[i] < 2**31:
                actual = "i64"
            if actual != declared:
                types[name] = actual
        numbers = {self._names[i]: args[i] for i in self._special}
        wanted = KernelRequest.of(self.plan, types, numbers, [self._names[i] for i in unaligned])
        assert self._aot is not None, "asked where there is a library"
        found = self._aot.kernel(wanted)
        return None if found is None else (found, tuple(self._names.index(name) for name in wanted.ones))

    def launch_boxes(self, grid: int, args: Sequence[Any]) -> bool:
        """Launch the library's kernel with tensors, `Boxes` and ints; False: it is for the JIT."""
        if self._aot is None:
            return False
        device = torch._C._cuda_getDevice()
        flat: list[Any] = []
        unaligned = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.data_ptr() & 15]
        kinds = [arg.type if isinstance(arg, Boxes) else getattr(arg, "dtype", None) for arg in args]
        kind = (device, *unaligned, *kinds, *[args[i] for i in self._special])
        compiled = self._compiled.get(kind)
        if compiled is None:
            compiled = self._look_up(args, unaligned)
            if compiled is None:
                return False
            self._compiled[kind] = compiled
        kernel, ones = compiled
        number = 0
        for i, arg in enumerate(args):
            if isinstance(arg, Boxes):
                flat += kernel.describe(number, arg)
                number += 1
            elif i not in ones:
                flat.append(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg)
        kernel.run(grid, torch._C._cuda_getCurrentRawStream(device), flat)
        return True


@functools.cache
def _kept(name: str, constexprs: tuple[tuple[str, Any], ...], num_warps: int | None) -> Launcher:
    return Launcher(name, dict(constexprs), None, num_warps, aot=default_aot())


def launch(
    name: str, grid: int, args: Sequence[Any], constexprs: Mapping[str, Any], num_warps: int | None = None
) -> None:
    """Launch `grid` programs of a kernel on the current stream; a grid of 0 launches nothing.

    By Triton's own path, unless TRITON_EP_AOT says that kernels come from the ahead-of-time library.

    args: tensors, `Boxes` and ints in the order of the kernel's spec.
    num_warps: warps of a program on a GPU, where it is not the number of the spec.

    Raises:
        EPError: what a hook raised inside an interpreted kernel (`PeerFailed`).
        LaunchError: an argument count that does not fit the spec.
        AotMiss, AotCorrupted, AotArchMismatch: of the library.
    """
    if default_aot() is not None:
        launcher = _kept(name, tuple(constexprs.items()), num_warps)
        if grid == 0 or launcher.launch_boxes(grid, args):
            return
    kernel_spec = spec(name)
    if len(args) != len(kernel_spec.arguments):
        raise LaunchError(f"{name} takes {len(kernel_spec.arguments)} arguments, got {len(args)}.")
    if grid == 0:
        return
    args = [arg.descriptor() if isinstance(arg, Boxes) else arg for arg in args]
    if INTERPRETING:
        _interpret(kernel_spec, grid, args, constexprs)
        return
    kernel_spec.kernel[(grid,)](*args, **constexprs, num_warps=num_warps or kernel_spec.num_warps)


def _interpret(kernel_spec: Any, grid: int, args: Sequence[Any], constexprs: Mapping[str, Any]) -> None:
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
