"""``patch`` and ``unpatch`` for transformers models."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.drafting.base import Drafter, OffloadingDrafter, PagedDrafter
from specmemo_kernels.drafting.placing import can_offload
from specmemo_kernels.integrations.hf_draft import DraftModel, HFDraftModel, attach
from specmemo_kernels.integrations.hf_generate import Generator
from specmemo_kernels.integrations.hf_plan import (
    choose_tree,
    device_plan,
    generation_shape,
    kernel_blocks,
    make_chooser,
    make_drafter,
)
from specmemo_kernels.integrations.hf_probe import check_config, probe
from specmemo_kernels.integrations.hf_signature import ModelSignature
from specmemo_kernels.integrations.hf_target import HFTarget, ModelFacts, lm_head_hook
from specmemo_kernels.memory_monitor import DeviceMonitor
from specmemo_kernels.memory_plan import BudgetError, MemoryPlan, divide_budget, parse_bytes
from specmemo_kernels.paged_kv import PagedKVPool, page_dtype
from specmemo_kernels.pressure import Governor, is_out_of_memory, levels
from specmemo_kernels.stats import DecodeStats
from specmemo_kernels.tree import DraftTree
from specmemo_kernels.tree_choice import TreeChooser


class SpecMemo:
    """The handle of a patched model: ``model.specmemo``; also a context manager that unpatches at its end.

    Attributes:
        plan: what generation may use (:class:`MemoryPlan`).
        stats: what was counted since patching or ``stats.reset()`` (:class:`DecodeStats`).
        drafter: what proposes tokens.
        backend: name of the operators' backend.
        reuse_prefix: keep the pages of finished sequences for those that begin the same.
        governor: what of the plan may be used now (``governor.level``), and when memory is looked at.
        chooser: says how much of the plan's tree a step verifies, where nobody asked for a tree.
    """

    def __init__(
        self,
        model: Any,
        facts: ModelFacts,
        drafter: Drafter,
        plan: MemoryPlan,
        target: HFTarget,
        backend: str,
        keep_free: int | None = None,
        reuse_prefix: bool = True,
    ) -> None:
        self.model, self.facts, self.drafter, self.plan, self.target = model, facts, drafter, plan, target
        self.backend, self.reuse_prefix = backend, reuse_prefix
        self.governor = Governor(
            levels(plan.tree.size, plan.prefill_chunk, plan.max_sequences, can_offload(drafter)),
            monitor=None if keep_free is None else DeviceMonitor({layer.device for layer in facts.layers}),
            keep_free=keep_free or 0,
        )
        self.stats = DecodeStats()
        self.chooser: TreeChooser | None = None
        self.generator = Generator(self)
        self._pool: PagedKVPool | None = None
        self._signature: ModelSignature | None = None
        self._undo: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._generating: int | None = None

    def pages_for(self, lengths: Sequence[int]) -> int:
        """Pages in which sequences of these lengths fit, as many side by side as the plan allows.

        Raises:
            BudgetError: one of them can never fit the plan.
        """
        plan = self.plan
        pages = sorted((-(-length // plan.page_size) for length in lengths), reverse=True)
        if plan.max_pages is not None and pages[0] > plan.max_pages:
            raise BudgetError(
                f"a prompt and its new tokens may take {max(lengths)} slots, the plan holds {plan.max_tokens} "
                f"({plan.max_pages} pages of {plan.page_size}); shorten the prompt or max_new_tokens, or patch with a "
                "larger memory_budget"
            )
        return min(sum(pages[: plan.max_sequences]), plan.max_pages or sum(pages))

    def pool_for(self, lengths: Sequence[int]) -> PagedKVPool:
        """A pool of :meth:`pages_for`, or while memory is scarce of the pages that the longest one alone needs.

        The last call's pool serves again when it is large enough, else a new one takes its place. What it kept of
        finished sequences serves as well, unless the model has changed since.

        Raises:
            BudgetError: one of the sequences can never fit the plan.
        """
        wanted, sequences = self.pages_for(lengths), min(len(lengths), self.plan.max_sequences)
        self._forget_if_changed()
        while True:
            level = self.governor.level
            pages = wanted if level.spare_pages else -(-max(lengths) // self.plan.page_size)
            nodes = min(level.max_tree, self.plan.tree.size) * min(sequences, level.max_sequences)
            try:
                if not self._pool_serves(pages, sequences, nodes):
                    self._replace_pool(pages, sequences, nodes)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not self.governor.shrink(sequences):
                    raise
                self.stats.shrinks += 1
                continue
            assert self._pool is not None
            self.stats.bytes_by_part = self.bytes_by_part
            return self._pool

    def _pool_serves(self, pages: int, sequences: int, nodes: int) -> bool:
        pool = self._pool  # no name for it may outlive this: the next one might not fit beside it
        if pool is None or pool.free_pages < pages:
            return False
        return pool.max_nodes >= nodes and pool.fits_sequences(sequences)

    def _replace_pool(self, pages: int, sequences: int, nodes: int) -> None:
        """A new pool, into which the kept pages of the old one are copied if both fit the plan at once."""
        if self._pool is not None and self._pool.kept_pages and self.governor.level.spare_pages:
            if self._both_fit(pages, sequences):
                try:
                    return self._new_pool(pages, sequences, nodes)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
            elif self.plan.max_pages is not None:  # all that there may be, so that pages are dropped only once
                pages = self.plan.max_pages
        self.release()
        self._new_pool(pages, sequences, nodes)

    def _both_fit(self, pages: int, sequences: int) -> bool:
        """Whether a new pool fits beside the old one, while no activations are held."""
        plan = self.plan
        if plan.max_pages is None:
            return True
        room = sum(plan.parts[name] for name in ("kv_pages", "drafter_pages", "tree_scratch", "activations"))
        page = (plan.parts["kv_pages"] + plan.parts["drafter_pages"]) // plan.max_pages
        scratch = plan.parts["tree_scratch"] // plan.max_sequences * sequences
        held = self.bytes_by_part
        return sum(held.values()) - held["heads"] + pages * page + scratch <= room

    def _new_pool(self, pages: int, sequences: int, nodes: int) -> None:
        plan, old = self.plan, self._pool
        with torch.inference_mode(False):  # else the pool could not be written outside of inference mode later
            pool = PagedKVPool(
                self.facts.layers,
                num_pages=pages,
                page_size=plan.page_size,
                max_sequences=sequences,
                max_nodes=nodes,
                kv_dtype=plan.kv_dtype,
                keep=self.reuse_prefix,
            )
            if old is not None:
                pool.take_kept(old)
            if isinstance(self.drafter, PagedDrafter) and self.governor.level.heads:
                self.drafter.allocate(pages, plan.page_size, sequences, plan.prefill_chunk)
        self._pool = pool

    def _forget_if_changed(self) -> None:
        """Drop the kept pages if the model isn't the one any more that made them."""
        if not self.reuse_prefix:
            return
        signature = ModelSignature(self.model)
        if self._pool is not None and signature != self._signature:
            self._pool.forget()
        self._signature = signature

    def acquire(self) -> None:
        """Wait until no other thread generates, and keep others waiting until :meth:`free`.

        Raises:
            RuntimeError: this thread itself is in the middle of a generation, for which it would wait forever.
        """
        if self._lock.locked() and self._generating == threading.get_ident():
            raise RuntimeError("this thread's generation with the same model isn't over; finish or close it first")
        self._lock.acquire()
        self._generating = threading.get_ident()

    def free(self) -> None:
        """The end of what :meth:`acquire` began."""
        self._generating = None
        self._lock.release()

    def rope_changes(self, length: int) -> bool:
        """Whether positions are encoded differently beyond a limit that ``length`` tokens cross (dynamic, longrope).

        The candidates of a step lie ahead of the newest token, and would switch it early.
        """
        config = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
        if not any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds):
            return False
        limits: list[int | None] = [
            getattr(config, "original_max_position_embeddings", None),
            config.max_position_embeddings,
        ]
        limits += [kind.get("original_max_position_embeddings") for kind in kinds]
        return length + self.plan.tree.max_depth > min(limit for limit in limits if limit)

    def release(self) -> None:
        """Free the pages kept between calls of generate."""
        self._pool = None
        if isinstance(self.drafter, PagedDrafter):
            self.drafter.release()

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes held right now: heads, pages and scratch."""
        pool = self._pool
        return {
            "heads": self.drafter.nbytes,
            "kv_pages": pool.page_bytes if pool else 0,
            "drafter_pages": self.drafter.page_bytes if isinstance(self.drafter, PagedDrafter) else 0,
            "tree_scratch": pool.scratch_bytes if pool else 0,
        }

    def __enter__(self) -> SpecMemo:
        return self

    def __exit__(self, *_: object) -> None:
        unpatch(self.model)

    def __repr__(self) -> str:
        return f"SpecMemo({type(self.model).__name__}, {self.plan})"


class PatchedGeneration:
    """Mixed into a patched model's class: generate's greedy mode runs the speculative loop."""

    specmemo: SpecMemo

    def _sample(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.specmemo.generator.sample(super()._sample, input_ids, *args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain, unpatched models (loading one doesn't need this package)."""
        state = {k: v for k, v in vars(self).items() if k != "specmemo"}
        head = self.get_output_embeddings()  # type: ignore[attr-defined]
        state["_modules"] = {k: _without_hook(v) if v is head else v for k, v in state["_modules"].items()}
        return object.__new__, (_plain_class(type(self)),), state


