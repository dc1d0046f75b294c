"""On GPUs: kernels of an ahead-of-time library compute the same bits as the JIT's.

python -m triton_ep.aot build --arch sm_90 --manifest tests/aot/gpu.toml
python -m pytest tests/aot/test_gpu.py --backend nvshmem
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.patience import LIMIT_S
from triton_ep import EPAll2AllLayer, MXTensor
from triton_ep.runtime.library import architectures, default_folder
from triton_ep.testing import Workload, apply_experts, make_workload

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, TOPK, EXPERTS = 7168, 8, 256

CASES: dict[str, dict[str, Any]] = {
    "bf16": {"enable_local_combine": True},
    "compact": {"enable_local_combine": True},
    "mxfp8": {"payload": "mxfp8", "alignment": 128},
    "nodes": {"payload": "mxfp8"},
    "low_latency": {"payload": "mxfp8", "alignment": 128, "low_latency": True, "capacity": 128 * 1024},
}


@pytest.fixture
def library() -> Path:
    """A library for this GPU, built from tests/aot/gpu.toml."""
    if not torch.cuda.is_available():
        pytest.skip("cubins need a GPU")
    major, minor = torch.cuda.get_device_capability()
    folder = default_folder()
    if f"sm_{major}{minor}" not in architectures(folder):
        command = f"python -m triton_ep.aot build --arch sm_{major}{minor} --manifest tests/aot/gpu.toml"
        pytest.skip(f"no library in {folder}: {command}")
    return folder


def _bits(x: torch.Tensor | MXTensor | None, rows: int) -> list[torch.Tensor]:
    if x is None:
        return []
    parts = [x.qdata, x.scale] if isinstance(x, MXTensor) else [x]
    return [part[:rows].contiguous().view(torch.uint8) for part in parts]


def _of_compact(layer: EPAll2AllLayer, work: Workload) -> list[torch.Tensor]:
    """Compact rows in bfloat16 and in one byte, also by a handle, and back; one-byte expert-major rows."""
    idx, weights = work.topk_idx, work.topk_weights
    data, scale = work.x.to(torch.float8_e4m3fn), work.x[:, : HIDDEN // 128].float().contiguous()
    results: list[torch.Tensor] = []
    for x, given in ((work.x, None), (data, scale)):
        rows = layer.dispatch_compact(x, idx, weights, scale=given)
        assert rows.topk_weights is not None
        results += [rows.x, rows.topk_idx, rows.topk_weights, *([] if rows.scale is None else [rows.scale])]
        results += layer.dispatch_compact_again(x, rows.layout_desc, scale=given)[:-1]
        y = torch.ones(rows.x.shape[0], work.x.shape[1], dtype=work.x.dtype, device=work.x.device)
        results += [layer.combine(y, rows.layout_desc), layer.combine_topk(rows.topk_weights, rows.layout_desc)[0]]
    return results + list(layer.dispatch_scaled(data, scale, idx, weights)[:3])


def _check_bits(rank: int, nodes: int, ranks_per_node: int, case: str, folder: str) -> None:
    world, device = nodes * ranks_per_node, torch.device("cuda", torch.cuda.current_device())
    options = CASES[case]
    max_tokens = 128 if options.get("low_latency") else 4096
    found = []
    for aot in (None, "require"):
        with EPAll2AllLayer(
            dist.group.WORLD, max_tokens, HIDDEN, TOPK, rank, EXPERTS, ranks_per_node, world, num_sm=24,
            aot=aot, aot_dir=folder, **options,
        ) as layer:  # fmt: skip
            results: list[torch.Tensor] = []
            for seed, tokens in enumerate((max_tokens, 100 + rank, 0)):
                work = make_workload(rank, world, tokens, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, seed=seed).to(
                    device
                )
                if case == "compact":
                    results += [result.clone() for result in _of_compact(layer, work)]
                    continue
                recv_x, weights, desc = layer.dispatch(work.x, work.topk_idx, work.topk_weights)
                rows = int(desc.expert_offsets[-1])
                results += [*_bits(recv_x, rows), *_bits(weights, rows), desc.expert_offsets.clone()]
                plain = recv_x.dequantize(torch.bfloat16) if isinstance(recv_x, MXTensor) else recv_x
                y = apply_experts(plain.nan_to_num(), desc.expert_offsets, rank * (EXPERTS // world))
                results.append(layer.combine(y, desc, weights=weights).clone())
                layer.barrier.barrier_all()
            layer.check()
            found.append([result.cpu() for result in results])
    jit, compiled = found
    assert len(jit) == len(compiled)
    for number, (left, right) in enumerate(zip(jit, compiled, strict=True)):
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), f"result {number} of {case} differs"


@pytest.mark.plain
@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "case"),
    [(1, w, case) for w in (2, 4, 8) for case in ("bf16", "compact", "mxfp8", "low_latency")]
    + [(2, 2, "nodes"), (2, 4, "nodes")],
)
def test_layers_give_the_bits_of_the_jit(
    run_ranks: Callable[..., Any], backend: str, library: Path, nodes: int, ranks_per_node: int, case: str
) -> None:
    """Dispatch and combine of full, uneven and empty batches: rows, weights, offsets and sums."""
    if backend == "host":
        pytest.skip("cubins run on GPUs: --backend nvshmem")
    run_ranks(_check_bits, nodes, ranks_per_node, case, str(library))


@pytest.mark.gpu
def test_products_give_the_bits_of_the_jit(library: Path) -> None:
    """Quantisation and grouped GEMM, with and without TMA, in a process without Triton."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_EP_AOT")}
    told = []
    for words in ([], ["--aot", str(library)]):
        done = subprocess.run(
            [sys.executable, "-m", "tests.aot.products", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
    assert told[0] == told[1]
