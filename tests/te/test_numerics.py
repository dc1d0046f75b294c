"""Linear and GroupedLinear: results and gradients against float64 products of the quantised operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint

import triton_ep.integrations.te as te
from tests.ops.grouped import check, ends_of
from tests.te import rule
from tests.te.rule import DEVICE
from triton_ep import MXTensor
from triton_ep.reference import grouped_gemm as oracle
from triton_ep.runtime.launch import INTERPRETING

BACKEND = "aot_eager" if INTERPRETING else "inductor"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:MXFP8 is emulated")]


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _linear(n: int, k: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> te.Linear:
    layer = te.Linear(k, n, bias=bias, params_dtype=dtype, device=DEVICE)
    with torch.no_grad():
        layer.weight.copy_(_randn(n, k, seed=1) / 8)
        if bias:
            layer.bias.copy_(_randn(n, seed=2))
    return layer


def _grouped(experts: int, n: int, k: int, bias: bool = False) -> te.GroupedLinear:
    layer = te.GroupedLinear(experts, k, n, bias=bias, params_dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        for e in range(experts):
            getattr(layer, f"weight{e}").copy_(_randn(n, k, seed=10 + e) / 8)
            if bias:
                getattr(layer, f"bias{e}").copy_(_randn(n, seed=20 + e))
    return layer


def _close(seen: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | float = 0.0) -> None:
    """`seen` is a @ b + bias of float64 operands, summed in float32 and rounded once."""
    unit = a.abs() @ b.abs() + (bias.abs() if isinstance(bias, torch.Tensor) else 0.0)
    check(seen.detach().cpu(), a @ b + bias, unit, terms=a.shape[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fp8_format", [te.Format.E4M3, te.Format.HYBRID], ids=lambda f: f.name)
@pytest.mark.parametrize("tokens", [64, 45])
def test_linear_numerics(tokens: int, fp8_format: te.Format, dtype: torch.dtype) -> None:
    """y, dx, dw and db; any number of tokens; gradients in E5M2 with HYBRID."""
    layer, n, k = _linear(96, 64, dtype), 96, 64
    x = _randn(tokens, k, seed=3, dtype=dtype).requires_grad_()
    dy = _randn(tokens, n, seed=4, dtype=dtype)
    with te.autocast(recipe=te.MXFP8BlockScaling(fp8_format=fp8_format)):
        y = layer(x)
    y.backward(dy)  # outside the region: the recipe of the forward pass applies
    grad_dtype = E5M2 if fp8_format == te.Format.HYBRID else E4M3
    w, bias = layer.weight.detach(), layer.bias.detach().cpu().double()
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype
    _close(y, rule.along_rows(x.detach()), rule.along_rows(w).t(), bias)
    _close(x.grad, rule.along_rows(dy, grad_dtype), rule.along_columns(w))
    _close(layer.weight.grad, rule.along_columns(dy, grad_dtype).t(), rule.along_columns(x.detach()))
    check(layer.bias.grad.cpu(), dy.cpu().double().sum(0), dy.cpu().double().abs().sum(0), terms=tokens)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(override: str) -> None:
    """Gradients from unquantised operands or from the forward pass's values; the recipe may change later."""
    layer, x, dy = _linear(96, 64, bias=False), _randn(32, 64, seed=3).requires_grad_(), _randn(32, 96, seed=4)
    recipe = te.MXFP8BlockScaling(backward_override=override)
    with te.autocast(recipe=recipe):
        y = layer(x)
    recipe.backward_override = None
    y.backward(dy)
    seen_x, seen_w = x.detach().cpu().double(), layer.weight.detach().cpu().double()
    if override == "dequantized":
        seen_x, seen_w = rule.along_rows(x.detach()), rule.along_rows(layer.weight.detach())
    _close(y, rule.along_rows(x.detach()), rule.along_rows(layer.weight.detach()).t())
    _close(x.grad, dy.cpu().double(), seen_w)
    _close(layer.weight.grad, dy.cpu().double().t(), seen_x)


