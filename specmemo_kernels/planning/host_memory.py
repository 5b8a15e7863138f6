"""Main memory: what this process may still take, by the kernel's figures and every limit on the process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class GroupFiles:
    """Where control groups keep limit and usage, and the name of file pages in memory.stat that can be dropped."""

    limit: str
    usage: str
    droppable: str


_FILES = {
    "cgroup2": GroupFiles("memory.max", "memory.current", "inactive_file"),
    "cgroup": GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def host_free(root: Path = ROOT) -> int:
    """Bytes that this process may still take: the least of available memory, the limits of its control group and all
    groups above, RLIMIT_AS and RLIMIT_DATA.

    Args:
        root: the folder that holds ``proc`` and the mounted file systems.
    """
    import resource  # not on every system

    found = [_fields(root / "proc/meminfo", ":")["MemAvailable"] * 1024]
    found += [limit - used for limit, used in _groups(root)]
    status = _fields(root / "proc/self/status", ":")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            found.append(most - status[name] * 1024)
    return min(found)


def host_memory(root: Path = ROOT) -> int:
    """Bytes of main memory, or the least limit of this process's control groups where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _groups(root))])


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and usage in bytes of each limited control group of this process: its own and all above, both versions."""
    for folder, files in _folders(root):
        try:
            used = int((folder / files.usage).read_text()) - _fields(folder / "memory.stat", " ")[files.droppable]
            yield int((folder / files.limit).read_text()), used
        except (OSError, ValueError, KeyError):  # no memory controller here, or no limit ("max")
            pass


def _folders(root: Path) -> Iterator[tuple[Path, GroupFiles]]:
    """The folders of this process's own group and of those above, up to what is mounted."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # no control groups
        return
    # hierarchy:controllers:path; version 2 has no controllers here.
    split = [line.split(":", 2) for line in lines]
    paths = {"cgroup2" if not names else "cgroup": path for _, names, path in split if not names or _memory(names)}
    for mount in mounts:
        # ID parent device root place options ... - type source options
        before, _, after = mount.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and not _memory(options)):
            continue
        mounted, place = map(_unescaped, before.split(" ")[3:5])
        top = root / place.lstrip("/")
        own, above = Path(paths[kind]), Path(mounted)
        # A process in a namespace of its own sees a path from another root; then the mount's root is all there is.
        inside = own.relative_to(above) if own.is_relative_to(above) and ".." not in own.parts else Path()
        for folder in (inside, *inside.parents):
            yield top / folder, _FILES[kind]


def _memory(names: str) -> bool:
    return "memory" in names.split(",")


def _unescaped(path: str) -> str:
    """``\\040`` of mountinfo as a space, and so on."""
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), path)


def _fields(file: Path, separator: str) -> dict[str, int]:
    """The lines ``name<separator>number ...`` of a file."""
    pairs = (line.partition(separator) for line in file.read_text().splitlines())
    values = ((name, rest.split()) for name, _, rest in pairs)
    return {name: int(words[0]) for name, words in values if words and words[0].isdigit()}
