"""Drafters and heads that several patched models are given: which may be shared, and what each model owns."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from specmemo_kernels.drafting.base import Drafter, OffloadingDrafter, StatefulDrafter
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.medusa_heads import MedusaHeads

if TYPE_CHECKING:
    from specmemo_kernels.integrations.hf.handle import SpecMemo

#: The handles of all patched models.
_handles: weakref.WeakSet[SpecMemo] = weakref.WeakSet()


def register(handle: SpecMemo) -> None:
    """The handle's drafter serves its model, until that is dropped or :func:`unregister` is called."""
    _handles.add(handle)


def unregister(handle: SpecMemo) -> None:
    """The handle's drafter may serve another model."""
    _handles.discard(handle)


def without_others(heads: Any) -> Any:
    """``heads`` as ``patch`` got them, such that using them leaves other patched models alone.

    Medusa heads of another model come back as a module with parameters of its own, which share the others' memory: one
    model may then move its heads to the host while the other uses them.

    Raises:
        ValueError: a drafter with state about sequences, or that leaves its device, serves another model. Sequences of
            both would have the same slots.
    """
    if isinstance(heads, MedusaHeads):
        mine = set(map(id, (*heads.parameters(), *heads.buffers())))
        return heads.twin() if any(mine & _tensors(each.drafter) for each in _handles) else heads
    has_state = isinstance(heads, StatefulDrafter) or (isinstance(heads, OffloadingDrafter) and heads.offloadable)
    if has_state and _serves(heads):
        gc.collect()  # a model that was dropped without unpatch is in a cycle with its handle
        if _serves(heads):
            raise ValueError(
                f"this {type(heads).__name__} has state and serves another patched model; make one for each model, "
                "or unpatch the other model first"
            )
    return heads


def _serves(drafter: Any) -> bool:
    return any(each.drafter is drafter for each in _handles)


def _tensors(drafter: Drafter) -> set[int]:
    if not isinstance(drafter, MedusaDrafter):
        return set()
    return set(map(id, (*drafter.heads.parameters(), *drafter.heads.buffers())))
