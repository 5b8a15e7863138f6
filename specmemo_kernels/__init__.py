"""Speculative decoding whose memory is planned, bounded and never wasted.

``specmemo_kernels.patch(model, heads=...)`` makes a transformers model's ``generate`` speculate; the operators behind
it are in :mod:`specmemo_kernels.ops`. Importing the package needs neither triton nor a compiler nor a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specmemo_kernels.drafting import Drafter, DraftInput, MedusaHeads
    from specmemo_kernels.drafting.load_heads import HeadsError, load_heads
    from specmemo_kernels.integrations.hf import SpecMemo, patch, unpatch
    from specmemo_kernels.integrations.hf_attention import UnsupportedModel
    from specmemo_kernels.planner import BudgetError, MemoryPlan
    from specmemo_kernels.tree import DraftTree

__version__ = "0.1.0"

# A literal, in step with the imports above: type checkers read both.
__all__ = [
    "BudgetError",
    "DraftInput",
    "DraftTree",
    "Drafter",
    "HeadsError",
    "MedusaHeads",
    "MemoryPlan",
    "SpecMemo",
    "UnsupportedModel",
    "__version__",
    "load_heads",
    "patch",
    "unpatch",
]
_HOME = {
    "BudgetError": "planner",
    "DraftInput": "drafting",
    "DraftTree": "tree",
    "Drafter": "drafting",
    "HeadsError": "drafting.load_heads",
    "MedusaHeads": "drafting",
    "MemoryPlan": "planner",
    "SpecMemo": "integrations.hf",
    "UnsupportedModel": "integrations.hf_attention",
    "load_heads": "drafting.load_heads",
    "patch": "integrations.hf",
    "unpatch": "integrations.hf",
}

if not TYPE_CHECKING:  # a checker would take every name for a public one

    def __getattr__(name: str) -> Any:
        """Public names load on first use, so that ``import specmemo_kernels`` stays light."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
