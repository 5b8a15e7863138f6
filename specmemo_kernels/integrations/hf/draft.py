"""A transformers model as the drafter of another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.drafting.draft_model import DraftModelDrafter
from specmemo_kernels.integrations.hf.attach import attach
from specmemo_kernels.integrations.hf.checks import check_numbers
from specmemo_kernels.integrations.hf.probe import check_config, probe
from specmemo_kernels.integrations.hf.target import HFTarget, ModelFacts


@dataclass(frozen=True)
class DraftModel:
    """A smaller model that drafts: ``specmemo_kernels.patch(model, heads=DraftModel("org/small"))``.

    Attributes:
        model: a loaded causal language model, or the folder or hub id of one (loaded in the big model's dtype).
        tokens: how many it guesses per step.
    """

    model: Any
    tokens: int = 5


def is_language_model(heads: Any) -> bool:
    """Whether ``heads`` is a model that can draft, given as it is."""
    return hasattr(heads, "generate") and hasattr(heads, "get_output_embeddings")


class HFDraftModel(DraftModelDrafter):
    """A draft model with what planning and unpatching have to know of it.

    Attributes:
        hf_model, facts: the model itself and what its probe showed.
    """

    def __init__(self, hf_model: Any, facts: ModelFacts, tokens: int, backend: str, detach: Callable[[], None]) -> None:
        weights = {p.data_ptr(): p.numel() * p.element_size() for p in (*hf_model.parameters(), *hf_model.buffers())}
        target = HFTarget(hf_model, facts, backend)
        super().__init__(target, facts.layers, max_depth=tokens, weight_bytes=sum(weights.values()), backend=backend)
        self.hf_model, self.facts, self.detach = hf_model, facts, detach

    @torch.no_grad()
    def propose(self, inputs: Any) -> torch.Tensor:
        return super().propose(inputs)


def load_draft_model(wanted: DraftModel, model: Any, facts: ModelFacts, backend: str) -> HFDraftModel:
    """The drafter that ``wanted`` describes, for ``model``.

    Raises:
        UnsupportedModel: it can't be run on packed rows.
        TypeError, ValueError: another vocabulary, the target itself, a model in training mode or of numbers that the
            backend doesn't compute with, or ``tokens`` that aren't a number of at least 1.
    """
    small = wanted.model
    if isinstance(small, str | Path):
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(small, dtype=facts.dtype)
        small = loaded.to(facts.device)
    if not is_language_model(small):
        raise ValueError(f"a draft model needs generate and an lm_head, got {type(small).__name__}")
    if small is model:
        raise ValueError("the draft model must be another model than the patched one")
    if small.training:
        raise ValueError("the draft model is in training mode; call its eval() first")
    check_config(small.config)
    detach = attach(small)
    try:
        small_facts = probe(small)
        check_numbers(small_facts, backend, "the draft model")
        if small_facts.vocab_size != facts.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {small_facts.vocab_size} tokens, the model one of "
                f"{facts.vocab_size}; both must use the same tokenizer"
            )
        return HFDraftModel(small, small_facts, wanted.tokens, backend, detach)
    except BaseException:
        detach()
        raise
