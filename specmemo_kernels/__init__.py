"""Speculative decoding whose memory is planned, bounded and never wasted.

``specmemo_kernels.patch(model, heads=...)`` makes a transformers model's ``generate`` speculate; the operators behind
it are in :mod:`specmemo_kernels.ops`. Importing the package needs neither triton nor a compiler nor a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specmemo_kernels.drafting import Drafter, DraftInput, MedusaHeads
    from specmemo_kernels.integrations.hf import SpecMemo, patch, unpatch
    from specmemo_kernels.integrations.hf_attention import UnsupportedModel
    from specmemo_kernels.planner import BudgetError, MemoryPlan
    from specmemo_kernels.tree import DraftTree

__version__ = "0.1.0"

_PUBLIC = {
    "BudgetError": "specmemo_kernels.planner",
    "DraftInput": "specmemo_kernels.drafting",
    "DraftTree": "specmemo_kernels.tree",
    "Drafter": "specmemo_kernels.drafting",
    "MedusaHeads": "specmemo_kernels.drafting",
    "MemoryPlan": "specmemo_kernels.planner",
    "SpecMemo": "specmemo_kernels.integrations.hf",
    "UnsupportedModel": "specmemo_kernels.integrations.hf_attention",
    "patch": "specmemo_kernels.integrations.hf",
    "unpatch": "specmemo_kernels.integrations.hf",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that ``import specmemo_kernels`` stays light."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
