"""Every example runs: the first ones bare, under torchrun and under mpirun, most others as ranks of a job."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

import pytest
import torch

from tests.patience import LIMIT_S
from tests.programs import environment_of_programs, run_program, run_ranks_of
from triton_ep.runtime.launch import INTERPRETING

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SYMMETRIC_HEAP = ROOT / "examples/00_symmetric_heap.py"
DISPATCH_COMBINE = ROOT / "examples/01_dispatch_combine.py"
MXFP8 = ROOT / "examples/02_mxfp8.py"
MOE_LAYER = ROOT / "examples/03_moe_layer.py"
TRAIN_STEP = ROOT / "examples/04_train_step.py"
OVERLAP = ROOT / "examples/05_overlap.py"
MOE_LM = ROOT / "examples/09_moe_lm.py"
MEGATRON = ROOT / "examples/06_megatron.py"
BARE: list[str] = []
RANKS = 4 if INTERPRETING else max(n for n in (1, 2, 4) if n <= torch.cuda.device_count())
LAUNCHED = min(RANKS, 2)
SMALL = ["--hidden", "32", "--ffn", "32", "--experts", "4"] if INTERPRETING else []
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", str(LAUNCHED)]


def _run(command: Sequence[str | Path]) -> str:
    """Output of a command that must succeed, run from the checkout, which need not be installed.

    command: arguments of `python`, or a command line of mpirun, which starts Python itself.
    """
    bare = command[0] in EXAMPLES
    environment = environment_of_programs()
    if Path(command[0]).name == "mpirun":
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    else:
        done = run_program(command, environment, imported=bare)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _mpirun(ranks: int = LAUNCHED) -> list[str]:
    """mpirun with some ranks on this host, as the current user."""
    program = shutil.which("mpirun")
    if program is None:
        pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
    return [program, "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), sys.executable]


@pytest.mark.parametrize(
    ("path", "line", "launcher"),
    [
        *((SYMMETRIC_HEAP, r"got the words of rank \d", launcher) for launcher in ("bare", "torchrun", "mpirun")),
        *((DISPATCH_COMBINE, r"\d+ rows for experts .+", launcher) for launcher in ("bare", "mpirun")),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else value if value.isalpha() else "",
)
def test_example_prints_one_line_per_rank(path: Path, line: str, launcher: str) -> None:
    """Every way to start gives ranks that check their rows: 4 when started bare, else the launcher's number."""
    command = {"bare": lambda: BARE, "torchrun": lambda: TORCHRUN, "mpirun": _mpirun}[launcher]()
    num_ranks = RANKS if launcher == "bare" else LAUNCHED
    ranks = re.findall(rf"^rank (\d) of {num_ranks}: {line}$", _run([*command, path]), re.MULTILINE)
    assert sorted(map(int, ranks)) == list(range(num_ranks))


@pytest.mark.parametrize("path", [SYMMETRIC_HEAP, DISPATCH_COMBINE], ids=lambda path: path.stem)
def test_example_runs_as_one_rank(path: Path) -> None:
    """Examples run as one rank, as on a machine with one GPU, under a launcher."""
    assert _run([*_mpirun(1), path]).startswith("rank 0 of 1: ")


def test_mxfp8_example_shows_bytes_and_error() -> None:
    """Every rank prints its bytes and error, and rank 0 the bytes of a row."""
    output = run_ranks_of([MXFP8], LAUNCHED)
    pattern = rf"^rank (\d) of {LAUNCHED}: sent (\d+) rows in (\d+) bytes, not (\d+); received \d+ with ([\d.]+) dB"
    lines = re.findall(pattern, output, re.MULTILINE)
    assert sorted(int(rank) for rank, *_ in lines) == list(range(LAUNCHED))
    for _, rows, mx_bytes, bf16_bytes, decibel in lines:
        assert (int(mx_bytes), int(bf16_bytes)) == (int(rows) * 640, int(rows) * 1024)
        assert float(decibel) > 30
    assert "528 in MXFP8, 640 on the wire\n" in output


