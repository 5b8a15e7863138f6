"""Speculative decoding with planned, bounded memory.

``specmemo_kernels.patch(model, heads=...)`` makes a transformers model's ``generate`` speculate. The operators are in
:mod:`specmemo_kernels.ops`. Importing the package needs neither triton nor a compiler nor a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specmemo_kernels.drafting import Drafter, DraftInput, MedusaHeads
    from specmemo_kernels.drafting.draft_model import DraftModelDrafter
    from specmemo_kernels.drafting.load_heads import HeadsError, load_heads
    from specmemo_kernels.drafting.prompt_lookup import PromptLookupDrafter
    from specmemo_kernels.engine.sampling import Sampling, TypicalAcceptance
    from specmemo_kernels.engine.scores import TokenScore
    from specmemo_kernels.integrations.distributed.ranks import RankError
    from specmemo_kernels.integrations.hf.batch import (
        BatchRun,
        Completion,
        Request,
        generate_batch,
        stream_batch,
    )
    from specmemo_kernels.integrations.hf.chat import ChatSession, LeftOutWarning
    from specmemo_kernels.integrations.hf.draft import DraftModel
    from specmemo_kernels.integrations.hf.engine import Engine, EngineClosed, QueueFull
    from specmemo_kernels.integrations.hf.generation import Generation, GenerationFailed
    from specmemo_kernels.integrations.hf.handle import SpecMemo
    from specmemo_kernels.integrations.hf.mask import UnsupportedModel
    from specmemo_kernels.integrations.hf.patch import patch, unpatch
    from specmemo_kernels.integrations.hf.run import Piece
    from specmemo_kernels.planning.memory_plan import BudgetError, MemoryPlan
    from specmemo_kernels.tree.draft_tree import DraftTree
    from specmemo_kernels.tree.tree_budget import TreeBudget

__version__ = "0.1.0"

# A literal, because type checkers read it; a test compares it with the imports above.
__all__ = [
    "BatchRun",
    "BudgetError",
    "ChatSession",
    "Completion",
    "DraftInput",
    "DraftModel",
    "DraftModelDrafter",
    "DraftTree",
    "Drafter",
    "Engine",
    "EngineClosed",
    "Generation",
    "GenerationFailed",
    "HeadsError",
    "LeftOutWarning",
    "MedusaHeads",
    "MemoryPlan",
    "Piece",
    "PromptLookupDrafter",
    "QueueFull",
    "RankError",
    "Request",
    "Sampling",
    "SpecMemo",
    "TokenScore",
    "TreeBudget",
    "TypicalAcceptance",
    "UnsupportedModel",
    "__version__",
    "generate_batch",
    "load_heads",
    "patch",
    "stream_batch",
    "unpatch",
]
_MODULES = {
    "drafting": ("DraftInput", "Drafter", "MedusaHeads"),
    "drafting.draft_model": ("DraftModelDrafter",),
    "drafting.load_heads": ("HeadsError", "load_heads"),
    "drafting.prompt_lookup": ("PromptLookupDrafter",),
    "engine.sampling": ("Sampling", "TypicalAcceptance"),
    "engine.scores": ("TokenScore",),
    "integrations.distributed.ranks": ("RankError",),
    "integrations.hf.batch": ("BatchRun", "Completion", "Request", "generate_batch", "stream_batch"),
    "integrations.hf.chat": ("ChatSession", "LeftOutWarning"),
    "integrations.hf.draft": ("DraftModel",),
    "integrations.hf.engine": ("Engine", "EngineClosed", "QueueFull"),
    "integrations.hf.generation": ("Generation", "GenerationFailed"),
    "integrations.hf.handle": ("SpecMemo",),
    "integrations.hf.mask": ("UnsupportedModel",),
    "integrations.hf.patch": ("patch", "unpatch"),
    "integrations.hf.run": ("Piece",),
    "planning.memory_plan": ("BudgetError", "MemoryPlan"),
    "tree.draft_tree": ("DraftTree",),
    "tree.tree_budget": ("TreeBudget",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import public names on first use, so that ``import specmemo_kernels`` stays light."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
