"""The router chooses as DeepSeek-V3 does, with groups and bias, and as simpler models do."""

import pytest
import torch

from triton_ep.errors import ConfigError, InputError
from triton_ep.nn.router import TopKRouter
from triton_ep.reference import router as reference

pytestmark = pytest.mark.plain
HIDDEN, EXPERTS, TOPK = 24, 16, 3


def _router(**options) -> TopKRouter:
    torch.manual_seed(3)
    router = TopKRouter(HIDDEN, EXPERTS, TOPK, **options)
    if router.expert_bias is not None:
        router.expert_bias.uniform_(-0.3, 0.3)
    return router


def _tokens(num: int = 40) -> torch.Tensor:
    return torch.randn(num, HIDDEN, generator=torch.Generator().manual_seed(1)) * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": False, "scale": 0.5},
        {"num_groups": 4, "topk_groups": 2},
        {"score": "sigmoid", "num_groups": 4, "topk_groups": 2, "correction_bias": True, "scale": 2.5},
        {"score": "sigmoid", "num_groups": 16, "topk_groups": 4, "correction_bias": True, "normalize": False},
        {"score": "sigmoid", "correction_bias": True, "bias": True},
    ],
    ids=lambda options: "-".join(options) or "softmax",
)
def test_router_chooses_and_weighs_as_the_rule_says(options):
    """The same experts in the same order, weights up to float32 rounding, gradients of the same formula."""
    router = _router(**options)
    if router.bias is not None:
        router.bias.data.uniform_(-1, 1)
    x = _tokens()
    ids, weights = router(x)
    assert (ids.dtype, weights.dtype, ids.shape, weights.shape) == (torch.int32, torch.float32, (40, 3), (40, 3))
    logits = torch.nn.functional.linear(x, router.weight, router.bias).detach()
    rule = {name: value for name, value in options.items() if name not in ("correction_bias", "bias")}
    rule = {"score": "softmax", **rule, "expert_bias": router.expert_bias}
    want_ids, want = reference.topk(logits, TOPK, **rule)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-7)

    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
    (seen,) = torch.autograd.grad(weights, router.weight, grad)
    leaf = logits.double().requires_grad_()
    scores = leaf.softmax(-1) if rule["score"] == "softmax" else leaf.sigmoid()
    chosen = scores.gather(1, want_ids)
    exact = chosen / chosen.sum(1, keepdim=True) if router.normalize else chosen
    (of_logits,) = torch.autograd.grad(exact * router.scale, leaf, grad.double())
    torch.testing.assert_close(seen.double(), of_logits.T @ x.double(), rtol=1e-4, atol=1e-6)


def test_noaux_tc_by_hand():
    """Group 0 has the best expert, group 1 the best sum of two. With a bias the sum of two decides; the bias affects
    the choice but not the weights."""
    router = TopKRouter(4, 4, 1, score="sigmoid", num_groups=2, correction_bias=True, scale=2.5)
    router.weight.data.copy_(torch.eye(4))
    x = torch.logit(torch.tensor([[0.9, 0.1, 0.6, 0.5]]))
    ids, weights = router(x)
    assert ids.tolist() == [[2]]
    torch.testing.assert_close(weights, torch.tensor([[2.5]]))
    router.normalize = False
    router.expert_bias.copy_(torch.tensor([0.0, 0.2, 0.0, 0.0]))
    ids, weights = router(x)
    assert ids.tolist() == [[0]]
    torch.testing.assert_close(weights, torch.tensor([[0.9 * 2.5]]))


