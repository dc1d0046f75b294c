"""Build kernels ahead of time for one layer, inspect them, and run them if GPUs are available.

    python examples/07_aot.py [--arch sm_90]

The build needs no GPU: this program compiles the kernels of a small layer into a temporary folder, verifies them, and
shows the error that a layer of another size gets. With GPUs of that architecture it then runs the layer on these cubins
alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from triton_ep import AotMiss, EPAll2AllLayer, finalize_distributed, initialize_distributed
from triton_ep.distributed import run_ranks
from triton_ep.runtime.library import Library
from triton_ep.runtime.plans import Shape, exchange
from triton_ep.runtime.plans.request import KernelRequest

SIZES = {"max_tokens": 16, "hidden": 256, "topk": 2, "num_experts": 4, "num_sm": 8}
RANKS = 2


def build(folder: Path, arch: str) -> None:
    """Compile and verify the kernels of a layer of SIZES."""
    config = {
        **SIZES,
        "world_size": RANKS,
        "local_world_size": RANKS,
        "gradients": False,
        "ids": ["i32"],
        "weights": [False],
    }
    command = [sys.executable, "-m", "triton_ep.aot"]
    options = ["--arch", arch, "--for-config", json.dumps(config), "--jobs", "2"]
    root = str(Path(__file__).resolve().parents[1])
    for words in (["build", *options], ["verify"]):
        done = subprocess.run([*command, *words, "--out", str(folder)], cwd=root, text=True, stdout=subprocess.PIPE)
        if done.returncode:
            raise SystemExit(done.stdout)
        print(done.stdout.strip())


def use(folder: str) -> None:
    """Dispatch and combine on one rank, with cubins only."""
    rank, world_size = initialize_distributed()
    names = ("max_tokens", "hidden", "topk")
    sizes = [SIZES[name] for name in names]
    with EPAll2AllLayer(
        None, *sizes, rank, SIZES["num_experts"], world_size, world_size, num_sm=8, use_aot=True, aot_dir=folder
    ) as layer:
        x = torch.full((5, 256), rank + 1.0, dtype=torch.bfloat16, device="cuda")
        ids = torch.tensor([[0, 3]] * 5, dtype=torch.int32, device="cuda")
        recv_x, _, desc = layer.dispatch(x, ids)
        assert torch.equal(layer.combine(recv_x, desc), 2 * x)
    print(f"rank {rank}: dispatch and combine by cubins, no compiler")
    finalize_distributed()


def main() -> None:
    """Build, inspect, request a kernel that is missing, run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="sm_90")
    arch = parser.parse_args().arch
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder, arch)
        library = Library(folder, arch)
        print(f"{len(library.entries)} cubins, {sum(path.stat().st_size for path in folder.rglob('*.cubin'))} bytes")
        more = {**SIZES, "topk": 3, "world_size": RANKS, "local_world_size": RANKS}
        try:
            library.find(KernelRequest.of(exchange.place(Shape(**more), True, False), {"scatter_idx_ptr": "*i32"}))
        except AotMiss as miss:
            print(f"AotMiss: {str(miss)[:160]} ...")
        here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        if here is None or arch != f"sm_{here[0]}{here[1]}" or torch.cuda.device_count() < RANKS:
            print(f"no {RANKS} GPUs of {arch} here: cubins built and verified, not run")
            return
        run_ranks(use, RANKS, str(folder))


if __name__ == "__main__":
    main()
