"""Files that are replaced atomically."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file; a crash leaves the old one or the new one, and processes that have the old one open can read it.

    The permissions are those of the old file; of a new one, those that the umask leaves.

    Raises:
        OSError: it can't be written, as on a full disk; it has a file's name.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        write(fresh)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.chmod(_mode(path))  # safetensors writes 0600
        fresh.replace(path)
    except OSError as error:
        if error.filename is None and error.strerror:  # of a write
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    except SafetensorError as error:  # what its library makes of the system's errors
        raise OSError(f"{path} can't be written: {error}") from error
    finally:
        fresh.unlink(missing_ok=True)


def _mode(path: Path) -> int:
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0o077)  # it can't be read otherwise
    os.umask(umask)
    return 0o666 & ~umask
