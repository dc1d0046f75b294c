"""Which ranks have ended a layer: notes in the store of the job, written and read without a meeting.

A rank that saw a failure does not wait for the others, and a rank that saw none must not take the next meeting of the
first for its own. So ending a layer is no meeting: each rank writes a note once its device has finished, and reads the
notes of the others.

Keys of a layer     <rank>  this member has ended it
                    count   how many have
                    all     the whole group has: the one key that is polled
                    seen    how many know; the last of them removes what is left of the keys
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


class Farewells:
    """Notes of one rank; store: one that all ranks of the job share.

    Every call may raise RuntimeError, when whoever serves the store is gone.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = dist.PrefixStore("triton_ep/ended", store)
        self._rank = rank

    def say(self, layer: str, members: Sequence[int]) -> None:
        """This rank has ended the layer, and its device runs nothing of it any more."""
        # `add`, because `set` returns before the server has it: a peer that this rank meets next must find the note.
        if self._store.add(f"{layer}/{self._rank}", 1) == 1 and self._store.add(f"{layer}/count", 1) == len(members):
            self._store.add(f"{layer}/all", 1)

    def all_said(self, layer: str) -> bool:
        """Whether every member has ended the layer; False again after `forget`."""
        return bool(self._store.check([f"{layer}/all"]))

    def silent(self, layer: str, members: Sequence[int]) -> list[int]:
        """Members that have not ended the layer; asks once for each."""
        silent = [rank for rank in members if not self._store.check([f"{layer}/{rank}"])]
        # Members that know that all have ended it have taken their notes away.
        return [] if self.all_said(layer) else silent

    def forget(self, layer: str, members: Sequence[int]) -> None:
        """This rank will not ask about the layer again."""
        self._store.delete_key(f"{layer}/{self._rank}")
        if self._store.add(f"{layer}/seen", 1) == len(members):
            for name in ("count", "all", "seen"):
                self._store.delete_key(f"{layer}/{name}")
