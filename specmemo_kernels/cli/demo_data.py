"""Which of Python's own library files the demo model was trained on, and which it has never seen."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

HELD_OUT_SHARE = 16  # one file in this many


def library_root() -> Path:
    """The folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def library_files(include_tests: bool = False) -> list[Path]:
    """The ``.py`` files of the standard library, sorted; installed packages are left out."""
    root = library_root()
    skip = {"site-packages", "lib2to3"} if include_tests else {"site-packages", "lib2to3", "test", "tests", "idlelib"}
    found = (f for f in root.rglob("*.py") if not skip & set(f.relative_to(root).parts))
    return sorted(f for f in found if f.stat().st_size > 200)


def is_held_out(file: Path) -> bool:
    """Whether ``file`` stayed out of training: decided by its path inside the library alone."""
    name = file.relative_to(library_root()).as_posix()
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0
