"""The memory plan of a loaded model, and the tree chooser."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

from specmemo_kernels import ops
from specmemo_kernels.backends.kernel_config import KernelConfig
from specmemo_kernels.cache.kv_storage import LayerKV, page_dtype
from specmemo_kernels.drafting.base import Drafter, PagedDrafter
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.engine.step_graph import MAX_STEPS
from specmemo_kernels.integrations.distributed.ranks import SingleRank
from specmemo_kernels.integrations.hf.draft import HFDraftModel
from specmemo_kernels.integrations.hf.graph import GraphUse
from specmemo_kernels.integrations.hf.probe import measure_libraries, measure_passes, time_passes
from specmemo_kernels.integrations.hf.target import ModelFacts
from specmemo_kernels.integrations.hf.tree_size import tree_candidates
from specmemo_kernels.planning.footprint import GenerationShape
from specmemo_kernels.planning.memory_plan import BudgetError, MemoryPlan, divide_budget, format_bytes
from specmemo_kernels.tree.acceptance import Accuracy, RunningAcceptance
from specmemo_kernels.tree.choice import TreeChooser
from specmemo_kernels.tree.draft_tree import DraftTree

#: Maximum share of the budget for graphs, unless graph=True.
GRAPH_SHARE = 0.1
#: Nodes of the partial trees that steps verify from graphs, besides the whole tree. Each size is captured once.
GRAPH_SIZES = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))


@dataclasses.dataclass(frozen=True)
class Setup:
    """A probed model with its drafter and ranks.

    Attributes:
        accuracy: of the drafter's guesses.
        backend: name of the operators' backend.
    """

    model: Any
    facts: ModelFacts
    drafter: Drafter
    accuracy: Accuracy
    backend: str
    ranks: SingleRank


def make_plan(
    setup: Setup, tree: DraftTree | int | None, graphs: GraphUse, limits: dict[str, Any]
) -> tuple[Setup, MemoryPlan, GraphUse]:
    """Plan for ``patch``'s ``tree``.

    Args:
        limits: the other arguments of :func:`divide_budget`.

    Returns:
        The setup, whose drafter lacks unused heads if ``tree`` is ``None``; the plan; and ``graphs``, or no graphs if
        they would take more than :data:`GRAPH_SHARE` of the budget and ``graph=True`` wasn't given.

    Raises:
        BudgetError: not even one page fits.
    """
    budget = limits["budget"]
    if not graphs.wanted or graphs.must or budget is None:
        return *_first_that_fits(setup, tree, graphs, limits), graphs
    with suppress(BudgetError):
        planned, plan = _first_that_fits(setup, tree, graphs, limits)
        if plan.parts["graphs"] <= GRAPH_SHARE * budget:
            return planned, plan, graphs
    none = GraphUse(reason=f"more than {GRAPH_SHARE:.0%} of the budget of {format_bytes(budget)} would go to graphs")
    return *_first_that_fits(setup, tree, none, limits), none


def _first_that_fits(
    setup: Setup, tree: DraftTree | int | None, graphs: GraphUse, limits: dict[str, Any]
) -> tuple[Setup, MemoryPlan]:
    """The plan for the first candidate tree that the budget holds."""
    kv_dtype, shape = limits["kv_dtype"], None
    candidates = tree_candidates(tree, setup.model, setup.facts, setup.drafter, setup.accuracy, setup.ranks, kv_dtype)
    for candidate in candidates:
        if tree is None:
            setup = dataclasses.replace(setup, drafter=_without_unused_heads(setup.drafter, candidate.tree))
        if shape is None:
            shape = generation_shape(setup, graphs, limits["page_size"], kv_dtype)
        head_bytes, coded_bytes = setup.drafter.nbytes, _coded_bytes(setup.drafter)
        shape = dataclasses.replace(shape, head_bytes=head_bytes, coded_head_bytes=coded_bytes)
        shape = setup.ranks.max_over_ranks(shape)
        try:
            return setup, dataclasses.replace(divide_budget(shape, candidate.tree, **limits), **candidate.plan_fields)
        except BudgetError as error:
            failure = error
    raise failure


def _without_unused_heads(drafter: Drafter, tree: DraftTree) -> Drafter:
    """A drafter with at most as many heads as the tree is deep, at least one."""
    depth = max(1, tree.max_depth)
    if not isinstance(drafter, MedusaDrafter) or depth >= drafter.max_depth:
        return drafter
    return drafter.truncated(depth)


def _coded_bytes(drafter: Drafter) -> int | None:
    return drafter.coded_nbytes if isinstance(drafter, MedusaDrafter) else None


def make_chooser(setup: Setup, plan: MemoryPlan, graphs: GraphUse) -> TreeChooser:
    """The chooser of the part of the plan's tree that a step verifies. Times a few forward passes.

    With graphs, parts have one of :data:`GRAPH_SIZES`. Chains have no known accuracy: the prior is 0.5 per guess.
    """
    drafter, agreed = setup.drafter, setup.ranks.broadcast_scalar
    rows = max(plan.prefill_chunk, plan.max_nodes)
    draft_seconds = None
    if isinstance(drafter, HFDraftModel):
        draft_seconds = time_passes(drafter.hf_model, drafter.facts, rows, agreed)
    prior = [[0.5]] * plan.tree.max_depth if getattr(drafter, "prefers_chain", False) else setup.accuracy
    sizes = GRAPH_SIZES if graphs.wanted else None
    seconds = time_passes(setup.model, setup.facts, rows, agreed)
    return TreeChooser(plan.tree, RunningAcceptance(plan.tree, prior), seconds, draft_seconds, sizes, agreed)


def kernel_blocks(
    facts: ModelFacts, backend: str, page_size: int, kv_dtype: str | None
) -> tuple[KernelConfig, ...] | None:
    """The backend's block sizes for the model's attention; of its widest heads where layers differ."""
    kind, sizes = max(_attention_sizes(facts), key=lambda pair: pair[0].head_dim)
    return ops.kernel_configs(backend, kind.device, kind.dtype, *sizes, page_size, page_dtype(kv_dtype))


def _attention_sizes(facts: ModelFacts) -> list[tuple[LayerKV, tuple[int, int, int, int]]]:
    """The kinds of attention layers, each with query heads, key/value heads and both head dimensions."""
    kinds = dict.fromkeys(zip(facts.layers, facts.num_qo_heads, strict=True))
    return [(kind, (heads, kind.num_kv_heads, kind.head_dim, kind.v_head_dim)) for kind, heads in kinds]


def generation_shape(setup: Setup, graphs: GraphUse, page_size: int, kv_dtype: str | None) -> GenerationShape:
    """The sizes that a memory plan needs, measured where they depend on the model's code."""
    model, facts, drafter, backend = setup.model, setup.facts, setup.drafter, setup.backend
    shapes = _attention_sizes(facts)
    (forward, logits), library_bytes = measure_passes(model, facts), measure_libraries(model, facts)
    if isinstance(drafter, HFDraftModel):
        shapes += _attention_sizes(drafter.facts)
        draft_forward, draft_logits = measure_passes(drafter.hf_model, drafter.facts)
        library_bytes = max(library_bytes, measure_libraries(drafter.hf_model, drafter.facts))
        forward, logits = forward.elementwise_max(draft_forward), logits.elementwise_max(draft_logits)
    codes = page_dtype(kv_dtype)
    splits = [ops.split_workspace(backend, kind.device, kind.dtype, *sizes, page_size, codes) for kind, sizes in shapes]
    workspace = max(ops.fixed_workspace(backend, kind.dtype, *sizes, codes) for kind, sizes in shapes)
    return GenerationShape(
        kv_bytes_per_token=sum(layer.page_bytes_per_token(kv_dtype) for layer in facts.layers),
        scratch_bytes_per_node=sum(layer.bytes_per_token for layer in facts.layers),
        head_bytes=drafter.nbytes,
        coded_head_bytes=_coded_bytes(drafter),
        forward=forward,
        logits=logits,
        # Hidden states: of the last steps, of the prompts in prefill, and of the previous chunk.
        state_bytes=3 * facts.hidden_size * facts.dtype.itemsize,
        split_size=min(size for size, _ in splits),
        split_row_bytes=max(row for _, row in splits),
        drafter_kv_bytes_per_token=drafter.kv_bytes_per_token if isinstance(drafter, PagedDrafter) else 0,
        workspace_bytes=workspace + library_bytes,
        devices=len({layer.device for layer in facts.layers} | {facts.device}),
        kept_steps=MAX_STEPS if graphs.wanted else 0,
        graphs=graphs.wanted and facts.device.type == "cuda",
    )
