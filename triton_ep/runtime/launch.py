"""How a kernel gets launched: interpreted on the CPU, compiled on the GPU, or taken from an ahead-of-time library.

The import of this module decides, once per process, whether kernels are interpreted. It must precede the import of
triton, because Triton decides when it decorates a kernel. TRITON_INTERPRET in the environment wins; without it, a
machine with a GPU compiles and a machine without one interprets. When kernels are compiled, the first compilation
imports Triton: a process that takes all kernels from a library (triton_ep/aot), or from those that earlier processes
have compiled (jit_cache.py), never loads the compiler.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

import torch

from triton_ep.errors import AotMiss, ConfigError, EPError, InputError, LaunchError
from triton_ep.runtime import jit_cache
from triton_ep.runtime.cubins import Aot, Kernel, choose
from triton_ep.runtime.driver import prefer_shared_memory
from triton_ep.runtime.environment import read_environment
from triton_ep.runtime.plans.request import WORD, KernelRequest
from triton_ep.runtime.plans.residency import Program
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
_BYTES = "*u8"
"""Declared type of an argument that takes tensors of any dtype: the kernel reads their bytes."""
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


# A launch reads every address; in C that takes a third of the time.
_ADDRESS = torch.Tensor.data_ptr


@functools.cache
def _specs() -> Mapping[str, Any]:
    """KernelSpecs by name. Loads Triton and the kernels, whose import declares them."""
    from triton_ep.kernels.spec import all_kernels

    return all_kernels()


@functools.cache
def _triton() -> tuple[Mapping[str, Any], Any, Any]:
    """Dtypes by name, and the launch hooks of Triton's profilers; a launch with hooks takes Triton's own path."""
    import triton.language as tl
    from triton import knobs

    dtypes = {dtype.name: dtype for dtype in (tl.bfloat16, tl.float16, tl.float32)}
    return dtypes, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


if INTERPRETING:
    _specs()  # load kernels with the launchers' import, before ranks are forked


def spec(name: str) -> Any:
    """KernelSpec of a kernel by its name; KeyError if there is none."""
    return _specs()[name]


def architecture() -> str:
    """Architecture of the current GPU, as in the names of cubins: "sm_90"."""
    return _architecture(torch.cuda.current_device())


@functools.cache
def _architecture(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def aot_for(mode: str | bool | None, folder: Path | str | None, heap: Any = None) -> Aot | None:
    """The library of `folder` as source of kernels; None: kernels come from the JIT or the interpreter.

    mode: "require" (also True) or "prefer"; None (also False): the value of TRITON_EP_AOT.
    folder: None: TRITON_EP_AOT_DIR, else `library.default_folder`.
    heap: for kernels that call NVSHMEM.

    Raises:
        ConfigError: another mode.
        AotMiss: there is no library, or kernels are interpreted; not with "prefer".
        AotArchMismatch: the library is not for this GPU; not with "prefer".
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
    """The library for launches outside layers."""
    return aot_for(None, None)


