"""Block-scaled tensors in files: pickles that `torch.load(weights_only=True)` accepts, and safetensors.

A file names its format version, so that a later layout cannot be mistaken for the current one. To load either kind, a
process only needs `import triton_ep.mx`.

    torch.save(model.state_dict(), path)        torch.load(path, weights_only=True)
    save_safetensors(model.state_dict(), path)  load_safetensors(path)

Source of safetensors: https://github.com/huggingface/safetensors, section "Format". Other programs see the parts as
plain tensors `<name>.qdata` and `<name>.scale`; the header's metadata says how they belong together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch

from triton_ep.errors import InputError
from triton_ep.mx.formats import elem_format
from triton_ep.ops.strides import view_as

FORMAT_VERSION = 1
"""Version that is written; newer versions are refused."""

_HEADER = "triton_ep"
_TEXT = "__metadata__"  # of a safetensors header
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


@dataclass(frozen=True)
class _Kind:
    """A class of block-scaled tensors, registered for files.

    Attributes:
        cls: class, whose constructor takes the parts and the context of `__tensor_flatten__` by name.
        parts: names of the component tensors.
        scale_dtype: dtype of the scales, which files store as bytes.
    """

    cls: type[torch.Tensor]
    parts: tuple[str, ...]
    scale_dtype: torch.dtype


_KINDS: dict[str, _Kind] = {}

_Class = TypeVar("_Class", bound=type[torch.Tensor])


def saved_as(kind: str, *, parts: tuple[str, ...], scale_dtype: torch.dtype) -> Callable[[_Class], _Class]:
    """Class decorator: files name tensors of the class `kind`.

    Arguments:
        parts: names of the component tensors; any but `qdata` and `scale` may be missing.
        scale_dtype: dtype of the scales.
    """

    def register(cls: _Class) -> _Class:
        _KINDS[kind] = _Kind(cls, parts, scale_dtype)
        return cls

    return register


def _take_apart(blocks: Any) -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
    """Kind, parts as plain tensors, and the rest as names and numbers."""
    (kind,) = (name for name, known in _KINDS.items() if isinstance(blocks, known.cls))
    names, context = blocks.__tensor_flatten__()
    parts = {name: getattr(blocks, name) for name in names}
    # Store bytes: not every version of torch pickles every small float.
    parts["scale"] = parts["scale"].view(torch.uint8)
    context = dict(context, orig_dtype=str(context["orig_dtype"]).removeprefix("torch."))
    if "elem_dtype" in context:
        context["elem_dtype"] = blocks.elem_format.name
    return kind, parts, context


def rebuild(version: int, kind: str, parts: dict[str, torch.Tensor], context: dict[str, Any]) -> torch.Tensor:
    """Rebuild the tensor from the results of `_take_apart`.

    Raises:
        InputError: unknown version or kind, or parts that do not fit each other.
    """
    if version > FORMAT_VERSION:
        raise InputError(
            f"the file has version {version} of block-scaled tensors, this program knows {FORMAT_VERSION} and older; "
            "update triton_ep."
        )
    known = _KINDS.get(kind)
    if known is None or not set(parts) <= set(known.parts):
        kinds = {name: each.parts for name, each in _KINDS.items()}
        raise InputError(f"the file has a tensor of kind {kind!r} with parts {sorted(parts)}; known: {kinds}.")
    parts = dict(parts, scale=parts["scale"].view(known.scale_dtype))
    rest = dict(context, orig_dtype=getattr(torch, context["orig_dtype"]))
    if "elem_dtype" in rest:
        fmt = elem_format(rest["elem_dtype"])
        parts["qdata"], rest["elem_dtype"] = parts["qdata"].view(fmt.storage), fmt.dtype
    return known.cls(**parts, **rest)


def rebuild_pickled(
    version: int,
    kind: str,
    parts: dict[str, torch.Tensor],
    context: dict[str, Any],
    requires_grad: bool,
    is_parameter: bool = False,
) -> torch.Tensor:
    """Rebuild a tensor or a parameter for `pickle` and `torch.load`; same errors as `rebuild`."""
    blocks = rebuild(version, kind, parts, context)
    return torch.nn.Parameter(blocks, requires_grad) if is_parameter else blocks.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild_pickled])  # torch.load(weights_only=True)


def reduce_blocks(blocks: torch.Tensor) -> tuple[Any, ...]:
    """Result of `__reduce_ex__` of a block-scaled tensor."""
    kind, parts, context = _take_apart(blocks)
    parts["qdata"] = parts["qdata"].view(torch.uint8)
    is_parameter = isinstance(blocks, torch.nn.Parameter)
    return rebuild_pickled, (FORMAT_VERSION, kind, parts, context, blocks.requires_grad, is_parameter)


def flatten_state_dict(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Convert to plain tensors, and header metadata from which `unflatten_state_dict` restores the originals.

    A block-scaled tensor `name` becomes `name.qdata` (float8, or bytes), `name.scale` (bytes), `name.per_tensor_scale`.
    The functions of the safetensors package accept both results.

    Raises:
        InputError: two tensors would get the same name.
    """
    kinds = tuple(known.cls for known in _KINDS.values())
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
    """Invert `flatten_state_dict`; without its metadata, the tensors are returned unchanged.

    Raises:
        InputError: a newer version, or parts that are missing or do not fit each other.
    """
    about = _json((metadata or {}).get(_HEADER, '{"version": 1, "tensors": {}}'), "the header's description of tensors")
    described = about.get("tensors")
    if type(about.get("version")) is not int or not isinstance(described, dict):
        raise InputError(f"the header's description of tensors has no version or no tensors: {about!r:.200}.")
    state = dict(tensors)
    for name, context in described.items():
        try:
            rest = dict(context)
            kind, names = rest.pop("kind"), rest.pop("parts")
            if missing := [part for part in names if f"{name}.{part}" not in state]:
                raise InputError(f"{name} lacks its parts {missing}; the file is not complete.")
            parts = {part: state.pop(f"{name}.{part}") for part in names}
            state[name] = rebuild(about["version"], kind, parts, rest)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{name} is described as {context!r:.200}, not a valid tensor: {error}.") from error
    return state