def test_changes_of_a_recipe_count() -> None:
    """The same object with another format, between two passes inside one region; quantisers follow."""
    layer, x, dy = _linear(32, 32, bias=False), _randn(32, 32, seed=3).requires_grad_(), _randn(32, 32, seed=4)
    recipe = te.MXFP8BlockScaling()
    with te.autocast(recipe=recipe):
        for fp8_format, grad_dtype in ((te.Format.E4M3, E4M3), (te.Format.HYBRID, E5M2), (te.Format.E4M3, E4M3)):
            recipe.fp8_format = fp8_format
            x.grad = None
            layer(x).backward(dy)
            _close(x.grad, rule.along_rows(dy, grad_dtype), rule.along_columns(layer.weight.detach()))
            assert [q.dtype for q in layer.quantizers["scaling_bwd"]] == [grad_dtype] * 2
            assert len(layer.quantizers["scaling_fwd"]) == 3


SPLITS = (33, 0, 1, 62)
"""A short last block, an empty group, a group of one row."""


@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_linear_numerics(bias: bool, as_tensor: bool) -> None:
    """y, dx, dw and db per group; blocks along rows start again in each; rows past the last group have no effect."""
    layer, spare = _grouped(4, 96, 64, bias), 3 if as_tensor else 0
    rows, ends = sum(SPLITS) + spare, ends_of(SPLITS).cpu()
    x, dy = _randn(rows, 64, seed=3).requires_grad_(), _randn(rows, 96, seed=4)
    splits = torch.tensor(SPLITS, device=DEVICE) if as_tensor else list(SPLITS)
    with te.autocast():
        y = layer(x, splits)
    y.backward(dy)
    w = torch.stack([getattr(layer, f"weight{e}").detach().cpu() for e in range(4)])
    w_rows = torch.stack([rule.along_rows(each) for each in w])
    w_columns = torch.stack([rule.along_columns(each) for each in w])
    x_rows, dy_rows = rule.along_rows(x.detach()), rule.along_rows(dy)
    exact = oracle.grouped_gemm(x_rows, w_rows.transpose(1, 2), ends)
    unit = oracle.magnitude(x_rows, w_rows.transpose(1, 2), ends)
    for e, part in oracle.groups(ends):
        dy_columns, x_columns = rule.along_columns(dy[part]), rule.along_columns(x.detach()[part])
        _close(getattr(layer, f"weight{e}").grad, dy_columns.t(), x_columns)
        if bias:
            b = getattr(layer, f"bias{e}")
            exact[part] += b.detach().cpu().double()
            unit[part] += b.detach().cpu().double().abs()
            exact_db = dy[part].cpu().double()
            check(b.grad.cpu(), exact_db.sum(0), exact_db.abs().sum(0), terms=62)
    check(y.detach().cpu(), exact, unit, terms=64)
    check(x.grad.cpu(), oracle.grouped_gemm(dy_rows, w_columns, ends), oracle.magnitude(dy_rows, w_columns, ends), 96)
    assert not y[sum(SPLITS) :].any() and not x.grad[sum(SPLITS) :].any()
    assert not layer.weight1.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_autocast_nothing_is_quantised(dtype: torch.dtype) -> None:
    """Both modules, forward and backward, in high precision; also inside a disabled region."""
    layer = te.GroupedLinear(2, 64, 32, params_dtype=dtype, device=DEVICE)
    single = te.Linear(64, 32, params_dtype=dtype, device=DEVICE)
    x, dy = _randn(40, 64, dtype=dtype).requires_grad_(), _randn(40, 32, seed=1, dtype=dtype)
    with te.autocast(), te.autocast(enabled=False):
        y, z = layer(x, [40, 0]), single(x)
    (y + z).backward(dy)
    xd, dyd = x.detach().cpu().double(), dy.cpu().double()
    for out, w in ((y, layer.weight0), (z, single.weight)):
        _close(out, xd, w.detach().cpu().double().t())
        _close(w.grad, dyd.t(), xd)


def _against_bf16(module: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor], k: int, n: int) -> list[float]:
    """Signal to noise of y, dx and dw of `run`, against the same computation in high precision."""
    found = []
    for enabled in (False, True):
        x, dy = _randn(128, k, seed=5).requires_grad_(), _randn(128, n, seed=6)
        with te.autocast(enabled=enabled):
            y = run(x)
        y.backward(dy)
        weights = [p for name, p in module.named_parameters() if name.startswith("weight")]
        found.append((y, x.grad, torch.cat([w.grad for w in weights])))
        module.zero_grad()
    return [rule.snr(exact, seen) for exact, seen in zip(*found, strict=True)]


