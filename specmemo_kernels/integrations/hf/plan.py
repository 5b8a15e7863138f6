"""From the arguments of ``patch`` to a drafter, its tree, and what the memory plan has to know."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.backends.kernel_config import KernelConfig
from specmemo_kernels.cache.kv_storage import page_dtype
from specmemo_kernels.drafting.base import Drafter, PagedDrafter
from specmemo_kernels.drafting.load_heads import load_heads
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.prompt_lookup import PromptLookupDrafter
from specmemo_kernels.engine.step_graph import MAX_STEPS
from specmemo_kernels.integrations.distributed.ranks import SingleRank, heads_digest
from specmemo_kernels.integrations.hf.attention import UnsupportedModel
from specmemo_kernels.integrations.hf.device import device_tree
from specmemo_kernels.integrations.hf.draft import DraftModel, HFDraftModel, is_language_model, load_draft_model
from specmemo_kernels.integrations.hf.graph import GraphUse
from specmemo_kernels.integrations.hf.probe import measure_libraries, measure_passes, time_passes
from specmemo_kernels.integrations.hf.target import ModelFacts
from specmemo_kernels.planning.footprint import GenerationShape
from specmemo_kernels.planning.memory_plan import BudgetError, MemoryPlan, divide_budget, format_bytes
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, Accuracy, RunningAcceptance, best_first_paths
from specmemo_kernels.tree.choice import TreeChooser
from specmemo_kernels.tree.draft_tree import DraftTree

#: What ``heads`` says to ask for prompt lookup.
PROMPT_LOOKUP = "prompt-lookup"
#: More of the budget isn't given to graphs that nobody asked for.
GRAPH_SHARE = 0.1
#: Nodes of the parts of a tree that steps verify from graphs, each of which is captured once; beside the whole tree.
GRAPH_SIZES = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))


def make_drafter(
    heads: Any, model: Any, facts: ModelFacts, backend: str, head_bits: int | None, ranks: SingleRank
) -> tuple[Drafter, Accuracy]:
    """The drafter behind ``heads``, and the accuracies to build its tree from.

    Raises:
        ValueError: ``head_bits`` for something that isn't Medusa heads, or has no vocabulary matrix of its own.
    """
    lookup = isinstance(heads, str) and heads == PROMPT_LOOKUP
    other = isinstance(heads, Drafter) and not isinstance(heads, nn.ModuleList)
    if head_bits is not None and (lookup or other or isinstance(heads, DraftModel) or is_language_model(heads)):
        what = repr(heads) if lookup else f"a {type(heads).__name__}"
        raise ValueError(f"head_bits is {head_bits}, which is for Medusa heads; heads is {what}")
    if lookup:
        return PromptLookupDrafter(), DEFAULT_ACCURACY
    if is_language_model(heads):
        heads = DraftModel(heads)
    if isinstance(heads, DraftModel):
        return load_draft_model(heads, model, facts, backend), DEFAULT_ACCURACY
    if other:
        return heads, DEFAULT_ACCURACY
    # Of what is divided over ranks no device need hold the whole.
    device = facts.device if ranks.size == 1 else torch.device("cpu")
    sizes = facts.hidden_size, facts.vocab_size
    loaded = ranks.run_on_all(
        "loading heads", lambda: load_heads(heads, *sizes, dtype=facts.dtype, device=device, head_bits=head_bits)
    )
    if ranks.size > 1:
        ranks.assert_same(heads_digest(loaded))
    accuracy = getattr(loaded, "cumulative_topk_accuracy", None) or DEFAULT_ACCURACY
    shared = ranks.lm_head(model)
    if shared[0].is_meta and not loaded.own_lm_head:
        raise UnsupportedModel(
            f"the heads share the lm_head of {type(model).__name__}, which is offloaded; give it a device in "
            "device_map, or use heads with vocabulary matrices of their own"
        )
    return MedusaDrafter(ranks.shard(loaded, facts.device), shared, backend, ranks.topk), accuracy


def choose_tree(tree: DraftTree | int | None, drafter: Drafter, facts: ModelFacts, accuracy: Accuracy) -> DraftTree:
    """The tree asked for, the best one of that many nodes, or (``None``) a chain as long as the drafter guesses."""
    if tree is None or (isinstance(tree, int) and getattr(drafter, "prefers_chain", False)):
        return DraftTree.chain(drafter.max_depth if tree is None else min(drafter.max_depth, tree - 1))
    if isinstance(tree, int):
        return DraftTree.from_paths(best_first_paths(accuracy[: drafter.max_depth], tree - 1))
    if tree.max_depth > drafter.max_depth:
        raise ValueError(f"the tree is {tree.max_depth} deep, the drafter guesses {drafter.max_depth} tokens ahead")
    if tree.width > facts.vocab_size:
        raise ValueError(f"the tree uses rank {tree.width - 1}, the vocabulary has {facts.vocab_size} tokens")
    return tree


def make_plan(
    model: Any,
    facts: ModelFacts,
    drafter: Drafter,
    accuracy: Accuracy,
    backend: str,
    tree: DraftTree | int | None,
    graphs: GraphUse,
    limits: dict[str, Any],
    ranks: SingleRank,
) -> tuple[Drafter, MemoryPlan, GraphUse]:
    """The plan for ``patch``'s ``tree``, the drafter with the heads that it uses, and what becomes of graphs: unless
    they must be, not more than a share of the budget goes to them.

    Args:
        limits: the other arguments of :func:`divide_budget`.

    Raises:
        BudgetError: not even one page fits.
    """

    def planned(use: GraphUse) -> tuple[Drafter, MemoryPlan]:
        if tree is None and not getattr(drafter, "prefers_chain", False):
            return device_plan(model, facts, drafter, accuracy, backend, use, limits, ranks)
        shape = generation_shape(model, facts, drafter, backend, use, limits["page_size"], limits["kv_dtype"], ranks)
        return drafter, divide_budget(shape, choose_tree(tree, drafter, facts, accuracy), **limits)

    budget = limits["budget"]
    if not graphs.wanted or graphs.must or budget is None:
        return *planned(graphs), graphs
    try:
        chosen, plan = planned(graphs)
        if plan.parts["graphs"] <= GRAPH_SHARE * budget:
            return chosen, plan, graphs
    except BudgetError:
        pass
    none = GraphUse(reason=f"more than {GRAPH_SHARE:.0%} of the budget of {format_bytes(budget)} would go to graphs")
    return *planned(none), none


def device_plan(
    model: Any,
    facts: ModelFacts,
    drafter: Drafter,
    accuracy: Accuracy,
    backend: str,
    graphs: GraphUse,
    limits: dict[str, Any],
    ranks: SingleRank,
) -> tuple[Drafter, MemoryPlan]:
    """The plan with the tree that suits the device, or as much of it as the budget holds; heads go with the depth.

    Args:
        limits: the other arguments of :func:`divide_budget`.

    Raises:
        BudgetError: not even a tree of one draft fits.
    """
    tree, fastest, forecast = ranks.decide(
        lambda: device_tree(model, facts, drafter, accuracy, limits["kv_dtype"], ranks.size)
    )
    drafter = _without_unused_heads(drafter, tree)
    shape = generation_shape(model, facts, drafter, backend, graphs, limits["page_size"], limits["kv_dtype"], ranks)
    while True:
        try:
            return drafter, dataclasses.replace(divide_budget(shape, tree, **limits), **forecast)
        except BudgetError:
            if tree.size <= 2:
                raise
        if tree.size > fastest:  # what may only come to be useful goes first
            tree = tree.pruned(fastest)
            continue
        tree = tree.pruned(max(2, tree.size // 2))
        drafter = _without_unused_heads(drafter, tree)
        shape = dataclasses.replace(shape, head_bytes=drafter.nbytes, coded_head_bytes=_coded_bytes(drafter))
        forecast = {"reasons": (f"the budget holds a tree of {tree.size} nodes, fewer than would be fastest",)}


def _without_unused_heads(drafter: Drafter, tree: DraftTree) -> Drafter:
    """The same drafter with no more heads than the tree is deep, at least one."""
    depth = max(1, tree.max_depth)
    if not isinstance(drafter, MedusaDrafter) or depth >= drafter.max_depth:
        return drafter
    return drafter.truncated(depth)


def _coded_bytes(drafter: Drafter) -> int | None:
    return drafter.coded_nbytes if isinstance(drafter, MedusaDrafter) else None


def make_chooser(
    model: Any,
    facts: ModelFacts,
    drafter: Drafter,
    accuracy: Accuracy,
    plan: MemoryPlan,
    graphs: GraphUse,
    ranks: SingleRank,
) -> TreeChooser:
    """What decides how much of the plan's tree a step verifies, in a few sizes where each takes a graph; times a few
    forward passes.

    Of chains nothing is known beforehand: every other guess is taken to be right.
    """
    rows = max(plan.prefill_chunk, plan.max_nodes)
    own = None
    if isinstance(drafter, HFDraftModel):
        own = time_passes(drafter.hf_model, drafter.facts, rows, ranks.broadcast_scalar)
    prior = [[0.5]] * plan.tree.max_depth if getattr(drafter, "prefers_chain", False) else accuracy
    sizes = GRAPH_SIZES if graphs.wanted else None
    seconds = time_passes(model, facts, rows, ranks.broadcast_scalar)
    return ranks.chooser(plan.tree, RunningAcceptance(plan.tree, prior), seconds, own, sizes)


def kernel_blocks(
    facts: ModelFacts, backend: str, page_size: int, kv_dtype: str | None
) -> tuple[KernelConfig, ...] | None:
    """The block sizes that the backend takes for the model's attention, of its widest heads where layers differ."""
    kind, heads = max(zip(facts.layers, facts.num_qo_heads, strict=True), key=lambda pair: pair[0].head_dim)
    sizes = (heads, kind.num_kv_heads, kind.head_dim, kind.v_head_dim)
    return ops.kernel_configs(backend, kind.device, kind.dtype, *sizes, page_size, page_dtype(kv_dtype))


