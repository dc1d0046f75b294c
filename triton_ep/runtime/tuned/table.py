"""The table of tuned settings: readable TOML, checked key by key. Needs neither torch nor Triton.

docs/reference/tuned-table.md describes the format.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from triton_ep.errors import ConfigError
from triton_ep.runtime.environment import Environment, read_environment

FORMAT = 1
KERNELS = ("push", "expand", "reduce", "pull")
MOST_ROWS = 16
MOST_WARPS = {"push": 32, "expand": 16, "reduce": 32, "pull": 32}
"""With any entry, four programs of expand must fit on a multiprocessor: they wait for programs of the push."""
_PAYLOADS = ("bf16", "mxfp8")
_HEADING = "# Settings found by `triton-ep tune`. docs/reference/tuned-table.md explains the keys; edit with care.\n"


@dataclass(frozen=True)
class KernelChoice:
    """Settings of a kernel on a GPU: rows that a program handles at a time, and its warps; both powers of two."""

    rows: int
    warps: int


@dataclass(frozen=True)
class Key:
    """The key by which a layer looks up its settings.

    Attributes:
        gpu: name from the driver; "cpu" for interpreted ranks.
        ranks_per_node, nodes: topology of the layer's group.
        payload: "bf16" (rows of two bytes per element) or "mxfp8".
        hidden: elements per row.
        tokens: most tokens per rank, rounded up to a power of two.
    """

    gpu: str
    ranks_per_node: int
    nodes: int
    payload: str
    hidden: int
    tokens: int

    def __str__(self) -> str:
        return (
            f"{self.gpu}, {self.nodes} x {self.ranks_per_node} ranks, {self.payload}, hidden {self.hidden}, "
            f"up to {self.tokens} tokens"
        )


@dataclass(frozen=True)
class TunedEntry:
    """One entry: a key, the settings, and the times measured with them.

    Attributes:
        num_sm: programs of the exchange.
        push, expand, reduce, pull: settings of these kernels; None: the built-in ones.
        topk, experts, local_combine: of the measured layer; not part of the key.
        dispatch_us, combine_us: microseconds, slowest rank, median.
        commit, date: of the measurement.
        source: file from which the entry was read; "" if none.
    """

    key: Key
    num_sm: int
    topk: int
    experts: int
    local_combine: bool
    dispatch_us: float
    combine_us: float
    commit: str
    date: str
    push: KernelChoice | None = None
    expand: KernelChoice | None = None
    reduce: KernelChoice | None = None
    pull: KernelChoice | None = None
    source: str = ""

    def kernel(self, name: str) -> KernelChoice | None:
        """The settings of a kernel of KERNELS."""
        choice: KernelChoice | None = getattr(self, name)
        return choice

    def with_kernel(self, name: str, choice: KernelChoice) -> TunedEntry:
        """A copy of the entry with other settings for a kernel of KERNELS."""
        changes: dict[str, Any] = {name: choice}
        return dataclasses.replace(self, **changes)


_MOST = 2**53
"""Upper limit of a number in a table."""
_ESCAPED = re.compile(r'[\x00-\x1f\x7f"\\]')
"""Characters that a quoted text must escape."""
_KEYS: dict[str, type] = {
    **{field.name: str if field.name in ("gpu", "payload") else int for field in dataclasses.fields(Key)},
    "num_sm": int,
    "topk": int,
    "experts": int,
    "local_combine": bool,
    "dispatch_us": float,
    "combine_us": float,
    "commit": str,
    "date": str,
}


def read_table(path: Path) -> list[TunedEntry]:
    """The entries of a file.

    Raises:
        ConfigError: the file does not exist or is malformed; with file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the tuned table {path} cannot be read: {error}.") from None
    return parse_table(text, str(path))


