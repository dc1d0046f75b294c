"""Checkpoints of MoE modules: saved and loaded with different numbers of ranks; names of Hugging Face's models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.nn import dense
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, InputError
from triton_ep.nn import MoE, TopKRouter, finalize_exchanges, huggingface_state, load_huggingface, sharded_state_dict

pytestmark = pytest.mark.plain
EXPERTS, HIDDEN, FFN, TOPK = 8, 64, 96, 2
SIZES: dict[str, Any] = {"num_experts": EXPERTS, "topk": TOPK, "max_tokens": 8, "timeout_s": 60.0}


class _Model(torch.nn.Module):
    """Two MoE layers under different names, and a dense layer that every rank has."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        device = current_heap().device
        self.first = torch.nn.Linear(HIDDEN, HIDDEN, device=device, dtype=torch.bfloat16)
        self.layers = torch.nn.ModuleList(MoE(HIDDEN, FFN, **SIZES, **options) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H]."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def _x(seed: int) -> torch.Tensor:
    return torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16().to(current_heap().device)


def _save(rank: int, nodes: int, ranks_per_node: int, folders: list[str]) -> None:
    for replicas, folder in enumerate(folders, 1):
        options: dict[str, Any] = {}
        mesh = None
        if replicas > 1:
            shape = (replicas, nodes * ranks_per_node // replicas)
            mesh = init_device_mesh(current_heap().device.type, shape, mesh_dim_names=("replicas", "experts"))
            options["group"] = mesh["experts"].get_group()
        model = _Model(5 * replicas, **options)
        if mesh is not None:
            for layer in model.layers:
                fully_shard(layer.experts, mesh=mesh["replicas"])
                assert isinstance(layer.experts.w2, DTensor)
        state = sharded_state_dict(model)
        assert state["layers.1.experts.w13"].shape == (EXPERTS, 2 * FFN, HIDDEN)
        assert set(state) == set(model.state_dict())
        checkpoint.save(state, checkpoint_id=folder)
        finalize_exchanges()


def _load(rank: int, nodes: int, ranks_per_node: int, folders: list[str], payload: str | None) -> None:
    model, x = _Model(6, payload=payload), _x(rank)
    with torch.no_grad():
        before = model(x)  # builds prepared weights, which each load makes stale
        for replicas, folder in enumerate(folders, 1):
            want = _Model(5 * replicas, payload=payload)
            exact = want(x)
            assert not torch.equal(before, exact)
            checkpoint.load(sharded_state_dict(model), checkpoint_id=folder)
            for name, value in want.state_dict().items():
                torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0, msg=name)
            before = model(x)
            assert torch.equal(before, exact)
    finalize_exchanges()


def test_any_number_of_ranks_reads_what_four_wrote(run_ranks, tmp_path):
    """Saved by 4 ranks, and with FSDP by 2 x 2; loaded by 2 and by 1, with bit-identical results."""
    folders = [str(tmp_path / "whole"), str(tmp_path / "replicas")]
    run_ranks(_save, 1, 4, folders)
    run_ranks(_load, 1, 2, folders, None)
    run_ranks(_load, 1, 1, folders, "mxfp8")


def _refuses_columns(rank: int, nodes: int, ranks_per_node: int) -> None:
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh(current_heap().device.type, (2, 1), mesh_dim_names=("replicas", "experts"))
    moe = MoE(HIDDEN, FFN, group=mesh["experts"].get_group(), **SIZES)
    fully_shard(moe.experts, mesh=mesh["replicas"], shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(ConfigError, match=r"experts\.w13 is sharded as .*dimension 0"):
        sharded_state_dict(moe)
    finalize_exchanges()


def test_shards_of_columns_are_refused(run_ranks):
    """A checkpoint by experts cannot hold experts that FSDP shards along their columns."""
    run_ranks(_refuses_columns, 1, 2)


# --- Hugging Face -----------------------------------------------------------------------------------------------

PREFIX = "model.layers.3.mlp."
ROUTER = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)) * HIDDEN**-0.5


