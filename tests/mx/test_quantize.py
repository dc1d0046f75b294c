"""Quantising kernels and the torch arithmetic of MXTensor give the oracle's bytes on every input."""

import pytest
import torch

from tests.combinations import combinations
from tests.mx.blocks import DEVICE, DTYPES, ELEMENTS, MODES, assert_same_bytes, random_bits, structured
from triton_ep.errors import InputError
from triton_ep.kernels.device import mxfp8 as device
from triton_ep.mx import arithmetic
from triton_ep.mx.formats import ScalingMode, elem_format
from triton_ep.ops import mxfp8 as ops
from triton_ep.reference import mxfp8 as reference

E4M3 = torch.float8_e4m3fn

# Group boundaries of [R, H]: sizes that are and are not multiples of 32, empty groups at either end, unused last rows.
GROUPS = {
    "none": (100, None),
    "one": (64, [0, 64]),
    "aligned": (160, [0, 32, 32, 96, 160]),
    "ragged": (200, [0, 5, 5, 69, 100, 133, 200]),
    "tail": (200, [0, 0, 33, 33, 70, 70]),
    "all_tail": (70, [0, 0, 0]),
    "no_groups": (40, [0]),
    "no_rows": (0, [0, 0, 0, 0]),
    "many": (42, [0, *range(1, 42, 2), 42]),
}
# More than a strip of columns. The loops inside a strip show with the narrow cases as well.
WIDE = ("none", "ragged", "tail")


