"""Bytes that leave GPU 0 over NVLink in one dispatch, by the GPU's own counters, in bf16 and in MXFP8.

    python tests/bench/link_bytes.py

One rank per GPU. Between two readings every rank runs --calls dispatches of the same tokens. The counters count whole
packets, headers and flow control included, so they exceed the payload; the ratio of the two payloads is the result.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from triton_ep import EPAll2AllLayer, finalize_distributed, initialize_distributed
from triton_ep.bench.origins import coded_rows
from triton_ep.bench.routing import Routing, dispatch_bytes, out_of, uniform_idx
from triton_ep.distributed import current_heap, launched_by, run_ranks

TOPK = 8


def sent_kib(text: str) -> int:
    """Sum over links of the sent data that `nvidia-smi nvlink -gt d` reports, in KiB.

    Raises:
        RuntimeError: the text has no counters.
    """
    found = re.findall(r"Data Tx:\s*(\d+)\s*KiB", text)
    if not found:
        raise RuntimeError(f"nvidia-smi does not show the counters of NVLink: {' '.join(text.split())[:200]!r}")
    return sum(map(int, found))


def _read() -> int:
    done = subprocess.run(
        ["nvidia-smi", "nvlink", "-gt", "d", "-i", "0"], capture_output=True, text=True, timeout=30, check=False
    )
    return sent_kib(done.stdout + done.stderr)


def measure(tokens: int, hidden: int, experts: int, calls: int) -> list[dict[str, object]]:
    """One result per payload on rank 0, none elsewhere; collective."""
    world, rank, device = dist.get_world_size(), dist.get_rank(), current_heap().device
    idxs = [uniform_idx(r, tokens, TOPK, experts, 0) for r in range(world)]
    x, idx = coded_rows(rank, tokens, hidden, 0, device), idxs[rank].to(device)
    routing = Routing.of(idxs, experts, world)
    results: list[dict[str, object]] = []
    for payload in (None, "mxfp8"):
        row_bytes = hidden * 2 if payload is None else hidden + hidden // 32
        with EPAll2AllLayer(
            None,
            tokens,
            hidden,
            TOPK,
            rank,
            experts,
            world,
            world,
            num_sm=32,
            payload=payload,
            capacity=tokens * TOPK * 2,
        ) as layer:
            layer.dispatch(x, idx)
            layer.check()
            dist.barrier()
            before = _read() if rank == 0 else 0
            dist.barrier()
            for _ in range(calls):
                layer.dispatch(x, idx)
            layer.check()
            dist.barrier()
            if rank == 0:
                counted = (_read() - before) * 1024 / calls
                wanted = out_of(dispatch_bytes(routing, row_bytes))[0]
                results.append({"payload": payload or "bf16", "counted_bytes": counted, "payload_bytes": wanted})
            dist.barrier()
    return results


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=7168, help="default %(default)s")
    parser.add_argument("--experts", type=int, default=256, help="over all ranks (default %(default)s)")
    parser.add_argument("--calls", type=int, default=200, help="dispatches between readings (default %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs GPUs that NVLink connects")
    if launched_by() == "none":
        run_ranks(_rank, torch.cuda.device_count(), options)
    else:
        _rank(options)


def _rank(options: argparse.Namespace) -> None:
    initialize_distributed()
    results = measure(options.tokens, options.hidden, options.experts, options.calls)
    if results:
        bf16, mxfp8 = results
        ratio = {name: mxfp8[name] / bf16[name] for name in ("counted_bytes", "payload_bytes")}  # type: ignore[operator]
        print(json.dumps({"results": results, "mxfp8_over_bf16": ratio}, indent=1), flush=True)
    finalize_distributed()


if __name__ == "__main__":
    main()
