"""Parameters and other facts for launching a compiled kernel without Triton. Needs neither torch nor Triton."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from triton_ep.runtime.plans.request import KernelRequest

if TYPE_CHECKING:
    from triton_ep.kernels.spec import KernelSpec

_OTHER_LAUNCHES = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
_ENTRY = re.compile(r"\.visible \.entry (\w+)\s*\((.*?)\)", re.DOTALL)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([bsuf]\d+)(\s+\.ptr[^\[]*?)?\s+\w+(?:\[(\d+)\])?\s*$")
_KINDS = {"64": "i64", "32": "i32", "16": "i16", "8": "i1"}


def parameters(ptx: str) -> list[str]:
    """Kinds of the parameters of the kernel, in order: "ptr", "i32", "i64", "i1", "tensormap".

    Raises:
        ValueError: there is not exactly one kernel, or a parameter of another kind.
    """
    kernels = _ENTRY.findall(ptx)
    if len(kernels) != 1:
        raise ValueError(f"the PTX has {len(kernels)} kernels, not 1")
    kinds = []
    for text in kernels[0][1].split(","):
        found = _PARAM.search(text.strip())
        if found is None:
            raise ValueError(f"parameter not understood: {text.strip()!r}")
        kind, pointer, count = found.groups()
        if count is not None:
            if count != "128":
                raise ValueError(f"a parameter of {count} bytes: {text.strip()!r}")
            kinds.append("tensormap")
        elif pointer:
            kinds.append("ptr")
        else:
            kinds.append(_KINDS[kind[1:]])
    return kinds


def declared(spec: KernelSpec) -> dict[str, Any]:
    """Facts about a kernel that a launch needs before it has a variant, for JSON."""
    return {
        "arguments": [list(item) for item in spec.arguments.items()],
        "order": list(spec.runtime_order),
        "specialised": list(spec.specialised),
        "options": [spec.num_warps, spec.maxnreg],
    }


def interface(spec: KernelSpec, request: KernelRequest, compiled: Any) -> dict[str, Any]:
    """How a variant is launched: fields of `library.Entry`, for JSON.

    compiled: the result of `triton.compile`.

    Raises:
        ValueError: it needs a launch that the run time does not support, or its parameters do not fit its arguments.
    """
    metadata = compiled.metadata
    other = [name for name in _OTHER_LAUNCHES if getattr(metadata, name, 0)]
    if other or metadata.num_ctas != 1:
        raise ValueError(
            f"{request.kernel} needs a launch that the run time does not support: {other}, {metadata.num_ctas}"
        )
    descriptors = [_descriptor(told) for told in getattr(metadata, "tensordesc_meta", None) or []]
    kinds = parameters(compiled.asm["ptx"])
    wanted = _by_arguments(request, spec, descriptors)
    if kinds != wanted:
        raise ValueError(f"{request.kernel} has the parameters {kinds} in its PTX; by its arguments they are {wanted}")
    return {
        "symbol": metadata.name,
        "params": kinds,
        "threads": 32 * metadata.num_warps,
        "shared": metadata.shared,
        "descriptors": descriptors,
    }


def _descriptor(told: Any) -> dict[str, Any]:
    if told is None:
        return {}
    names = ("swizzle", "elem_size", "elem_type", "block_size")
    if told.get("fp4_padded"):
        raise ValueError("descriptors of padded fp4 are not supported")
    return {name: list(told[name]) if name == "block_size" else told[name] for name in names}


def _by_arguments(request: KernelRequest, spec: KernelSpec, descriptors: list[dict[str, Any]]) -> list[str]:
    """Kinds of the parameters in Triton's launch interface: arguments in order, then two pointers to scratch."""
    kinds: list[str] = []
    boxes = iter(descriptors)
    for name in spec.runtime_order:
        kind = request.types.get(name, spec.arguments[name])
        if name in request.ones:
            continue
        if kind.startswith("*"):
            kinds.append("ptr")
        elif kind.startswith("tensordesc"):
            ndim = kind.count(",") + 1
            by_copy_engine = ["tensormap"] if next(boxes, {}) else ["ptr", *["i64"] * 2 * ndim, "i1", "i1"]
            kinds += [*by_copy_engine, *["i32"] * ndim, *["i64"] * ndim]
        else:
            kinds.append(kind)
    return [*kinds, "ptr", "ptr"]
