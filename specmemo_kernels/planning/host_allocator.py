"""The C allocator and MKL's buffers on a CPU: what they hold beside tensors, and how it goes back to the system.

Everything here is for glibc and torch builds with MKL. Elsewhere nothing is measured and nothing is released.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: glibc's parameters of mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Larger blocks are mapped on their own, so that freeing one returns it. glibc begins at 128 KiB and raises the
#: threshold up to 32 MiB with each mapped block that is freed. Tensors then lie in the heap and leave holes: 13 MiB
#: beside 13 MiB of activations. At 1 MiB there were 2 to 10 MiB of holes, at 256 KiB there are 1 to 4. A prefill of 600
#: tokens takes about 3 % longer (page faults), a decode step the same time.
MAPPED_BYTES = 256 << 10
#: Free bytes at the end of the heap that may stay.
_TRIMMED_BYTES = 2 << 20


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33; ``hblkhd`` and ``uordblks`` are bytes in use, mapped and in the heap."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def _function(name: str, result: Any = ctypes.c_int) -> Callable[..., Any] | None:
    """A function of the C library, ``None`` where it has none of this name."""
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), name, None)
    if found is not None:
        found.restype = result
    return found


@functools.cache
def _mkl_free_buffers() -> Callable[[], object] | None:
    """MKL's function that frees its packing buffers; torch's own builds export it by an internal name."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    names = ("mkl_serv_free_buffers", "mkl_free_buffers", "MKL_Free_Buffers")
    return next((getattr(library, name) for name in names if hasattr(library, name)), None)


def free_library_buffers() -> None:
    """Free the buffers that MKL keeps from product to product.

    A product with more rows than any before gets another buffer beside the old ones, so call this before it.
    """
    free = _mkl_free_buffers()
    if free is not None:
        free()


def release_host_memory() -> None:
    """Return to the system what libraries and the C allocator hold without need."""
    free_library_buffers()
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def return_large_blocks() -> None:
    """Make the C allocator return each large block when it is freed, in this process from now on."""
    mallopt = _function("mallopt")
    if mallopt is not None and _function("malloc_trim") is not None:  # mallopt alone: other numbers in other libraries
        mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_TRIM_THRESHOLD, _TRIMMED_BYTES)


def allocated_bytes() -> int:
    """Bytes in use of the C allocator, those of tensors on the CPU among them; 0 where it doesn't say."""
    info = _function("mallinfo2", _MallocInfo)
    if info is None:
        return 0
    found = info()
    return int(found.hblkhd + found.uordblks)
