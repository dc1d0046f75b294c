"""Records every variant that layers and launches of this process request, when the JIT compiles them."""

import fcntl
from collections.abc import Sequence
from typing import Any

import torch

from triton_ep.config import EPConfig
from triton_ep.context.context import DispatchCombineContext
from triton_ep.runtime import launch as runtime
from triton_ep.runtime.plans.layers import layer_requests
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import Plan


def request_of(plan: Plan, spec: Any, args: Sequence[Any]) -> KernelRequest:
    """The variant that a launch with these arguments requests."""
    types, numbers, unaligned = {}, {}, []
    for (name, declared), arg in zip(spec.arguments.items(), args, strict=True):
        actual = declared
        if isinstance(arg, runtime.Boxes):
            actual = arg.type
        elif isinstance(arg, torch.Tensor):
            actual = f"*{runtime._TYPES[arg.dtype]}"
            if arg.data_ptr() % 16:
                unaligned.append(name)
        elif not -(2**31) <= arg < 2**31:
            actual = "i64"
        if actual != declared:
            types[name] = actual
        if name in spec.specialised:
            numbers[name] = arg
    constexprs = {name: getattr(value, "name", value) for name, value in plan.constexprs.items()}
    plan = Plan(plan.kernel, constexprs, plan.num_warps, plan.maxnreg)
    return KernelRequest.of(plan, types, numbers, unaligned)


def install(path: str) -> None:
    """From now on, append each variant to a file at its first request."""
    seen: set[str] = set()

    def note(request: KernelRequest) -> None:
        text = request.text()
        if text not in seen:
            seen.add(text)
            with open(path, "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # ranks share the file
                file.write(text + "\n")

    launch = runtime.Launcher.launch_in_order
    make = DispatchCombineContext.__init__

    def noted_make(self: DispatchCombineContext, config: EPConfig, *args: Any) -> None:
        make(self, config, *args)
        # To create a layer, a library must have some variant of each of its kernels, launched or not.
        of_kernels: dict[str, KernelRequest] = {}
        for request in layer_requests(config.shape(self.network)):
            of_kernels.setdefault(request.kernel, request)
        for request in of_kernels.values():
            note(request)

    def noted_launch(self: runtime.Launcher, grid: int, args: tuple[Any, ...], stream: Any) -> None:
        if grid:
            spec, named = runtime.spec(self.plan.kernel), self.named(args)
            note(request_of(self.plan, spec, [named[name] for name in spec.arguments]))
        launch(self, grid, args, stream)

    runtime.Launcher.launch_in_order = noted_launch
    DispatchCombineContext.__init__ = noted_make
