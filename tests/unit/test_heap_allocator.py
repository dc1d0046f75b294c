"""Guarantees of an arena: pieces are disjoint, each lies inside one range, and all bytes return in the end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_ep.errors import HeapError
from triton_ep.heap.allocator import Arena

ALIGN = 16
# ("take", bytes), ("give", index of a taken piece), ("extend", bytes)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 200)),
        st.tuples(st.just("give"), st.integers(0, 50)),
        st.tuples(st.just("extend"), st.integers(0, 300)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(size=st.integers(0, 500), steps=STEPS)
def test_pieces_are_apart_and_come_back(size: int, steps: list[tuple[str, int]]) -> None:
    """No two pieces share a byte, no piece crosses two ranges, and all freed bytes can be taken again."""
    arena = Arena(size, ALIGN)
    ranges = [(0, size - size % ALIGN)]
    out: dict[int, int] = {}
    for what, number in steps:
        taken = sum(-(-max(nbytes, 1) // ALIGN) * ALIGN for nbytes in out.values())
        assert arena.free_bytes() == arena.size - taken
        if what == "extend":
            start = arena.extend(number)
            assert start == ranges[-1][1]
            ranges.append((start, start + number - number % ALIGN))
        elif what == "take":
            room = arena.largest_free()
            offset = arena.take(number)
            assert (offset is not None) == (max(number, 1) <= room)
            if offset is None:
                continue
            assert offset % ALIGN == 0
            assert any(start <= offset and offset + number <= end for start, end in ranges)
            end = offset + max(number, 1)
            assert all(end <= other or other + max(nbytes, 1) <= offset for other, nbytes in out.items())
            out[offset] = number
        elif out:
            offset = sorted(out)[number % len(out)]
            arena.give(offset, out.pop(offset))
    for offset, nbytes in out.items():
        arena.give(offset, nbytes)
    assert arena.largest_free() == max(end - start for start, end in ranges)
    assert arena.size == ranges[-1][1]
    for start, end in sorted(ranges, key=lambda each: each[0] - each[1]):  # largest first, so that each fits one range
        if end > start:
            assert arena.take(end - start) is not None
    assert arena.free_bytes() == 0


def test_what_was_not_taken_is_not_given_back() -> None:
    """Freeing twice, with another size, or from the middle of a piece is an error that leaves the arena unchanged."""
    arena = Arena(10 * ALIGN, ALIGN)
    offset = arena.take(3 * ALIGN)
    assert offset is not None
    for wrong in ((offset, ALIGN), (offset + ALIGN, 2 * ALIGN), (9 * ALIGN, ALIGN)):
        with pytest.raises(HeapError, match="not allocated"):
            arena.give(*wrong)
    arena.give(offset, 3 * ALIGN)
    with pytest.raises(HeapError, match="freed twice"):
        arena.give(offset, 3 * ALIGN)
    assert arena.largest_free() == 10 * ALIGN


def test_a_range_of_an_owner_is_for_no_other() -> None:
    """A caller that names the owner may use both ranges; all others, even other owners, only the common range."""
    arena = Arena(32, ALIGN)
    start = arena.extend(64, "ours")
    assert arena.largest_free() == arena.largest_free("theirs") == 32
    assert arena.largest_free("ours") == 64
    assert arena.take(48) is None and arena.take(48, "theirs") is None
    assert arena.take(48, "ours") == start
    assert arena.take(32, "ours") == 0  # the range without an owner comes first
    assert arena.take(ALIGN) is None
    arena.give(start, 48)
    assert arena.take(64, "ours") == start