def _grouped(case: str, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [R, hidden] and offsets, on the CPU."""
    rows, bounds = GROUPS[case]
    x = random_bits(rows * 32 * 32 * 2, dtype, seed=rows).view(-1, 32)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(5))].flatten()[: rows * hidden]
    return x.view(rows, hidden).clone(), None if bounds is None else torch.tensor(bounds, dtype=torch.int32)


def _on_device(offsets: torch.Tensor | None) -> torch.Tensor | None:
    return None if offsets is None else offsets.to(DEVICE)


def _in_float32_and_another(elem: str, mode: str, dtype: torch.dtype) -> bool:
    """For CPUs: every format and mode in float32 and one of the 16-bit dtypes, each of which meets every mode."""
    turn = list(ELEMENTS).index(elem) + MODES.index(mode)
    return dtype in (torch.float32, (torch.bfloat16, torch.float16)[turn % 2])


EVERY_FORM = pytest.mark.parametrize(
    ("elem", "mode", "dtype"),
    combinations(list(ELEMENTS), MODES, list(DTYPES.values()), on_cpu=_in_float32_and_another),
)


@EVERY_FORM
def test_every_structured_block_is_the_references(elem: str, mode: str, dtype: torch.dtype) -> None:
    """Zeros, subnormals, NaN, infinities, ties, every exponent with every mantissa at which a rule's result changes."""
    x = structured(elem, dtype)
    codes, scale = reference.quantize(x, ELEMENTS[elem], mode)
    by_kernel = ops.quantize_rows(x.to(DEVICE), ELEMENTS[elem], mode)
    by_torch = arithmetic.quantize(x, elem_format(ELEMENTS[elem]), ScalingMode(mode), 32)
    for name, (got_codes, got_scale) in (("kernel", by_kernel), ("torch", by_torch)):
        assert_same_bytes(got_scale, scale, f"scales of the {name}")
        assert_same_bytes(got_codes, codes, f"elements of the {name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("elem", ELEMENTS)
def test_a_million_random_values_are_the_references(elem: str, dtype: torch.dtype) -> None:
    """A quarter of the values in each mode."""
    for seed, mode in enumerate(MODES):
        x = random_bits(262_144, dtype, seed)
        codes, scale = reference.quantize(x, ELEMENTS[elem], mode)
        got_codes, got_scale = ops.quantize_rows(x.to(DEVICE), ELEMENTS[elem], mode)
        assert_same_bytes(got_scale, scale, f"scales, {mode}")
        assert_same_bytes(got_codes, codes, f"elements, {mode}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("elem", ELEMENTS)
def test_ten_million_random_values_per_mode_on_a_gpu(elem: str, dtype: torch.dtype) -> None:
    """Rows, columns and both, compiled, against the oracle, which computes in float64 on the GPU."""
    x = random_bits(10_485_760, dtype, seed=23, device="cuda")
    rows = x.view(-1, 4096)
    for mode in MODES:
        codes, scale = (part.view(rows.shape[0], -1) for part in reference.quantize(x, ELEMENTS[elem], mode))
        column_codes, column_scale = reference.quantize(rows.T.contiguous(), ELEMENTS[elem], mode)
        both = ops.quantize_both(rows, None, ELEMENTS[elem], mode)
        alone = (
            *ops.quantize_rows(rows, ELEMENTS[elem], mode),
            *ops.quantize_columns(rows, None, ELEMENTS[elem], mode),
        )
        wanted = (codes, scale, column_codes.view(torch.uint8).T.contiguous().view(ELEMENTS[elem]), column_scale.T)
        for got, got_alone, want in zip(both, alone, wanted, strict=True):
            assert_same_bytes(got, want.contiguous(), f"both, {mode}")
            assert_same_bytes(got_alone, want.contiguous(), f"alone, {mode}")
        values = ops.dequantize_rows(codes, scale, dtype)
        expected = reference.dequantize(codes, scale, dtype)
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts() -> None:
    """The last blocks of 2**31 + 2**21 elements are quantised correctly."""
    hidden = 4096
    rows = (2**31 + 2**21) // hidden
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    x[-64:] = torch.randn(64, hidden, device="cuda")
    wanted = reference.quantize(x[-64:].cpu())
    for got, want in zip(ops.quantize_rows(x), wanted, strict=True):
        assert_same_bytes(got[-64:], want, "rows")
    codes, scale = ops.quantize_columns(x)
    want_codes, want_scale = reference.quantize_columns(x[-64:].cpu())
    assert_same_bytes(codes[-64:], want_codes, "columns")
    assert_same_bytes(scale[-2:], want_scale, "scales of columns")
    values = ops.dequantize_rows(*ops.quantize_rows(x))
    assert torch.equal(values[-64:].cpu(), reference.dequantize(*wanted, torch.bfloat16))


@pytest.mark.parametrize(
    ("case", "hidden"), combinations(list(GROUPS), [32, 1056], on_cpu=lambda case, hidden: hidden == 32 or case in WIDE)
)
def test_columns_and_both_are_the_references(case: str, hidden: int) -> None:
    """Blocks start again at each group; short blocks, empty groups and rows past the last group included."""
    x, offsets = _grouped(case, hidden, torch.bfloat16)
    column_codes, column_scale = reference.quantize_columns(x, offsets)
    row_codes, row_scale = reference.quantize(x)
    alone = ops.quantize_columns(x.to(DEVICE), _on_device(offsets))
    both = ops.quantize_both(x.to(DEVICE), _on_device(offsets))
    for got, want, what in zip(
        (*alone, *both),
        (column_codes, column_scale, row_codes, row_scale, column_codes, column_scale),
        ("columns", "scale", "both: rows", "both: row scale", "both: columns", "both: column scale"),
        strict=True,
    ):
        assert_same_bytes(got, want, what)


@EVERY_FORM
def test_both_in_every_format(elem: str, mode: str, dtype: torch.dtype) -> None:
    """Both directions at once, on structured blocks that cross group boundaries."""
    x = structured(elem, dtype)[::23].flatten()
    x = x[: len(x) // 96 * 96].view(-1, 96)
    offsets = torch.tensor([0, 7, 39, len(x)], dtype=torch.int32)
    got = ops.quantize_both(x.to(DEVICE), _on_device(offsets), ELEMENTS[elem], mode)
    rows = reference.quantize(x, ELEMENTS[elem], mode)
    columns = reference.quantize_columns(x, offsets, ELEMENTS[elem], mode)
    for part, want in zip(got, (*rows, *columns), strict=True):
        assert_same_bytes(part, want, f"{elem} {mode}")


def test_columns_of_any_width() -> None:
    """The width need not be a multiple of 32, which only row blocks require."""
    x = torch.randn(70, 41, generator=torch.Generator().manual_seed(2))
    offsets = torch.tensor([0, 40, 70], dtype=torch.int32)
    for got, want in zip(
        ops.quantize_columns(x.to(DEVICE), _on_device(offsets)), reference.quantize_columns(x, offsets), strict=True
    ):
        assert_same_bytes(got, want, "columns")


@pytest.mark.parametrize("elem", ELEMENTS)
def test_every_scale_and_element_is_dequantised(elem: str) -> None:
    """All 256 scales times all 256 elements, in every dtype, by kernels and by torch arithmetic."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    qdata = codes.repeat(256, 1).view(ELEMENTS[elem])
    scale = codes[:, None].expand(256, 8).contiguous()
    for dtype in DTYPES.values():
        expected = reference.dequantize(qdata, scale, dtype)
        by_rows = ops.dequantize_rows(qdata.to(DEVICE), scale.to(DEVICE), dtype).cpu()
        by_torch = arithmetic.dequantize(qdata, scale, dtype)
        columns = qdata.view(torch.uint8).T.contiguous().view(ELEMENTS[elem])
        by_columns = ops.dequantize_columns(columns.to(DEVICE), scale.T.to(DEVICE), None, dtype).cpu().T
        for got in (by_rows, by_torch, by_columns):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", GROUPS)
def test_columns_are_dequantised_by_group(case: str) -> None:
    """Values return within the rounding of e4m3; rows past the last group become zero, whatever they held."""
    rows, bounds = GROUPS[case]
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16).to(DEVICE)
    offsets = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    end = rows if bounds is None else bounds[-1]
    codes, scale = ops.quantize_columns(x, offsets)
    codes.view(torch.uint8)[end:] = 0x7F
    values = ops.dequantize_columns(codes, scale, offsets)
    # Half a unit of 3 mantissa bits; for the smallest elements half their step, 2**-10, at a scale below 4 / 256.
    torch.testing.assert_close(values[:end], x[:end], rtol=2.0**-4, atol=2.0**-10 * 4 / 256)
    assert torch.equal(values[end:], torch.zeros_like(values[end:]))


def test_strided_rows_and_no_rows() -> None:
    """A slice of columns is quantised like its copy; empty tensors give empty tensors."""
    x = torch.randn(6, 192, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    for got, want in zip(ops.quantize_rows(x[:, 64:128]), ops.quantize_rows(x[:, 64:128].clone()), strict=True):
        assert_same_bytes(got, want, "slice")
    for shape in ((0, 64), (3, 0)):
        codes, scale = ops.quantize_rows(x.new_empty(shape))
        assert (codes.shape, scale.shape) == (shape, (shape[0], shape[1] // 32))
        assert ops.dequantize_rows(codes, scale).shape == shape
        assert ops.quantize_columns(x.new_empty(shape))[0].shape == shape


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_other_block_sizes(block_size: int) -> None:
    """The torch arithmetic takes any block size."""
    x = random_bits(64 * 128, torch.float32, seed=block_size).view(-1, 128)
    for mode in MODES:
        got = arithmetic.quantize(x, elem_format(E4M3), ScalingMode(mode), block_size)
        for part, want in zip(got, reference.quantize(x, E4M3, mode, block_size), strict=True):
            assert_same_bytes(part, want, mode)


def test_modes_by_any_name() -> None:
    """Strings in any case, the enum, and other enums with the same names; the kernels support all modes."""
    import enum

    other = enum.Enum("Other", {"RCEIL": 7, "FLOOR": 8})
    assert ScalingMode.parse("RCEIL") is ScalingMode.parse(other.RCEIL) is ScalingMode.RCEIL
    assert ScalingMode.parse(ScalingMode.EVEN) is ScalingMode.EVEN
    codes = [device.MODE_RCEIL, device.MODE_FLOOR, device.MODE_CEIL, device.MODE_EVEN]
    assert [code.value for code in codes] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: ops.quantize_rows(x[:, :33]), "multiple of 32"),
        (lambda x: ops.quantize_rows(x[0]), r"\[R, H\]"),
        (lambda x: ops.quantize_rows(x.double()), "float64"),
        (lambda x: ops.quantize_rows(x, torch.uint8), "elem_dtype is torch.uint8"),
        (lambda x: ops.quantize_rows(x, scaling_mode="nearest"), "'nearest'.*'rceil', 'floor', 'ceil', 'even'"),
        (lambda x: ops.quantize_columns(x, torch.tensor([0, 4])), "int32"),
        (lambda x: ops.quantize_both(x[:, :33]), "multiple of 32"),
        (lambda x: ops.dequantize_rows(*ops.quantize_rows(x), torch.float64), "float64"),
        (lambda x: ops.dequantize_rows(ops.quantize_rows(x)[0], x), r"\[R, H / 32\]"),
        (lambda x: ops.dequantize_rows(x, x), "elem_dtype"),
        (lambda x: ops.dequantize_columns(*ops.quantize_columns(x), torch.zeros(9, dtype=torch.int32, device=DEVICE)),
         "8 groups"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, text: str) -> None:
    """Invalid shapes, dtypes and modes; each error names the given value."""
    with pytest.raises(InputError, match=text):
        call(torch.zeros(4, 64, device=DEVICE))


@pytest.mark.skipif(DEVICE != "cpu", reason="of a GPU the host does not read offsets")
@pytest.mark.parametrize("starts", [[-5, 3], [1, 4], [0, 4, 2, 5], [0, 6], [0, -1]])
def test_wrong_offsets_are_refused_where_the_host_can_read_them(starts: list[int]) -> None:
    """The error comes before any access to memory before or after the rows."""
    x, offsets = torch.zeros(5, 32), torch.tensor(starts, dtype=torch.int32)
    elements, scale = ops.quantize_columns(x, torch.tensor([0] * len(starts), dtype=torch.int32))
    for call in (
        lambda: ops.quantize_columns(x, offsets),
        lambda: ops.quantize_both(x, offsets),
        lambda: ops.dequantize_columns(elements, scale, offsets),
    ):
        with pytest.raises(InputError, match="must begin with 0, never decrease, and end at 5 or before"):
            call()
