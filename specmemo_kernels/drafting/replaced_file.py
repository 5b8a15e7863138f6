"""Files that are replaced atomically."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file; a crash leaves the old one or the new one, and processes that have the old one open can read it.

    Raises:
        OSError: it can't be written, as on a full disk.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        write(fresh)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(path)
    except SafetensorError as error:  # what its library makes of the system's errors
        raise OSError(f"{path} can't be written: {error}") from error
    finally:
        fresh.unlink(missing_ok=True)