def test_moe_layer_example_compares_every_gradient() -> None:
    """The table has a line per rank with a number per gradient; the example asserts that they suffice."""
    lines = run_ranks_of([MOE_LAYER], LAUNCHED).splitlines()
    assert lines[1].split() == ["rank", "y", "dx", "dw13", "dw2", "drouter"]
    least = [float(cell) for cell in lines[-1].split()[1:]]
    for rank, line in enumerate(lines[2:-1]):
        cells = line.split()
        assert int(cells[0]) == rank
        assert all(float(seen) >= bound for seen, bound in zip(cells[1:], least, strict=True))
    assert len(lines) == LAUNCHED + 3


def test_training_example_compares_the_losses(tmp_path: Path) -> None:
    """Both losses fall together, are stored, and are drawn. (Few steps and ranks, because CPU ranks are slow.)"""
    ranks, picture, rows = min(RANKS, 2), tmp_path / "losses.png", tmp_path / "losses.csv"
    words = ["--steps", "3", "--length", "8", "--out", picture, "--csv", rows]
    output = _run([*_mpirun(ranks), TRAIN_STEP, *words])
    assert output.startswith(f"rank 0 of {ranks}: loss of 3 steps, entropy 1.2080\n")
    steps = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    assert [int(step) for step, *_ in steps] == [1, 3]
    for first, last in zip(*(map(float, values) for _, *values in steps), strict=True):
        assert last < first
    assert "as good" in output and "NOT" not in output
    header, *lines = (line.split(",") for line in rows.read_text().splitlines())
    assert header == ["step", "bf16 seed 0", "MXFP8"]
    assert [line[0] for line in lines] == ["1", "2", "3"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_language_model_example_trains_saves_loads_and_decodes(tmp_path: Path) -> None:
    """The example's assertions hold, the picture is written, and the prompt is continued."""
    words = ["--steps", "2", "--blocks", "1", "--length", "8", "--write", "2", *SMALL, "--folder", tmp_path]
    output = run_ranks_of([MOE_LM, *words], LAUNCHED)
    ranks, ep = LAUNCHED, max(LAUNCHED // 2, 1)
    assert re.search(rf"^trained by {ranks} ranks with EP {ep}: loss ", output, re.M)
    before, after = re.search(
        rf"^loss of other text .+ -> ([\d.]+); loaded with EP {ranks}: ([\d.]+)$", output, re.M
    ).groups()
    assert abs(float(before) - float(after)) < 0.05
    assert re.search(r"^decoded, [\d.]+% from the whole pass: ['\"]The following ", output, re.M)
    assert [line.split(",")[0] for line in output.splitlines() if line.startswith("step ")] == [
        f"step {step} of 2" for step in (1, 2)
    ]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_overlap_example_is_right_on_every_rank() -> None:
    """Each rank checks the returned rows in every step, and reports it."""
    pattern = rf"^rank (\d) of {LAUNCHED}: 3 steps of 2 micro-batches, .+ are right$"
    lines = re.findall(pattern, run_ranks_of([OVERLAP], LAUNCHED), re.MULTILINE)
    assert sorted(map(int, lines)) == list(range(LAUNCHED))


def test_megatron_example_has_the_bits_of_the_dense_layer() -> None:
    """Each rank compares outputs and gradients, and reports it."""
    pattern = rf"^rank (\d) of {LAUNCHED}: \d+ tokens, the bits of .+$"
    lines = re.findall(pattern, run_ranks_of([MEGATRON], LAUNCHED), re.MULTILINE)
    assert sorted(map(int, lines)) == list(range(LAUNCHED))


def test_page_quotes_the_examples() -> None:
    """Code that the how-to pages quote is in the examples, line by line."""
    paths = []
    for name, depth in (("train-a-moe-layer", 8), ("overlap", 12)):
        page = (ROOT / f"docs/how-to/{name}.md").read_text()
        quotation = r"^```python no-run \(quoted from (\S+)\)\n(.+?)^```$"
        for path, text in re.findall(quotation, page, re.MULTILINE | re.DOTALL):
            paths.append(path)
            assert indent(text, " " * depth) in (ROOT / path).read_text()
    assert paths == ["examples/04_train_step.py", "examples/05_overlap.py"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_says_how_to_run_it(path: Path) -> None:
    """Each example names its command."""
    assert f"python examples/{path.name}" in path.read_text()
