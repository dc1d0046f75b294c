"""What a dispatch is given: rows, and a routing map where the caller has no expert ids."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """Rows to send, [T, H]: as they are, or quantised; or rows that were received.

    Attributes:
        data: of the token dtype, or e4m3, whatever the bytes are; received ones also bfloat16.
        scale: [T, H / 32] uint8, with e4m3 data only; of received ones also [R] float32.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None

    def like(self, given: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The data and scales, with the dtypes of those whose bytes were sent."""
        if self.scale is None or given.scale is None:
            return self.data, None
        same = given.data.dtype == self.data.dtype
        return self.data if same else self.data.view(given.data.dtype), self.scale.view(given.scale.dtype)


class RoutingMap(NamedTuple):
    """What a routing map says of this rank's tokens, in place of expert ids [T, K] and weights [T, K].

    Attributes:
        routed: [T, E] bool, contiguous.
        probs: [T, E] float32, contiguous, or None.
        excess: [1] int32 on the device, to which experts are added that find no slot; None: a token with more than K
            experts is reported with the splits, from which hosts raise `CapacityError`.
    """

    routed: torch.Tensor
    probs: torch.Tensor | None
    excess: torch.Tensor | None
