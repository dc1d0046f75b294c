"""Calls that repeat the launches of an earlier one: working out a launch takes longer than the launch.

The kernels of a call, their grids and most of their arguments follow from the layer and from the kind of the call:
which arguments it has, of which dtypes; for a dispatch also how many tokens, and how rows land. When a kind comes for
the second time, a `Noting` notes its launches while the ordinary steps make them (triton_ep/exchange/steps.py). From
then on a `Repeat` makes the same launches with the tensors of the call, unless something else has changed, which
`look_up` finds: the sizes of buffers, kernels compiled since, hooks of a profiler. Addresses that are no multiples of
16 are for the ordinary steps.

Only calls within a node are repeated, without scatter indices, hooks and copy engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.layout import Sizes
from triton_ep.context.rows import RowFormat
from triton_ep.runtime.launch import Launch, Launcher

Kind = tuple[object, ...]
Known = TypeVar("Known", bound="Repeat")
Made = TypeVar("Made", bound="Noting")

MOST = 32
"""Kinds that a layer remembers. Where every call has another number of tokens, most of them come only once."""
_FIRST, _NEVER = object(), object()
"""Of a kind that has come once, and of one that cannot be repeated."""


@dataclass(slots=True)
class Facts:
    """What the launches of a noted call depend on besides its kind.

    Attributes:
        sizes: of the buffers.
        num_compiled: kernels compiled before.
        first: one of the launchers; all have the same hooks.
    """

    sizes: Sizes
    num_compiled: int
    first: Launcher


@dataclass(slots=True)
class Repeat:
    """The launches of calls of one kind."""

    facts: Facts


class Noting:
    """Notes the launches of a call; a context manager around it, which keeps what `keep` was given.

    Attributes:
        parts: launches up to each `end_part`.
    """

    def __init__(self, ctx: DispatchCombineContext, fmt: RowFormat, kind: Kind) -> None:
        self._ctx, self._fmt, self._kind = ctx, fmt, kind
        self._launchers = [*ctx.rows.own.launchers.values(), *fmt.launchers.values()]
        self._before = self._state()
        self._launches: list[Launch] = []
        self.parts: list[list[Launch]] = []
        self._result: object = _FIRST

    def _state(self) -> tuple[Sizes, int, int]:
        kernels = len(self._ctx.rows.own.launchers) + len(self._fmt.launchers)
        return self._ctx.sizes, Launcher.num_compiled, kernels

    def __enter__(self) -> None:
        for launcher in self._launchers:
            launcher.noted = self._launches

    def __exit__(self, *raised: object) -> None:
        for launcher in self._launchers:
            launcher.noted = None
        if self._ctx.repeats is not None:
            self._ctx.repeats[self._kind] = self._result

    def end_part(self) -> None:
        """A part of the launches has been made."""
        self.parts.append(list(self._launches))
        self._launches.clear()

    def keep(self, make: Callable[[Facts], Repeat | None]) -> None:
        """Keep a `Repeat`, or that there is none; neither if this call has changed what others depend on."""
        sizes, num_compiled, _ = self._before
        if self._state() == self._before:
            self._result = make(Facts(sizes, num_compiled, self._launchers[0])) or _NEVER


def look_up(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    kind: Kind,
    repeated: type[Known],
    noting: Callable[..., Made],
    *given: object,
) -> Known | Made | None:
    """How a call of this kind is launched: by a `Repeat`, by the steps while they are noted, or, None, by these alone.

    repeated, noting: classes for the first and the second; given: arguments of the latter after these.
    """
    repeats = ctx.repeats
    if repeats is None:
        return None
    known = repeats.get(kind)
    if isinstance(known, repeated):
        facts = known.facts
        if facts.sizes is ctx.sizes and facts.num_compiled == Launcher.num_compiled:
            return None if facts.first.is_hooked else known
    if known is None:
        if len(repeats) >= MOST:
            _forget(repeats)
        repeats[kind] = _FIRST
    # Memory of a graph belongs to its replays. Launches with hooks look at their arguments each time.
    if known is None or known is _NEVER or ctx.is_capturing:
        return None
    if any(launcher.is_hooked for launcher in fmt.launchers.values()):
        return None
    return noting(ctx, fmt, kind, *given)


def _forget(repeats: dict[Kind, object]) -> None:
    """Make room: forget the kinds that have come once, or, if there are none, all."""
    once = [kind for kind, known in repeats.items() if known is _FIRST]
    for kind in once or list(repeats):
        del repeats[kind]
