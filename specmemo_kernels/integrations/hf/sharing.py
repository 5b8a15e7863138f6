"""Drafters and heads that are given to several patched models."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from specmemo_kernels.drafting.base import OffloadingDrafter, StatefulDrafter
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.medusa_heads import MedusaHeads

if TYPE_CHECKING:
    from specmemo_kernels.integrations.hf.handle import SpecMemo

#: The handles of all patched models, whose drafters are in use.
_handles: weakref.WeakSet[SpecMemo] = weakref.WeakSet()

register, unregister = _handles.add, _handles.discard


def without_others(heads: Any) -> Any:
    """``heads`` as given to ``patch``, such that other patched models aren't affected.

    Medusa heads in use by another model are returned as a twin module, whose parameters share the memory: a model may
    then move its heads to the host while the other model uses them.

    Raises:
        ValueError: a drafter with state about sequences, or an offloadable one, serves another model. Sequences of both
            models would have the same slots.
    """
    if isinstance(heads, MedusaHeads):
        ids = _tensor_ids(heads)
        drafters = (handle.drafter for handle in _handles)
        shared = any(ids & _tensor_ids(d.heads) for d in drafters if isinstance(d, MedusaDrafter))
        return heads.twin() if shared else heads
    has_state = isinstance(heads, StatefulDrafter) or (isinstance(heads, OffloadingDrafter) and heads.offloadable)
    if has_state and _is_in_use(heads):
        gc.collect()  # a model that was dropped without unpatch is in a cycle with its handle
        if _is_in_use(heads):
            raise ValueError(
                f"this {type(heads).__name__} has state and serves another patched model; make one for each model, "
                "or unpatch the other model first"
            )
    return heads


def _is_in_use(drafter: Any) -> bool:
    return any(handle.drafter is drafter for handle in _handles)


def _tensor_ids(heads: MedusaHeads) -> set[int]:
    return set(map(id, (*heads.parameters(), *heads.buffers())))
