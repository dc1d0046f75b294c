"""Parameters of the experts: initial values and accepted checkpoints."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.ops.grouped import DEVICE
from triton_ep.errors import ConfigError, InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.nn import SwiGLUExperts
from triton_ep.nn.joined import Joined

pytestmark = pytest.mark.plain
HIDDEN, FFN = 128, 64


def _experts(first: int = 0, number: int = 2, **options: Any) -> SwiGLUExperts:
    torch.manual_seed(7)
    return SwiGLUExperts(HIDDEN, FFN, number, first_expert=first, num_experts=4, device="cpu", **options)


def test_what_experts_begin_with_depends_on_their_number_alone():
    """Ranks seeded alike have different experts, the same set for any number of ranks, of the stated variance."""
    whole, halves = _experts(0, 4, bias=True), [_experts(first, bias=True) for first in (0, 2)]
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, torch.cat([getattr(half, name) for half in halves])), name
    assert not torch.equal(whole.w13[0], whole.w13[1]) and not whole.b13.any() and not whole.b2.any()
    torch.testing.assert_close(whole.w13.float().std().item(), HIDDEN**-0.5, rtol=0.02, atol=0)
    torch.testing.assert_close(whole.w2.float().std().item(), FFN**-0.5, rtol=0.02, atol=0)
    assert {name: list(p.shape) for name, p in halves[0].named_parameters()} == {
        "w13": [2, 2 * FFN, HIDDEN],
        "b13": [2, 2 * FFN],
        "w2": [2, HIDDEN, FFN],
        "b2": [2, HIDDEN],
    }
    assert list(_experts(gated=False).w13.shape) == [2, FFN, HIDDEN]
    with torch.device("meta"):
        assert SwiGLUExperts(HIDDEN, FFN, 2).w2.is_meta


@pytest.mark.parametrize("separate", [False, True])
def test_state_dicts_of_either_form_and_of_all_experts(separate):
    """w13 or w1 and w3, of this rank's experts or of all, load into the same module; and back."""
    torch.manual_seed(0)
    of_all = {
        "w1": torch.randn(4, FFN, HIDDEN).bfloat16(),
        "w3": torch.randn(4, FFN, HIDDEN).bfloat16(),
        "w2": torch.randn(4, HIDDEN, FFN).bfloat16(),
        "b1": torch.randn(4, FFN).bfloat16(),
        "b3": torch.randn(4, FFN).bfloat16(),
        "b2": torch.randn(4, HIDDEN).bfloat16(),
    }
    joined = {f"{letter}13": torch.cat([of_all[f"{letter}1"], of_all[f"{letter}3"]], 1) for letter in "wb"}
    joined |= {name: of_all[name] for name in ("w2", "b2")}
    for state in (of_all, joined, {name: value[2:] for name, value in of_all.items()}):
        module = _experts(2, bias=True, separate=separate)
        given = dict(state)
        module.load_state_dict(given)
        assert given.keys() == state.keys(), "the caller's dict is unchanged"
        assert torch.equal(module.gate_up_weight(), joined["w13"][2:])
        assert torch.equal(module.gate_up_bias(), joined["b13"][2:])
        assert torch.equal(module.w2, of_all["w2"][2:]) and torch.equal(module.b2, of_all["b2"][2:])
        mine = of_all if separate else joined
        assert module.state_dict().keys() == mine.keys()
        assert all(torch.equal(value, mine[name][2:]) for name, value in module.state_dict().items())
    with pytest.raises(InputError, match="w2 of the state dict has 3 experts; this rank has 2 of 4"):
        _experts(separate=separate).load_state_dict({**of_all, "w2": of_all["w2"][:3]}, strict=False)


def test_a_state_dict_of_experts_without_gates():
    """Without gates, w1 alone becomes w13."""
    module = _experts(gated=False)
    w1 = torch.randn(2, FFN, HIDDEN).bfloat16()
    module.load_state_dict({"w1": w1, "w2": module.w2.detach()})
    assert torch.equal(module.w13, w1)


def test_joined_halves_are_made_again_after_a_step_of_any_optimizer() -> None:
    """A write to `.data` changes neither address nor counter, like FSDP's gather; the joined memory is kept."""
    first, second = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)
    joined = Joined()
    before = joined.values(first, second)
    assert torch.equal(before, torch.cat([first, second], 1))
    first.data.fill_(5.0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter]).step()
    after = joined.values(first, second)
    assert torch.equal(after, torch.cat([first, second], 1)) and after.data_ptr() == before.data_ptr()


def test_halves_without_version_counters() -> None:
    """A model that was made under torch.inference_mode."""
    joined = Joined()
    with torch.inference_mode():
        first, second = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)
        joined(first, second)
        first.mul_(2)
    joined.invalidate()
    assert torch.equal(joined(first, second), torch.cat([first, second], 1))


