"""The pages are correct: code blocks run, links resolve, tables agree with the source."""

import ast
import dataclasses
import inspect
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import environment_of_programs, run_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path) -> Iterator[tuple[str, int, str]]:
    """(info string, line, text) of every fenced block of a page."""
    lines = page.read_text().splitlines()
    start = None
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            if start is None:
                start, info = number, line.lstrip()[3:].strip()
            else:
                yield info, start, "\n".join(lines[start : number - 1])
                start = None
    assert start is None, f"{_name(page)}:{start}: the block is not closed"


PYTHON = [(page, line, info, text) for page in PAGES for info, line, text in _blocks(page) if "python" in info]


@pytest.mark.parametrize(
    ("info", "text"),
    [pytest.param(info, text, id=f"{_name(page)}:{line}") for page, line, info, text in PYTHON],
)
def test_python_block_runs(info: str, text: str, tmp_path: Path) -> None:
    """Each ```python block runs without error; a no-run block gives its reason and still parses."""
    if info != "python":
        assert re.fullmatch(r"python no-run \(.{10,}\)", info), "write ```python no-run (the reason)"
        ast.parse(text)
        return
    script = tmp_path / "block.py"
    script.write_text(text + "\n")
    done = run_program([script], environment_of_programs(), tmp_path, imported=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken_links(page: Path) -> Iterator[str]:
    """Links of a page to missing files or headings; links to other sites are not followed."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in _anchors(there)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names an existing file, and an existing heading in it."""
    assert list(_broken_links(page)) == []


def test_the_link_check_sees_a_breach(tmp_path: Path) -> None:
    """A missing file and a missing heading are found; a good link and another site are not."""
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](page.md#a-heading) [b](none.md) [c](#nowhere) [d](https://example.org/x)\n")
    assert list(_broken_links(page)) == ["none.md", "#nowhere"]


def test_every_page_is_reached_from_the_index() -> None:
    """Links from the README lead to every page, directly or through other pages."""
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text())
            left += [(page.parent / link).resolve() for link in links]
    assert [_name(page) for page in PAGES if page not in reached] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_paths_in_pages_exist(page: Path) -> None:
    """Paths of this project named in a page exist; `<op>` stands for a name."""
    folders = r"(?:triton_ep|kernels|aot|tests|docs|examples)"
    named = re.findall(rf"`({folders}/[\w./<>]*)`", page.read_text())
    gone = [path for path in named if "<" not in path and not (ROOT / path).exists()]
    assert gone == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_in_pages_exist(page: Path) -> None:
    """`make x` in a page is a target, `triton-ep x` a sub-command."""
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"[`\n]make ([a-z-]+)", text)) <= targets
    commands = set(re.findall(r"\(\w+, \"([a-z]+)\",", (ROOT / "triton_ep/cli/__init__.py").read_text()))
    assert {"doctor", "demo"} <= commands
    assert set(re.findall(r"[`\n]triton-ep ([a-z]+)", text)) <= commands


def _cells() -> set[str]:
    """All values of docs/benchmarks/results/*.csv."""
    rows = [path.read_text() for path in (ROOT / "docs/benchmarks/results").glob("*.csv")]
    return {cell for text in rows for line in text.splitlines() for cell in line.split(",")}


@pytest.mark.parametrize("page", [page for page in PAGES if not page.stem.endswith("-history")], ids=_name)
def test_no_figure_without_a_row(page: Path) -> None:
    """Speeds come from docs/benchmarks/results/*.csv; pages quote them to the digit. Histories also have figures that
    were taken by hand, and say so."""
    figures = re.findall(r"(?<![\d.,])(\d+(?:\.\d+)?) ?(?:GB/s|TB/s|TFLOP/s|us\b|µs)", page.read_text())
    cells = _cells()
    assert [figure for figure in figures if figure not in cells] == []


@pytest.mark.parametrize("section", ["A MoE layer", "The exchange"])
def test_times_in_tables_of_where_it_stands_are_rows(section: str) -> None:
    """Numbers of one decimal place in the tables of a section."""
    text = (ROOT / "docs/records/where-it-stands.md").read_text().split(f"## {section}\n", 1)[1].split("\n## ")[0]
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|")).replace(",", "")
    figures = re.findall(r"(?<![\d.])\d+\.\d(?!\d)", tables)
    cells = _cells()
    assert len(figures) > 5
    assert [figure for figure in figures if figure not in cells] == []