def generation_shape(
    model: Any,
    facts: ModelFacts,
    drafter: Drafter,
    backend: str,
    graphs: GraphUse,
    page_size: int,
    kv_dtype: str | None,
    ranks: SingleRank,
) -> GenerationShape:
    """What the plan has to know, measured where it depends on the model's code; a drafter's own pages hold no codes.

    Of several ranks, what is enough for each.
    """
    kinds = set(zip(facts.layers, facts.num_qo_heads, strict=True))
    if isinstance(drafter, HFDraftModel):
        kinds |= set(zip(drafter.facts.layers, drafter.facts.num_qo_heads, strict=True))
    shapes = [(kind, (heads, kind.num_kv_heads, kind.head_dim, kind.v_head_dim)) for kind, heads in kinds]
    codes = page_dtype(kv_dtype)
    splits = [ops.split_workspace(backend, kind.device, kind.dtype, *sizes, page_size, codes) for kind, sizes in shapes]
    (forward, logits), kept = measure_passes(model, facts), measure_libraries(model, facts)
    if isinstance(drafter, HFDraftModel):
        own_forward, own_logits = measure_passes(drafter.hf_model, drafter.facts)
        kept = max(kept, measure_libraries(drafter.hf_model, drafter.facts))
        forward, logits = forward.elementwise_max(own_forward), logits.elementwise_max(own_logits)
    shape = GenerationShape(
        kv_bytes_per_token=sum(layer.page_bytes_per_token(kv_dtype) for layer in facts.layers),
        scratch_bytes_per_node=sum(layer.bytes_per_token for layer in facts.layers),
        head_bytes=drafter.nbytes,
        coded_head_bytes=_coded_bytes(drafter),
        forward=forward,
        logits=logits,
        # The last steps', the new prompts' so far, and those of the chunk before.
        state_bytes=3 * facts.hidden_size * facts.dtype.itemsize,
        split_size=min(size for size, _ in splits),
        split_row_bytes=max(row for _, row in splits),
        drafter_kv_bytes_per_token=drafter.kv_bytes_per_token if isinstance(drafter, PagedDrafter) else 0,
        workspace_bytes=max(ops.fixed_workspace(backend, kind.dtype, *sizes, codes) for kind, sizes in shapes) + kept,
        devices=len({layer.device for layer in facts.layers} | {facts.device}),
        kept_steps=MAX_STEPS if graphs.wanted else 0,
        graphs=graphs.wanted and facts.device.type == "cuda",
    )
    return ranks.max_over_ranks(shape)
