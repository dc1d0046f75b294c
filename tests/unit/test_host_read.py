"""Words that a kernel publishes to the waiting host."""

import threading
import time

import pytest
import torch

from triton_ep.context.host_read import HostRead

CPU = torch.device("cpu")


def _told(number: int, words: list[int]) -> torch.Tensor:
    return torch.tensor([number << 32 | word & 0xFFFFFFFF for word in words])


def test_words_are_those_of_the_read_that_began_last() -> None:
    """Words may be negative; words of an earlier read are not accepted."""
    read = HostRead(3, 0.05, CPU)
    for words in ([1, -2, 0], [2**31 - 1, -(2**31), 1]):
        number = read.begin()
        with pytest.raises(TimeoutError):
            read.wait()
        read.memory.copy_(_told(number, words))
        assert read.wait() == words


@pytest.mark.parametrize("late", range(4))
def test_a_word_that_comes_late_is_waited_for(late: int) -> None:
    """The read waits for a late word, whichever it is."""
    read = HostRead(4, 30.0, CPU)
    read.memory.copy_(_told(read.begin(), [9, 9, 9, 9]))
    told = _told(read.begin(), [1, 2, 3, 4])
    for at in range(4):
        if at != late:
            read.memory[at] = told[at]
    began = time.monotonic()
    later = threading.Timer(0.1, lambda: read.memory.copy_(told))
    later.start()
    assert read.wait() == [1, 2, 3, 4] and time.monotonic() - began > 0.05
    later.join()


def test_numbers_begin_anew_before_they_are_too_large() -> None:
    """Numbers of reads are positive, have 31 bits, and wrap around to 1."""
    read = HostRead(1, 0.0, CPU)
    read._number = 2**31 - 2
    assert [read.begin(), read.begin(), read.begin()] == [2**31 - 1, 1, 2]