def _first_column(page: Path, heading: str) -> list[str]:
    """Names in backticks in the first column of the table under a heading."""
    section = page.read_text().split(f"## {heading}\n", 1)[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_config_page_lists_every_field() -> None:
    """docs/reference/config.md has the fields of EPConfig, in order."""
    from triton_ep import EPConfig

    page = ROOT / "docs/reference/config.md"
    assert _first_column(page, "Fields of EPConfig") == [field.name for field in dataclasses.fields(EPConfig)]


def test_layer_page_lists_every_argument() -> None:
    """docs/reference/layer.md has the arguments of the layer and of dispatch, and only existing fields."""
    from triton_ep import EPAll2AllLayer, EPAllToAllLayoutDesc

    page = ROOT / "docs/reference/layer.md"
    of_init = list(inspect.signature(EPAll2AllLayer.__init__).parameters)[1:]
    assert sorted(_first_column(page, "Arguments of the layer")) == sorted(of_init)
    of_dispatch = list(inspect.signature(EPAll2AllLayer.dispatch).parameters)[1:]
    assert _first_column(page, "dispatch") == of_dispatch
    fields = {field.name for field in dataclasses.fields(EPAllToAllLayoutDesc)}
    views = {name for name, kind in vars(EPAllToAllLayoutDesc).items() if isinstance(kind, property)}
    assert set(_first_column(page, "The descriptor")) <= fields | views


def test_debug_page_explains_every_wait() -> None:
    """docs/how-to/debug-a-hang.md says what it means that a rank is missing in each kind of wait."""
    from triton_ep.context.status import OPERATIONS

    page = (ROOT / "docs/how-to/debug-a-hang.md").read_text()
    told = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    waits = [operation.what for operation in OPERATIONS.values()]
    assert [wait for wait in waits if re.sub(r" \((dispatch|combine)\)$", "", wait) not in told] == []


def test_nn_page_lists_every_argument() -> None:
    """docs/reference/nn.md has the arguments of the modules, and only existing calls."""
    from triton_ep.nn import MoE, TopKRouter

    page = ROOT / "docs/reference/nn.md"
    for kind, heading in ((MoE, "Arguments of MoE"), (TopKRouter, "TopKRouter")):
        assert sorted(_first_column(page, heading)) == sorted(list(inspect.signature(kind.__init__).parameters)[1:])
    calls = page.read_text().split("## Calls of MoE\n")[1].split("\n## ")[0]
    for name in re.findall(r"`moe\.(\w+)", calls):
        assert hasattr(MoE, name) or name in ("router", "experts", "shared", "last_aux"), name


def test_errors_page_lists_every_error() -> None:
    """docs/reference/errors.md has every error, with its second base class."""
    from triton_ep import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EPError)]
    documented = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE)
    real = [(kind.__name__, kind.__bases__[1].__name__) for kind in kinds if kind is not errors.EPError]
    assert sorted(documented) == sorted(real)


def test_layer_table_is_the_one_that_is_enforced() -> None:
    """docs/concepts/architecture-in-a-page.md shows the layers of pyproject.toml, the lowest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    page = (ROOT / "docs/concepts/architecture-in-a-page.md").read_text()
    rows = re.findall(r"^\| (\d) \| (.+) \|$", page, re.MULTILINE)
    assert [number for number, _ in rows] == [str(number) for number in range(len(layers))]
    shown = [sorted(re.findall(r"`([\w.]+)`", cell)) for _, cell in rows]
    assert shown == [sorted(layer.split(" : ")) for layer in reversed(layers)]


def test_buffer_table_is_that_of_the_source() -> None:
    """docs/concepts/layout.md has every symmetric buffer: shape, writer, reader, and when it may be reused."""
    from triton_ep import EPConfig
    from triton_ep.context.layout import BUFFERS, Sizes

    page = (ROOT / "docs/concepts/layout.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \[(.+)\] (\w+) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == [buffer.name for buffer in BUFFERS]
    for local_world_size, low_latency, copy_engines in ((2, False, False), (4, True, False), (4, False, True)):
        config = EPConfig(
            max_tokens=21,
            hidden=52,
            topk=3,
            num_experts=12,
            rank=0,
            world_size=4,
            local_world_size=local_world_size,
            enable_local_combine=local_world_size == 2,
            recv_capacity=91,
            low_latency=low_latency,
            copy_engines=copy_engines,
        )
        sizes = Sizes(config, arrival_rows=77, output_rows=91)
        letters = {
            "W": 4,
            "LW": local_world_size,
            "N": config.num_nodes,
            "M": 21,
            "H": 52,
            "A": 77,
            "R": 91,
            "B": sizes.message_bytes,
            "V": sizes.shape.wire_bytes,
            "C": sizes.shape.max_chunks,
            "KP": sizes.shape.kp,
            "L": 4 * 21 if config.low_latency else 0,
            "EP": 4,
            "K": 3,
            "G": sizes.shape.most_groups,
            "P": sizes.shape.max_programs,
            "D": sizes.shape.senders,
            "S": sizes.shape.row_length,
            "J": 4 * 21 if copy_engines else 0,
            "O": 4 if copy_engines else 0,
            "X": 0 if config.is_intra_node else config.num_nodes * 21,
            "Z": sizes.partial_stride,
        }
        dtypes = {"rows": config.token_dtype, "partial": config.partial_dtype, "weights": config.weight_dtype}
        for (_, shape, dtype, writer, reader, reset), buffer in zip(rows, BUFFERS, strict=True):
            extents = [[int(letters.get(f, f)) for f in extent.split(" * ")] for extent in shape.split(", ")]
            assert tuple(map(math.prod, extents)) == buffer.shape(sizes), buffer.name
            assert str(dtypes.get(dtype, f"torch.{dtype}")) == str(buffer.dtype(config)), buffer.name
            assert (writer, reader, reset) == (buffer.writer, buffer.reader, buffer.reset), buffer.name
