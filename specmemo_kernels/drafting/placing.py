"""Moves a drafter off its device when memory is low, and back."""

from __future__ import annotations

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import Drafter, OffloadingDrafter, PagedDrafter


def can_offload(drafter: Drafter) -> bool:
    """Whether a drafter can free memory while it isn't in use."""
    return isinstance(drafter, PagedDrafter) or (isinstance(drafter, OffloadingDrafter) and drafter.offloadable)


class DrafterResidency:
    """Moves ``drafter`` on and off its device; on it, it has as many pages as the target's ``pool``."""

    def __init__(self, drafter: Drafter, pool: PagedKVPool) -> None:
        self.drafter, self.pool = drafter, pool

    def ensure(self, on_device: bool, prefill_chunk: int) -> None:
        """Restore or offload the drafter; after an error the next call completes the move."""
        if isinstance(self.drafter, OffloadingDrafter):
            if on_device:
                self.drafter.restore()
            else:
                self.drafter.offload()
        pages = self.pool.num_pages if on_device else 0
        if not isinstance(self.drafter, PagedDrafter) or pages == self.drafter.num_pages:
            return
        self.drafter.release()
        if pages:
            self.drafter.allocate(pages, self.pool.page_size, self.pool.block_table.shape[0], prefill_chunk)
