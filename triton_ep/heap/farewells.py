"""Record which ranks have ended a layer: notes in the store of the job, written and read without a meeting.

A rank that saw a failure does not wait for the others, and a rank that saw none must not mistake the first rank's next
meeting for its own. So ending a layer is not a meeting: each rank writes a note once its device has finished, and reads
the notes of the others.

Keys of a layer     <rank>  this member has ended the layer
                    count   number of members that have ended it
                    all     every member has ended it: the only key that is polled
                    seen    number of members that know; the last one removes the remaining keys
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


class Farewells:
    """Notes of one rank; store: shared by all ranks of the job.

    Every call may raise RuntimeError if the process that serves the store is gone.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = dist.PrefixStore("triton_ep/ended", store)
        self._rank = rank

    def say(self, layer: str, members: Sequence[int]) -> None:
        """Note that this rank has ended the layer; its device must have finished the layer's work."""
        # `add`, because `set` returns before the server has the key: a peer that this rank meets next must find it.
        if self._store.add(f"{layer}/{self._rank}", 1) == 1 and self._store.add(f"{layer}/count", 1) == len(members):
            self._store.add(f"{layer}/all", 1)

    def all_said(self, layer: str) -> bool:
        """Whether every member has ended the layer; False again after `forget`."""
        return bool(self._store.check([f"{layer}/all"]))

    def silent(self, layer: str, members: Sequence[int]) -> list[int]:
        """Members that have not ended the layer; one query per member."""
        silent = [rank for rank in members if not self._store.check([f"{layer}/{rank}"])]
        # Members that know that all have ended the layer have removed their notes.
        return [] if self.all_said(layer) else silent

    def forget(self, layer: str, members: Sequence[int]) -> None:
        """Remove this rank's note; this rank must not query the layer again."""
        self._store.delete_key(f"{layer}/{self._rank}")
        if self._store.add(f"{layer}/seen", 1) == len(members):
            for name in ("count", "all", "seen"):
                self._store.delete_key(f"{layer}/{name}")
