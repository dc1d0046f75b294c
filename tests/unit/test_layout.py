"""The table of symmetric buffers: host and device agree on it."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from triton_ep import EPConfig
from triton_ep.context.layout import ALIGN_BYTES, BUFFERS, Sizes, estimate_bytes, initial_sizes, rows_of_sums
from triton_ep.context.records import Report
from triton_ep.kernels.device import buffers, codes
from triton_ep.kernels.device.payload import MX, QUANTISE, WORDS, wire_of
from triton_ep.kernels.internode.dispatch import messages_at
from triton_ep.ops.tuning import as_words

# Device names of buffers that differ from the public names.
DEVICE_NAMES = {
    "dispatch_output_buf": "COMBINE_X",
    "weight_recv_buf": "COMBINE_WEIGHT",
    "token_send_buf_rdma": "NET_SEND",
    "token_recv_buf_rdma": "NET_RECV",
    "token_flag": "NET_FLAG",
    "partial_send_buf": "PARTIAL_SEND",
    "partial_recv_buf": "PARTIAL_RECV",
}


def _config(**changes) -> EPConfig:
    sizes = {"max_tokens": 100, "hidden": 72, "topk": 3, "num_experts": 16, "rank": 1, "world_size": 4}
    return EPConfig(**{**sizes, "local_world_size": 2, **changes})


def test_buffers_have_the_same_numbers_on_host_and_device() -> None:
    """A buffer's position in the table is its row in the address tables that kernels read."""
    for index, buffer in enumerate(BUFFERS):
        name = DEVICE_NAMES.get(buffer.name, buffer.name.upper())
        assert getattr(buffers, name).value == index, buffer.name
    assert buffers.NUM_BUFFERS.value == len(BUFFERS)


def test_reports_have_the_same_fields_on_host_and_device() -> None:
    """The host reads a row of the report into a tuple; kernels address its words by number."""
    assert [getattr(codes, f"REPORT_{name.upper()}") for name in Report._fields] == list(range(codes.REPORT_WORDS))


def test_words_of_the_state_array_do_not_overlap() -> None:
    """Epochs, counters, time limit, alarm, published words and the four words of the status record do not overlap."""
    words = [buffers.EPOCH_DISPATCH, buffers.EPOCH_COMBINE, buffers.EPOCH_BARRIER_ALL, buffers.EPOCH_BARRIER_NODE]
    words += [buffers.EPOCH_LL_DISPATCH, buffers.EPOCH_LL_COMBINE]
    words += [
        buffers.TIMEOUT_US,
        buffers.PROGRAMS_DONE,
        buffers.ALARM,
        buffers.OVERFLOW_TOTAL,
    ]
    words += [buffers.PROGRAMS_COUNTED, buffers.EPOCH_PLACED]
    single = [word.value for word in words]
    status = range(buffers.STATUS.value, buffers.STATUS.value + 4)
    assert sorted([*single, *status]) == list(range(buffers.STATE_WORDS.value))


@triton.jit
def _message_sizes_probe(out_ptr, word_ptr, row_words, KP: tl.constexpr, PAYLOAD: tl.constexpr):
    wire = wire_of(row_words, word_ptr.dtype.element_ty, PAYLOAD)
    messages = messages_at(tl.zeros([], tl.int64), wire.row_bytes, KP)
    tl.store(out_ptr, wire.row_bytes)
    tl.store(out_ptr + 1, messages.meta_offset)
    tl.store(out_ptr + 2, messages.row_bytes)


@pytest.mark.parametrize("payload", [None, "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [1, 37, 32, 96, 7168])
def test_rows_on_the_wire_are_as_kernels_compute_them(payload: str | None, dtype: torch.dtype, hidden: int) -> None:
    """Kernels derive the sizes of a row from its words; the layout allocates those of the longest row of a layer, which
    also sends one-byte rows with scales."""
    if payload and hidden % 32:
        pytest.skip("no row of MXFP8 has this length")
    sizes = Sizes(_config(hidden=hidden, token_dtype=dtype, payload=payload), 1, 1)
    row = torch.empty(1, hidden, dtype=dtype)
    forms = {WORDS: as_words(row, sizes.shape.payload_bytes)}
    if payload:
        forms = {QUANTISE: row}
    if hidden % 32 == 0:
        forms[MX] = as_words(row.view(torch.uint8)[:, :hidden], hidden)
    found = []
    for form, words in forms.items():
        out = torch.zeros(3, dtype=torch.int64)
        _message_sizes_probe[(1,)](out, words, words.numel(), KP=sizes.shape.kp, PAYLOAD=form.value)
        assert out[0] == (sizes.shape if form is not MX else replace(sizes.shape, payload="mxfp8")).wire_bytes
        found.append(out.tolist())
    assert [sizes.wire_bytes, sizes.message_meta_offset, sizes.message_bytes] == max(found)


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("local_world_size", [1, 2, 4])
def test_estimate_is_the_sum_of_aligned_buffers(capacity: int | None, local_world_size: int) -> None:
    """The memory of a layer is known before anything is allocated."""
    sizes = initial_sizes(_config(local_world_size=local_world_size, recv_capacity=capacity))
    total = 0
    for buffer in BUFFERS:
        nbytes = torch.Size(buffer.shape(sizes)).numel() * buffer.dtype(sizes.config).itemsize
        assert buffer.nbytes(sizes) % ALIGN_BYTES == 0
        assert 0 <= buffer.nbytes(sizes) - nbytes < ALIGN_BYTES
        total += buffer.nbytes(sizes)
    assert estimate_bytes(sizes) == total


@pytest.mark.parametrize(
    "changes, arrivals, sums",
    [
        ({"world_size": 8, "topk": 1}, 200, 200),  # twice the mean; at most there are 4 * 100 sums
        ({"world_size": 8, "topk": 8}, 800, 800),
        ({"world_size": 8, "topk": 1, "recv_capacity": 40}, 800, 400),
        ({"local_world_size": 4}, 400, 300),
    ],
)
def test_sums_have_as_many_rows_as_arrive_or_all_that_there_can_be(changes: dict, arrivals: int, sums: int) -> None:
    """A sum belongs to a token and a rank, like a row that arrives; static layers have room for the most of both."""
    config = _config(enable_local_combine=True, **changes)
    sizes = initial_sizes(config)
    assert (sizes.arrival_rows, sizes.output_rows) == (arrivals, sums)
    assert sums <= rows_of_sums(config)
    assert config.recv_capacity is None or sums == rows_of_sums(config)


def test_one_node_needs_no_network_buffers() -> None:
    """Buffers for puts take memory only with several nodes."""
    sizes = initial_sizes(_config(local_world_size=4))
    network = [buffer for buffer in BUFFERS if buffer.name.endswith("_rdma") or buffer.name.startswith("partial_")]
    assert [buffer.nbytes(sizes) for buffer in network if not buffer.name.endswith("flag")] == [0] * 4