def _matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up [E, F, H] and down [E, H, F] in bf16, different for every expert."""
    g = torch.Generator().manual_seed(2)
    gate, up = (torch.randn(EXPERTS, FFN, HIDDEN, generator=g) * HIDDEN**-0.5 for _ in range(2))
    return gate.bfloat16(), up.bfloat16(), (torch.randn(EXPERTS, HIDDEN, FFN, generator=g) * FFN**-0.5).bfloat16()


def _by_expert(names: tuple[str, str, str], parts: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return {
        f"{PREFIX}experts.{e}.{name}.weight": part[e]
        for name, part in zip(names, parts, strict=True)
        for e in range(EXPERTS)
    }


def _checkpoint(layout: str) -> dict[str, torch.Tensor]:
    gate, up, down = _matrices()
    state = {f"{PREFIX}gate.weight": ROUTER, "model.layers.4.mlp.gate.weight": -ROUTER}
    if layout == "deepseek":
        state[f"{PREFIX}shared_experts.gate_proj.weight"] = torch.zeros(3)
        state[f"{PREFIX}gate.e_score_correction_bias"] = torch.linspace(-1, 1, EXPERTS)
        return state | _by_expert(("gate_proj", "up_proj", "down_proj"), (gate, up, down))
    if layout == "mixtral":
        return state | _by_expert(("w1", "w3", "w2"), (gate, up, down))
    if layout == "fused":
        fused = {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}
        return state | {f"{PREFIX}experts.{name}": value for name, value in fused.items()}
    of_down = torch.rand(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(4))  # the same on all ranks
    biases = torch.linspace(-1, 1, EXPERTS * 2 * FFN).view(EXPERTS, FFN, 2), of_down
    by_turns = {
        "experts.gate_up_proj": torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2),
        "experts.gate_up_proj_bias": biases[0].flatten(1).bfloat16(),
        "experts.down_proj": down.transpose(1, 2),
        "experts.down_proj_bias": biases[1].bfloat16(),
        "router.weight": ROUTER,
        "router.bias": torch.linspace(0, 1, EXPERTS),
    }
    return {f"{PREFIX}{name}": value for name, value in by_turns.items()}


def _biases(state: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """[E, 2F] gate first, [E, H]."""
    given = state.get(f"{PREFIX}experts.gate_up_proj_bias")
    if given is None:
        return None, None
    return torch.cat([given[:, ::2], given[:, 1::2]], 1).double(), state[f"{PREFIX}experts.down_proj_bias"].double()


def _router(layout: str) -> TopKRouter:
    options: dict[str, Any] = {}
    if layout == "deepseek":
        options = {"score": "sigmoid", "correction_bias": True}
    elif layout == "by turns":
        options = {"bias": True}
    return TopKRouter(HIDDEN, EXPERTS, TOPK, device=current_heap().device, **options)


def _check_layout(rank: int, nodes: int, ranks_per_node: int, layout: str, separate: bool) -> None:
    state, x = _checkpoint(layout), _x(rank)
    moe = MoE(HIDDEN, FFN, router=_router(layout), separate=separate, bias=layout == "by turns", **SIZES)
    left = load_huggingface(moe, state, PREFIX)
    assert left == (["shared_experts.gate_proj.weight"] if layout == "deepseek" else [])

    gate, up, down = _matrices()
    with torch.no_grad():
        seen = moe(x)
        ids, weights = (each.cpu() for each in moe.router(x)[:2])
        logits = x.cpu().float() @ ROUTER.T + state.get(f"{PREFIX}router.bias", 0.0)
        if layout == "deepseek":
            logits = logits.sigmoid() + state[f"{PREFIX}gate.e_score_correction_bias"]
        assert torch.equal(ids.sort(1).values.long(), logits.topk(TOPK).indices.sort(1).values)
        w13 = torch.cat([gate, up], 1).double()
        (exact,) = dense.moe([x.cpu().double()], [ids], [weights.double()], w13, down.double(), moe.experts.activation,
                             *_biases(state))  # fmt: skip
    assert dense.decibel(seen, exact) > 38.0
    if layout in ("deepseek", "mixtral"):
        again = huggingface_state(moe, layout, PREFIX)
        first, count = moe.experts.first_expert, moe.experts.num_local_experts
        assert len([name for name in again if ".experts." in name]) == 3 * count
        assert f"{PREFIX}experts.{first}." in " ".join(again)
        assert all(torch.equal(value.cpu(), state[name]) for name, value in again.items())
    finalize_exchanges()


@pytest.mark.parametrize(
    ("layout", "separate"),
    [("deepseek", False), ("mixtral", True), ("fused", False), ("by turns", False), ("by turns", True)],
)
def test_layouts_of_hugging_face(run_ranks, layout, separate):
    """Each rank loads its experts from a checkpoint, and the layer computes with the checkpoint's matrices."""
    run_ranks(_check_layout, 1, 2, layout, separate)


