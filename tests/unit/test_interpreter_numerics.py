"""Arithmetic of interpreted kernels equals a GPU's, bit for bit if the result is unique."""

from typing import Any

import pytest
import torch
import triton

from tests.programs import environment_of_programs, run_program
from triton_ep.runtime import interpreter

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are compiled in this process", allow_module_level=True)

from . import interpreter_kernels as kernels

BLOCK = 1 << 15
BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
# Canonical NaNs: PTX defines one pattern per format.
NAN = {torch.bfloat16: 0x7FFF, torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    interpreter.install()


def _all_bf16() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def _float32_patterns() -> torch.Tensor:
    """2**18 float32: random bits, and random numbers at and next to the ties of every format."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 18,), generator=generator, dtype=torch.int64)
    # Numbers within the range of float8, cut to few bits, plus or minus one unit: ties, and near ties.
    ties = bits[1 << 17 :]
    exponent = 100 + (ties >> 23) % 50
    keep = torch.tensor([0x7FF80000, 0x7FF00000, 0x7FFF8000, 0x7FFC0000])[ties & 3]
    ties = ((exponent << 23) | (ties & 0x7FFFFF)) & keep
    ties += bits[: 1 << 17] % 3 - 1
    return torch.cat([bits[: 1 << 17], ties]).to(torch.int32).view(torch.float32)


def _cast(x: torch.Tensor, dtype: torch.dtype, kernel: Any = None) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    (kernel or kernels.cast_kernel)[(x.numel() // BLOCK,)](x, out, BLOCK=BLOCK)
    return out


def _assert_same_bits(out: torch.Tensor, expected: torch.Tensor, is_nan: torch.Tensor) -> None:
    """Compare the bits of a narrow float; where `is_nan`, expect the format's canonical NaN."""
    bits = BITS[out.dtype]
    got, want = out.view(bits).to(torch.int32), expected.view(bits).to(torch.int32)
    want[is_nan] = NAN[out.dtype]
    wrong = (got != want).nonzero().flatten()
    assert wrong.numel() == 0, f"{wrong.numel()} differ, first at {wrong[0]}: {got[wrong[0]]:#x}, {want[wrong[0]]:#x}"


@pytest.mark.parametrize("dtype", list(BITS), ids=str)
@pytest.mark.parametrize("source", ["bf16", "float32"])
def test_casts_round_to_nearest_even_and_saturate(source: str, dtype: torch.dtype) -> None:
    """Every bf16 and 2**18 float32 are cast as torch casts them, to float8 after clamping."""
    x = _all_bf16() if source == "bf16" else _float32_patterns()
    clamped = x.float().clamp(-LARGEST[dtype], LARGEST[dtype]) if dtype in LARGEST else x
    out = _cast(x, dtype)
    if x.dtype == dtype:
        assert torch.equal(out.view(torch.int16), x.view(torch.int16))
    else:
        _assert_same_bits(out, clamped.to(dtype), x.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32], ids=str)
