"""Arguments of TransformerEngine's modules beyond sizes: each has its effect, is ignored, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import triton_ep.integrations.te as te
from tests.te.rule import DEVICE
from triton_ep.errors import InputError

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:MXFP8 is emulated")]

SPLITS = [33, 0, 31]


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


def _make(kind: str, quantised: bool = False, **options: object) -> torch.nn.Module:
    """A module whose weights depend only on its kind."""
    options = {"params_dtype": torch.bfloat16, "device": DEVICE, **options}
    with te.quantized_model_init(enabled=quantised):
        module = te.Linear(64, 32, **options) if kind == "linear" else te.GroupedLinear(3, 64, 32, **options)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(_randn(*parameter.shape, seed=10 + index) / 8)
    return module


def _weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in module.named_parameters() if name.startswith("weight")]


def _forward(module: torch.nn.Module, seed: int, **how: object) -> tuple[torch.Tensor, torch.Tensor]:
    x = _randn(64, 64, seed=seed).requires_grad_()
    with te.autocast():
        return x, module(x, **how) if isinstance(module, te.Linear) else module(x, SPLITS, **how)


def _gradients(module: torch.nn.Module, seed: int = 1, **how: object) -> list[torch.Tensor]:
    """Gradients of x and of all parameters, from a backward pass by autograd alone."""
    x, y = _forward(module, seed, **how)
    module.zero_grad()
    y.backward(_randn(64, 32, seed=seed + 50))
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("quantised", [False, True], ids=["", "quantised"])
@pytest.mark.parametrize("delay", [False, True], ids=["", "delayed"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_fused_gradients_are_added_to_main_grad(kind: str, delay: bool, quantised: bool) -> None:
    """In main_grad's dtype; overwrites in the first micro-batch or if the weight says so; `grad` stays None."""
    plain = _make(kind, quantised)
    module = _make(kind, quantised, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    for weight in _weights(module):
        weight.main_grad = torch.ones(weight.shape, device=DEVICE)
    sums = [weight.main_grad.clone() for weight in _weights(module)]
    for seed, first, overwrite in (
        (1, None, False),
        (2, True, False),
        (3, None, False),
        (4, False, True),
        (5, None, False),
    ):
        want = _gradients(plain, seed, is_first_microbatch=first)
        x, y = _forward(module, seed, is_first_microbatch=first)
        module.zero_grad()
        for weight in _weights(module):
            weight.overwrite_main_grad = overwrite
        y.backward(_randn(64, 32, seed=seed + 50))
        if delay:
            assert all(map(torch.equal, sums, [weight.main_grad for weight in _weights(module)]))
            module.backward_dw()
        assert torch.equal(x.grad, want[0])
        exact = dict(zip((name for name, _ in module.named_parameters()), want[1:], strict=True))
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad, exact[name]) if name.startswith("bias") else parameter.grad is None
        for index, (name, weight) in enumerate(n for n in module.named_parameters() if n[0].startswith("weight")):
            restarted = first or overwrite
            # The gradient in float32, which autograd rounds.
            gradient = weight.main_grad - (0 if restarted else sums[index])
            if restarted:
                assert torch.equal(gradient.bfloat16(), exact[name])
            torch.testing.assert_close(gradient, exact[name].float(), rtol=2**-8, atol=1e-5)
            sums[index] = weight.main_grad.clone()


def test_delayed_gradients_wait_in_order() -> None:
    """Each backward_dw handles one backward pass, the oldest first; gradients add up; one call too many is an error."""
    plain, module = _make("grouped"), _make("grouped", delay_wgrad_compute=True)
    assert module.need_backward_dw() and not plain.need_backward_dw()
    plain.backward_dw()
    one, two = _gradients(plain, 1), _gradients(plain, 2)
    for seed in (1, 2):
        _, y = _forward(module, seed)
        y.backward(_randn(64, 32, seed=seed + 50))
    weights = _weights(module)
    assert all(weight.grad is None and weight.skip_backward_post_hook for weight in weights)
    names = [name for name, _ in module.named_parameters()]
    of_weights = [index for index, name in enumerate(names) if name.startswith("weight")]
    module.backward_dw()
    assert all(torch.equal(w.grad, one[1 + i]) for w, i in zip(weights, of_weights, strict=True))
    module.backward_dw()
    assert all(torch.equal(w.grad, one[1 + i] + two[1 + i]) for w, i in zip(weights, of_weights, strict=True))
    with pytest.raises(te.NothingDelayedError, match="no backward pass"):
        module.backward_dw()


