"""The block of dispatch, experts and combine: its gradients equal those of the separate autograd ops."""

import contextlib
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.layer.cases import Case, make_layer, workloads
from triton_ep import InputError, MXTensor, PeerFailed, WaitTimeout, autograd
from triton_ep.distributed import current_heap
from triton_ep.nn.moe_block import ExpertGradients, MoEBlock, Needs
from triton_ep.ops.row_scales import RowScaled

CASES = (
    Case("exact", tokens=(5, 0, 7), topk=3, experts=3, dtype=torch.float32, alignment=4),
    Case("static_local", tokens=(4, 6), hidden=32, dtype=torch.float32, static=True, local_combine=True),
    Case("mxfp8", tokens=(6, 3), topk=3, experts=2, alignment=8, static=True, payload="mxfp8"),
)


def _values(rows: object) -> torch.Tensor:
    """[R, H] float32 values of rows in the form in which they land."""
    if isinstance(rows, RowScaled):
        return rows.qdata.float() * rows.scale.unsqueeze(1)
    return rows.dequantize(torch.float32) if isinstance(rows, MXTensor) else rows.float()


class _Linear:
    """Experts y = w * (x @ a[expert] + b[expert]), a [e, H, H], b [e, H] or None, with a hand-written backward."""

    def __init__(self, dtype: torch.dtype, kind: type) -> None:
        self.dtype, self.kind, self.kept = dtype, kind, 0

    def _segments(self, desc: object):
        return enumerate(pairwise(desc.expert_offsets.tolist()))

    def forward(self, rows, row_weights, params, desc, keep):
        """Read and write only rows in use."""
        assert not torch.is_grad_enabled() or not any(p.requires_grad for p in params if p is not None)
        assert isinstance(rows, self.kind) and desc.tiles is not None
        self.kept += keep
        a, b = params
        x, pre = _values(rows), torch.full(rows.shape, torch.nan, device=row_weights.device)
        for expert, (first, end) in self._segments(desc):
            pre[first:end] = x[first:end] @ a[expert]
            if b is not None:
                pre[first:end] += b[expert]
        return (pre * row_weights.unsqueeze(1)).to(self.dtype), (rows, {"pre": pre}, [row_weights, "plain"])

    def backward(self, grad, saved, params, desc, needs):
        """Return only needed gradients."""
        rows, named, (row_weights, text) = saved
        assert text == "plain" and isinstance(rows, self.kind) and isinstance(grad, self.kind)
        assert isinstance(needs, Needs)
        a, b = params
        x, dy = _values(rows), _values(grad)
        dpre = dy * row_weights.unsqueeze(1)
        dx = torch.full(rows.shape, torch.nan, device=dy.device)
        da, db = torch.zeros_like(a), None if b is None else torch.zeros_like(b)
        for expert, (first, end) in self._segments(desc):
            dx[first:end] = dpre[first:end] @ a[expert].T
            da[expert] = x[first:end].T @ dpre[first:end]
            if db is not None:
                db[expert] = dpre[first:end].sum(0)
        dweights = (dy * named["pre"]).sum(1)
        return ExpertGradients(
            (lambda: dx.to(self.dtype)) if needs.rows else None,
            dweights if needs.row_weights else None,
            lambda: [da if needs.params[0] else None, db if needs.params[1] else None],
        )


def _by_ops(layer, x, idx, weights, params):
    """The same experts between the separate autograd ops."""
    rows, row_weights, desc = autograd.dispatch(layer, x, idx, weights)
    values = rows.dequantize(torch.float32) if isinstance(rows, MXTensor) else rows
    a, b = params
    parts = []
    for expert, (first, end) in enumerate(pairwise(desc.expert_offsets.tolist())):
        pre = values[first:end].float() @ a[expert]
        pre = pre if b is None else pre + b[expert]
        parts.append(pre * row_weights[first:end].unsqueeze(1))
    behind = values.new_zeros(len(values) - sum(map(len, parts)), values.shape[1])
    return autograd.combine(layer, torch.cat([*parts, behind.float()]).to(layer.config.token_dtype), desc)


def _leaves(case: Case, layer, call: int, bias: bool):
    """x, ids, weights and parameters of this rank; all but the ids require gradients."""
    cfg, device = layer.config, current_heap().device
    work = workloads(case, cfg.world_size, call)[cfg.rank]
    generator = torch.Generator().manual_seed(cfg.rank)
    shape = (case.experts, case.hidden, case.hidden)
    a = torch.randn(shape, generator=generator) / case.hidden**0.5
    b = torch.randn(shape[:2], generator=generator)
    x, weights = work.x.clone().to(device), work.topk_weights.clone().to(device)
    leaves = [x, weights, a.to(device), *([b.to(device)] if bias else [])]
    return work.topk_idx.to(device), [leaf.requires_grad_() for leaf in leaves]


def _step(call, leaves, idx):
    """The result of a call and its gradients, for a transposed output gradient."""
    x, weights, a, *b = leaves
    out = call(x, idx, weights, [a, *(b or [None])])
    wide = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape[1], out.shape[0]).to(out.dtype)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return out.detach(), torch.autograd.grad(out, wanted, wide.T)


