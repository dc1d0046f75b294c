"""Inputs of a dispatch: rows, and a routing map if the caller has no expert ids."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """Rows to send, [T, H], as they are or quantised; or received rows.

    Attributes:
        data: of the token dtype, or e4m3, whatever the bytes hold; received rows may also be bfloat16.
        scale: [T, H / 32] uint8, with e4m3 data only; for received rows also [R] float32.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None

    def like(self, given: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The data and scales, viewed with the dtypes of the rows given to the dispatch."""
        if self.scale is None or given.scale is None:
            return self.data, None
        same = given.data.dtype == self.data.dtype
        return self.data if same else self.data.view(given.data.dtype), self.scale.view(given.scale.dtype)

    def returned(self, received: Rows) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Received rows in the form of these, which were sent: a tensor, or a pair of rows and scales."""
        return received.data if self.scale is None else received.like(self)


class RoutingMap(NamedTuple):
    """Routing map of this rank's tokens, in place of expert ids [T, K] and weights [T, K].

    Attributes:
        routed: [T, E] bool, contiguous.
        probs: [T, E] float32, contiguous, or None.
        excess: [1] int32 on the device; experts without a slot are added to this count. None: the splits report a token
            with more than K experts, and hosts raise `CapacityError`.
    """

    routed: torch.Tensor
    probs: torch.Tensor | None
    excess: torch.Tensor | None
