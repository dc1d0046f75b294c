"""What to build: the manifest (manifest.toml), one EPConfig, or single variants, as lists of kernel requests.

Imports neither torch nor Triton, except for `declared_variants`.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from triton_ep.errors import ConfigError
from triton_ep.kernels.device.codes import NVSHMEM, P2P
from triton_ep.runtime.plans import experts, experts_backward, layers, products
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import TOKEN_BYTES, Shape, sending_in_budget
from triton_ep.runtime.tuned.table import KERNELS, Key, look_up

FORMAT = 1
_TOKENS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SHAPE = {field.name for field in dataclasses.fields(Shape)} - {"network", "interpreted", "tuned", "token"}
_USES = {field.name for field in dataclasses.fields(layers.LayerCalls)}
_OTHER = {"token_dtype", "gpus", "ranks", "sm_budget"}
_IGNORED = {"rank", "recv_capacity", "timeout_s", "weight_dtype", "offset_dtype", "use_aot", "tuned", "shared_staging"}
"""Fields of EPConfig that do not affect kernels, or are given by other fields."""
_KINDS = {field.name: str(field.type) for kind in (Shape, layers.LayerCalls) for field in dataclasses.fields(kind)}
"""Types of these fields, as text."""
_CHOICES: dict[str, tuple[Any, ...]] = {
    "ids": ("i32", "i64"),
    "weights": (False, True),
    "scatter": (False, True),
    "landing": ("row", "bf16"),
}
_PRODUCTS: dict[str, Any] = {
    "grouped_gemm": products.grouped_gemm,
    "mxfp8": products.mxfp8,
    "experts": experts.experts,
    "experts_backward": experts_backward.experts_backward,
}
"""Kernels that belong to no layer."""
_NEEDED = ("max_tokens", "hidden", "topk", "num_experts", "world_size", "local_world_size")


def default_manifest() -> Path:
    """The manifest of the package."""
    return Path(__file__).resolve().parent / "manifest.toml"


def read_manifest(path: Path) -> list[KernelRequest]:
    """The requests of a manifest, without repetition.

    Raises:
        ConfigError: the manifest is unreadable, or an entry is wrong; names the entry.
    """
    table = _read(path)
    unknown = set(table) - {"format", "models", "layer", "declared", "variant", *_PRODUCTS}
    if unknown or table.get("format") != FORMAT:
        raise ConfigError(f"{path}: format must be {FORMAT}; unknown keys: {sorted(unknown)}.")
    models = table.get("models", {})
    if not isinstance(models, dict) or not all(isinstance(values, dict) for values in models.values()):
        raise ConfigError(f"{path}: models must be a table of tables, [models.NAME].")
    for name in ("layer", "variant", *_PRODUCTS):
        _check_tables(table.get(name, []), name, path)
    found: list[KernelRequest] = []
    for number, values in enumerate(table.get("layer", []), 1):
        name = values.pop("model", None)
        if name is not None and name not in models:
            raise ConfigError(f"{path}: layer {number} names the model {name!r}; there are {', '.join(models)}.")
        found += of_config({**models.get(name, {}), **values}, f"{path}: layer {number}")
    for name, make in _PRODUCTS.items():
        for number, values in enumerate(table.get(name, []), 1):
            found += _checked(make, values, f"{path}: {name} {number}")
    for number, values in enumerate(table.get("variant", []), 1):
        found.append(_variant(values, f"{path}: variant {number}"))
    if table.get("declared", False):
        found += declared_variants()
    return unique(found)


def _check_tables(given: Any, name: str, path: Path) -> None:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise ConfigError(f"{path}: {name} must be a list of tables, [[{name}]].")


def read_config(text: str) -> list[KernelRequest]:
    """The requests of one EPConfig; `text` is JSON, or the path of a TOML or JSON file.

    Accepts the fields of EPConfig, and those of triton_ep.runtime.plans.layers.LayerCalls, which say how the layer is
    called; both keep their defaults. `grouped_gemm`, `mxfp8`, `experts`, `experts_backward`: tables as in a manifest.

    Raises:
        ConfigError: the text is unreadable, or a field is missing or unknown.
    """
    inline = text.lstrip().startswith("{")
    where = "the configuration" if inline else text
    table = _json(text, where) if inline else _read(Path(text))
    given = {name: table.pop(name) for name in _PRODUCTS if name in table}
    if unfit := [name for name, values in given.items() if not isinstance(values, dict)]:
        raise ConfigError(f"{where}: {unfit[0]} must be a table of fields.")
    found = of_config(table, where)
    for name, values in given.items():
        found += _checked(_PRODUCTS[name], values, f"{where}: {name}")
    return unique(found)


def read_variants(text: str) -> list[KernelRequest]:
    """Single variants, as an `AotMiss` prints them: JSON of one, or the path of a file with one per line.

    Raises:
        ConfigError: the text is unreadable, or is no variant.
    """
    lines = [text] if text.lstrip().startswith("{") else _lines(Path(text))
    return unique(_variant(_json(line, text), text) for line in lines)


def of_config(values: Mapping[str, Any], where: str) -> list[KernelRequest]:
    """The requests of a layer with these fields. `ranks`: [ranks per node, nodes]. `gpus`: add the choices of the tuned
    tables for these GPUs. Payload "bf16" means None.

    Raises:
        ConfigError: a field is missing, unknown, or has an invalid value; names the field.
    """
    given = {name: value for name, value in values.items() if name not in _IGNORED}
    if "ranks" in given:
        ranks = given.pop("ranks")
        if not _are(ranks, int) or len(ranks) != 2:
            raise ConfigError(f"{where}: ranks is {ranks!r}; it must be [ranks per node, nodes].")
        given |= {"local_world_size": ranks[0], "world_size": ranks[0] * ranks[1]}
    unknown = sorted(set(given) - _SHAPE - _USES - _OTHER)
    missing = sorted(set(_NEEDED) - set(given))
    if unknown or missing:
        raise ConfigError(f"{where}: missing {missing}, unknown {unknown}; fields are those of EPConfig.")
    token = str(given.get("token_dtype", "bfloat16")).removeprefix("torch.")
    token = _TOKENS.get(token, token)
    if given.get("payload") == "bf16":
        given["payload"] = None
    if faults := list(_faults(given, token)):
        raise ConfigError(f"{where}: {'; '.join(faults)}.")
    if (budget := given.get("sm_budget")) is not None:
        one_node = given["world_size"] == given["local_world_size"]
        num_sm = sending_in_budget(given.get("num_sm", Shape.num_sm), budget, one_node)
        given |= {"budgeted": True, "num_sm": num_sm}
    sizes = {name: given[name] for name in _SHAPE if name in given}
    network = P2P if sizes["world_size"] == sizes["local_world_size"] else NVSHMEM
    shape = Shape(**sizes, token=token, network=network)
    calls: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items() if n in _USES}
    uses = layers.LayerCalls(**calls)
    found = layers.layer_requests(shape, uses)
    for gpu in given.get("gpus", []):
        found += layers.layer_requests(_tuned(shape, gpu), uses)
    return found


def _faults(given: Mapping[str, Any], token: str) -> Iterator[str]:
    """Faults in the fields of a layer. Checked here because EPConfig needs torch."""
    for name, kind in _KINDS.items():
        value = given.get(name, None)
        if name in given and kind == "int" and (type(value) is not int or value < 1):
            yield f"{name} must be an integer of at least 1, got {value!r}"
        elif name in given and kind == "bool" and not isinstance(value, bool):
            yield f"{name} must be true or false, got {value!r}"
    lists = {name: given[name] for name in (*_CHOICES, "gpus") if name in given}
    for name, values in lists.items():
        choices = _CHOICES.get(name)
        if not _are(values, str if choices is None else type(choices[0])):
            yield f"{name} must be a list{'' if choices is None else f' of {choices}'}, got {values!r}"
        elif choices is not None and not set(values) <= set(choices):
            yield f"{name} has {sorted(set(values) - set(choices))}; there are {choices}"
    budget = given.get("sm_budget")
    if budget is not None and (type(budget) is not int or budget < 1 or given.get("low_latency")):
        yield f"sm_budget must be an integer of at least 1, in layers without low_latency, got {budget!r}"
    if token not in TOKEN_BYTES:
        yield f"token_dtype {token!r} is none of {sorted(_TOKENS)}"
    if given.get("payload") not in (None, "mxfp8"):
        yield f'payload is {given["payload"]!r}; rows travel as they are ("bf16") or as "mxfp8"'
    if not any(type(given[name]) is not int or given[name] < 1 for name in _NEEDED):
        yield from _misfits(given, token)


def _misfits(given: Mapping[str, Any], token: str) -> Iterator[str]:
    """Faults of fields that are valid alone but not together."""
    ranks, per_node, experts, topk, hidden = (
        given[name] for name in ("world_size", "local_world_size", "num_experts", "topk", "hidden")
    )
    if ranks % per_node:
        yield f"world_size {ranks} must be a multiple of local_world_size {per_node}"
    if experts % ranks:
        yield f"num_experts {experts} must be a multiple of world_size {ranks}"
    if topk > min(experts, 32):
        yield f"topk {topk} exceeds {min(experts, 32)}"
    if given.get("payload") and hidden % 32:
        yield f'hidden {hidden} must be a multiple of 32 with payload "mxfp8"'
    if given.get("low_latency") and ranks != per_node:
        yield f"low_latency is for one node, but world_size is {ranks} and local_world_size {per_node}"
    if given.get("landing") and (not given.get("payload") or given.get("low_latency")):
        yield 'landing is for layers with payload "mxfp8" and without low_latency'
    if given.get("compact") and (given.get("payload") or given.get("low_latency")):
        yield "compact is for layers without payload and low_latency"
    if given.get("biases") and given.get("low_latency"):
        yield "biases are for layers without low_latency"
    if given.get("fp8_rows") and given.get("payload"):
        yield "fp8_rows are for layers without payload"
    if given.get("fp8_rows") and hidden % 32:
        yield f"hidden {hidden} must be a multiple of 32 with fp8_rows"


def _are(values: Any, kind: type) -> bool:
    """True for a list of values of exactly this type."""
    return isinstance(values, list | tuple) and all(type(value) is kind for value in values)


def _tuned(s: Shape, gpu: str) -> Shape:
    """The shape with the choices of the tuned tables for a GPU; unchanged if they have none."""
    payload = s.payload or ("bf16" if TOKEN_BYTES[s.token] == 2 else "float32")
    tokens = 1 << (s.max_tokens - 1).bit_length()
    entry = look_up(Key(gpu, s.local_world_size, s.num_nodes, payload, s.hidden, tokens))
    if entry is None:
        return s
    choices = [(name, entry.kernel(name)) for name in KERNELS]
    chosen = tuple((name, choice.rows, choice.warps) for name, choice in choices if choice is not None)
    return dataclasses.replace(s, num_sm=entry.num_sm, tuned=chosen)


def declared_variants() -> list[KernelRequest]:
    """The variants that kernels declare themselves (kernels/spec.py). Imports Triton."""
    from triton_ep.kernels.spec import all_kernels

    found = []
    for spec in all_kernels().values():
        for variant in spec.variants:
            types = {name: kind.format(**variant.types) for name, kind in spec.arguments.items() if "{" in kind}
            found.append(KernelRequest(spec.name, variant.constexprs, types, tuple(sorted(variant.aligned))))
    return found


def unique(found: Iterable[KernelRequest]) -> list[KernelRequest]:
    """Requests without repetition, sorted by kernel."""
    by_signature = {request.signature(): request for request in found}
    return sorted(by_signature.values(), key=lambda request: (request.kernel, request.text()))


def _checked(make: Any, values: Mapping[str, Any], where: str) -> list[KernelRequest]:
    try:
        made: list[KernelRequest] = make(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})
    except (TypeError, KeyError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"{where}: {error}.") from None
    return made


def _variant(values: Any, where: str) -> KernelRequest:
    try:
        request = KernelRequest.from_dict(values)
        maps, lists = (request.constexprs, request.types), (request.aligned, request.ones, request.unaligned)
        if not isinstance(request.kernel, str) or not all(isinstance(each, dict) for each in maps):
            raise TypeError("kernel is a name, constexprs and types are tables")
        if not all(_are(names, str) for names in lists):
            raise TypeError("aligned, ones and unaligned are lists of arguments")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{where:.200}: no variant of a kernel: {error}.") from None
    return request


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where:.200}: no JSON: {error}.") from None


def _lines(path: Path) -> list[str]:
    return [line for line in _text(path).splitlines() if line.strip()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def _read(path: Path) -> dict[str, Any]:
    text = _text(path)
    if path.suffix == ".json":
        table = _json(text, str(path))
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: an object with fields is needed, got {type(table).__name__}.")
        return table
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: no TOML: {error}.") from None
