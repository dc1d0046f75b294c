"""Files that other processes see complete or not at all."""

import os
import tempfile
from pathlib import Path


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
