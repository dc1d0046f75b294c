"""Programs written for other packages: attributes, integers of any type, and errors with a remedy for the rest."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from triton_ep import EPAll2AllLayer, EPConfig
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, InputError

SIZES = {"max_tokens": 8, "hidden": 32, "topk": 2, "num_experts": 4, "rank": 0, "world_size": 2, "local_world_size": 2}


def _check_layer(rank: int, nodes: int, ranks_per_node: int) -> None:
    world, device = nodes * ranks_per_node, current_heap().device
    sizes = (np.int64(8), np.int32(32), torch.tensor(2), np.int64(rank), 4, ranks_per_node, np.int64(world))
    layer = EPAll2AllLayer(dist.group.WORLD, *sizes, num_sm=np.int64(2), capacity=np.int64(64))
    assert (layer.max_tokens, layer.hidden, layer.topk, layer.num_tot_experts) == (8, 32, 2, 4)
    assert (layer.rank, layer.world_size, layer.local_world_size, layer.num_sm) == (rank, world, ranks_per_node, 2)
    assert (layer.dtype, layer.weight_dtype, layer.enable_local_combine) == (torch.bfloat16, torch.float32, False)
    assert layer.ep_group is dist.group.WORLD and layer.is_intra_node and layer.ep_config.recv_capacity == 64
    assert layer.context.ep_config is layer.config and f"rank={rank}" in repr(layer)
    assert layer.context.dispatch_output_buf.shape == (layer.context.weight_recv_buf.shape[0], 32)

    module = torch.nn.Linear(2, 2)
    module.exchange = layer
    for act in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="symmetric memory of running processes"):
            act(module)

    # The table of Triton-distributed covers all ranks; the layer takes this rank's rows of it, ranked again.
    ids = torch.tensor([[0, 3], [4, 1], [3, 2]], dtype=torch.int32)
    everybody = torch.cat([ids] * world)
    table = everybody.flatten().argsort(stable=True).argsort().int().view_as(everybody)
    x = torch.arange(96, device=device).view(3, 32).bfloat16() + 100 * rank
    with pytest.raises(InputError, match=r"has 6 rows, but this rank has 3 tokens.*argsort\(\)"):
        layer.dispatch(x, ids.to(device), None, table.to(device))
    own = table[3 * rank : 3 * rank + 3]
    own = own.flatten().argsort().argsort().view_as(own)
    plain, _, desc = layer.dispatch(x, ids.to(device))
    rows = int(desc.expert_offsets[-1])
    given, _, _ = layer.dispatch(x, ids.to(device), full_scatter_indices=own.to(device))
    assert torch.equal(given[:rows], plain[:rows])
    for rows_wanted in (400.0, -1, "9"):
        with pytest.raises(ConfigError, match="dispatch_recv_tokens must be an integer of at least 0"):
            layer.context.reallocate_dispatch_output_buf(rows_wanted)
    layer.finalize()

    mesh = SimpleNamespace(get_group=lambda: dist.group.WORLD)
    for group, num_sm in ((mesh, 2), ("world", None)):
        with pytest.raises(ConfigError, match=r"no process group of this process.*get_group\(\)"):
            EPAll2AllLayer(group, *sizes, num_sm=num_sm)


@pytest.mark.plain
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2)])
def test_a_layer_meets_programs_halfway(run_ranks, nodes, ranks_per_node):
    """Attributes, and sizes from numpy and tensors; wrong copies, groups and scatter tables raise with a remedy."""
    run_ranks(_check_layer, nodes, ranks_per_node)


def _check_agreement(rank: int, nodes: int, ranks_per_node: int) -> None:
    world = nodes * ranks_per_node
    right = {**SIZES, "num_tot_experts": 4, "rank": rank, "world_size": world, "local_world_size": world, "num_sm": 2}
    del right["num_experts"]
    for name, wrong, text in (
        # More experts change no buffer size here, but they do change where splits are written.
        ("num_tot_experts", 8, r"EPConfig.num_experts: 4 by rank 0; 8 by rank 1\. Give all"),
        ("num_sm", 3, "EPConfig.num_sm: 2 by rank 0; 3 by rank 1"),
        ("num_sm", None, "EPConfig.num_sm: 2 by rank 0; None by rank 1"),
        ("capacity", 64, "EPConfig.recv_capacity: None by rank 0; 64 by rank 1"),
        ("rank", 0, "EPConfig says rank 0 of 2, but this process is rank 1"),
    ):
        given = {**right, name: wrong} if rank == 1 else right
        with pytest.raises(ConfigError, match=text):
            EPAll2AllLayer(dist.group.WORLD, **given)
    for wrong_here, text in (
        ({"tuned": "h200"}, "tuned must be an entry of a tuned table"),
        ({"tuned": "h200", "num_sm": None}, "tuned must be an entry of a tuned table"),
        ({"dtype": [torch.bfloat16]}, r"token_dtype \[torch.bfloat16\] is none of"),
        ({"weight_dtype": torch.ones(2)}, "weight_dtype .* is not torch.float32"),
        ({"payload": torch.ones(2)}, "payload is "),
        ({"max_tokens": torch.ones((), dtype=torch.int32, device="meta")}, "max_tokens must be an integer"),
        ({"capacity": torch.ones((), dtype=torch.int32, device="meta")}, "capacity .* must be an integer"),
        ({"aot": torch.ones(2)}, "aot is of type Tensor"),
        ({"use_aot": torch.ones(2)}, "aot is of type Tensor"),
        ({"aot_dir": 3}, "aot_dir is of type int"),
    ):
        with pytest.raises(ConfigError, match=text):
            EPAll2AllLayer(dist.group.WORLD, **{**right, **wrong_here})
    EPAll2AllLayer(dist.group.WORLD, **right, timeout_s=20.0 + rank).finalize()


@pytest.mark.plain
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2)])
def test_ranks_that_differ_are_told(run_ranks, nodes, ranks_per_node):
    """All ranks raise, with the field, before anything is allocated; `timeout_s` may differ."""
    run_ranks(_check_agreement, nodes, ranks_per_node)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_tokens": 8.0}, "max_tokens must be an integer of at least 1, got 8.0"),
        ({"topk": True}, "topk must be an integer of at least 1, got True"),
        ({"rank": "0"}, "rank must be an integer of at least 0, got '0'"),
        ({"recv_capacity": 2.5}, "capacity .* must be an integer of at least 1, got 2.5"),
        ({"recv_capacity": 2**31}, "capacity 2147483648 exceeds 2147483647"),
        ({"alignment": 2**31}, "rows of padding, and at most 2147483647 can be numbered"),
        ({"max_tokens": 2**31}, "a rank could receive [0-9]+ rows .* Lower EPConfig.max_tokens 2147483648"),
        ({"enable_local_combine": "yes"}, "enable_local_combine must be True or False, got 'yes'"),
        ({"timeout_s": "30"}, "at most 2000 seconds, got '30'"),
        ({"timeout_s": True}, "at most 2000 seconds, got True"),
        ({"tuned": "h200"}, "tuned must be a TunedEntry or None, got str"),
        ({"token_dtype": torch.float8_e4m3fn}, r"torch.float8_e4m3fn is none of .* payload=\"mxfp8\""),
        ({"weight_dtype": torch.bfloat16}, "is not torch.float32; convert the weights"),
    ],
)
def test_a_configuration_of_the_wrong_kind_is_told(change, text):
    """The error names field and value."""
    assert EPConfig(**SIZES).rank == 0
    with pytest.raises(ConfigError, match=text):
        EPConfig(**{**SIZES, **change})
