"""Where a drafter is while memory is scarce: on its device with pages of its own, or out of the way."""

from __future__ import annotations

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import Drafter, OffloadingDrafter, PagedDrafter


def can_offload(drafter: Drafter) -> bool:
    """Whether a drafter can give back memory while it isn't asked."""
    return isinstance(drafter, PagedDrafter) or (isinstance(drafter, OffloadingDrafter) and drafter.offloadable)


class DrafterResidency:
    """Keeps ``drafter`` where :meth:`put` says, with as many pages as the target's ``pool``."""

    def __init__(self, drafter: Drafter, pool: PagedKVPool) -> None:
        self.drafter, self.pool = drafter, pool

    def ensure(self, there: bool, prefill_chunk: int) -> None:
        """On its device, or (``there`` false) out of it; what fails on the way is done by the next call."""
        if isinstance(self.drafter, OffloadingDrafter):
            if there:
                self.drafter.restore()
            else:
                self.drafter.offload()
        pages = self.pool.num_pages if there else 0
        if not isinstance(self.drafter, PagedDrafter) or pages == self.drafter.num_pages:
            return
        self.drafter.release()
        if pages:
            self.drafter.allocate(pages, self.pool.page_size, self.pool.block_table.shape[0], prefill_chunk)
