"""Free memory of this process, by device."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from specmemo_kernels.planning.host_allocator import release_host_memory
from specmemo_kernels.planning.host_memory import host_free


class MemoryMonitor(Protocol):
    """Reads and increases the free memory between steps."""

    def free(self) -> int:
        """Free bytes on the device with the least."""

    def release_cached(self) -> None:
        """Return memory cached by allocators to the device."""


class DeviceMonitor:
    """Reads the GPU driver, and the operating system for a CPU.

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

    def release_cached(self) -> None:
        release_cached(self.devices)


def release_cached(devices: Iterable[torch.device]) -> None:
    """Return memory cached by allocators and libraries to the devices."""
    kinds = {device.type for device in devices}
    if "cuda" in kinds:
        torch.cuda.empty_cache()
    if "cpu" in kinds:
        release_host_memory()


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate on a device.

    On a GPU within ``torch.cuda.set_per_process_memory_fraction``; on a CPU
    :func:`specmemo_kernels.planning.host_memory.host_free`.
    """
    if device.type == "cpu":
        return host_free()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, allowed - torch.cuda.memory_reserved(device))
