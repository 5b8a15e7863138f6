"""Huge pages of the system under the pages of the pool.

A token's keys and values lie in as many places as there are layers and heads, each on another 4 KiB of memory, and a
core can't remember where so many of them are: finding them anew is a fifth of a commit. Linux gives 2 MiB at a time to
who asks for it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

HUGE_PAGE = 2 * 2**20  # bytes, of x86-64 and of arm64 with pages of 4 KiB


@functools.cache
def _madvise() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages under what a new CPU tensor covers of them; others, and other systems, are left as they are.

    A wish: where the system has none to give, memory comes as always. None of the memory is touched, and no more can
    be used than the tensor has.
    """
    madvise = _madvise()
    if madvise is None or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:  # a fake one lies nowhere
        return
    storage = tensor.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
    if start < end:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)
