"""Memory of files that are mapped into this process, as safetensors' weights are; best effort, on Linux."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")
_MADV_PAGEOUT = 21  # since Linux 5.4, of any architecture


class MappedFiles:
    """The parts of this process's address space that are files' now."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
            addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
            if inode != "0":
                start, end = (int(address, 16) for address in addresses.split("-"))
                self._starts.append(start)
                self._ends.append(end)

    def page_out(self, tensor: torch.Tensor) -> None:
        """Let the system take back the pages of a tensor that is part of a file and won't be read soon.

        The tensor stays valid: its pages are read from the file again. Other memory is left alone.
        """
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        place = bisect.bisect_right(self._starts, start) - 1
        if place < 0 or end > self._ends[place]:
            return
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_PAGEOUT)