def test_hooks_of_data_parallelism_see_a_gradient() -> None:
    """A weight with `grad_added_to_main_grad` gets zeros, so that its hook runs; frozen weights get nothing."""
    module = _make("grouped", fuse_wgrad_accumulation=True)
    first, frozen, last = _weights(module)
    frozen.requires_grad_(False)
    seen = []
    for weight in (first, last):
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape, device=DEVICE), False
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad_added_to_main_grad))
    _, y = _forward(module, 1)
    y.backward(_randn(64, 32, seed=5))
    assert seen == [True, True] and first.main_grad.any() and last.main_grad.any()
    assert not first.grad.any() and frozen.grad is None and not hasattr(frozen, "main_grad")


def test_fused_gradients_need_main_grad() -> None:
    """It must have the weight's shape; the error comes before anything is computed."""
    module = _make("linear", fuse_wgrad_accumulation=True)
    for shape, seen in ((None, "None"), ((64, 32), r"\[64, 32\]")):
        if shape is not None:
            module.weight.main_grad = torch.zeros(shape, device=DEVICE)
        _, y = _forward(module, 1)
        with pytest.raises(InputError, match=rf"main_grad, a tensor \[32, 64\] as the weight; it is {seen}"):
            y.sum().backward()
    with pytest.raises(Exception, match="fuse_wgrad_accumulation"):
        torch.compile(module, fullgraph=True, backend="eager")(_randn(32, 64))


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_save_original_input_changes_no_bit(kind: str) -> None:
    """Another tensor is saved, and the gradients are the same."""
    assert all(map(torch.equal, _gradients(_make(kind, save_original_input=True)), _gradients(_make(kind))))


def test_grouped_linear_takes_leading_dimensions() -> None:
    """[A, B, K] is A * B rows."""
    module, x = _make("grouped"), _randn(2, 32, 64)
    leaf, flat = x.clone().requires_grad_(), x.view(64, 64).clone().requires_grad_()
    with te.autocast():
        y, z = module(leaf, SPLITS), module(flat, torch.tensor(SPLITS, device=DEVICE))
    assert y.shape == (2, 32, 32) and torch.equal(y.view(64, 32), z)
    (y.sum() + z.sum()).backward()
    assert torch.equal(leaf.grad.view(64, 64), flat.grad)


def test_random_state_of_a_tracker() -> None:
    """Weights are drawn inside the tracker's fork for the name."""
    names = []

    class Tracker:
        @contextmanager
        def fork(self, name: str = "default") -> Iterator[None]:
            names.append(name)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                yield

    for options in (
        {"get_rng_state_tracker": Tracker},
        {"get_rng_state_tracker": Tracker, "rng_tracker_name": "expert"},
    ):
        found = [te.GroupedLinear(2, 32, 32, device="cpu", **options) for _ in range(2)]
        assert torch.equal(found[0].weight0, found[1].weight0) and torch.equal(found[0].weight1, found[1].weight1)
    assert set(names) == {"default", "expert"}


def test_what_is_accepted_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallelism over one rank is accepted; True and other values are refused; an unknown name is a TypeError."""
    linear = te.Linear(32, 32, parallel_mode="column", tp_size=1, sequence_parallel=True, ub_name="qkv", device=DEVICE)
    assert (linear.parallel_mode, linear.tp_size, linear.sequence_parallel) == ("column", 1, False)
    te.GroupedLinear(2, 32, 32, parallel_mode="row", use_grouped_tensor=True, ub_overlap_rs=False, device=DEVICE)
    for module in (te.Linear, lambda *sizes, **options: te.GroupedLinear(2, *sizes, **options)):
        for name, value in (
            ("ub_overlap_ag", True),
            ("symmetric_ar_type", "two_shot"),
            ("single_grouped_weight", True),
            ("parameters_split", ("q", "k")),
        ):
            with pytest.raises(InputError, match=f"{name}="):
                module(32, 32, **{name: value})
        with pytest.raises(InputError, match="tp_size of 2: tensor parallelism"):
            module(32, 32, tp_size=2)
        with pytest.raises(InputError, match="parallel_mode='diagonal'"):
            module(32, 32, parallel_mode="diagonal")
        with pytest.raises(TypeError, match="unexpected keyword argument 'bais'"):
            module(32, 32, bais=False)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group)
    te.Linear(32, 32, tp_group=1, device=DEVICE)
    with pytest.raises(InputError, match="a tp_group of 4"):
        te.Linear(32, 32, tp_group=4)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("linear", "fp8_output", True),
        ("linear", "fp8_grad", True),
        ("grouped", "out", None),
        ("grouped", "dgrad_out", None),
    ],
)
def test_arguments_of_calls_that_are_refused(kind: str, name: str, value: object) -> None:
    """By name, but for TransformerEngine's default."""
    module = _make(kind)
    default = False if kind == "linear" else None
    assert torch.equal(_forward(module, 1, **{name: default})[1], _forward(module, 1)[1])
    with pytest.raises(InputError, match=f"got {name}="):
        _forward(module, 1, **{name: value if value is not None else torch.empty(64, 32)})


