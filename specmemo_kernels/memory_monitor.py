"""How much memory this process may still take, per device."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch


class MemoryMonitor(Protocol):
    """Asked between steps, every few of them."""

    def free(self) -> int:
        """Bytes that may still be taken, on the device that has the least."""

    def give_back(self) -> None:
        """Return what an allocator keeps for later, so that others find it free."""


class DeviceMonitor:
    """Asks the driver, on a CPU the kernel.

    Args:
        devices: those that hold a model and its pages.

    Raises:
        ValueError: a CPU on a system without ``/proc``.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = sorted(set(devices), key=str)
        if any(device.type == "cpu" for device in self.devices) and not Path("/proc/self/status").exists():
            raise ValueError("keep_free: free memory of a CPU is read from /proc, which this system doesn't have")

    def free(self) -> int:
        return min(free_bytes(device) for device in self.devices)

    def give_back(self) -> None:
        give_back(self.devices)


def give_back(devices: Iterable[torch.device]) -> None:
    """Return torch's cached blocks to the devices; a CPU's allocator keeps none."""
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Of a GPU, and of the share of it that ``torch.cuda.set_per_process_memory_fraction`` allows; of a CPU's memory,
    its control group (v2) and the process's RLIMIT_AS and RLIMIT_DATA whatever is least.
    """
    if device.type == "cpu":
        return _host_free()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, allowed - torch.cuda.memory_reserved(device))


def _host_free() -> int:
    import resource  # not on every system

    found = [_fields("/proc/meminfo", ":")["MemAvailable"] * 1024]
    group = Path("/sys/fs/cgroup")
    try:
        used = int((group / "memory.current").read_text()) - _fields(group / "memory.stat", " ")["inactive_file"]
        found.append(int((group / "memory.max").read_text()) - used)
    except (OSError, ValueError, KeyError):  # no such group, or no limit ("max")
        pass
    status = _fields("/proc/self/status", ":")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            found.append(most - status[name] * 1024)
    return min(found)


def _fields(file: str | Path, separator: str) -> dict[str, int]:
    """The lines ``name<separator>number ...`` of a file."""
    pairs = (line.partition(separator) for line in Path(file).read_text().splitlines())
    values = ((name, rest.split()) for name, _, rest in pairs)
    return {name: int(words[0]) for name, words in values if words and words[0].isdigit()}