def test_casts_of_bf16_from_and_to_other_types(dtype: torch.dtype) -> None:
    """bf16 casts to fp16, fp64 and int32, and back, round once."""
    x = _all_bf16()
    if dtype == torch.int32:
        x = torch.where(x.abs() < 2**31, x, 0)
    out = _cast(x, dtype)
    expected = x.to(dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    if dtype == torch.float16:  # no exact way back: check all fp16 numbers instead
        out = expected = x.view(torch.float16)
    back = _cast(out, torch.bfloat16)
    _assert_same_bits(back, expected.to(torch.bfloat16), expected.isnan() if dtype.is_floating_point else x != x)


def test_wide_numbers_are_rounded_once() -> None:
    """fp64 next to a tie of bf16 must not be rounded to the tie in float32 first."""
    above, below = 1.00390625 + 2.0**-40, 1.01171875 - 2.0**-40
    x = torch.tensor([above, below, -above, 1e300, 2.0**-133 + 2.0**-134 + 2.0**-180], dtype=torch.float64)
    x = torch.nn.functional.pad(x, (0, BLOCK - x.numel()))
    expected = [0x3F81, 0x3F81, 0xBF81, 0x7F80, 0x0002]
    assert [bits & 0xFFFF for bits in _cast(x, torch.bfloat16).view(torch.int16)[:5].tolist()] == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_float8_is_read_exactly(dtype: torch.dtype) -> None:
    """All 256 patterns have their value as float32 and bf16; NaN stays NaN, infinities of e5m2 stay infinite."""
    x = torch.arange(BLOCK).to(torch.uint8).view(dtype)
    for wide in (torch.float32, torch.bfloat16):
        torch.testing.assert_close(_cast(x, wide), x.to(wide), rtol=0, atol=0, equal_nan=True)


def test_truncation_is_honoured() -> None:
    """fp_downcast_rounding="rtz" drops the bits, and never turns a finite number into infinity."""
    x = _float32_patterns()
    expected = (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    _assert_same_bits(_cast(x, torch.bfloat16, kernels.truncate_kernel), expected, x.isnan())


def test_bf16_arithmetic_rounds_like_torch() -> None:
    """All bf16 values with a permutation of them: + - * fma maximum where negation."""
    a = _all_bf16()
    b = a[torch.randperm(a.numel(), generator=torch.Generator().manual_seed(3))]
    out = torch.empty((7, a.numel()), dtype=torch.bfloat16)
    kernels.arithmetic_kernel[(a.numel() // BLOCK,)](a, b, out, a.numel(), BLOCK=BLOCK)
    fused = (a.double() * b.double() + a.double()).float().to(torch.bfloat16)
    expected = [a + b, a - b, a * b, fused, torch.fmax(a, b), torch.where((a < b) & ~a.isnan(), a, b + 1), -a]
    names = ["sum", "difference", "product", "fma", "maximum", "where", "negative"]
    for name, got, want in zip(names, out, expected, strict=True):
        if name == "maximum":  # Triton versions differ for NaN operands
            ordered = ~(a.isnan() | b.isnan())
            got, want = got[ordered], want[ordered]
        # Zeros may differ in sign: a - b for minus, and maximum of zeros.
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


def test_bf16_reductions_accumulate_in_float32() -> None:
    """Sum, maximum and running sum of bf16 round once, in the result."""
    x = torch.randn((256, 16), generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    out = torch.empty((3, 16))
    kernels.reduce_kernel[(1,)](x, out, ROWS=256, COLUMNS=16)
    total = x.double().sum(0)
    # Half a unit of bf16, 2**-9, for the rounding; float32 accumulation of 256 terms adds far less.
    torch.testing.assert_close(out[0].double(), total, rtol=2.0**-8, atol=1e-4)
    torch.testing.assert_close(out[2].double(), total, rtol=2.0**-8, atol=1e-4)
    assert torch.equal(out[1], x.float().max(0).values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dot_of_narrow_floats(dtype: torch.dtype) -> None:
    """Operands are integers of few bits, so the float32 product is exact in any order."""
    generator = torch.Generator().manual_seed(11)
    a = torch.randint(-4, 5, (32, 64), generator=generator).to(dtype)
    b = torch.randint(-4, 5, (64, 16), generator=generator).to(dtype)
    out = torch.empty((32, 16))
    kernels.dot_kernel[(1,)](a, b, out, M=32, N=16, K=64)
    assert torch.equal(out, a.float() @ b.float())


def _e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Two fp4 per byte along the last dimension, low nibble first."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return torch.where(nibbles > 7, -table[nibbles & 7], table[nibbles & 7])


@pytest.mark.parametrize("a_format", ["e4m3", "bf16", "e2m1"])
@pytest.mark.parametrize("b_format", ["e4m3", "e5m2", "e2m1"])
def test_dot_scaled(a_format: str, b_format: str) -> None:
    """Both operands have one e8m0 scale per 32 elements along K; formats are plain strings."""
    generator = torch.Generator().manual_seed(13)
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}

    def operand(rows: int, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, 64] in storage form and as float32 values."""
        if fmt == "e2m1":
            stored = torch.randint(0, 256, (rows, 32), generator=generator).to(torch.uint8)
            return stored, _e2m1(stored)
        stored = torch.randint(-4, 5, (rows, 64), generator=generator).to(dtypes[fmt])
        return stored, stored.float()

    (a, a_values), (b, b_values) = operand(16, a_format), operand(32, b_format)
    a_scale = torch.randint(124, 131, (16, 2), generator=generator).to(torch.uint8)
    b_scale = torch.randint(124, 131, (32, 2), generator=generator).to(torch.uint8)
    out = torch.empty((16, 32))
    b = b.view(torch.uint8).T.contiguous().view(b.dtype)
    kernels.dot_scaled_kernel[(1,)](
        a, a_scale, b, b_scale, out, M=16, N=32, K=64,
        A_PACK=1 + (a_format == "e2m1"), B_PACK=1 + (b_format == "e2m1"),
        A_FORMAT=a_format, B_FORMAT=b_format,
    )  # fmt: skip
    a_values = a_values * torch.exp2(a_scale.float() - 127).repeat_interleave(32, 1)
    b_values = b_values * torch.exp2(b_scale.float() - 127).repeat_interleave(32, 1)
    torch.testing.assert_close(out, a_values @ b_values.T + 1, rtol=0, atol=0)


def test_a_scale_of_255_is_nan() -> None:
    """e8m0 has one NaN, which affects only its own row."""
    ones = torch.ones((32, 32)).to(torch.float8_e4m3fn)
    a_scale = torch.full((32, 1), 127, dtype=torch.uint8)
    b_scale = a_scale.clone()
    a_scale[3] = 255
    out = torch.empty((32, 32))
    kernels.dot_scaled_kernel[(1,)](
        ones,
        a_scale,
        ones,
        b_scale,
        out,
        M=32,
        N=32,
        K=32,
        A_PACK=1,
        B_PACK=1,
        A_FORMAT="e4m3",
        B_FORMAT="e4m3",
    )
    assert out[3].isnan().all()
    assert (out[[i for i in range(32) if i != 3]] == 33).all()


def test_float8_has_no_arithmetic() -> None:
    """Arithmetic that does not compile for GPUs is an error in the interpreter, too."""
    x = torch.ones(1).to(torch.float8_e4m3fn)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="cast to float32 first"):
        kernels.fp8_sum_kernel[(1,)](x, x.clone())


def test_self_test_passes_and_names_what_is_broken() -> None:
    """The self-test passes here; without the fix-ups it fails and names each one."""
    interpreter.self_test()
    script = "from triton_ep.runtime.interpreter import selftest; selftest.run()"
    done = run_program(["-c", script])
    assert done.returncode != 0
    for name in (
        "float32 to bf16",
        "float32 to float8 e4m3",
        "NaN of float8 e4m3",
        "bf16 arithmetic",
        "tl.dot of bf16",
    ):
        assert f"{name}: " in done.stderr


def test_only_interpreted_processes_are_changed() -> None:
    """Importing the package does not import Triton; installing without TRITON_INTERPRET names the remedy."""
    script = (
        "import sys; from triton_ep.runtime import interpreter\n"
        "assert 'triton' not in sys.modules\n"
        "interpreter.set_chaos(None)\n"
        "for call in (interpreter.install, lambda: interpreter.set_chaos(1), interpreter.self_test):\n"
        "    try: call()\n"
        "    except interpreter.EPError as error: print(error)\n"
        "import triton.runtime.interpreter as stock\n"
        "print(stock._patch_lang.__module__, hasattr(stock.InterpreterBuilder, 'create_dot_scaled'))\n"
    )
    done = run_program(["-c", script], environment_of_programs() | {"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "set TRITON_INTERPRET=1" in lines[0]
    assert "chaos mode belongs to interpreted kernels" in lines[1]
    assert "install()" in lines[2]
    assert lines[3].startswith("triton.runtime.interpreter ")