def _without_hook(head: nn.Module) -> nn.Module:
    """The same lm_head, its parameters shared, less our hook."""
    twin = copy.copy(head)
    hooks = head._forward_pre_hooks
    twin._forward_pre_hooks = type(hooks)((k, hook) for k, hook in hooks.items() if hook is not lm_head_hook)
    return twin


def _plain_class(patched: type) -> type:
    return patched.__mro__[2]


def patch(
    model: Any,
    heads: str | Path | nn.Module | dict[str, torch.Tensor] | Drafter | DraftModel,
    *,
    memory_budget: int | str | None = None,
    tree: DraftTree | Sequence[Sequence[int]] | int | None = None,
    backend: str | None = None,
    page_size: int = 16,
    prefill_chunk: int = 256,
    max_batch_size: int = 8,
    kv_dtype: str | None = None,
    keep_free: int | str | None = None,
    reuse_prefix: bool = True,
) -> SpecMemo:
    """Make ``model.generate`` speculate: the same tokens, in fewer steps, inside a memory budget.

    Args:
        model: a decoder of transformers with an lm_head, loaded.
        heads: Medusa heads (a folder, a hub id, a module, a dict of tensors); ``"prompt-lookup"``, which needs no
            weights; a smaller causal language model with the same vocabulary, or :class:`DraftModel` to say more about
            one; or any :class:`Drafter`.
        memory_budget: bytes (or ``"2GiB"``) of generation memory: everything but the model's own weights.
            ``None``: no limit, each call takes what its lengths need.
        tree: a :class:`DraftTree`, a list of rank paths (as Medusa publishes them), or a number of nodes;
            ``None`` takes the best nodes for the heads' accuracies and the device, which is known by name or
            measured once per process, in about a second (``specmemo probe`` keeps that); heads that this tree
            doesn't use are dropped. Prompt lookup and draft models get a chain unless a tree is given. Of a tree that
            isn't given each step verifies the part that pays, by what was accepted lately and by measured times.
        backend: ``"reference"``, ``"cpu"``, ``"triton"`` or ``None`` (by device).
        page_size: tokens per page of the KV cache.
        prefill_chunk: most prompt tokens per forward pass; the plan may lower it to keep the budget.
        max_batch_size: most sequences decoded at once; the plan may lower it. Further rows wait for their turn.
        kv_dtype: ``"int8"`` or ``"fp8"`` stores keys and values in pages as 8-bit codes with a scale per token and
            head: about twice the tokens in the same memory, at a small error, so that the tokens may differ from the
            model's own. ``None`` (default): in the model's dtype. Never chosen for you.
        keep_free: bytes (or ``"512MiB"``) of the device's memory to leave to others. Every few steps it is looked at;
            below the mark generation gives up, one after the other, nodes of the tree, pages that nobody needs yet, the
            heads, and sequences, which wait in host memory; it takes them back when there is a quarter more again.
            ``None``: only when an allocation fails, which either way costs a step's time and no token.
        reuse_prefix: keep the pages of finished sequences until they are needed otherwise, so that a prompt that
            begins like an earlier text (the next turn of a conversation) is computed from there on alone. They are
            dropped when the model's weights, modules, adapters or hooks are seen to have changed; after changes that
            can't be seen (:mod:`hf_signature`) call ``model.specmemo.release()``.

    Returns:
        The handle, also ``model.specmemo``; ``with patch(...):`` unpatches at the end.

    Raises:
        UnsupportedModel, HeadsError, BudgetError, ValueError: with the value and the limit; the model is as before.
    """
    if isinstance(getattr(model, "specmemo", None), SpecMemo):
        raise ValueError("the model is patched already; call specmemo_kernels.unpatch(model) first")
    for name, value in (("page_size", page_size), ("prefill_chunk", prefill_chunk), ("max_batch_size", max_batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}, it must be at least 1")
    if not hasattr(model, "generate") or not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"patch needs a transformers model with generate and an lm_head, got {type(model).__name__}")
    check_config(model.config)
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    free = None if keep_free is None else parse_bytes(keep_free, "keep_free")
    page_dtype(kv_dtype)
    name = ops.backend_name(backend, model.get_input_embeddings().weight.device)
    undo = [attach(model)]
    try:
        facts = probe(model)
        drafter, accuracy = make_drafter(heads, model, facts, name)
        if isinstance(drafter, HFDraftModel):
            undo.append(drafter.detach)
            drafter.keeps_pages = reuse_prefix
        limits: dict[str, Any] = {"budget": budget, "page_size": page_size, "prefill_chunk": prefill_chunk}
        limits |= {"max_sequences": max_batch_size, "kv_dtype": kv_dtype}
        if tree is None and not getattr(drafter, "prefers_chain", False):
            drafter, plan = device_plan(model, facts, drafter, accuracy, name, limits)
        else:
            chosen = choose_tree(tree, drafter, facts, accuracy)
            shape = generation_shape(model, facts, drafter, name, page_size, kv_dtype)
            plan = divide_budget(shape, chosen, **limits)
        plan = replace(plan, kernels=kernel_blocks(facts, name, page_size, kv_dtype))
        handle = SpecMemo(model, facts, drafter, plan, HFTarget(model, facts, name), name, free, reuse_prefix)
    except BaseException:
        for step in undo:
            step()
        raise
    handle._undo = undo
    if tree is None:
        handle.chooser = make_chooser(model, facts, drafter, accuracy, plan)
    cls = type(model)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    model.__class__ = type(cls.__name__, (PatchedGeneration, cls), names)
    model.specmemo = handle
    return handle


def unpatch(model: Any) -> None:
    """Undo :func:`patch`; a model that isn't patched stays as it is."""
    handle = vars(model).get("specmemo")
    if not isinstance(handle, SpecMemo):
        return
    handle.release()
    for step in handle._undo:
        step()
    model.__class__ = _plain_class(type(model))
    del model.specmemo
    if isinstance(handle.drafter, OffloadingDrafter):
        handle.drafter.restore()
