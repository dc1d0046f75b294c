"""Counts of the host as tensors."""

import torch

from triton_ep.integrations.host_counts import HostCounts


def test_every_call_gets_its_own_numbers():
    """Tensors of earlier calls keep their numbers while later calls take theirs, also of another length."""
    made, counts = HostCounts(), []
    for call in range(150):
        length = 5 if call % 40 else 3
        numbers = [call * 1000 + i for i in range(length)]
        counts.append((made.tensor(numbers), numbers))
    for found, numbers in counts:
        assert (found.dtype, found.device.type, found.tolist()) == (torch.int64, "cpu", numbers)


def test_counts_made_in_inference_mode_can_be_used_outside():
    """A tensor that a call in inference mode makes is an ordinary one."""
    made = HostCounts()
    with torch.inference_mode():
        made.tensor([1, 2])
    found = made.tensor([3, 4])
    assert not found.is_inference()
    assert found.add_(1).tolist() == [4, 5]