def test_bias_below_all_scores_chooses_inside_of_the_groups():
    """With negative score plus bias, experts of excluded groups stay excluded (a zero there would win)."""
    router = _router(score="sigmoid", num_groups=4, topk_groups=1, correction_bias=True)
    router.expert_bias.fill_(-5.0)
    ids, _ = router(_tokens())
    assert bool((ids // 4 == ids[:, :1] // 4).all())


def test_shapes_and_no_tokens():
    """Leading dimensions stay; zero tokens give zero rows and a loss of zero."""
    router = _router(aux_loss=True)
    ids, weights, _ = router(_tokens().view(5, 8, HIDDEN))
    assert ids.shape == weights.shape == (5, 8, TOPK)
    ids, weights, loss = router(_tokens(0))
    assert ids.shape == (0, TOPK) and float(loss.detach()) == 0
    with pytest.raises(InputError, match=r"\[\.\.\., 24\], got \[2, 5\]"):
        router(torch.zeros(2, 5))
    with pytest.raises(InputError, match=r"\[\.\.\., 24\], a tensor, got NoneType"):
        router(None)


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "num_groups": 4, "topk_groups": 2}], ids=str)
def test_one_token_without_leading_dimensions(options):
    """[H] gives what [1, H] gives, the loss included."""
    router = _router(aux_loss=True, **options)
    ids, weights, loss = router(_tokens(1)[0])
    want_ids, want_weights, want = router(_tokens(1))
    assert torch.equal(ids, want_ids[0]) and torch.equal(weights, want_weights[0]) and torch.equal(loss, want)


def test_balancing_loss():
    """The formula, its gradient, and the value one if all experts get the same load."""
    router = _router(aux_loss=True, score="sigmoid")
    x = _tokens()
    ids, _, loss = router(x)
    scores = (x @ router.weight.T).sigmoid()
    share = (scores / scores.sum(1, keepdim=True)).mean(0)
    copies = torch.bincount(ids.flatten().long(), minlength=EXPERTS) / (TOPK * 40)
    want = EXPERTS * (copies * share).sum()
    torch.testing.assert_close(loss, want)
    for seen, exact in zip(*(torch.autograd.grad(value, router.weight) for value in (loss, want)), strict=True):
        torch.testing.assert_close(seen, exact)
    even = TopKRouter(4, 4, 1, aux_loss=True)
    even.weight.data.copy_(torch.eye(4))
    torch.testing.assert_close(even(torch.eye(4))[2], torch.tensor(1.0))


def test_the_bias_stays_float32_when_the_model_is_cast():
    """Beside 0.5, an update of 0.001 is less than half a step of bf16."""
    router = torch.nn.Sequential(_router(score="sigmoid", correction_bias=True)).bfloat16()[0]
    assert router.weight.dtype == torch.bfloat16 and router.expert_bias.dtype == torch.float32
    router.expert_bias.fill_(0.5)
    router(_tokens(40))
    router.update_expert_bias(1e-3)
    assert torch.equal((router.expert_bias - 0.5).abs() > 5e-4, torch.ones(EXPERTS, dtype=torch.bool))
    assert router.to("meta").expert_bias.is_meta


def test_bias_moves_towards_even_loads():
    """Training counts assignments; an update moves the bias by the rate and resets the counts; many updates balance."""
    router = _router(score="sigmoid", correction_bias=True)
    router.expert_bias.zero_()
    x = _tokens(400) + 0.5
    router.eval()
    router(x)
    assert not router.expert_load.any()
    router.train()
    ids, _ = router(x)
    before = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
    assert torch.equal(router.expert_load, before)
    router.update_expert_bias(0.01)
    assert torch.equal(router.expert_bias, 0.01 * torch.sign(75 - before.float()))
    for _ in range(60):
        ids, _ = router(x)
        router.update_expert_bias(0.01)
    after = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
    assert after.max() - after.min() < (before.max() - before.min()) / 4
    assert "expert_bias" in router.state_dict() and "expert_load" not in router.state_dict()
    with pytest.raises(ConfigError, match="correction_bias=True"):
        _router().update_expert_bias()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score": "tanh"}, "tanh"),
        ({"num_groups": 5}, "16 experts .* 5 groups"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups is 5"),
        ({"topk_groups": True}, "topk_groups is True"),
        ({"scale": "2"}, "scale of a router must be a finite number, got '2'"),
        ({"scale": True}, "finite number, got True"),
        ({"scale": float("nan")}, "finite number, got nan"),
        ({"num_groups": 8, "topk_groups": 1}, "topk 3 exceeds the 2 experts"),
    ],
)
def test_sizes_that_do_not_go_together(options, words):
    """Unfit sizes are refused by name."""
    with pytest.raises(ConfigError, match=words):
        TopKRouter(HIDDEN, EXPERTS, TOPK, **options)
