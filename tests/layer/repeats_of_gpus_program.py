"""Makes calls of layers as on a GPU, without one, and prints whether repeated launches are those of the ordinary steps.

    TRITON_INTERPRET=1 python repeats_of_gpus_program.py RANKS

No kernel runs, so the calls are those that the host need not read anything for. The last line is JSON: of each kind of
call how many launches it repeats, and what is wrong with them.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.aot import launches_of_gpus_program as stand_in
from tests.layer.repeated_calls import Launches, calls_of, check_all, compact_calls_of
from triton_ep.distributed import initialize_distributed
from triton_ep.exchange import repeated_combine, repeated_dispatch
from triton_ep.runtime import launch
from triton_ep.runtime import repeat as repeats

STREAM = 77
STARTED: Launches = []
"""Kernels, and what they are started with: grid, stream, addresses and integers."""
HELD: list[object] = []
"""Tensors of ordinary launches, and results: no later call gets their memory."""


def _start(self: launch.Launcher, *given: Any) -> None:
    STARTED.append((self.plan.kernel, dict(zip(("grid", "stream", *self.names), given, strict=True))))


def as_on_a_gpu() -> None:
    """As the stand-in, but note what compiled kernels would be started with."""
    finds = repeated_dispatch.find, repeated_combine.find
    stand_in.as_on_a_gpu()
    repeated_dispatch.find, repeated_combine.find = finds

    def launched(self: launch.Launcher, grid: int, args: tuple[Any, ...], stream: Any) -> None:
        if self.noted is not None:
            self.noted.append(launch.Launch(self, grid, args, stream))
        HELD.append(args)
        passed = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        _start(self, grid, STREAM if stream is None else stream, *passed)

    launch.Launcher.launch_in_order = launched
    launch.Launcher.start_of = lambda self, _: lambda *given: _start(self, *given)
    repeats.raw_stream = lambda device: STREAM
    torch.cuda.current_device = lambda: 0


def launches_of(call: Callable[[], object]) -> Launches:
    """What a call launches."""
    STARTED.clear()
    HELD.append(call())
    return list(STARTED)


def main() -> None:
    """Print what was found."""
    stand_in.RANKS_PER_NODE = int(sys.argv[1])
    initialize_distributed()
    as_on_a_gpu()
    found = {}
    with torch.no_grad():
        for name, options in {
            "bf16": {},
            "summed": {"enable_local_combine": True, "alignment": 128, "shared_staging": True},
            "mxfp8": {"payload": "mxfp8", "enable_local_combine": True},
            "budget": {"sm_budget": 24},
            "few": {"max_tokens": stand_in.FEW},
        }.items():
            layer = stand_in.layer_of(**options)
            noted, calls = (calls_of(layer, *stand_in.inputs(layer.config.max_tokens)) for _ in range(2))
            of_layer = check_all(layer, noted, calls, launches_of)
            found |= {f"{call} of {name}": result for call, result in of_layer.items()}
        exact = stand_in.layer_of(capacity=None)
        noted, calls = (compact_calls_of(exact, *stand_in.inputs(), stand_in.TOKENS + more) for more in (0, 8))
        found |= check_all(exact, noted, calls, launches_of)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
