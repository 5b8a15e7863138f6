"""The standard library's files: the demo model's training and held-out texts."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

HELD_OUT_SHARE = 16  # one file in 16 is held out


def library_root() -> Path:
    """The folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def library_files(include_tests: bool = False) -> list[Path]:
    """The ``.py`` files of the standard library, sorted; installed packages are left out."""
    root = library_root()
    skip = {"site-packages", "lib2to3"} if include_tests else {"site-packages", "lib2to3", "test", "tests", "idlelib"}
    files = (f for f in root.rglob("*.py") if not skip & set(f.relative_to(root).parts))
    return sorted(f for f in files if f.stat().st_size > 200)


def is_held_out(file: Path) -> bool:
    """Whether ``file`` was held out of training; depends only on its path inside the library."""
    name = file.relative_to(library_root()).as_posix()
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0
