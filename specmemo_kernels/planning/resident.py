"""Peak memory of a call, temporaries inside of operators and memory of foreign libraries included."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from specmemo_kernels.planning.host_allocator import release_host_memory
from specmemo_kernels.planning.host_memory import numbers

_STATUS, _REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
#: Seconds between two looks at the process, where the kernel's peak can't be reset.
_INTERVAL = 0.001


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Peak bytes during ``call`` beyond those before it.

    On a CPU the growth of the process's anonymous memory, in pages of 4 KiB; blocks of the C allocator that were free
    before are returned to the system first. On a GPU the peak of torch's allocator, whose peak statistics are reset. 0
    on a system without ``/proc``, and on other devices.
    """
    if device.type == "cuda":
        return _cuda_peak(call, device)
    if device.type != "cpu" or not _STATUS.exists():
        call()
        return 0
    release_host_memory()
    before = _fields()
    try:
        _REFS.write_text("5")  # resets VmHWM
    except OSError:
        return max(0, _polled_peak(call) - _anonymous(before))
    call()
    after = _fields()
    # The kernel's peak has pages of files too, which are mapped and stay so.
    return max(0, after["VmHWM"] - after["RssFile"] - _anonymous(before))


def _fields() -> dict[str, int]:
    """Bytes by name, of the fields in KiB."""
    return {name: kib * 1024 for name, kib in numbers(_STATUS, ":").items()}


def _anonymous(fields: dict[str, int]) -> int:
    return fields["RssAnon"] + fields["RssShmem"]


def _polled_peak(call: Callable[[], object]) -> int:
    peak, done = _anonymous(_fields()), threading.Event()

    def poll() -> None:
        nonlocal peak
        while not done.wait(_INTERVAL):
            peak = max(peak, _anonymous(_fields()))

    poller = threading.Thread(target=poll, name="specmemo-memory", daemon=True)
    poller.start()
    try:
        call()
    finally:
        done.set()
        poller.join()
    return max(peak, _anonymous(_fields()))


def _cuda_peak(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)
