"""Sizes in kernel plans that must fit each other (triton_ep/runtime/plans)."""

import pytest

import triton_ep.runtime.launch  # noqa: F401  before the kernels: decides how they run
from triton_ep.kernels.device.codes import LL_NO_WEIGHTS
from triton_ep.kernels.spec import all_kernels
from triton_ep.ops import tuning
from triton_ep.runtime.plans import exchange, low_latency
from triton_ep.runtime.plans.residency import Program, most_waiting, per_multiprocessor
from triton_ep.runtime.plans.shape import Shape

DECODE = Shape(128, 7168, 8, 256, world_size=4, local_world_size=4, low_latency=True)


@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize("num_sm", [1, 3, 8, 20, 64])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
def test_no_pair_of_flags_of_arrivals_is_read_by_two_threads(ranks_per_node, num_sm, num_warps):
    """In a tensor with fewer elements than threads, several threads would load the same element, at different times."""
    tuned = (("expand", 1, num_warps),)
    shape = Shape(64, 64, 2, 16, world_size=8, local_world_size=ranks_per_node, num_sm=num_sm, tuned=tuned)
    plan = exchange.expand(shape, landing=0, has_weights=True, keep_copies=False, row_words=16)
    sources = plan.constexprs["SOURCES"]
    assert plan.num_warps == num_warps
    read = plan.constexprs["WATCHED"] or sources * plan.constexprs["SENDERS"]
    assert read >= 2 * 32 * num_warps and plan.constexprs["WATCHED"] <= plan.constexprs["SENDERS"]
    assert sources >= max(ranks_per_node, 2) and sources & (sources - 1) == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_small_programs_watch_many_flags_in_groups(ranks):
    """A pair per thread of their one warp; a thread reads no more than one word of a group, either."""
    plan = exchange.expand(Shape(4096, 7168, 8, 256, ranks, ranks), 0, False, True, 896)
    values = plan.constexprs
    assert plan.num_warps == 1 and values["WATCHED"] == 64
    assert values["SOURCES"] == ranks and values["SOURCES"] * values["SENDERS"] // values["WATCHED"] <= 32


def test_sums_that_wait_leave_room_for_what_they_wait_for():
    """Waiting programs of a low-latency combine are half of those that fit, four per multiprocessor."""
    spec = all_kernels()["low_latency_combine_kernel"]
    program = Program.declared(low_latency.combine(DECODE, LL_NO_WEIGHTS), spec.num_warps, spec.maxnreg)
    waiting = tuning.half_of(132, program)
    assert 2 * waiting <= 132 * per_multiprocessor(program)
    assert waiting == 4 * 132
    # However the programs of one layer are placed, those of another layer have room.
    assert waiting <= most_waiting(132, program, program, 2 * 132)


@pytest.mark.parametrize("token", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("world_size", [1, 2, 8, 32])
@pytest.mark.parametrize("hidden", [8, 37, 512, 7168, 16384])
def test_no_word_of_a_sum_is_polled_by_two_threads(hidden, world_size, token):
    """Two threads may see different values, but the loop around the poll must end for all of them at once."""
    shape = Shape(64, hidden, 2, 64, world_size=world_size, local_world_size=world_size, low_latency=True, token=token)
    plan = low_latency.combine(shape, LL_NO_WEIGHTS)
    values = plan.constexprs
    assert values["BLOCK_S"] // (2 if values["PACKED"] else 1) >= 32 * all_kernels()[plan.kernel].num_warps
    assert values["PACKED"] == (token != "fp32" and hidden % 2 == 0)
    assert (values["PARTS"] - 1) * values["BLOCK_S"] < hidden <= values["PARTS"] * values["BLOCK_S"]
