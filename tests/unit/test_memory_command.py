"""`triton-ep memory` reports the memory of a layer: compared with a real heap and with the table of the docs."""

from __future__ import annotations

import argparse
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from triton_ep import EPAll2AllLayer
from triton_ep.cli import main, memory
from triton_ep.context.layout import estimate_bytes
from triton_ep.distributed import current_heap

pytestmark = pytest.mark.plain
PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/size-memory.md"


def _report(*options: str) -> memory.Report:
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    arguments = parser.parse_args(options)
    config = memory.config_of(arguments)
    return memory.report_of(config, memory.MOE_LAYERS[arguments.model], 4 * 2**30)


def _taken() -> int:
    """Allocated bytes of this rank's symmetric memory."""
    arena = current_heap()._arena
    return sum(arena._taken.values())


def _check_heap(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any]) -> None:
    before, world = _taken(), nodes * ranks_per_node
    said_so: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said_so.append  # type: ignore[method-assign]
    logging.getLogger("triton_ep").addHandler(handler)
    logging.getLogger("triton_ep").setLevel(logging.INFO)
    layer = EPAll2AllLayer(
        dist.group.WORLD,
        max_tokens=40,
        hidden=96,
        topk=3,
        rank=rank,
        num_tot_experts=2 * world,
        local_world_size=ranks_per_node,
        world_size=world,
        **options,
    )
    taken, said = _taken() - before, estimate_bytes(layer.context.sizes)
    blocks = [block.nbytes for block in layer.context.memory._blocks.values()]
    layer.finalize()
    page = current_heap()._arena._align  # alignment of the heap, to which each block is rounded up
    assert sum(blocks) == said
    (made,) = (record.getMessage() for record in said_so)
    assert f"made: room for {layer.context.sizes.arrival_rows} arriving rows" in made and "hidden=96" in made
    assert f"{said / 2**20:.1f} MiB of symmetric memory" in made
    assert taken == sum(-(-block // page) * page for block in blocks)
    assert _taken() == before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"payload": "mxfp8"},
        {"capacity": 300, "enable_local_combine": True},
        {"alignment": 16},
        {"payload": "mxfp8", "enable_local_combine": True, "shared_staging": True},
    ],
    ids=["exact", "mxfp8", "static-local", "aligned", "shared"],
)
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (2, 1)])
def test_a_layer_takes_what_estimate_bytes_says(
    run_ranks: Any, nodes: int, ranks_per_node: int, options: dict[str, Any]
) -> None:
    """The layer's blocks have the estimated size; the heap allocates no more, and frees them at the layer's end."""
    run_ranks(_check_heap, nodes, ranks_per_node, options)


@pytest.mark.parametrize(
    "options", [{"low_latency": True, "capacity": 240}, {"copy_engines": True}], ids=["low_latency", "copy_engines"]
)
def test_a_layer_of_one_node_takes_what_estimate_bytes_says(run_ranks: Any, options: dict[str, Any]) -> None:
    """The estimate is right for the buffers of the low-latency path and of copy engines, too."""
    run_ranks(_check_heap, 1, 2, options)


def test_copy_engines_have_room_for_all_rows() -> None:
    """Staging rows for every token of every rank; no layer grows them."""
    told = _report("--copy-engines", "--tokens", "128", "--alignment", "1")
    assert told.buffers["stage_x"] == 8 * 128 * 7168 * 2
    assert told.buffers["stage_source"] == 8 * 128 * 4 and "stage_source" not in _report().buffers


def test_the_heap_suggested_holds_one_exchange() -> None:
    """heap_bytes exceeds the need by less than a step; `fit` is the number of exchanges with room in the heap."""
    for ranks in ("8", "64", "256"):
        report = _report("--ranks", ranks)
        assert 0 <= report.heap_bytes - report.total < memory.HEAP_STEP
        assert report.fit * report.total <= report.heap < (report.fit + 1) * report.total
        assert sum(report.buffers.values()) == report.total <= report.most


def test_shared_staging_saves_the_smaller_of_both_buffers() -> None:
    """The rows of dispatch and combine lie in the same memory; the report names the larger buffer only."""
    kept, saved = "dispatch_output_buf", "stage_x"
    for payload in ("bf16", "mxfp8"):
        options = ("--ranks", "4", "--capacity", "1.5x", "--enable-local-combine", "--payload", payload)
        apart, shared = _report(*options), _report(*options, "--shared-staging")
        assert apart.total - shared.total == apart.buffers[saved] > 0
        assert kept in shared.buffers and saved not in shared.buffers
        assert sum(shared.buffers.values()) == shared.total


def test_static_worst_case_is_what_an_exact_exchange_may_grow_to() -> None:
    """Growth ends once all rows that can arrive have room."""
    assert _report("--ranks", "8", "--capacity", "worst").total == _report("--ranks", "8").most


def test_sums_begin_with_as_many_rows_as_arrive() -> None:
    """With several nodes; an exact exchange may grow to what a static one takes for the worst case."""
    exact = _report("--ranks", "64", "--enable-local-combine")
    assert exact.buffers["dispatch_output_buf"] == exact.buffers["stage_x"]
    assert exact.most == _report("--ranks", "64", "--enable-local-combine", "--capacity", "worst").total


def test_json_and_page_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON and page have the same numbers."""
    assert main(["memory", "--ranks", "64", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert main(["memory", "--ranks", "64"]) == 0
    page = capsys.readouterr().out
    assert f"heap_bytes={said['heap_bytes']}" in page
    assert re.search(rf"one exchange +{re.escape(memory.human(said['total']))}", page)


@pytest.mark.parametrize("capacity", ["none", "x", "-3", "1.5y", "infx"])
def test_a_wrong_capacity_is_refused(capacity: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong capacity gives exit code 1 and a message."""
    assert main(["memory", f"--capacity={capacity}"]) == 1
    assert "capacity" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tokens", "--local-world-size", "--ranks", "--alignment"])
def test_zero_is_no_default(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A size of 0 is refused, not replaced by the default."""
    assert main(["memory", option, "0"]) == 1
    assert option.strip("-") in capsys.readouterr().err


def test_output_on_the_page_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/how-to/size-memory.md shows what the command prints."""
    ((words, shown),) = re.findall(r"```console\n\$ triton-ep (memory[^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert main(words.split()) == 0
    assert capsys.readouterr().out.strip() == shown.strip()


def test_table_of_the_page_is_computed() -> None:
    """docs/how-to/size-memory.md: three models, three sizes, GiB of one exchange, exact and static."""
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (.+) \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 3 * 2
    for model, payload, *cells in rows:
        for ranks, cell in zip(("8", "64", "128"), cells, strict=True):
            if cell == "too few experts":
                assert model == "mixtral"
                continue
            options = ("--model", model, "--payload", payload, "--ranks", ranks)
            exact, static = _report(*options), _report(*options, "--capacity", "1.5x", "--enable-local-combine")
            assert cell == f"{exact.total / 2**30:.2f}, {static.total / 2**30:.2f}"
