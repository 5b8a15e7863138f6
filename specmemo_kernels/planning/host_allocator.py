"""Memory held by the C allocator and MKL on a CPU: measure it and return it to the system.

For glibc and torch builds with MKL; elsewhere these functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

#: Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Larger blocks are mapped, so that freeing one returns it. glibc starts at 128 KiB and raises the threshold to up to
#: 32 MiB whenever a mapped block is freed. Tensors in the heap then leave holes: 13 MiB beside 13 MiB of activations, 2
#: to 10 MiB with a threshold of 1 MiB, 1 to 5 MiB with 256 KiB, 1 to 2 MiB with 64 KiB. Prefill and decode take 0.99 to
#: 1.03 of the time with 256 KiB (models of 6 and 12 layers, batches of 2 to 8).
MAPPED_BYTES = 64 << 10
#: The same while temporary tensors and objects that are kept are allocated in turn.
_TEMPORARY_BYTES = 16 << 10
#: Free bytes at the end of the heap that may stay.
_TRIMMED_BYTES = 2 << 20


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33; bytes in use are ``hblkhd`` (mapped) and ``uordblks`` (heap)."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def _function(name: str, result: Any = ctypes.c_int) -> Callable[..., Any] | None:
    """A function of the C library, or ``None``."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.restype = result
    return function


@functools.cache
def _mkl_function(*names: str) -> Any:
    """A function of MKL by the first of these names, or ``None``; torch's builds export internal names."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    return next((getattr(library, name) for name in names if hasattr(library, name)), None)


def free_library_buffers() -> None:
    """Free MKL's packing buffers.

    Call this before a product with more rows than any before: MKL allocates another buffer beside the old ones.
    """
    free = _mkl_function("mkl_serv_free_buffers", "mkl_free_buffers", "MKL_Free_Buffers")
    if free is not None:
        free()


def library_bytes() -> int:
    """Bytes of MKL's packing buffers of all threads; 0 without MKL."""
    stat = _mkl_function("mkl_serv_mem_stat", "mkl_mem_stat", "MKL_Mem_Stat")
    if stat is None:
        return 0
    stat.restype, count = ctypes.c_int64, ctypes.c_int(0)
    return int(stat(ctypes.byref(count)))


def release_host_memory() -> None:
    """Return unused memory of MKL and the C allocator to the system."""
    free_library_buffers()
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def return_large_blocks() -> None:
    """Make the C allocator return freed large blocks to the system, for the rest of the process."""
    mallopt = _function("mallopt")
    if mallopt is not None and _function("malloc_trim") is not None:  # else not glibc: parameters differ
        mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_TRIM_THRESHOLD, _TRIMMED_BYTES)


@contextmanager
def mapped_temporaries() -> Iterator[None]:
    """Map also small blocks meanwhile, where :func:`return_large_blocks` was called.

    Small objects that are kept would leave holes between temporary tensors in the heap.
    """
    mallopt = _function("mallopt")
    if mallopt is None or _function("malloc_trim") is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _TEMPORARY_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        release_host_memory()


def allocated_bytes() -> int:
    """Bytes in use of the C allocator, CPU tensors included; 0 without ``mallinfo2``."""
    mallinfo = _function("mallinfo2", _MallocInfo)
    if mallinfo is None:
        return 0
    info = mallinfo()
    return int(info.hblkhd + info.uordblks)