def parse_table(text: str, source: str) -> list[TunedEntry]:
    """The entries of a file's text; `source` names it in errors.

    Raises:
        ConfigError: with source and line.
    """
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{source}: this is no table: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        where = line[1] if line else str(text.count("\n") + 1)
        raise ConfigError(f"{source}:{where}: this is no TOML: {error}.") from None
    check = _Checker(text, source)
    check.keys(table, ("format", "entry"), ("format",), 0)
    if table["format"] != FORMAT or isinstance(table["format"], bool):
        raise check.error("format", 0, f"format is {table['format']!r}; this version reads {FORMAT}.")
    entries = table.get("entry", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise check.error("entry", 0, "entries are written as [[entry]].")
    found: dict[Key, int] = {}
    result = []
    for number, values in enumerate(entries, 1):
        entry = check.entry(values, number)
        if entry.key in found:
            first = check.line("", found[entry.key])
            raise check.error("", number, f"the entry for {entry.key} is there already, in line {first}.")
        found[entry.key] = number
        result.append(entry)
    return result


class _Checker:
    """Checks values and finds their lines."""

    def __init__(self, text: str, source: str) -> None:
        self.lines, self.source = text.splitlines(), source

    def line(self, key: str, number: int) -> int:
        """Line of a key in the entry of this number, 0 = before the first one; without the key, line of the entry."""
        starts = [at for at, line in enumerate(self.lines) if re.match(r"\s*\[\[\s*entry\s*\]\]", line)]
        bounds = [0, *starts, len(self.lines)]
        begin, end = bounds[min(number, len(starts))], bounds[min(number, len(starts)) + 1]
        for at in range(begin, end):
            if key and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", self.lines[at]):
                return at + 1
        return begin + 1

    def error(self, key: str, number: int, text: str) -> ConfigError:
        """The error for a key of an entry."""
        return ConfigError(f"{self.source}:{self.line(key, number)}: {text}")

    def keys(self, values: dict[str, Any], known: Sequence[str], needed: Iterable[str], number: int) -> None:
        """Raise unless `values` has all needed keys and no unknown ones."""
        for key in values:
            if key not in known:
                raise self.error(key, number, f"there is no key {key!r}; known are {', '.join(known)}.")
        for key in needed:
            if key not in values:
                raise self.error("", number, f"the key {key!r} is missing.")

    def entry(self, values: dict[str, Any], number: int) -> TunedEntry:
        """An entry from its values."""
        self.keys(values, (*_KEYS, *KERNELS), _KEYS, number)
        for name, kind in _KEYS.items():
            value = values[name]
            # In Python a bool is an int, which must not count as one; an integer counts as a number.
            kinds = (int, float) if kind is float else (kind,)
            if not isinstance(value, kinds) or isinstance(value, bool) != (kind is bool):
                raise self.error(name, number, f"{name} is {value!r}, where {_WORDS[kind]} is needed.")
            if isinstance(value, int | float) and not 0 < value < _MOST and kind is not bool:
                raise self.error(name, number, f"{name} is {value!r:.40}; it must be above 0, and below {_MOST}.")
        if values["payload"] not in _PAYLOADS:
            raise self.error("payload", number, f"payload is {values['payload']!r}, none of {', '.join(_PAYLOADS)}.")
        if not _is_power(values["tokens"]):
            raise self.error("tokens", number, f"tokens is {values['tokens']}, no power of two.")
        if values["num_sm"] > 1024:
            raise self.error("num_sm", number, f"num_sm is {values['num_sm']}; at most 1024 are possible.")
        choices: dict[str, Any] = {name: self.choice(values[name], name, number) for name in KERNELS if name in values}
        key = Key(**{field.name: values[field.name] for field in dataclasses.fields(Key)})
        rest = {name: kind(values[name]) for name, kind in _KEYS.items() if name not in dataclasses.asdict(key)}
        return TunedEntry(key=key, **rest, **choices, source=self.source)

    def choice(self, value: Any, name: str, number: int) -> KernelChoice:
        """The settings of a kernel, from { rows = .., warps = .. }."""
        if not isinstance(value, dict) or set(value) != {"rows", "warps"}:
            raise self.error(name, number, f"{name} is {value!r}, where {{ rows = .., warps = .. }} is needed.")
        for part, most in (("rows", MOST_ROWS), ("warps", MOST_WARPS[name])):
            if not _is_power(value[part]) or value[part] > most:
                raise self.error(name, number, f"{part} of {name} is {value[part]!r}, no power of two up to {most}.")
        return KernelChoice(value["rows"], value["warps"])


_WORDS = {int: "an integer", float: "a number", str: "a text in quotes", bool: "true or false"}


def _is_power(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1 and value & (value - 1) == 0


def format_table(entries: Iterable[TunedEntry]) -> str:
    """The text of a file with these entries, in the order of their keys."""
    parts = [f"{_HEADING}format = {FORMAT}\n"]
    for entry in sorted(entries, key=lambda entry: dataclasses.astuple(entry.key)):
        values = {**dataclasses.asdict(entry.key), **{n: getattr(entry, n) for n in _KEYS if hasattr(entry, n)}}
        lines = [f"{name} = {_value(values[name])}" for name in _KEYS]
        for name in KERNELS:
            if (choice := entry.kernel(name)) is not None:
                lines.append(f"{name} = {{ rows = {choice.rows}, warps = {choice.warps} }}")
        parts.append("\n".join(["[[entry]]", *lines]) + "\n")
    return "\n".join(parts)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", value) + '"'
    return str(value)


def merged(old: Iterable[TunedEntry], new: Iterable[TunedEntry]) -> list[TunedEntry]:
    """The entries of both; a new entry replaces an old one with the same key."""
    return list({entry.key: entry for entry in (*old, *new)}.values())


def tables(environment: Environment | None = None) -> list[tuple[str, list[TunedEntry]]]:
    """Names and entries of all tables in use, in the order of look-up: TRITON_EP_TUNED, then the package's.

    environment: None = the present one.

    Raises:
        ConfigError: a table is missing or malformed.
    """
    found = []
    if (told := (environment or read_environment()).tuned) is not None:
        found.append((told, read_table(Path(told))))
    for file in sorted(resources.files("triton_ep.runtime.tuned").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            name = f"triton_ep/runtime/tuned/{file.name}"
            found.append((name, parse_table(file.read_text(encoding="utf-8"), name)))
    return found


def look_up(key: Key) -> TunedEntry | None:
    """The entry for this key from the first table that has one; None: no table has one.

    Raises:
        ConfigError: a table is missing or malformed.
    """
    return next((entry for _, entries in tables() for entry in entries if entry.key == key), None)