def test_noise_against_bf16() -> None:
    """At least 26, 25 and 24 dB for result, gradient of the input, gradient of the weights."""
    single, grouped = _linear(128, 256, bias=False), _grouped(3, 128, 256)
    for found in (
        _against_bf16(single, single, 256, 128),
        _against_bf16(grouped, lambda x: grouped(x, [64, 0, 64]), 256, 128),
    ):
        assert all(seen >= least for seen, least in zip(found, (26, 25, 24), strict=True)), found


def test_grouped_linear_prequantized_mxfp8_input() -> None:
    """MXFP8 input is bit-identical to the same values quantised by the module, forward and backward."""
    splits = [64, 0, 32]
    for form in ("MXTensor", "MXFP8Tensor", "rowwise MXFP8Tensor"):
        found = []
        x = _randn(96, 64, seed=5)
        if form == "MXTensor":
            quantised = MXTensor.to_mx(x)
        else:
            quantised = te.MXFP8Quantizer(E4M3, columnwise=not form.startswith("row"))(x)
        for given in (quantised.detach(), quantised.detach().dequantize()):
            layer = _grouped(3, 32, 64)
            leaf = given.requires_grad_()
            with te.autocast():
                y = layer(leaf, splits)
            y.backward(_randn(96, 32, seed=6))
            assert type(leaf.grad) is torch.Tensor
            found.append([y.detach(), leaf.grad, layer.weight0.grad, layer.weight1.grad, layer.weight2.grad])
        assert all(map(torch.equal, *found)), form


def test_linear_takes_prequantised_input_and_leading_dimensions() -> None:
    """[..., K] in, [..., N] out; MXFP8 input counts as its values, inside and outside autocast."""
    layer = _linear(32, 64)
    x = _randn(2, 16, 64, seed=5)
    quantised = te.MXFP8Quantizer(E4M3, columnwise=False)(x)
    for enabled in (True, False):
        with te.autocast(enabled=enabled):
            out = layer(quantised)
            assert out.shape == (2, 16, 32)
            assert torch.equal(out, layer(quantised.dequantize()))
            assert torch.equal(out.view(32, 32), layer(quantised.dequantize().view(32, 64)))


def test_micro_batches_share_quantised_weights() -> None:
    """is_first_microbatch: False reuses the weights that True quantised; gradients go to the weight itself."""
    layer, x, dy = _linear(32, 64, bias=False), _randn(32, 64, seed=5), _randn(32, 32, seed=6)
    with te.autocast():
        first = layer(x, is_first_microbatch=True)
        with torch.no_grad():
            layer.weight.mul_(3)
        assert torch.equal(layer(x, is_first_microbatch=False), first)
        assert not torch.equal(layer(x), first)
        again = layer(x, is_first_microbatch=True)
        assert torch.equal(again, layer(x))
    again.backward(dy)
    _close(layer.weight.grad, rule.along_columns(dy).t(), rule.along_columns(x))


# --- torch.compile ----------------------------------------------------------------------------------------


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.experts = _linear(64, 32), _grouped(2, 32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(torch.nn.functional.gelu(self.up(x)), [20, 12])


def _results(block: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    block.zero_grad()
    x = _randn(32, 32, seed=7).requires_grad_()
    y = run(x)
    y.backward(_randn(32, 32, seed=8))
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())]


