"""The file by which ranks of a host meet, if something else is in its place."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from pathlib import Path

import pytest

from triton_ep.distributed import rendezvous
from triton_ep.errors import ConfigError
from triton_ep.runtime.environment import Environment

pytestmark = pytest.mark.plain


def _note(job: str) -> Path:
    name = hashlib.sha256(job.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"triton_ep-{os.getuid()}-{name}")


def test_a_folder_in_its_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 names the obstacle, and leaves no draft."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    note = _note("a job")
    note.mkdir()
    environment = Environment(launcher="mpirun", rank=0, world_size=2, local_rank=0, local_size=2, job="a job")
    with pytest.raises(ConfigError, match=rf"meet by the file {note}, .*set TMPDIR"):
        rendezvous._meet_on_this_host(environment, 60.0)
    assert list(tmp_path.iterdir()) == [note]


@pytest.mark.parametrize("kind", ["symlink", "folder", "text"])
def test_only_a_note_of_rank_0_is_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else in its place is ignored until rank 0 has written its note there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    note, good = _note("a job"), f"{os.getpid()} {rendezvous._start_ticks(os.getpid())} 1234"
    if kind == "symlink":  # to a valid note at another place
        (tmp_path / "other").write_text(good.replace("1234", "99"))
        note.symlink_to(tmp_path / "other")
    elif kind == "folder":
        note.mkdir()
    else:
        note.write_text("not three numbers")
    looked = threading.Event()
    lstat = Path.lstat

    def noted(path: Path) -> os.stat_result:
        if path == note:
            looked.set()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", noted)

    def write() -> None:
        looked.wait()
        if kind == "folder":
            note.rmdir()
        (tmp_path / "draft").write_text(good)
        os.replace(tmp_path / "draft", note)

    writer = threading.Thread(target=write)
    writer.start()
    environment = Environment(launcher="mpirun", rank=1, world_size=2, local_rank=1, local_size=2, job="a job")
    assert rendezvous._read_note(note, environment, 600.0) == 1234
    writer.join()