def test_the_joined_copy_follows_its_halves():
    """Joined once, at one address; again after a half changes or `invalidate`; the gradient is split into halves."""
    first, second = (torch.randn(2, 3, 4).requires_grad_() for _ in range(2))
    kept = Joined()
    both = kept(first, second)
    address = both.data_ptr()
    assert torch.equal(both, torch.cat([first, second], 1))
    grad = torch.randn(2, 6, 4)
    both.backward(grad)
    assert torch.equal(first.grad, grad[:, :3]) and torch.equal(second.grad, grad[:, 3:])
    version = kept(first, second)._version
    assert kept(first, second)._version == version, "nothing was written"
    with torch.no_grad():
        second.mul_(2)
    again = kept(first, second)
    assert torch.equal(again, torch.cat([first, second], 1)) and again.data_ptr() == address
    assert again._version > version
    first.data.view(-1).numpy()[:] = 5  # no version counter moves
    assert not torch.equal(kept(first, second), torch.cat([first, second], 1))
    kept.invalidate()
    assert torch.equal(kept(first, second), torch.cat([first, second], 1))
    module = copy.deepcopy(_experts(separate=True))
    assert module.gate_up_weight().shape == (2, 2 * FFN, HIDDEN)


@pytest.mark.parametrize("payload", [None, "mxfp8"])
def test_parameters_that_products_do_not_take(payload):
    """They are refused before the dispatch, so that the other ranks can be told."""
    experts = _experts(payload=payload)
    device, kept = experts.w2.device, experts.w13
    experts.check_parameters(experts.local_parameters(), device)
    for wrong in (kept.detach().half(), kept.detach().transpose(1, 2).contiguous().transpose(1, 2)):
        experts.w13 = torch.nn.Parameter(wrong)
        with pytest.raises(InputError, match=r"w13 of the experts must be contiguous torch.bfloat16 or torch.float32"):
            experts.check_parameters(experts.local_parameters(), device)
    experts.w13 = torch.nn.Parameter(kept.detach().float())
    if payload is None:
        with pytest.raises(InputError, match=r"w13 of the experts is torch.float32, w2 torch.bfloat16"):
            experts.check_parameters(experts.local_parameters(), device)
    else:
        experts.check_parameters(experts.local_parameters(), device)


def test_where_parameters_may_be_mxtensors():
    """As w13 and w2 of MXFP8 experts; elsewhere they are refused, with the remedy."""
    for options, name, words in (
        ({"payload": None}, "w2", r'payload="mxfp8", or w2.dequantize\(\)'),
        ({"payload": "mxfp8", "separate": True}, "w3", r"w3.dequantize\(\), or make the module with separate=False"),
        ({"payload": "mxfp8", "separate": True}, "w2", None),
        ({"payload": "mxfp8"}, "w13", None),
    ):
        experts = _experts(**options)
        quantised = MXTensor.to_mx(getattr(experts, name).detach())
        setattr(experts, name, torch.nn.Parameter(quantised, requires_grad=False))
        with nullcontext() if words is None else pytest.raises(InputError, match=words):
            experts.check_parameters(experts.local_parameters(), experts.w2.device)


def test_parameters_within_a_larger_buffer():
    """Gradients are the same wherever in memory w2 begins."""
    found = []
    for offset in (0, 1, 4):
        torch.manual_seed(0)
        experts = _experts().to(DEVICE)
        flat = experts.w2.new_zeros(experts.w2.numel() + offset)
        flat[offset:] = experts.w2.detach().flatten()
        experts.w2.data = flat[offset:].view(experts.w2.shape)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(6, experts.hidden, generator=generator).bfloat16().to(experts.w2.device).requires_grad_()
        offs = torch.tensor([0, 4, 6], dtype=torch.int32, device=x.device)
        experts(x, offs).sum().backward()
        found.append((x.grad, experts.w13.grad, experts.w2.grad))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_options_that_do_not_go_together():
    """Unfit options are refused by name."""
    for options, words in (
        ({"payload": "mxfp4"}, "payload is 'mxfp4'"),
        ({"precision": "exact"}, "payload=None sends bf16"),
        ({"separate": True, "gated": False}, "no w3"),
        ({"payload": "mxfp8", "prepared": "all"}, "prepared is 'all'"),
        ({"first": 0.5}, "first_expert must be an integer of at least 0, got 0.5"),
        ({"bias": 1}, "bias must be True or False, got 1"),
        ({"separate": "yes"}, "separate must be True or False, got 'yes'"),
    ):
        with pytest.raises(ConfigError, match=words):
            _experts(**options)
    with pytest.raises(ConfigError, match=r"ffn is 100, but payload=.mxfp8. .* the nearest is 96 or 128"):
        SwiGLUExperts(HIDDEN, 100, 2, payload="mxfp8")
    with pytest.raises(ConfigError, match="experts 3 to 4 of this rank are not among 4"):
        SwiGLUExperts(HIDDEN, FFN, 2, first_expert=3, num_experts=4)
    with pytest.raises(ConfigError, match="num_local_experts must be an integer of at least 1, got 0"):
        SwiGLUExperts(HIDDEN, FFN, 0)
    with pytest.raises(InputError, match=r"x must be a tensor .* got list"):
        _experts()([1], torch.zeros(3, dtype=torch.int32))
