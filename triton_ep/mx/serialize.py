"""Block-scaled tensors in files: pickles that `torch.load(weights_only=True)` takes, and safetensors.

A file names its format's version, so that a later layout cannot be read as today's. `import triton_ep.mx` is all that
a process needs to load either kind.

    torch.save(model.state_dict(), path)        torch.load(path, weights_only=True)
    save_safetensors(model.state_dict(), path)  load_safetensors(path)

Source of the second: https://github.com/huggingface/safetensors, section "Format"; other programs see the parts as
plain tensors `<name>.qdata` and `<name>.scale`, and how they belong together in the header's metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from triton_ep._strides import view_as
from triton_ep.errors import InputError

FORMAT_VERSION = 1
"""Of what is written; whatever is newer is refused."""

MX_PARTS = ("qdata", "scale")
NVFP4_PARTS = ("qdata", "scale", "per_tensor_scale")
"""Tensors that the two kinds are made of, in order; the last one may be missing."""

_HEADER = "triton_ep"
_MAX_HEADER = 100_000_000
_SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _SAFETENSORS.items()}


def _kinds() -> dict[str, type[torch.Tensor]]:
    # They need this module.
    from triton_ep.mx.nvfp4 import NVFP4Tensor
    from triton_ep.mx.tensor import MXTensor

    return {"mx": MXTensor, "nvfp4": NVFP4Tensor}


def _take_apart(blocks: Any) -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
    """Kind, parts as plain tensors, and the rest as names and numbers."""
    (kind,) = (name for name, cls in _kinds().items() if isinstance(blocks, cls))
    names, context = blocks.__tensor_flatten__()
    parts = {name: getattr(blocks, name) for name in names}
    # As bytes: not every version of torch pickles every small float.
    parts["scale"] = parts["scale"].view(torch.uint8)
    context = dict(context, orig_dtype=str(context["orig_dtype"]).removeprefix("torch."))
    if "elem_dtype" in context:
        context["elem_dtype"] = blocks.elem_format.name
    return kind, parts, context


def rebuild(version: int, kind: str, parts: dict[str, torch.Tensor], context: dict[str, Any]) -> torch.Tensor:
    """The tensor that `_take_apart` took apart.

    Raises:
        InputError: a version or kind that this program does not know, or parts that do not fit each other.
    """
    if version > FORMAT_VERSION:
        raise InputError(
            f"the file has version {version} of block-scaled tensors, this program knows {FORMAT_VERSION} and older; "
            "update triton_ep."
        )
    known = {"mx": (MX_PARTS, torch.float8_e8m0fnu), "nvfp4": (NVFP4_PARTS, torch.float8_e4m3fn)}
    if kind not in known or not set(parts) <= set(known[kind][0]):
        raise InputError(f"the file has a tensor of kind {kind!r} with parts {sorted(parts)}; known: {known}.")
    parts = dict(parts, scale=parts["scale"].view(known[kind][1]))
    rest = dict(context, orig_dtype=getattr(torch, context["orig_dtype"]))
    if "elem_dtype" in rest:
        from triton_ep.mx.formats import elem_format

        fmt = elem_format(rest["elem_dtype"])
        parts["qdata"], rest["elem_dtype"] = parts["qdata"].view(fmt.storage), fmt.dtype
    made: torch.Tensor = _kinds()[kind](**parts, **rest)
    return made


def rebuild_pickled(
    version: int, kind: str, parts: dict[str, torch.Tensor], context: dict[str, Any], requires_grad: bool
) -> torch.Tensor:
    """What `pickle` and `torch.load` call; same errors as `rebuild`."""
    return rebuild(version, kind, parts, context).requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild_pickled])  # torch.load(weights_only=True)


def reduce_blocks(blocks: torch.Tensor) -> tuple[Any, ...]:
    """What `__reduce_ex__` of a block-scaled tensor answers."""
    kind, parts, context = _take_apart(blocks)
    parts["qdata"] = parts["qdata"].view(torch.uint8)
    return rebuild_pickled, (FORMAT_VERSION, kind, parts, context, blocks.requires_grad)


def flatten_state_dict(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Plain tensors, and the header's metadata that tells `unflatten_state_dict` what they were.

    A block-scaled tensor `name` becomes `name.qdata` (float8, or bytes), `name.scale` (bytes), `name.per_tensor_scale`.
    Both results are what the functions of the safetensors package take.

    Raises:
        InputError: two tensors would get the same name.
    """
    kinds = tuple(_kinds().values())
    tensors: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    for name, value in state.items():
        parts = {name: value.detach()}
        if isinstance(value, kinds):
            kind, of_blocks, context = _take_apart(value.detach())
            described[name] = {"kind": kind, "parts": list(of_blocks), **context}
            parts = {f"{name}.{part}": tensor for part, tensor in of_blocks.items()}
        if taken := sorted(set(parts) & set(tensors)):
            raise InputError(f"two tensors of the state would be called {taken}; rename one.")
        tensors.update(parts)
    return tensors, {"format": "pt", _HEADER: json.dumps({"version": FORMAT_VERSION, "tensors": described})}


