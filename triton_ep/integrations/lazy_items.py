"""Handles that look like another package's tuples. An item costs nothing until it is read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, overload


class LazyItems(Sequence[Any]):
    """A sequence of fixed length that computes an item each time it is read."""

    @abstractmethod
    def _makers(self) -> tuple[Callable[[], Any], ...]:
        """One function per item that computes the item."""

    def __len__(self) -> int:
        return len(self._makers())

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(make() for make in self._makers()[index])
        return self._makers()[index]()
