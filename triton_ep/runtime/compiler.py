"""Inputs of Triton's compiler for a kernel variant, for the JIT and for ahead-of-time builds. Imports Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
from triton.compiler import ASTSource

from triton_ep.runtime.plans.request import KernelRequest

if TYPE_CHECKING:
    from triton_ep.kernels.spec import KernelSpec

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def source_of(spec: KernelSpec, request: KernelRequest) -> ASTSource:
    """The variant as Triton's compiler takes it.

    Triton's JIT cannot do this: it specialises every integer of an argument group by its value, even ranks and sizes.

    Raises:
        ValueError: the request does not fit the kernel.
    """
    if sorted(request.constexprs) != sorted(spec.constexprs):
        raise ValueError(f"{spec.name} takes {[*spec.constexprs]}, the request has {[*request.constexprs]}")
    signature, constexprs, hints = {}, {}, {}
    for index, parameter in enumerate(spec.parameters):
        kinds = {}
        for place, name in enumerate(parameter.fields):
            path = (index,) if parameter.group is None else (index, place)
            if name in request.constexprs or name in request.ones:
                kinds[name] = "constexpr"
                constexprs[path] = constexpr(request.constexprs[name]) if name in request.constexprs else 1
                continue
            kinds[name] = request.types.get(name, spec.arguments[name])
            if "{" in kinds[name]:
                raise ValueError(f"the type of {name} is open: {kinds[name]}")
            if (kinds[name].startswith("*") and name not in request.unaligned) or name in request.aligned:
                hints[path] = [["tt.divisibility", 16]]
        signature[parameter.name] = parameter.of(kinds)
    return ASTSource(spec.kernel, signature, constexprs=constexprs, attrs=hints)


def options_of(spec: KernelSpec, request: KernelRequest) -> dict[str, Any]:
    """Compiler options of a variant: warps and registers.

    Raises:
        ValueError: neither the kernel nor the request sets the number of warps.
    """
    warps = request.num_warps or spec.num_warps
    if warps is None:
        raise ValueError(f"{spec.name} declares no num_warps, so its plan must choose them")
    limit = request.maxnreg or spec.maxnreg
    return {"num_warps": warps, **({"maxnreg": limit} if limit else {})}


def constexpr(value: Any) -> Any:
    """The value of a compile-time argument; plans write dtypes by Triton's names."""
    return getattr(triton.language, _DTYPES[value]) if isinstance(value, str) else value
