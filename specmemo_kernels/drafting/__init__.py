"""Drafters propose the tokens that a step verifies."""

from specmemo_kernels.drafting.base import Drafter, DraftInput
from specmemo_kernels.drafting.medusa_heads import MedusaHeads

__all__ = ["DraftInput", "Drafter", "MedusaHeads"]
