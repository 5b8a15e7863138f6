"""The drafter that ``patch(heads=...)`` describes; a transformers model as a drafter; drafters of several models."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from specmemo_kernels.drafting.base import MTP, PROMPT_LOOKUP, AnyDrafter, OffloadingDrafter, StatefulDrafter
from specmemo_kernels.drafting.draft_model import DraftModelDrafter
from specmemo_kernels.drafting.load_heads import load_heads
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.medusa_heads import MedusaHeads
from specmemo_kernels.drafting.prompt_lookup import PromptLookupDrafter
from specmemo_kernels.integrations.distributed.ranks import SingleRank, heads_digest
from specmemo_kernels.integrations.hf.checks import check_config, check_numbers
from specmemo_kernels.integrations.hf.coded import plain_weight, tensor_bytes
from specmemo_kernels.integrations.hf.feature_drafter import load_feature_drafter, vocabulary_of
from specmemo_kernels.integrations.hf.fuse import FUSED_BACKENDS, find_leaves
from specmemo_kernels.integrations.hf.linears import by_operators
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.probe import probe
from specmemo_kernels.integrations.hf.target import HFTarget, ModelFacts, attach
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, Accuracy

if TYPE_CHECKING:
    from specmemo_kernels.integrations.hf.handle import SpecMemo

_PACKED = "which packs Medusa heads and published drafters"
#: The handles of all patched models, whose drafters are in use.
_handles: weakref.WeakSet[SpecMemo] = weakref.WeakSet()

register, unregister = _handles.add, _handles.discard


@dataclass(frozen=True)
class DraftModel:
    """A smaller model that drafts: ``specmemo_kernels.patch(model, heads=DraftModel("org/small"))``.

    Attributes:
        model: a loaded causal language model, or the folder or hub id of one (loaded in the big model's dtype).
        tokens: guesses per step.
    """

    model: Any
    tokens: int = 5


@dataclass(frozen=True)
class Setup:
    """A probed model with its drafter, the drafter's accuracy, the operators' backend and the ranks."""

    model: Any
    facts: ModelFacts
    drafter: AnyDrafter
    accuracy: Accuracy
    backend: str
    ranks: SingleRank


@runtime_checkable
class AttachedDrafter(Protocol):
    """A drafter that has put hooks or views on a model; ``detach`` removes them."""

    detach: Callable[[], None]


class HFDraftModel(DraftModelDrafter):
    """A transformers model as a drafter.

    Attributes:
        facts: the result of the model's probe. detach: removes its hooks.
    """

    def __init__(self, hf_model: Any, facts: ModelFacts, tokens: int, backend: str, detach: Callable[[], None]) -> None:
        weight_bytes = sum(map(tensor_bytes, (*hf_model.parameters(), *hf_model.buffers())))
        target = HFTarget(hf_model, facts, backend)
        super().__init__(target, facts.layers, max_depth=tokens, weight_bytes=weight_bytes, backend=backend)
        self.hf_model, self.facts, self.detach = hf_model, facts, detach

    @torch.no_grad()
    def propose(self, inputs: Any) -> torch.Tensor:
        return super().propose(inputs)


def make_drafter(
    heads: Any, model: Any, facts: ModelFacts, backend: str, head_bits: int | None, ranks: SingleRank, fuse: bool = True
) -> tuple[AnyDrafter, Accuracy]:
    """The drafter for ``patch``'s ``heads``, and its accuracies, from which a tree is built.

    Raises:
        ValueError: ``head_bits`` for anything but Medusa heads and published drafters.
    """
    lookup = isinstance(heads, str) and heads == PROMPT_LOOKUP
    custom = isinstance(heads, AnyDrafter) and not isinstance(heads, nn.ModuleList)
    if head_bits is not None and (lookup or custom or isinstance(heads, DraftModel) or _is_language_model(heads)):
        given = repr(heads) if lookup else f"a {type(heads).__name__}"
        raise ValueError(f"head_bits is {head_bits}, {_PACKED}; heads is {given}")
    if lookup:
        return PromptLookupDrafter(), DEFAULT_ACCURACY
    if _is_language_model(heads):
        heads = DraftModel(heads)
    if isinstance(heads, DraftModel):
        return _load_draft_model(heads, model, facts, backend, fuse), DEFAULT_ACCURACY
    if custom:
        return heads, DEFAULT_ACCURACY
    if heads == MTP or _is_mtp_model(heads):
        # Imported here, as in load_feature_drafter.
        from specmemo_kernels.integrations.hf.mtp import MtpDrafter, load_mtp

        if head_bits is not None:
            raise ValueError(f"head_bits is {head_bits}, {_PACKED}; heads is {MTP!r}")
        mtp = load_mtp(model) if isinstance(heads, str) else heads
        layers = MtpDrafter(mtp, vocabulary_of(model, facts, backend, ranks), facts, backend)
        return layers, layers.spec.assumed_accuracy
    if isinstance(heads, str | Path):
        drafter = load_feature_drafter(heads, model, facts, backend, ranks, head_bits)
        if drafter is not None:
            return drafter
    # With several ranks, heads load into host memory, so that no device holds all rows of sharded heads.
    device = facts.device if ranks.size == 1 else torch.device("cpu")
    sizes = facts.hidden_size, facts.vocab_size
    loaded = ranks.run_on_all(
        "loading heads", lambda: load_heads(heads, *sizes, dtype=facts.dtype, device=device, head_bits=head_bits)
    )
    if ranks.size > 1:
        ranks.assert_same(heads_digest(loaded))
    accuracy = getattr(loaded, "cumulative_topk_accuracy", None) or DEFAULT_ACCURACY
    head = model.get_output_embeddings()
    if getattr(getattr(head, "weight", None), "is_meta", False) and not loaded.own_lm_head:
        raise UnsupportedModel(
            f"the heads share the lm_head of {type(model).__name__}, which is offloaded; give it a device in "
            "device_map, or use heads with vocabulary matrices of their own"
        )

    def logits(x: torch.Tensor) -> torch.Tensor:
        with facts.pass_mode():
            result: torch.Tensor = head(x)
        return result

    shared = logits if plain_weight(head) is None else ranks.lm_head(model)
    return MedusaDrafter(ranks.shard(loaded, facts.device), shared, backend, ranks.topk), accuracy


def _is_mtp_model(heads: Any) -> bool:
    """Whether ``heads`` are MTP layers that transformers has loaded."""
    from transformers.modeling_layers import MtpModel

    return isinstance(heads, MtpModel)


def _is_language_model(heads: Any) -> bool:
    return hasattr(heads, "generate") and hasattr(heads, "get_output_embeddings")


def _load_draft_model(draft: DraftModel, model: Any, facts: ModelFacts, backend: str, fuse: bool) -> HFDraftModel:
    """The drafter that ``draft`` describes, for ``model``.

    Raises:
        UnsupportedModel: it can't run on packed rows.
        TypeError, ValueError: another vocabulary, the target itself, training mode, a dtype that the backend doesn't
            support, or ``tokens`` below 1.
    """
    small = draft.model
    if isinstance(small, str | Path):
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(small, dtype=facts.dtype)
        small = loaded.to(facts.device)
    if not _is_language_model(small):
        raise ValueError(f"a draft model needs generate and an lm_head, got {type(small).__name__}")
    if small is model:
        raise ValueError("the draft model must be another model than the patched one")
    if small.training:
        raise ValueError("the draft model is in training mode; call its eval() first")
    check_config(small.config)
    detach = attach(small)
    try:
        with by_operators(backend, small.get_input_embeddings().weight.device):
            small_facts = probe(small)
        check_numbers(small_facts, backend, "the draft model")
        if small_facts.mixers.mixers:
            raise UnsupportedModel(
                f"the draft model {type(small).__name__} has recurrent layers, whose states can't drop rejected "
                "guesses; use a draft model with attention layers only"
            )
        if fuse and backend in FUSED_BACKENDS:
            small_facts = replace(small_facts, leaves=find_leaves(small, small_facts.dtype, backend, invariant=False))
        if small_facts.vocab_size != facts.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {small_facts.vocab_size} tokens, the model one of "
                f"{facts.vocab_size}; both must use the same tokenizer"
            )
        return HFDraftModel(small, small_facts, draft.tokens, backend, detach)
    except BaseException:
        detach()
        raise


def without_others(heads: Any) -> Any:
    """``heads`` as given to ``patch``, without effects on other patched models.

    Medusa heads in use by another model are returned as a twin module, whose parameters share the memory. Each model
    can then move its own heads to the host.

    Raises:
        ValueError: a drafter with state per sequence, or an offloadable drafter, serves another model. Sequences of
            both models would have the same slots.
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
