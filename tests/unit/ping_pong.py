"""One rank of the two-process ping-pong over shared memory; started by test_interpreter_chaos.py.

    python -m tests.unit.ping_pong RANK FILE ROUNDS '[["way", seed or null], ...]'

Both ranks map FILE. Every case has its own page, so nothing is ever reset. Prints a JSON list: the
number of wrong words in each case, or -1 for a flag that did not arrive.
"""

import json
import mmap
import sys
import time
from pathlib import Path

import torch

import triton_ep.runtime.interpreter as interpreter
from tests.patience import LIMIT_S

interpreter.install()

from . import wrong_kernels  # noqa: E402  (kernels are decorated at import)

BLOCK = 64
PAGE = 4096
TIMEOUT_NS = 10 * 10**9
WORDS_AT = 512  # offset in a half page; its flag is at 0, the word for "ready" at 8
HALF = PAGE // 2


def _meet(memory: torch.Tensor, page: int, rank: int) -> None:
    """Wait, outside any kernel, until both ranks reach this case."""
    ready = [memory[page + r * HALF + 8 : page + r * HALF + 16].view(torch.int64) for r in range(2)]
    ready[rank].fill_(1)
    deadline = time.monotonic() + LIMIT_S
    while not ready[1 - rank].item():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: the other rank did not reach page {page // PAGE}")
        time.sleep(0.0002)


def main() -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    rank, rounds = int(sys.argv[1]), int(sys.argv[3])
    cases = json.loads(sys.argv[4])
    with Path(sys.argv[2]).open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    interpreter.register_heap(memory.data_ptr(), memory.numel())
    results = []
    for number, (way, seed) in enumerate(cases):
        page = number * PAGE
        own, peer = page + rank * HALF, memory.data_ptr() + page + (1 - rank) * HALF
        bad = torch.full((1,), -2, dtype=torch.int64)
        interpreter.set_chaos(None if seed is None else 2 * seed + rank)
        _meet(memory, page, rank)
        wrong_kernels.ping_pong_kernel[(1,)](
            memory[own + WORDS_AT :].view(torch.int32), memory[own : own + 8].view(torch.int64),
            peer + WORDS_AT, peer, bad, rank, rounds, TIMEOUT_NS // (50 if way == "plain_flag" else 1),
            WAY=wrong_kernels.WAYS[way], BLOCK=BLOCK,
        )  # fmt: skip
        interpreter.set_chaos(None)
        results.append(bad.item())
    print(json.dumps(results))


if __name__ == "__main__":
    main()