def _check_scales(rank: int, nodes: int, ranks_per_node: int) -> None:
    hidden, ffn = 256, 160
    g = torch.Generator().manual_seed(3)
    state, exact = {}, {}
    for e in range(2):
        for name, shape in (("gate_proj", (ffn, hidden)), ("up_proj", (ffn, hidden)), ("down_proj", (hidden, ffn))):
            key = f"experts.{e}.{name}.weight"
            state[key] = torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
            state[f"{key}_scale_inv"] = scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=g)
            exact[key] = torch.stack(
                [
                    torch.stack([state[key][i, j].float() * scale[i // 128, j // 128] for j in range(0, shape[1], 31)])
                    for i in range(0, shape[0], 37)
                ]
            )
    sizes = {**SIZES, "num_experts": 2}
    moe = MoE(hidden, ffn, router=False, params_dtype=torch.float32, **sizes)
    assert load_huggingface(moe, state) == []
    for e in range(2):
        parts = (moe.experts.w13[e, :ffn], moe.experts.w13[e, ffn:], moe.experts.w2[e])
        for name, part in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            torch.testing.assert_close(part[::37, ::31].detach().cpu(), exact[f"experts.{e}.{name}.weight"])
    finalize_exchanges()


def test_blocks_in_fp8_are_multiplied_out(run_ranks):
    """DeepSeek-V3's own files: e4m3 with a scale for every 128 x 128, also for a partial block at the edge."""
    run_ranks(_check_scales, 1, 1)


def _refusals(rank: int, nodes: int, ranks_per_node: int) -> None:
    moe = MoE(HIDDEN, FFN, **SIZES)
    state = _checkpoint("mixtral")
    del state[f"{PREFIX}experts.5.w3.weight"]
    with pytest.raises(InputError, match=r"no model\.layers\.3\.mlp\.experts\.5\.w3\.weight"):
        load_huggingface(moe, state, PREFIX)
    state = _checkpoint("mixtral") | {f"{PREFIX}experts.8.w3.weight": torch.zeros(FFN, HIDDEN)}
    before = moe.experts.w13.detach().clone()
    with pytest.raises(InputError, match="has 9 experts; this layer has 8"):
        load_huggingface(moe, state, PREFIX)
    assert torch.equal(moe.experts.w13, before)
    state = _checkpoint("fused") | {f"{PREFIX}experts.down_proj": torch.zeros(EXPERTS, FFN, HIDDEN)}
    with pytest.raises(InputError, match=r"down_proj is \[8, 96, 64\]; this layer takes \[8, 64, 96\]"):
        load_huggingface(moe, state, PREFIX)
    with pytest.raises(InputError, match="have biases: pass bias=True"):
        load_huggingface(moe, _checkpoint("by turns"), PREFIX)
    with pytest.raises(InputError, match=r"e_score_correction_bias; make this one with correction_bias=True"):
        load_huggingface(moe, _checkpoint("deepseek"), PREFIX)
    with pytest.raises(InputError, match="'deepseek', 'mixtral'"):
        huggingface_state(moe, "llama")
    moe.router = TopKRouter(HIDDEN, EXPERTS, SIZES["topk"], bias=True)
    with pytest.raises(InputError, match="router without bias"):
        huggingface_state(moe, "mixtral")
    clamped = MoE(HIDDEN, FFN, limit=7.0, **SIZES)
    with pytest.raises(InputError, match="without biases, limit"):
        huggingface_state(clamped, "mixtral")
    finalize_exchanges()


def test_what_does_not_fit_is_refused_by_name(run_ranks):
    """Missing and surplus experts, wrong shapes, biases and layouts."""
    run_ranks(_refusals, 1, 1)
