"""Rows of docs/benchmarks/results: their columns, the environment columns of every row, and the file."""

from __future__ import annotations

import csv
import datetime
import io
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from triton_ep.errors import InputError
from triton_ep.runtime.files import cannot_write, check_writable, write_complete
from triton_ep.runtime.machine import inspect_machine

ROOT = Path(__file__).resolve().parents[2]
HEADER = (
    "op,provider,mode,payload,nodes,ranks,tokens,hidden,topk,experts,routing,median_us,p20_us,p80_us,skew_pct,"
    "bytes_out,gbps,gpu,driver,torch,triton,nvshmem,commit,date,skip_reason,host_us,kernel_us,floor_us,floor_ratio,iters,"
    "peak_mib,error_db"
)
COLUMNS = HEADER.split(",")
_BEFORE = COLUMNS[: COLUMNS.index("peak_mib")]
"""Columns of older files, which lack the last two; rows of such files leave those empty."""

# Columns that pictures and comparisons compute with; a cell may be empty.
_COUNTS = ("nodes", "ranks", "tokens", "hidden", "topk", "experts", "iters")
_TIMES = ("median_us", "floor_us", "peak_mib")

Row = dict[str, str]


def commit_of_checkout() -> str | None:
    """Short commit of this checkout, with "+dirty" if tracked files differ from it; None without a checkout or git."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    answers = [
        subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    if any(answer.returncode for answer in answers):
        return None
    return answers[0].stdout.strip() + ("+dirty" if answers[1].stdout.strip() else "")


def driver_version() -> str:
    """Version of the NVIDIA driver, or the CUDA version that it supports if the driver does not report its own."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.split()[0]
    told = Path("/proc/driver/nvidia/version")
    if told.exists() and (found := re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", told.read_text())):
        return found[1]
    version: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return f"cuda-{version}"


def environment(commit: str, gpus: bool) -> Row:
    """The environment columns of a row; `gpu` is "cpu" without GPUs."""
    machine = inspect_machine()
    return {
        "gpu": machine.gpus[0].name.removeprefix("NVIDIA ") if gpus and machine.gpus else "cpu",
        "driver": driver_version() if gpus and machine.gpus else "none",
        "torch": torch.__version__,
        "triton": machine.triton or "none",
        "nvshmem": (machine.nvshmem or "none") if gpus else "none",
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def make_row(values: Mapping[str, object]) -> Row:
    """A row of all columns; columns that are not given stay empty.

    Raises:
        KeyError: a value belongs to no column.
    """
    if unknown := set(values) - set(COLUMNS):
        raise KeyError(f"a benchmark row has no columns {sorted(unknown)}")
    return {name: str(values.get(name, "")) for name in COLUMNS}


def check_file(path: Path) -> None:
    """Raise InputError unless `append_rows` can append to the file, or create or replace it."""
    check_writable(path)
    if _header_of(path) == _BEFORE:
        check_writable(path.with_suffix(".part"))


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append to the file; create it, with its folder and header, if it does not exist.

    A file of an earlier version is replaced, whole, by one that has the columns it lacks.

    Raises:
        InputError: the file has other columns, or cannot be written.
    """
    header = _header_of(path)
    try:
        if header == _BEFORE:
            text = io.StringIO()
            _write(text, [*read_rows(path), *rows], with_header=True)
            write_complete(path, text.getvalue().encode())
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="") as file:
            _write(file, rows, with_header=header is None)
    except OSError as error:
        raise cannot_write(path, error) from error


def _write(file: TextIO, rows: Sequence[Row], with_header: bool) -> None:
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    if with_header:
        writer.writeheader()
    writer.writerows(rows)


def _header_of(path: Path) -> list[str] | None:
    """The columns of a file; None: it does not exist, or is empty.

    Raises:
        InputError: rows have other columns, or the file cannot be read.
    """
    try:
        if not path.exists() or not path.stat().st_size:
            return None
        with path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as rows of a benchmark: {error}. Name another file.") from error
    if header not in (COLUMNS, _BEFORE):
        shown = str(header)[:200]
        raise InputError(f"{path} has the columns {shown}, rows of this version have {COLUMNS}. Name another file.")
    return header


def read_rows(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        InputError: the file does not exist, is no text, or has other columns or a bad number.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}. `triton-ep bench dispatch --csv {path}` writes one.")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames not in (COLUMNS, _BEFORE):
                shown = str(reader.fieldnames)[:200]
                raise InputError(f"{path} has the columns {shown}, rows of this version have {COLUMNS}.")
            rows = []
            for row in reader:
                if reader.fieldnames == _BEFORE:
                    row.update(dict.fromkeys(COLUMNS[len(_BEFORE) :], ""))
                _check_row(row, f"{path}, line {reader.line_num}")
                rows.append(row)
            return rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as rows of a benchmark: {error}.") from error


def _check_row(row: Mapping[Any, Any], where: str) -> None:
    """Raise InputError unless a row has a cell for every column, and numbers in columns that are used as numbers."""
    if set(row) != set(COLUMNS) or None in row.values():
        raise InputError(f"{where}: a row has {len(COLUMNS)} cells, this one does not.")
    for name in (*_COUNTS, *_TIMES):
        try:
            number = float(int(row[name]) if name in _COUNTS else row[name]) if row[name] else 1.0
        except (ValueError, OverflowError):
            number = math.nan
        if not 0 < number < math.inf:
            raise InputError(f"{where}: {name} is {row[name]!r:.60}, which is no number above 0.")
