"""``patch`` and ``unpatch`` for transformers models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.arguments import flag, integer, wrong_type
from specmemo_kernels.cache.kv_storage import page_dtype
from specmemo_kernels.drafting.base import Drafter, FeatureDrafter, OffloadingDrafter
from specmemo_kernels.integrations.distributed.ranks import SingleRank, digest
from specmemo_kernels.integrations.distributed.tensor_parallel import ranks_of
from specmemo_kernels.integrations.hf.checks import (
    check_config,
    check_generation,
    check_modules,
    check_numbers,
    evaluation,
    without_wrapper,
)
from specmemo_kernels.integrations.hf.compressed import CompressedWeights, compress_weights
from specmemo_kernels.integrations.hf.draft import (
    AttachedDrafter,
    DraftModel,
    HFDraftModel,
    Setup,
    make_drafter,
    register,
    without_others,
)
from specmemo_kernels.integrations.hf.features import find_taps
from specmemo_kernels.integrations.hf.fuse import FUSED_BACKENDS, find_leaves
from specmemo_kernels.integrations.hf.generation_lock import Unpatched
from specmemo_kernels.integrations.hf.handle import SpecMemo, handle_of, run_steps
from specmemo_kernels.integrations.hf.invariance import check_invariance, check_invariant_arguments
from specmemo_kernels.integrations.hf.linears import by_operators
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.plan import LEAST_CONTEXT, PlanLimits, make_chooser, make_plan
from specmemo_kernels.integrations.hf.pool import graph_use
from specmemo_kernels.integrations.hf.probe import probe
from specmemo_kernels.integrations.hf.target import ModelFacts, attach
from specmemo_kernels.ops.weight_codes import check_bits
from specmemo_kernels.planning.host_allocator import release_host_memory, return_large_blocks
from specmemo_kernels.planning.memory_plan import parse_bytes
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import TreeBudget, tree_argument

#: An attribute of a model whose ``patch`` couldn't be undone: the steps that are left.
_UNDO = "_specmemo_undo"


class PatchedGeneration:
    """Mixin of a patched model's class: ``generate`` runs the speculative loop."""

    specmemo: SpecMemo

    def _sample(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not input_ids.numel() and kwargs.get("inputs_embeds") is None:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; give at least one row of one token")
        # Another thread may unpatch the model between any two lines, which changes its class back.
        cls, handle = type(self), vars(self).get("specmemo")
        own_sample = partial(_plain_class(cls)._sample, self)  # type: ignore[attr-defined]
        if handle is not None:
            with suppress(Unpatched):
                return handle.generator.sample(own_sample, input_ids, *args, **kwargs)
        return own_sample(input_ids, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain, unpatched model; loading it doesn't need this package."""
        state = {k: v for k, v in vars(self).items() if k != "specmemo"}
        return object.__new__, (_plain_class(type(self)),), state


def _plain_class(cls: type) -> type:
    """The class before patching."""
    order = cls.__mro__
    return order[order.index(PatchedGeneration) + 1] if PatchedGeneration in order else cls


def patch(
    model: Any,
    heads: str | Path | nn.Module | dict[str, torch.Tensor] | Drafter | DraftModel,
    *,
    memory_budget: int | str | None = None,
    context: int | None = None,
    tree: DraftTree | TreeBudget | Sequence[Sequence[int]] | int | None = None,
    backend: str | None = None,
    page_size: int | None = None,
    prefill_chunk: int = 256,
    max_batch_size: int = 8,
    kv_dtype: str | None = None,
    head_bits: int | None = None,
    keep_free: int | str | None = None,
    reuse_prefix: bool = True,
    graph: bool | None = None,
    fuse: bool = True,
    invariant: bool = False,
    compress: bool = False,
    rank_timeout: float = 60.0,
) -> SpecMemo:
    """Make ``model.generate`` speculate: the same tokens, in fewer steps, inside a memory budget.

    Args:
        model: a loaded transformers decoder with an lm_head, quantised or not, with adapters or without; of a
            ``PeftModel`` the model inside, which its ``generate`` calls.
        heads: Medusa heads (a folder, a hub id, a module, a dict of tensors); another published drafter (a folder or a
            hub id: EAGLE-1 to 3, Clover-2, DFlash); ``"mtp"`` for the model's own MTP layer, or an ``MtpModel``;
            ``"prompt-lookup"``, which needs no weights; a smaller causal language model with the same vocabulary, or a
            :class:`DraftModel`; or any :class:`Drafter`.
        memory_budget: bytes (or ``"2GiB"``) of generation memory: everything but the model's own weights.
            ``None``: no limit, each call allocates for its lengths.
        context: tokens of the longest sequence, prompt and new tokens together, that the budget must hold. The plan
            makes room with a shorter prefill chunk, fewer sequences at once and a smaller tree. ``None``: what is left.
            Without a budget any length is held.
        tree: a :class:`DraftTree`, a list of rank paths (as Medusa publishes them), or a number of nodes. Drafters
            that read hidden states make a tree of their own for each sequence in each step (a :class:`TreeBudget`, or a
            number of nodes), unless a tree is given. ``None``: the best tree for the heads' accuracies and the device.
            The device is known by name, or measured once per process in one to two seconds (``specmemo probe`` saves
            the result). Heads that this tree doesn't use are dropped. Each step verifies the fastest part of the tree,
            by recent acceptance and measured times. Prompt lookup and draft models get a chain, unless a tree is given.
        backend: ``"reference"``, ``"cpu"``, ``"triton"`` or ``None``: by device, with a warning where that is the
            reference (Apple's and Intel's GPUs, an installation without the C++ module).
        page_size: tokens per page of the KV cache. ``None``: 16, or 64 on GPUs whose kernels are faster with them (by
            prediction MI300), if such a page for each sequence is at most 1 % of the budget.
        prefill_chunk: most prompt tokens per forward pass; the plan may lower it to keep the budget.
        max_batch_size: most sequences decoded at once; the plan may lower it. Further rows are queued.
        kv_dtype: ``"int8"`` or ``"fp8"`` stores keys and values in pages as 8-bit codes with a scale per token and
            head: about twice the tokens in the same memory. The error is small, but tokens may differ from the model's
            own. ``None`` (default): the model's dtype.
        head_bits: 4 stores the matrices of Medusa heads and published drafters as 4-bit codes with a float16 scale per
            64, about a quarter of 16-bit matrices; they are packed while loading, a few rows at a time. Drafters only
            guess: the guesses get slightly worse, no token changes. ``None`` (default): as stored.
        keep_free: bytes (or ``"512MiB"``) of the device's memory to leave free, checked every few steps. Below this
            limit generation degrades: fewer nodes of the tree, then no spare pages, no heads, and fewer sequences
            (swapped out to host memory). It recovers when a quarter more is free. ``None``: degrade only when an
            allocation fails. A failed step is retried, and no token is lost.
        reuse_prefix: keep the pages of finished sequences until they are needed. A prompt that begins like an earlier
            text (the next turn of a conversation) is then computed from there on. Pages are dropped when a change of
            the model's weights, modules or adapters is detected. After an undetected change
            (:mod:`specmemo_kernels.integrations.hf.changes`) call ``model.specmemo.release()``. Models with recurrent
            layers keep the states at the ends of texts, so a prompt must begin with a whole earlier text.
        graph: capture whole steps, from the heads' guesses to the commit. On a GPU in CUDA graphs, which are launched
            before the tokens of the previous step are read; on a CPU as a list of operators, which is called without
            the Python code of the model's modules. ``None``: where the model and the drafter allow it (else
            ``model.specmemo.graphs.reason`` has the reason). ``True``: required. ``False``: never. With sampling or
            logits processors only heads and the pass are captured, not with drafters that read several layers' states
            (EAGLE) or logits that aren't the lm_head's. Other steps (prefill, too few pages, ...) run eagerly and are
            counted in ``stats.eager_reasons``.
        fuse: compute gated MLPs and RMS norms by our operators, on a CPU and in 16 bits on ``sm_90`` linear layers too;
            they are faster for few rows. ``model.specmemo.fused`` lists the modules. Only inside speculative steps, and
            only modules of known types whose results agree within rounding errors; modules with hooks, adapters or
            quantised weights are left alone. ``False``: the model's own modules.
        invariant: compute each row with the same bits, whatever other rows are in the pass. In 16-bit dtypes too the
            tokens then don't depend on the drafter, the tree, the batch or the prefill chunk. They are those of steps
            with one node; ``generate`` of the unpatched model may decide near ties differently. On a CPU only.
        compress: store the bfloat16 weights of linear layers, embeddings and experts without loss in 12 bits, a quarter
            less memory of the model itself. The operators' results have the same bits, and the tokens are the same; a
            step of a few nodes reads a quarter less. Compressing takes a few seconds per billion weights. Plain forward
            passes decompress each matrix and are slower; saved and copied models and ``unpatch`` have the weights back.
            ``model.specmemo.compressed`` has the modules. On a CPU, with ``fuse=True``.
        rank_timeout: seconds after which a rank raises if another rank sends no message. For tensor parallel models
            (``from_pretrained(..., tp_plan="auto")`` under ``torchrun``), whose ranks all make the same calls.

    Returns:
        The handle, also ``model.specmemo``; ``with patch(...):`` unpatches at the end.

    Raises:
        UnsupportedModel, HeadsError, BudgetError, RankError, BackendUnavailable, TypeError, ValueError: with the value
            and the limit; the model is as before. Only a lack of memory may keep compressed weights as they are, until
            :func:`unpatch`: the error has a note then.
    """
    wrapped, model = model, without_wrapper(model)
    if handle_of(model) is not None:
        raise ValueError("the model is patched already; call specmemo_kernels.unpatch(model) first")
    _finish_undo(model)
    page_size = None if page_size is None else integer("page_size", page_size)
    prefill_chunk = integer("prefill_chunk", prefill_chunk)
    context = LEAST_CONTEXT if context is None else integer("context", context, LEAST_CONTEXT)
    max_batch_size, tree = integer("max_batch_size", max_batch_size), tree_argument(tree)
    flag("reuse_prefix", reuse_prefix)
    flag("graph", graph, or_none=True)
    flag("fuse", fuse)
    flag("invariant", invariant)
    flag("compress", compress)
    if not isinstance(backend, str | None):
        raise wrong_type("backend", backend, "'reference', 'cpu', 'triton' or None")
    if not hasattr(model, "generate") or not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"patch needs a transformers model with generate and an lm_head, got {type(model).__name__}")
    check_generation(wrapped)
    check_config(model.config)
    check_modules(model)
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    free = None if keep_free is None else parse_bytes(keep_free, "keep_free")
    limits = PlanLimits(budget, page_size, prefill_chunk, max_batch_size, kv_dtype, context)
    page_dtype(kv_dtype)
    check_bits(head_bits)
    device = model.get_input_embeddings().weight.device
    name = ops.backend_name(backend, device)
    if backend is None and name == "reference":
        warnings.warn(
            f"specmemo: there are no kernels for {device} here, so the reference backend computes, which is slow; "
            'backend="reference" accepts it without this warning',
            UserWarning,
            stacklevel=2,
        )
    if invariant:
        check_invariant_arguments(name, fuse, kv_dtype)
    if compress and (name != "cpu" or not fuse):
        raise ValueError(
            f"compress is True, but only backend='cpu' with fuse=True multiplies compressed weights; got "
            f"backend={name!r}, fuse={fuse}"
        )
    ranks = ranks_of(model, rank_timeout)
    undo: list[Callable[[], None]] = []
    try:
        # Weights and heads are moved in memory; they can be trained afterwards.
        with ranks.guarded(), evaluation(model), torch.inference_mode(False):
            undo.append(attach(model))
            if ranks.size > 1:
                if free is not None:
                    raise ValueError(f"keep_free is {keep_free}, but {ranks.size} ranks can't degrade; leave it out")
                others = {"tree": tree, "backend": name, "reuse_prefix": reuse_prefix, "graph": graph, "fuse": fuse}
                ranks.assert_same(digest(model) | vars(limits) | others | {"head_bits": head_bits})
                if compress:
                    raise ValueError(
                        f"compress is True, but the model is sharded over {ranks.size} ranks; leave it out"
                    )
            undo.append(ranks.replicate_kv_heads(model))
            compressed = compress_weights(model, undo) if compress else CompressedWeights()
            facts = replace(_facts(model, name, ranks, fuse, invariant), compressed=compressed)
            if prefill_chunk < (least := facts.mixers.least_chunk):
                raise ValueError(
                    f"prefill_chunk is {prefill_chunk}, it must be at least {least}: a layer of {type(model).__name__} "
                    "computes one prompt token alone in another way than several"
                )
            if budget is not None and facts.device.type == "cpu":
                return_large_blocks()
            drafter, accuracy = make_drafter(without_others(heads), model, facts, name, head_bits, ranks, fuse)
            if isinstance(drafter, AttachedDrafter):
                undo.append(drafter.detach)
            if isinstance(drafter, FeatureDrafter):
                facts = replace(facts, taps=find_taps(model, drafter.feature_ids))
            for field in ("max_depth", "nbytes"):
                integer(f"{type(drafter).__name__}.{field}", getattr(drafter, field), 0)
            if isinstance(drafter, HFDraftModel):
                drafter.keeps_pages = reuse_prefix
            setup = Setup(model, facts, drafter, accuracy, name, ranks)
            setup, plan, graphs = make_plan(setup, tree, graph_use(graph, setup), limits)
            chooser = make_chooser(setup, plan, graphs) if tree is None else None
            target = ranks.target(model, facts, name)
            undo_steps: list[Callable[[], None]] = [*undo, partial(_make_plain, model)]
            if isinstance(setup.drafter, OffloadingDrafter):
                undo_steps.append(setup.drafter.restore)
            undo_steps.append(ranks.close)
            handle = SpecMemo(
                setup, plan, target, graphs, chooser, undo_steps, keep_free=free, reuse_prefix=reuse_prefix
            )
    except BaseException as error:
        _undo_failed(model, [*undo, ranks.close], error)
        raise
    cls = type(model)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    model.__class__ = type(cls.__name__, (PatchedGeneration, cls), names)
    model.specmemo = handle
    register(handle)
    if facts.device.type == "cpu":
        release_host_memory()
    return handle


def _facts(model: Any, backend: str, ranks: SingleRank, fuse: bool, invariant: bool) -> ModelFacts:
    """The model's facts, with the modules that operators replace.

    Raises:
        UnsupportedModel: as :func:`probe`, or recurrent layers on several ranks.
    """
    with by_operators(backend, model.get_input_embeddings().weight.device):
        facts = probe(model)
    check_numbers(facts, backend)
    if facts.mixers.mixers and ranks.size > 1:
        raise UnsupportedModel(
            f"{type(model).__name__} has recurrent layers and is on {ranks.size} ranks; it can be patched on one "
            "device only"
        )
    if fuse and backend in FUSED_BACKENDS:
        facts = replace(facts, leaves=find_leaves(model, facts.dtype, backend, invariant))
    if invariant:
        facts = replace(facts, leaves=facts.leaves.with_functions(check_invariance(model, facts)))
    return facts


def _make_plain(model: Any) -> None:
    model.__class__ = _plain_class(type(model))
    del model.specmemo


def unpatch(model: Any) -> None:
    """Undo :func:`patch`; does nothing if the model isn't patched.

    Waits for another thread's generation. Queued calls of ``generate`` then run the model's own method. Also finishes
    the undoing of a ``patch`` that failed for lack of memory.

    Raises:
        RuntimeError: a generation of this thread isn't over.
    """
    handle = handle_of(model)
    if handle is not None:
        handle.undo()
    _finish_undo(without_wrapper(model))


def _undo_failed(model: Any, steps: list[Callable[[], None]], error: BaseException) -> None:
    """Run the steps that undo a failed ``patch``; those that fail too stay with the model, for :func:`unpatch`."""
    left = []
    for step in steps:
        try:
            step()
        except Exception as failure:
            error.add_note(f"{failure} (while patch was undone: free memory and call specmemo_kernels.unpatch(model))")
            left.append(step)
    if left:
        vars(model)[_UNDO] = [*left, partial(delattr, model, _UNDO)]


def _finish_undo(model: Any) -> None:
    """Run the steps that :func:`_undo_failed` has left."""
    run_steps(getattr(model, _UNDO, []))
