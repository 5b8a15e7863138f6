"""Gloo's collectives, with one worker thread per process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store


def use_one_worker(group: Any, name: str) -> None:
    """Replace the gloo backend of ``group`` by one with a single worker thread; all ranks call this together.

    torch's own has two. After a collective, a worker writes its name into a string that both share, without a lock
    (``ProcessGroupGloo::runLoop`` in torch 2.13). Names of more than 15 characters are on the heap, as that of
    a DTensor's gather, so a worker may write freed memory, and the process crashes.

    Args:
        group: the process group, of any backend. The backend it had stays alive and idle.
        name: the same on all ranks, another one in each call.

    Raises:
        RuntimeError: a rank can't be reached.
    """
    backends = {device: group._get_backend(device) for device in group._device_types}
    found = [device for device, backend in backends.items() if isinstance(backend, dist.ProcessGroupGloo)]
    if not found or backends[found[0]].options._threads == 1:
        return
    options, before = dist.ProcessGroupGloo._Options(), backends[found[0]].options  # type: ignore[attr-defined]
    for field in ("_devices", "_timeout", "group_name", "global_ranks_in_group"):
        setattr(options, field, getattr(before, field))
    options._threads = 1
    store = PrefixStore(f"specmemo/{name}", _get_default_store())
    backend = dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), options)
    group_name, group_desc = group.group_name, group.group_desc  # which a group keeps in its backends
    for device in found:  # a group keeps the first backend of each type, so the type is another
        group._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(group_name)
    group._set_group_desc(group_desc)