def _json(text: Any, what: str) -> dict[str, Any]:
    """Parse a JSON object with unique names; `what` names it in errors."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(found)
        if len(values) != len(found):
            names = [name for name, _ in found]
            raise ValueError(f"{sorted({name for name in names if names.count(name) > 1})} come twice")
        return values

    try:
        values = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{what} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise InputError(f"{what} is {type(values).__name__}; it must be a JSON object.")
    return values


def save_safetensors(
    state: Mapping[str, torch.Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state dict, block-scaled tensors included, as a safetensors file, which appears only once complete.

    metadata: more text for the header.

    Raises:
        InputError: a dtype without a name in the format, a tensor with the reserved name of the header's text, or
            metadata that is not text.
    """
    tensors, header_text = flatten_state_dict(state)
    if _TEXT in tensors:
        raise InputError(f"a tensor is called {_TEXT!r}, which is the header's own name for text. Rename it.")
    if not all(isinstance(part, str) for pair in (metadata or {}).items() for part in pair):
        raise InputError("metadata must be text by text: a dictionary from str to str.")
    header: dict[str, Any] = {_TEXT: {**(metadata or {}), **header_text}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise InputError(f"{name} is {tensor.dtype}; safetensors supports {sorted(_SAFETENSORS)}.")
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
    """Load the state dict of a safetensors file, with the block-scaled tensors that `save_safetensors` wrote.

    Raises:
        InputError: not a safetensors file, a newer version of block-scaled tensors, or an incomplete file.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, os.path.getsize(path)):
            raise InputError(f"{os.fspath(path)} is no safetensors file: its header would have {length} bytes.")
        where = os.fspath(path)
        header = _json(file.read(length), f"the header of {where!r}")
        rest = bytearray(file.read())
    data = torch.frombuffer(rest, dtype=torch.uint8) if rest else torch.empty(0, dtype=torch.uint8)
    metadata = header.pop(_TEXT, None)
    if metadata is not None and not isinstance(metadata, dict):
        raise InputError(f"{_TEXT} of {where!r} is {metadata!r:.200}; it must be text by text.")
    tensors, places = {}, []
    for name, about in header.items():
        dtype, shape, (first, end) = _described(about, f"{name} of {where!r}")
        if end - first != prod(shape) * dtype.itemsize or end > len(data):
            raise InputError(f"{name} of {where!r} is {about!r:.200}; that does not fit the file.")
        # Copy: in the file, a tensor of any dtype may start at any byte.
        try:
            values = torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise InputError(f"{name} of {where!r} has the shape {shape!r:.200}: {error}.") from error
        if end > first:
            values.view(-1).view(torch.uint8).copy_(data[first:end])
            places.append((first, end, name))
        tensors[name] = values.to(device)
    state = unflatten_state_dict(tensors, metadata)
    _check_places(sorted(places), len(data), where)
    return state


def _described(about: Any, what: str) -> tuple[torch.dtype, list[int], tuple[int, int]]:
    """Dtype, shape, first byte and byte after the last, from a header's entry for a tensor.

    Raises:
        InputError: the entry is malformed.
    """
    shape, places = (about.get("shape"), about.get("data_offsets")) if isinstance(about, dict) else (None, None)
    dtype = _SAFETENSORS.get(str(about["dtype"])) if isinstance(about, dict) and "dtype" in about else None
    numbers = all(isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in (shape, places))
    if dtype is None or not numbers or len(places or ()) != 2:
        raise InputError(f"{what} is {about!r:.200}; that is no dtype of torch, or no shape and place in the file.")
    assert shape is not None and places is not None, "checked: lists of numbers"
    return dtype, shape, (places[0], places[1])


def _check_places(places: list[tuple[int, int, str]], size: int, where: str) -> None:
    """Raise InputError unless the tensors fill the file without gap or overlap; `places` is sorted."""
    last = 0
    for first, end, name in places:
        if first != last:
            raise InputError(
                f"{name} of {where!r} begins at byte {first} of the data, the tensor before it ends at {last}: tensors "
                "must not overlap, and leave no gap."
            )
        last = end
    if last != size:
        raise InputError(f"{where!r} has {size} bytes of data, its tensors end at {last}. The file is incomplete.")