def _check_block(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    mx = case.payload is not None
    landing, kind = ("row", RowScaled) if mx else (None, torch.Tensor)
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        experts = _Linear(case.dtype, kind)
        block = MoEBlock(layer, experts, landing, landing)
        for call, bias in enumerate((True, False)):
            idx, leaves = _leaves(case, layer, call, bias)
            out, grads = _step(block, leaves, idx)
            want_out, want_grads = _step(lambda *given: _by_ops(layer, *given), leaves, idx)
            step = torch.finfo(case.dtype).eps
            torch.testing.assert_close(out, want_out, rtol=0, atol=0)
            for got, want in zip(grads, want_grads, strict=True):
                assert got.dtype == want.dtype and torch.isfinite(got).all()
                largest = float(want.abs().max()) if want.numel() else 0.0
                # Sums over rows run in another order.
                torch.testing.assert_close(got, want, rtol=4 * step, atol=4 * step * largest)
        kept = experts.kept
        with torch.no_grad():
            assert torch.equal(block(leaves[0], idx, leaves[1], [leaves[2], None]), out)
        assert experts.kept == kept
        layer.check()


@pytest.mark.plain
@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "case"),
    [(1, 1, CASES[0]), *((1, 2, case) for case in CASES), (2, 2, CASES[1])],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_gradients_are_those_of_the_single_ops(run_ranks, nodes, ranks_per_node, case):
    """Gradients of rows, weights and parameters, with rows in the form that the experts request in both passes."""
    run_ranks(_check_block, nodes, ranks_per_node, case)


def _check_uses(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = CASES[0]
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        block = MoEBlock(layer, _Linear(case.dtype, torch.Tensor))
        idx, leaves = _leaves(case, layer, 0, True)
        _, (dx, dweights, da, db) = _step(block, leaves, idx)

        def recomputed(*given):  # in the backward pass, by another dispatch
            return checkpoint(block, *given, use_reentrant=False)

        assert all(map(torch.equal, _step(recomputed, leaves, idx)[1], (dx, dweights, da, db)))
        x, weights, a, b = leaves
        outs = [block(x, idx, weights * factor, [a, b]) for factor in (1, 2)]  # two passes are open at once
        once, twice = (torch.autograd.grad(out.sum(), a)[0] for out in outs)
        assert torch.equal(once * 2, twice) and once.any()
        # Frozen inputs need no gradients, and nothing is sent.
        for frozen in (0, 1):
            leaves[frozen].requires_grad_(False)
            _, grads = _step(block, leaves, idx)
            left = [want for i, want in enumerate((dx, dweights, da, db)) if leaves[i].requires_grad]
            assert len(grads) == len(left) and all(map(torch.equal, grads, left))
            leaves[frozen].requires_grad_()
        for changed in ([0, 1], [1]):
            out = block(x, idx, weights, [a, b])
            if rank in changed:
                with torch.no_grad():
                    a.add_(1)
                with pytest.raises(InputError, match="changed in place between a forward pass and its backward pass"):
                    out.sum().backward()
                continue
            # This rank's gradients lack the contribution of the other rank's experts.
            dx, dweights, da, _ = torch.autograd.grad(out.sum(), leaves)
            there = (idx >= case.experts) & (idx < 2 * case.experts)
            assert torch.equal(dx.isnan().any(1), there.any(1)) and torch.equal(dweights.isnan(), there)
            assert da.isfinite().all()
            with pytest.raises(PeerFailed, match="rank 1 rejected its arguments"):
                layer.check()
        _step(block, leaves, idx)
        layer.check()


@pytest.mark.plain
def test_the_block_is_a_step_of_autograd_like_any_other(run_ranks):
    """Activation checkpoints, several open passes, frozen inputs, and parameters changed in between."""
    run_ranks(_check_uses, 1, 2)


def _check_order(rank: int, nodes: int, ranks_per_node: int) -> None:
    case, done = CASES[0], []

    class Noting(_Linear):
        def backward(self, *args):
            """Record when the parameters' gradients are computed."""
            found = super().backward(*args)
            return ExpertGradients(found.rows, found.row_weights, lambda: done.append("parameters") or found.params())

    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        idx, leaves = _leaves(case, layer, 0, True)
        combine = layer.combine
        layer.combine = lambda *args, **options: done.append("combine") or combine(*args, **options)
        turns = []

        @contextlib.contextmanager
        def turn(name):
            turns.append(name)
            yield

        _step(MoEBlock(layer, Noting(case.dtype, torch.Tensor), turn=turn), leaves, idx)
        assert done == ["combine", "combine", "parameters"]
        assert [name.split()[1] for name in turns] == ["forward", "backward"]


@pytest.mark.plain
def test_gradients_of_rows_leave_before_those_of_parameters_are_made(run_ranks):
    """The second combine belongs to the backward pass; each pass takes its own turn."""
    run_ranks(_check_order, 1, 1)


class _Broken(_Linear):
    def backward(self, grad, saved, params, desc, needs):
        """Nothing."""
        raise ZeroDivisionError("no expert")


def _check_error(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = CASES[0]
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        idx, leaves = _leaves(case, layer, 0, True)
        heap, told = layer.context.heap, []
        heap.abort = told.append  # a real abort could not be undone
        try:
            with pytest.raises(ZeroDivisionError):
                _step(MoEBlock(layer, _Broken(case.dtype, torch.Tensor)), leaves, idx)
        finally:
            del heap.abort
        assert told == ["the experts of a MoE layer broke off on rank 0 with ZeroDivisionError: no expert"]
        with pytest.raises(WaitTimeout, match="This layer failed before"):
            layer.check()


@pytest.mark.plain
def test_an_error_of_experts_is_told_to_the_other_ranks(run_ranks, backend):
    """The other ranks do not wait for the timeout, and the layer is no longer usable."""
    if backend != "host":
        pytest.skip("GPUs are told by their time limit")
    run_ranks(_check_error, 1, 1)