def _same(seen: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    if BACKEND == "aot_eager":
        return all(map(torch.equal, seen, want))
    # Fused operations round less often, so a value may be quantised to its neighbour.
    return all(rule.snr(b, a) > 20 for a, b in zip(seen, want, strict=True))


def test_compile_follows_the_region_outside() -> None:
    """One graph, fullgraph=True, serves calls in any region and outside all regions."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds to import

    torch._dynamo.reset()
    block = _Block()
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    hybrid = te.MXFP8BlockScaling(fp8_format=te.Format.HYBRID)
    by_region = []
    with torch._inductor.config.patch(compile_threads=1):
        for enabled, recipe in ((False, None), (True, None), (True, hybrid), (False, None)):
            with te.autocast(enabled=enabled, recipe=recipe):
                seen, want = _results(block, compiled), _results(block, block)
            assert _same(seen, want)
            by_region.append(want)
    assert counter.frame_count == 1
    assert not torch.equal(by_region[0][0], by_region[1][0]) and not torch.equal(by_region[1][1], by_region[2][1])


def test_compile_nested_autocast() -> None:
    """Regions inside the compiled function, one disabled inside another; a changed recipe is traced again."""
    torch._dynamo.reset()
    block, recipe = _Block(), te.MXFP8BlockScaling()

    def run(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            first = block.up(x)
            with te.autocast(enabled=False):
                second = block.up(x)
            with te.autocast():
                return block.experts(first + second, [20, 12])

    compiled = torch.compile(run, fullgraph=True, backend=BACKEND)
    with torch._inductor.config.patch(compile_threads=1):
        for fp8_format in (te.Format.E4M3, te.Format.HYBRID):
            recipe.fp8_format = fp8_format
            assert _same(_results(block, compiled), _results(block, run))
    assert te.FP8GlobalStateManager.AUTOCAST_DEPTH == 0 and te.state.traced_state() is None


# --- activation checkpointing -------------------------------------------------------------------------------


def _plain_checkpoint(reentrant: bool) -> Callable[..., torch.Tensor]:
    return lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)


CHECKPOINTS = {
    "te": lambda block, x: te.checkpoint(block, x),
    "te_reentrant": lambda block, x: te.checkpoint(block, x, use_reentrant=True),
    "torch_contexts": lambda block, x: torch.utils.checkpoint.checkpoint(
        block, x, use_reentrant=False, context_fn=te.checkpoint_contexts
    ),
    "torch": _plain_checkpoint(False),
    "torch_reentrant": _plain_checkpoint(True),
}


@pytest.mark.parametrize("backward_in", ["nothing", "another recipe"])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_recomputation_sees_the_recipe(how: str, backward_in: str) -> None:
    """Gradients are bit-identical to those without checkpointing, wherever the backward pass runs."""
    block, found, calls = _Block(), [], []
    block.up.register_forward_hook(lambda *_: calls.append(te.FP8GlobalStateManager.AUTOCAST_DEPTH))
    hybrid = te.MXFP8BlockScaling(fp8_format=te.Format.HYBRID)
    for checkpoint in (lambda block, x: block(x), CHECKPOINTS[how]):
        block.zero_grad()
        x = _randn(32, 32, seed=7).requires_grad_()
        with te.autocast(recipe=hybrid):
            y = checkpoint(block, x)
        with te.autocast(enabled=backward_in != "nothing"):
            y.backward(_randn(32, 32, seed=8))
        found.append([y.detach(), x.grad, *(p.grad for p in block.parameters())])
    assert all(map(torch.equal, *found))
    assert len(calls) == 3  # twice forward, and one recomputation
    assert te.FP8GlobalStateManager.AUTOCAST_DEPTH == 0


def test_te_checkpoint_tells_two_recipes_apart() -> None:
    """One module runs under two recipes before either backward pass: each recomputation uses its own recipe."""
    layer, grads = _linear(32, 64, bias=False), []
    recipes = (te.MXFP8BlockScaling(fp8_format=te.Format.HYBRID), te.MXFP8BlockScaling())
    for checkpoint in (lambda x: layer(layer.back(layer(x))), lambda x: te.checkpoint(lambda z: layer.twice(z), x)):
        layer.back = _linear(64, 32, bias=False)
        layer.twice = lambda z: layer(layer.back(layer(z)))
        xs = [_randn(32, 64, seed=s).requires_grad_() for s in (1, 2)]
        ys = []
        for x, recipe in zip(xs, recipes, strict=True):
            with te.autocast(recipe=recipe):
                ys.append(checkpoint(x))
        for y in ys:
            y.backward(_randn(32, 32, seed=3))
        grads.append([x.grad for x in xs])
    assert all(map(torch.equal, *grads))


def test_a_region_opened_in_a_backward_pass_counts() -> None:
    """A hook opens its own region and runs a module that ran under another recipe before."""
    layer, seen = _linear(32, 64, bias=False), []
    x, probe = _randn(32, 64, seed=1).requires_grad_(), _randn(32, 64, seed=2)
    with te.autocast():
        want = layer(probe)
        y = layer(x)

    def hook(grad: torch.Tensor) -> None:
        with te.autocast(enabled=False):
            seen.append(layer(probe).detach())
        with te.autocast():
            seen.append(layer(probe).detach())

    y.register_hook(hook)
    y.backward(_randn(32, 32, seed=3))
    assert torch.equal(seen[0], layer(probe)) and torch.equal(seen[1], want)