@dataclass(frozen=True)
class Boxes:
    """A row-major matrix that a kernel reads in boxes, with TMA if the GPU has it.

    Attributes:
        base: tensor at its start.
        shape, strides: in elements; the last stride is 1.
        block_shape: shape of a box.
    """

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]

    @property
    def type(self) -> str:
        """Triton's type name of its descriptor."""
        return f"tensordesc<{_TYPES[self.base.dtype]}[{','.join(map(str, self.block_shape))}]>"

    @property
    def dtype(self) -> tuple[Any, ...]:
        """The part that a kernel is compiled for, like the dtype of a tensor."""
        return (self.base.dtype, *self.block_shape)

    def descriptor(self) -> Any:
        """The descriptor for the JIT and the interpreter."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape)


Start = Callable[..., None]
"""Launches a compiled kernel. Takes the number of programs, the address of a stream, then the addresses (or `Boxes`)
and integers of a launch, in order; and, by name, the metadata for hooks of Triton, and these hooks."""


class _NoHooks:
    """Hooks of kernels that do not come from Triton."""

    calls = ()


class _NoHooksYet(_NoHooks):
    """Hooks of a process that has not loaded Triton but may load it."""


class Launch(NamedTuple):
    """One launch of a `Launcher`: its arguments are in the order of `Launcher.names`."""

    launcher: Launcher
    grid: int
    args: tuple[Any, ...]
    stream: torch.cuda.Stream | None


class Launcher:
    """One kernel with its constexprs, ready to be launched any number of times, by the names of its arguments.

    Triton's own launch path binds and inspects every argument at each call. A Launcher compiles once per kind of
    arguments and keeps the compiled kernel. Later launches look only at what decides the kind: element dtypes of
    pointers whose declaration leaves them open, addresses that are no multiple of 16, and integers that the kernel is
    specialised by. A library of compiled kernels is looked up by the same kinds.

    Args:
        plan: kernel, constexprs and options.
        bound: arguments that are the same in every launch, by name; those that the kernel does not take are ignored.
        extern_libs: name and path of device bitcode, for variants that call NVSHMEM, or a function that returns them.
        aot: library to take the kernel from; None: the JIT, or the interpreter.
        any_arguments: callers choose all dtypes, sizes and devices, so the kind contains all of them, not only the
            open ones, and each launch checks where tensors are.
        early: the kernel may start before the kernel ahead on its stream has ended (kernels/device/early.py).

    Attributes:
        declared: upper bound of the resources of a program, from plan and kernel: the same on all ranks.
        program: resources of a program of the kernels compiled by the JIT, now or earlier; until then as declared.
        names: the arguments of a launch, in order.
        specialised: names of the integers that the kernel is compiled for.
        num_compiled: kernels of all launchers that the JIT has compiled, or taken from those of earlier processes.
        noted: a list to which each launch is added, for `runtime.repeat`; None: launches are not noted.
        launch: launch(grid, *, stream=None, **arguments) launches `grid` programs; a grid of 0 launches nothing.
            Takes tensors (or `Boxes`) and ints, by the names of the kernel's parameters. stream: None: the current
            stream. Passing a stream takes a fraction of the time of making it current.

            Raises:
                TypeError: an argument is missing, or the kernel has none of that name.
                InputError: with `any_arguments`, a tensor is where the kernel does not run.
                EPError: a hook raised it inside an interpreted kernel (`PeerFailed`).
                LaunchError: the driver refused.
                AotMiss: the library lacks the variant. AotCorrupted, AotArchMismatch, AotNvshmemMismatch: it has the
                    variant, but cannot use it.

    Raises:
        AotMiss: the library has no variant of the kernel, and the JIT is not allowed.
        LaunchError: neither plan nor kernel sets the number of warps.
    """

    launch: Callable[..., None]
    num_compiled = 0
    spec: Any = None
    """The kernel's KernelSpec; None: Triton has not been needed yet."""

    def __init__(
        self,
        plan: Plan,
        bound: Mapping[str, Any] | None = None,
        extern_libs: ExternLibs = None,
        aot: Aot | None = None,
        any_arguments: bool = False,
        early: bool = False,
    ) -> None:
        self.plan, self._any_arguments, self._early = plan, any_arguments, early
        self._extern_libs = extern_libs
        self._compiled: dict[Any, Start] = {}
        self._told: dict[Any, Callable[..., Any]] = {}
        self.noted: list[Launch] | None = None
        self._aot = aot
        self._enter: Any = _NoHooks
        self._exit: Any = _NoHooks
        self._cache: jit_cache.JitCache | None = None
        info = None if aot is None else aot.info(plan.kernel)
        if info is None:
            self._aot = None
            self._cache = None if INTERPRETING else jit_cache.current(architecture)
            info = None if self._cache is None else self._cache.info(plan.kernel)
            self._enter = self._exit = _NoHooksYet
        if info is None:
            self._use_jit()
            if self._cache is not None:
                self._cache.store_infos()
            warps, maxnreg = self.spec.num_warps, self.spec.maxnreg
            self._set_arguments(self.spec.arguments, self.spec.specialised, bound or {})
        else:
            self._order = tuple(info["order"])
            self._set_arguments(dict(info["arguments"]), info["specialised"], bound or {})
            warps, maxnreg = info["options"]
        self.program = self.declared = Program.declared(plan, warps or 1, maxnreg)
        self._taken: Program | None = None
        if INTERPRETING or self._may_have_boxes or any_arguments:
            self.launch = _by_name(plan.kernel, self.names, self.launch_in_order)
        else:
            self.launch = self._short_cut()

    def _set_arguments(
        self, arguments: Mapping[str, str], specialised: Sequence[str], bound: Mapping[str, Any]
    ) -> None:
        self._bound = {name: bound[name] for name in arguments if name in bound}
        self._types = {name: kind for name, kind in arguments.items() if name not in bound}
        self.names = names = tuple(self._types)
        kinds = tuple(self._types.values())
        self._num_pointers = sum(kind[0] in "*{" for kind in kinds)
        self._typed = tuple(i for i in range(self._num_pointers) if self._any_arguments or "{" in kinds[i])
        self._special = tuple(i for i, name in enumerate(names) if name in specialised)
        self.specialised = [names[i] for i in self._special]
        self._kinds = bool(self._typed or self._special)
        # Only an argument whose declared type is fully open may be a matrix in boxes.
        self._may_have_boxes = any(kind[0] == "{" for kind in kinds)

    def _use_jit(self) -> None:
        """Load Triton, the kernel and its compile-time values."""
        if self.spec is not None:
            return
        self._aot = None
        self.spec = spec(self.plan.kernel)
        self._order = self.spec.runtime_order
        if (self.plan.num_warps or self.spec.num_warps) is None and not INTERPRETING:
            raise LaunchError(f"{self.plan.kernel} declares no num_warps, so its plan must choose them.")
        dtypes, self._enter, self._exit = _triton()
        values = self.plan.constexprs.items()
        self._constexprs = {name: dtypes[value] if isinstance(value, str) else value for name, value in values}

    def _short_cut(self) -> Callable[..., None]:
        """`launch` as a function generated for this kernel. It passes aligned arguments of a compiled kind straight to
        the driver; for all other arguments it calls `launch_in_order`, like the function of `_by_name`."""
        pointers, integers = self.names[: self._num_pointers], self.names[self._num_pointers :]
        kind = "device"
        if self._kinds:
            dtypes = [f"{self.names[i]}.dtype" for i in self._typed]
            kind = f"(device, (), {', '.join([*dtypes, *[self.names[i] for i in self._special]])},)"
        addresses = [f"address_{number}" for number in range(len(pointers))]
        given = "".join(f"{name}, " for name in self.names)
        lines = [
            f"def {self.plan.kernel}(grid, *, {given}stream=None):",
            "    device = C._cuda_getDevice()",
            *[f"    {address} = {name}.data_ptr()" for address, name in zip(addresses, pointers, strict=True)],
            f"    start = compiled.get({kind})",
            f"    unlike = start is None or ({' | '.join([*addresses, '0'])}) & 15 or not grid",
            "    noticed = me.noted is not None or me._enter is unknown and 'triton.knobs' in modules",
            "    if unlike or noticed or me._enter.calls or me._exit.calls:",
            f"        return launch(grid, ({given}), stream)",
            "    where = C._cuda_getCurrentRawStream(device) if stream is None else stream.cuda_stream",
            f"    start({', '.join(['grid', 'where', *addresses, *integers])})",
        ]
        scope: dict[str, Any] = {"C": torch._C, "compiled": self._compiled, "me": self, "launch": self.launch_in_order,
                                 "unknown": _NoHooksYet, "modules": sys.modules}  # fmt: skip
        exec("\n".join(lines), scope)
        made: Callable[..., None] = scope[self.plan.kernel]
        return made

    @property
    def is_hooked(self) -> bool:
        """Whether a profiler has hooks in Triton's launches."""
        if self._enter is _NoHooksYet and hasattr(sys.modules.get("triton.knobs"), "runtime"):
            _, self._enter, self._exit = _triton()
        return bool(self._enter.calls or self._exit.calls)

    def named(self, args: Sequence[Any]) -> dict[str, Any]:
        """All arguments of the kernel by name, from the arguments of a launch in order."""
        return self._bound | dict(zip(self.names, args, strict=True))

    def launch_in_order(self, grid: int, args: tuple[Any, ...], stream: torch.cuda.Stream | None) -> None:
        """`launch`, with the arguments in the order of `names`."""
        if self.noted is not None:
            self.noted.append(Launch(self, grid, args, stream))
        if grid == 0:
            return
        if self._any_arguments:
            self._check_places(args[: self._num_pointers])
        if INTERPRETING:
            named = self.named(args)
            _interpret(self.spec, grid, [named[name] for name in self.spec.arguments], self._constexprs)
            return
        # Private functions, because torch.cuda.current_device and current_stream check and wrap their results: together
        # they take longer than the rest of a launch.
        device = torch._C._cuda_getDevice()
        pointers = self._addresses(args) if self._may_have_boxes else list(map(_ADDRESS, args[: self._num_pointers]))
        unaligned: tuple[int, ...] = ()
        if self._may_have_boxes or functools.reduce(or_, pointers, 0) & 15:
            unaligned = tuple([i for i, pointer in enumerate(pointers) if type(pointer) is int and pointer & 15])
        kind = self._kind(device, args, unaligned)
        start = self._compiled.get(kind)
        if start is None:
            start = self._compiled[kind] = self._make_start(kind, self._request(args, unaligned))
        where = torch._C._cuda_getCurrentRawStream(device) if stream is None else stream.cuda_stream
        if self.is_hooked:
            if kind not in self._told:  # hooks get metadata only for kernels that Triton has loaded
                start = self._compiled[kind] = self._start_of_jit(kind, self._request(args, unaligned))
            told = self._told[kind]((grid, 1, 1), where)
            start(grid, where, *pointers, *args[self._num_pointers :], told=told, enter=self._enter, leave=self._exit)
            return
        start(grid, where, *pointers, *args[self._num_pointers :])

    def _kind(self, device: int, args: Sequence[Any], unaligned: tuple[int, ...]) -> Any:
        """What the kernel is compiled for. unaligned: pointers whose addresses are no multiple of 16."""
        if not (unaligned or self._kinds):
            return device
        kind = (device, unaligned, *[args[i].dtype for i in self._typed], *[args[i] for i in self._special])
        if self._any_arguments:  # Triton passes an integer as 64 bits if 32 do not suffice
            kind += tuple([value >> 31 for value in args[self._num_pointers :]])
        return kind

    def start_of(self, args: Sequence[Any]) -> Start | None:
        """What launches the compiled kernel with arguments like these, at addresses that are multiples of 16.

        None: it is not compiled, or each launch must look at its arguments or call hooks of Triton.
        """
        if self._any_arguments or self._may_have_boxes or self.is_hooked:
            return None
        return self._compiled.get(self._kind(torch._C._cuda_getDevice(), args, ()))

    def _check_places(self, args: Sequence[Any]) -> None:
        place = _place()  # once, and compared here: each launch takes this way
        for name, arg in zip(self.names, args, strict=False):
            tensor = arg.base if isinstance(arg, Boxes) else arg
            if tensor.get_device() != place:
                check_place(name.removesuffix("_ptr"), tensor)

    def _addresses(self, args: Sequence[Any]) -> list[Any]:
        """Addresses of tensors, and `Boxes` as they are."""
        return [arg if isinstance(arg, Boxes) else arg.data_ptr() for arg in args[: self._num_pointers]]

    def _make_start(self, kind: Any, request: KernelRequest) -> Start:
        """The library's kernel for this request. If the library lacks it, this launcher uses the JIT from then on."""
        if self._aot is not None:
            kernel = self._aot.kernel(request)
            if kernel is not None:
                return self._start_of_library(kernel, request)
            self._compiled.clear()
            self._use_jit()
        made, kept = None, self._kept(request)
        if kept is None:
            made = self._compiled_once(request)
            # Triton describes matrices to TMA anew at each launch, which takes 20 us for three of them.
            kept = self._kept(request) if made is None or _has_boxes(request) else None
        if kept is None:
            return self._start_of_jit(kind, request, made)
        entry = kept.kernel.entry
        self._note(entry.threads // 32, kept.registers, entry.shared)
        return self._start_of_library(kept.kernel, request)

    def _kept(self, request: KernelRequest) -> jit_cache.Kept | None:
        """The kernel that the JIT has compiled, now or earlier, and kept on disk; None: there is none to use."""
        cache = self._cache_for(request)
        return None if cache is None else cache.kernel(request, torch._C._cuda_getDevice())

    def _cache_for(self, request: KernelRequest) -> jit_cache.JitCache | None:
        """Where this kernel is kept on disk; None: nowhere, or its launches are hooked and go through Triton."""
        return None if request.calls_nvshmem or self.is_hooked else self._cache

    def _compiled_once(self, request: KernelRequest) -> Any:
        """The kernel that Triton compiles; None: another process has compiled and kept it meanwhile."""
        if self._cache is None:
            return self._compile(request)
        with self._cache.alone(request):
            cache = self._cache_for(request)
            return None if cache is not None and cache.holds(request) else self._compile(request)

    def _compile(self, request: KernelRequest) -> Any:
        """The kernel that Triton compiles, not loaded; kept on disk."""
        self._use_jit()
        from triton import compile as compile_by_triton
        from triton import knobs

        from triton_ep.runtime.compiler import options_of, source_of

        options = options_of(self.spec, request) | {"debug": knobs.runtime.debug, "launch_pdl": self._early}
        libs = self._extern_libs() if callable(self._extern_libs) else self._extern_libs
        if libs:
            options["extern_libs"] = dict(libs)
        made = compile_by_triton(source_of(self.spec, request), options=options)
        if self._cache is not None and not request.calls_nvshmem:
            self._cache.store(self.spec, request, made)
        return made

    def _start_of_jit(self, kind: Any, request: KernelRequest, made: Any = None) -> Start:
        """The kernel that Triton has compiled, or compiles now, launched by Triton."""
        made = made or self._compile(request)
        self._told[kind] = made.launch_metadata
        made.run  # loads it  # noqa: B018
        if request.side_by_side:
            prefer_shared_memory(made.function)
        self._note(made.metadata.num_warps, made.n_regs, made.metadata.shared)
        texts = {name: f"{name}.descriptor()" if _is_boxes(request, name) else name for name in self._order}
        texts |= dict.fromkeys(self.spec.constexprs, "None")  # compiled in; the passed value does not matter
        passed = []
        for parameter in self.spec.parameters:
            values = ", ".join(texts[name] for name in parameter.fields)
            passed.append(values if parameter.group is None else f"({values},)")
        names = {"run": made.run, "function": made.function, "metadata": made.packed_metadata}
        given = ["grid", "1", "1", "where", "function", "metadata", "told", "enter", "leave", *passed]
        return self._written_out(*(_inside(made.run, given, names) or (f"run({', '.join(given)})", names)))

    def _note(self, warps: int, registers: int, shared: int) -> None:
        """Note the resources of a program; keep the maximum over the variants."""
        taken = Program(warps, registers, shared + self.plan.ring_bytes)
        self.program = taken if self._taken is None else Program(*map(max, taken, self._taken))
        self._taken = self.program
        Launcher.num_compiled += 1

    def _start_of_library(self, kernel: Kernel, request: KernelRequest) -> Start:
        passed, number = [], 0
        for name in self._order:
            if _is_boxes(request, name):
                passed.append(f"*describe({number}, {name})")
                number += 1
            elif name not in request.ones:
                passed.append(name)
        names = {"run": kernel.run_early if self._early else kernel.run, "describe": kernel.describe}
        return self._written_out(f"run(grid, where, [{', '.join(passed)}])", names)

    def _written_out(self, call: str, names: Mapping[str, Any]) -> Start:
        """Generate a function for this kernel that executes `call`, with the kernel's arguments in scope by name.

        Generated code groups and orders arguments without a loop, and reads the bound arguments only once.
        """
        bound = {name: value.data_ptr() if isinstance(value, torch.Tensor) else value
                 for name, value in self._bound.items()}  # fmt: skip
        given = ", ".join(["grid", "where", *self.names])
        scope = {**bound, **names}
        exec(f"def start({given}, *, told=None, enter=None, leave=None):\n    {call}", scope)
        made: Start = scope["start"]
        return made

    def _request(self, args: Sequence[Any], unaligned: Sequence[int]) -> KernelRequest:
        """The request of a launch with these arguments."""
        types = {}
        for arg, (name, declared) in zip(args, self._types.items(), strict=True):
            actual = declared
            if isinstance(arg, Boxes):
                actual = arg.type
            elif isinstance(arg, torch.Tensor):
                if declared != _BYTES:
                    actual = f"*{_TYPES.get(arg.dtype, arg.dtype)}"
            elif not -(2**31) <= arg < 2**31:
                actual = "i64"
            if actual != declared:
                types[name] = actual
        numbers = {self.names[i]: args[i] for i in self._special}
        odd = [name for name, arg in self._bound.items() if isinstance(arg, torch.Tensor) and arg.data_ptr() % WORD]
        return KernelRequest.of(self.plan, types, numbers, [*odd, *[self.names[i] for i in unaligned]])


def _place() -> int:
    """Where kernels run now, as `Tensor.get_device` numbers it."""
    return -1 if INTERPRETING else int(torch._C._cuda_getDevice())


def check_place(name: str, given: torch.Tensor) -> None:
    """Refuse a tensor that kernels cannot read now. After such a read a process could no longer use its GPU.

    Raises:
        InputError: it is not on the current GPU, or, where kernels are interpreted, not on the CPU.
    """
    if given.get_device() == _place():
        return
    if INTERPRETING:
        raise InputError(
            f"{name} is on {given.device}, but kernels of this process are interpreted on the CPU. Move it there, or "
            "start the process without TRITON_INTERPRET=1."
        )
    also = ", or make its GPU current" if given.is_cuda else ""
    raise InputError(
        f"{name} is on {given.device}, but kernels run on the current GPU, cuda:{_place()}. Move it there{also}."
    )


class _Given:
    """Stand-in for an argument in `_inside`.

    Attributes:
        text: the expression that it stands for.
    """

    def __init__(self, text: str) -> None:
        self.text = text


def _inside(run: Any, given: Sequence[str], names: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The driver call inside Triton's `run(*given)` as text, and the names in it; None: it cannot be found out.

    Triton's own function checks at each launch whether the kernel needs scratch memory, and adds constant arguments: a
    fifth of a launch. Here it runs once, on stand-ins for the arguments.

    given: expressions. names: values of the names in these expressions.
    """
    if type(run).__name__ != "CudaLauncher" or any(
        getattr(run, f"{of}_scratch_size", 1) for of in ("global", "profile")
    ):
        return None
    calls: list[tuple[Any, ...]] = []
    probe = copy.copy(run)
    probe.launch = lambda *passed: calls.append(passed)
    try:
        probe(*map(_Given, given))
    except Exception:  # a version of Triton that inspects its arguments
        return None
    if len(calls) != 1:
        return None
    known: dict[str, Any] = {**names, "launch": run.launch}
    del known["run"]

    def written(value: Any) -> str:
        if isinstance(value, _Given):
            return value.text
        if type(value) is tuple and value:
            return f"({', '.join(map(written, value))},)"
        name = f"always_{len(known)}"
        known[name] = value
        return name

    return f"launch({', '.join(map(written, calls[0]))})", known


def _has_boxes(request: KernelRequest) -> bool:
    return any(_is_boxes(request, name) for name in request.types)


def _is_boxes(request: KernelRequest, name: str) -> bool:
    return request.types.get(name, "").startswith("tensordesc")


def _by_name(kernel: str, names: Sequence[str], launch: Callable[..., None]) -> Callable[..., None]:
    """A function that takes a kernel's arguments by name and calls launch(grid, arguments in order, stream).

    It is generated for this kernel, so that Python itself matches the names, in a fraction of a microsecond; a
    function of **arguments would build and search a dict at every launch.
    """
    given = "".join(f"{name}, " for name in names)
    source = f"lambda grid, *, {given}stream=None: launch(grid, ({given}), stream)"
    function: Callable[..., None] = eval(source, {"launch": launch})
    function.__name__ = function.__qualname__ = kernel
    return function


_launchers: dict[Any, Launcher] = {}
"""Launchers of `launch`, by the key of their plan."""


def launch(plan: Plan, grid: int, **arguments: Any) -> None:
    """Launch `grid` programs of a kernel that belongs to no layer, on the current stream; a grid of 0 launches nothing.

    arguments: tensors, `Boxes` and ints, by the names of the kernel's parameters.

    Raises: as `Launcher` and its `launch`.
    """
    launcher = _launchers.get(plan.key)
    if launcher is None:
        launcher = _launchers[plan.key] = Launcher(plan, aot=default_aot(), any_arguments=True)
    launcher.launch(grid, **arguments)


def _interpret(kernel_spec: Any, grid: int, args: Sequence[Any], constexprs: Mapping[str, Any]) -> None:
    values = dict(zip(kernel_spec.arguments, args, strict=True)) | dict(constexprs)
    values = {name: value.descriptor() if isinstance(value, Boxes) else value for name, value in values.items()}
    try:
        kernel_spec.kernel[(grid,)](*kernel_spec.for_interpreter(values))
    except Exception as error:
        # The interpreter wraps exceptions of a kernel; unwrap our own errors for the caller.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, EPError):
            cause = cause.__cause__
        if cause is not None:
            raise cause from None
        raise
