"""Free main memory of this process, by the kernel's figures and all limits on the process."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class GroupFiles:
    """Files of a control group: limit, usage, and the entry of memory.stat for reclaimable file pages."""

    limit: str
    usage: str
    droppable: str


_FILES = {
    "cgroup2": GroupFiles("memory.max", "memory.current", "inactive_file"),
    "cgroup": GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def host_free(root: Path = ROOT) -> int:
    """Bytes that this process may still allocate.

    The minimum of available memory, the limits of its control group and all parent groups, RLIMIT_AS and RLIMIT_DATA.
    ``root`` is the folder of ``proc`` and the mounted file systems.
    """
    import resource  # not on every system

    free = [numbers(root / "proc/meminfo", ":")["MemAvailable"] * 1024]
    free += [limit - used for limit, used in _groups(root)]
    status = numbers(root / "proc/self/status", ":")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        allowed = resource.getrlimit(limit)[0]
        if allowed != resource.RLIM_INFINITY:
            free.append(allowed - status[name] * 1024)
    return min(free)


def host_memory(root: Path = ROOT) -> int:
    """Bytes of main memory, or the smallest limit of this process's control groups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _groups(root))])


def cpu_name(root: Path = ROOT) -> str:
    """The processor's name, or its architecture."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and usage in bytes of each control group of this process with a limit, parents included, both versions."""
    for folder, files in _folders(root):
        try:
            used = int((folder / files.usage).read_text()) - numbers(folder / "memory.stat", " ")[files.droppable]
            yield int((folder / files.limit).read_text()), used
        except (OSError, ValueError, KeyError):  # no memory controller here, or no limit ("max")
            pass


def _folders(root: Path) -> Iterator[tuple[Path, GroupFiles]]:
    """Folders of this process's control groups and their parents, up to the mount point."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # no control groups
        return
    # hierarchy:controllers:path; version 2 has no controllers here.
    groups = [line.split(":", 2) for line in lines]
    paths = {"cgroup" if names else "cgroup2": path for _, names, path in groups if not names or _has_memory(names)}
    for mount in mounts:
        # ID parent device root place options ... - type source options
        before, _, after = mount.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and not _has_memory(options)):
            continue
        mount_root, mount_point = map(_unescaped, before.split(" ")[3:5])
        group = Path(paths[kind])
        # In another namespace the path has another root; then only the mount point's group is visible.
        visible = group.is_relative_to(mount_root) and ".." not in group.parts
        inside = group.relative_to(mount_root) if visible else Path()
        for folder in (inside, *inside.parents):
            yield root / mount_point.lstrip("/") / folder, _FILES[kind]


def _has_memory(controllers: str) -> bool:
    return "memory" in controllers.split(",")


def _unescaped(path: str) -> str:
    """Decode the octal escapes of mountinfo (``\\040`` is a space)."""
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), path)


def numbers(file: Path, separator: str) -> dict[str, int]:
    """The first number of each line ``name<separator>number ...`` of a file, by name."""
    pairs = (line.partition(separator) for line in file.read_text().splitlines())
    values = ((name, rest.split()) for name, _, rest in pairs)
    return {name: int(words[0]) for name, words in values if words and words[0].isdigit()}
