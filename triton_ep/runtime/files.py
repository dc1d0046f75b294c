"""Files that a command writes: complete or not at all, and known to be writable before the work begins."""

import os
import tempfile
from pathlib import Path

from triton_ep.errors import InputError


def write_complete(path: Path, data: bytes) -> None:
    """Create the folder, write the data, then give the file its name. Raises OSError if one of them fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def check_writable(path: Path) -> None:
    """Raise InputError unless the file can be written. A file that exists keeps its contents, and none is left behind.

    The folders of the path may be missing: they are created with the file.
    """
    try:
        if path.exists():
            with path.open("ab"):
                return
        folder = path.absolute().parent
        while not folder.exists():
            folder = folder.parent
        # Try it: permissions alone do not tell whether a file system is read-only, or has files at all.
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> InputError:
    """The error of a file that cannot be written."""
    return InputError(f"{path} cannot be written: {error}. Name another path, or make its folder writable.")