def unflatten_state_dict(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> dict[str, torch.Tensor]:
    """The state that `flatten_state_dict` made plain; without its metadata, the tensors as they are.

    Raises:
        InputError: a newer version, or parts that are missing or do not fit each other.
    """
    about = json.loads((metadata or {}).get(_HEADER, '{"version": 1, "tensors": {}}'))
    state = dict(tensors)
    for name, context in about["tensors"].items():
        kind, names = context.pop("kind"), context.pop("parts")
        if missing := [part for part in names if f"{name}.{part}" not in state]:
            raise InputError(f"{name} lacks its parts {missing}; the file is not complete.")
        parts = {part: state.pop(f"{name}.{part}") for part in names}
        state[name] = rebuild(about["version"], kind, parts, context)
    return state


def save_safetensors(
    state: Mapping[str, torch.Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state dict, block-scaled tensors included, as a safetensors file; it appears when it is complete.

    metadata: more text for the header.

    Raises:
        InputError: a dtype that the format has no name for.
    """
    tensors, header_text = flatten_state_dict(state)
    header: dict[str, Any] = {"__metadata__": {**(metadata or {}), **header_text}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise InputError(f"{name} is {tensor.dtype}; safetensors has {sorted(_SAFETENSORS)}.")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = f"{os.fspath(path)}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                if tensor.numel():
                    file.write(view_as(tensor.cpu().contiguous().reshape(-1), torch.uint8).numpy().data)
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def load_safetensors(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """State dict of a safetensors file; block-scaled tensors are what they were when `save_safetensors` wrote them.

    Raises:
        InputError: no safetensors file, a newer version of block-scaled tensors, or an incomplete one.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, os.path.getsize(path)):
            raise InputError(f"{os.fspath(path)} is no safetensors file: its header would have {length} bytes.")
        header = json.loads(file.read(length))
        rest = bytearray(file.read())
    data = torch.frombuffer(rest, dtype=torch.uint8) if rest else torch.empty(0, dtype=torch.uint8)
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, about in header.items():
        first, end = about["data_offsets"]
        dtype, shape = _SAFETENSORS.get(about["dtype"]), about["shape"]
        if dtype is None or end - first != prod(shape) * dtype.itemsize or end > len(data):
            raise InputError(f"{name} of {os.fspath(path)} is {about}; that does not fit the file or a dtype of torch.")
        # A copy: any dtype may start at any byte of a file.
        values = torch.empty(shape, dtype=dtype)
        if end > first:
            values.view(-1).view(torch.uint8).copy_(data[first:end])
        tensors[name] = values.to(device)
    return unflatten_state_dict(tensors, metadata)