def test_names_that_are_not_here_say_why() -> None:
    """One recipe needs no roles; the keys of a module's quantisers are TransformerEngine's."""
    with pytest.raises(AttributeError, match="QuantizerRole is for custom recipes"):
        _ = te.QuantizerRole
    assert not hasattr(te, "QuantizerRole") and not hasattr(te, "nothing")
    module = _make("linear")
    _forward(module, 1)
    assert [te.FP8GlobalStateManager.get_meta_tensor_key(forward) for forward in (True, False)] == list(
        module.quantizers
    )


def test_checkpoints_of_transformer_engine_load() -> None:
    """Their `_extra_state` is ignored; state dicts load from and into torch's modules."""
    model = torch.nn.Sequential(_make("linear"), _make("grouped"))
    state = model.state_dict()
    state.update({"0._extra_state": torch.empty(0, dtype=torch.uint8), "1._extra_state": None})
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected"):
        model.load_state_dict({**state, "0.other_state": None})
    plain = torch.nn.Linear(64, 32, dtype=torch.bfloat16, device=DEVICE)
    model[0].load_state_dict(plain.state_dict())
    plain.load_state_dict(model[0].state_dict())
    assert _make("linear", quantised=True).primary_weights_in_fp8 and not model[0].primary_weights_in_fp8


def test_former_names() -> None:
    """fp8_autocast and fp8_model_init with their arguments; queries about unsupported recipes."""
    recipe, group = te.MXFP8BlockScaling(margin=3), object()
    with te.fp8_autocast(enabled=True, calibrating=True, fp8_recipe=recipe, fp8_group=group):
        state = te.FP8GlobalStateManager
        assert state.is_fp8_enabled() and state.get_fp8_recipe() is recipe and state.get_fp8_group() is group
        assert state.is_fp8_calibration()
    assert not te.FP8GlobalStateManager.is_fp8_enabled()
    with te.fp8_model_init(enabled=True):
        assert isinstance(te.Linear(32, 32, device=DEVICE).weight, te.QuantizedTensor)
    for ask in (te.is_fp8_available, te.is_fp8_block_scaling_available, te.is_nvfp4_available):
        assert ask() is False
        assert ask(return_reason=True) == getattr(state, ask.__name__)() == (False, ask(return_reason=True)[1])
        assert "MXFP8BlockScaling" in ask(return_reason=True)[1]
        check = getattr(te, ask.__name__.replace("is_", "check_").replace("available", "support"))
        assert check() == ask(return_reason=True)


class _Tracker:
    """Stand-in for TransformerEngine's and Megatron's trackers of random states; the state is a count of draws."""

    def __init__(self) -> None:
        self.drawn = 0

    def get_states(self) -> dict[str, int]:
        return {"default": self.drawn}

    def set_states(self, states: dict[str, int]) -> None:
        self.drawn = states["default"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_may_be_walked_twice_and_draws_the_same(reentrant: bool) -> None:
    """retain_graph recomputes again, with the tracker's states of the forward pass; then the current states return."""
    module, tracker, grads = _make("linear"), _Tracker(), []
    x = _randn(64, 64).requires_grad_()

    def draw(x: torch.Tensor) -> torch.Tensor:
        tracker.drawn += 1
        return module(x) * tracker.drawn

    with te.autocast():
        plain = draw(x)
        tracker.drawn = 0
        options = {"get_rng_state_tracker": lambda: tracker, "tp_group": None, "distribute_saved_activations": False}
        y = te.checkpoint(draw, x, use_reentrant=reentrant, **options)
    for out in (plain, y, y):
        tracker.drawn = 9
        x.grad = None
        out.backward(_randn(64, 32, seed=1), retain_graph=True)
        grads.append(x.grad)
        assert tracker.drawn == 9
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    with pytest.raises(InputError, match="distribute_saved_activations"):
        te.checkpoint(draw, x, distribute_saved_activations=True)
