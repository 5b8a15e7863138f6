"""The memory plan of a loaded model, and the tree chooser."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial

from specmemo_kernels import ops
from specmemo_kernels.backends.kernel_config import (
    PAGE_SIZE,
    WIDE_PAGE_SHARE,
    KernelConfig,
    preferred_page_size,
)
from specmemo_kernels.cache.kv_storage import LayerKV, page_dtype
from specmemo_kernels.drafting.base import AnyDrafter, FeatureDrafter, PagedDrafter, prefers_chain
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.engine.overlap import slots_ahead
from specmemo_kernels.engine.step_graph import max_steps, may_pad, padded_sequences
from specmemo_kernels.integrations.hf.candidate_trees import tree_candidates
from specmemo_kernels.integrations.hf.draft import HFDraftModel, Setup
from specmemo_kernels.integrations.hf.feature_drafter import (
    count_draft_results,
    measure_advance,
    measure_draft,
    time_draft,
)
from specmemo_kernels.integrations.hf.measure import (
    count_results,
    measure_beside_mixers,
    measure_libraries,
    measure_mixers,
    measure_passes,
    measure_quantised,
    time_passes,
)
from specmemo_kernels.integrations.hf.pool import GraphUse
from specmemo_kernels.integrations.hf.target import ModelFacts
from specmemo_kernels.planning.device_probe import kernel_target
from specmemo_kernels.planning.drafter_spec import CHAIN_ACCURACY
from specmemo_kernels.planning.footprint import KEPT_STATES, GenerationShape, draw_bytes, recorded_bytes
from specmemo_kernels.planning.memory_plan import BudgetError, MemoryPlan, chunk_sizes, divide_budget, format_bytes
from specmemo_kernels.tree.acceptance import (
    Acceptance,
    RankAcceptance,
    RunningAcceptance,
)
from specmemo_kernels.tree.choice import TreeChooser
from specmemo_kernels.tree.tree_budget import TreeBudget, Trees

#: Maximum share of the budget for graphs, unless graph=True.
GRAPH_SHARE = 0.1
#: Nodes of the partial trees that steps verify from graphs, besides the whole tree. Each size is captured once.
GRAPH_SIZES = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
#: The same where captures are so slow that steps are padded. Of ten batches one after the other these write up to 1.18
#: times as many tokens per second as :data:`GRAPH_SIZES` (``bench/padded_steps.py``, a simulation).
PADDED_SIZES = frozenset((1, 2, 4, 8, 16, 32, 64))
#: A token of a prompt and a new one, where ``patch`` is given no ``context``.
LEAST_CONTEXT = 2


@dataclasses.dataclass(frozen=True)
class PlanLimits:
    """Arguments of ``patch`` that limit the plan; ``page_size`` ``None``: as the kernels prefer.

    ``context``: tokens that one sequence must be able to have.
    """

    budget: int | None
    page_size: int | None
    prefill_chunk: int
    max_sequences: int
    kv_dtype: str | None
    context: int = LEAST_CONTEXT


def make_plan(
    setup: Setup, tree: Trees | int | None, graphs: GraphUse, limits: PlanLimits
) -> tuple[Setup, MemoryPlan, GraphUse]:
    """Divide the memory budget for ``patch``'s ``tree``, without graphs where they would take too much of it.

    Returns:
        The setup, whose drafter lacks unused heads if ``tree`` is ``None``; the plan; and ``graphs``, or no graphs if
        they would take more than :data:`GRAPH_SHARE` of the budget and ``graph=True`` wasn't given.

    Raises:
        BudgetError: not even the least pages fit.
    """
    budget = limits.budget
    if limits.page_size is None:
        limits = dataclasses.replace(limits, page_size=_page_size(setup, limits))
    if not graphs.wanted or graphs.must or budget is None:
        return *_first_that_fits(setup, tree, graphs, limits), graphs
    with suppress(BudgetError):
        planned, plan = _first_that_fits(setup, tree, graphs, limits)
        if plan.parts["graphs"] <= GRAPH_SHARE * budget:
            return planned, plan, graphs
    none = GraphUse(reason=f"more than {GRAPH_SHARE:.0%} of the budget of {format_bytes(budget)} would go to graphs")
    return *_first_that_fits(setup, tree, none, limits), none


def _page_size(setup: Setup, limits: PlanLimits) -> int:
    """The page size that the GPU's kernels prefer, unless one page per sequence is a large share of the budget."""
    device, budget = setup.facts.device, limits.budget
    preferred = preferred_page_size(kernel_target(device) if device.type == "cuda" else None)
    token = sum(layer.page_bytes_per_token(limits.kv_dtype) for layer in setup.facts.layers)
    fits = budget is None or limits.max_sequences * preferred * token <= WIDE_PAGE_SHARE * budget
    return preferred if setup.backend == "triton" and fits else PAGE_SIZE


def _first_that_fits(
    setup: Setup, tree: Trees | int | None, graphs: GraphUse, limits: PlanLimits
) -> tuple[Setup, MemoryPlan]:
    """The plan for the first candidate tree that the budget holds."""
    shape = None
    for candidate, fields in tree_candidates(setup, tree, limits.kv_dtype, graphs.wanted):
        if tree is None:
            setup = dataclasses.replace(setup, drafter=_without_unused_heads(setup.drafter, candidate))
        if shape is None:
            shape = _generation_shape(setup, graphs, limits)
        shape = dataclasses.replace(
            shape, head_bytes=setup.drafter.nbytes, coded_head_bytes=_coded_bytes(setup.drafter)
        )
        if setup.facts.mixers.mixers:
            shape = dataclasses.replace(shape, mixers=measure_mixers(setup.facts, candidate))
        if isinstance(setup.drafter, FeatureDrafter):
            shape = dataclasses.replace(shape, draft=measure_draft(setup.drafter, setup.facts, candidate))
            if shape.step_operators:
                count = count_draft_results(setup.drafter, setup.facts, candidate)
                shape = dataclasses.replace(shape, draft_operators=count)
        shape = setup.ranks.max_over_ranks(shape)
        slots = limits.context + slots_ahead(candidate, graphs.in_flight)
        try:
            plan = _with_kept_steps(shape, candidate, limits, slots)
            kernels = _kernel_blocks(setup.facts, setup.backend, limits.kv_dtype)
            bits = _head_bits(setup.drafter)
            return setup, dataclasses.replace(plan, kernels=kernels, head_bits=bits, **fields)
        except BudgetError as error:
            failure = error
    raise failure


def _with_kept_steps(shape: GenerationShape, tree: Trees, limits: PlanLimits, slots: int) -> MemoryPlan:
    """The plan with as many cached steps as take at most :data:`GRAPH_SHARE` of the budget, at least a quarter of all.

    Raises:
        BudgetError: not even the least pages fit.
    """
    sizes = {name: value for name, value in vars(limits).items() if name != "context"}
    for part in (1, 2, 4):
        fewer = dataclasses.replace(shape, kept_steps=shape.kept_steps // part)
        try:
            plan = divide_budget(fewer, tree, slots=slots, **sizes)
        except BudgetError:
            if part == 4 or not recorded_bytes(fewer):
                raise
            continue
        if limits.budget is None or plan.parts.get("graphs", 0) <= GRAPH_SHARE * limits.budget:
            break
    return plan


def _without_unused_heads(drafter: AnyDrafter, tree: Trees) -> AnyDrafter:
    """A drafter with at most as many heads as the tree is deep, at least one."""
    depth = max(1, tree.max_depth)
    if not isinstance(drafter, MedusaDrafter) or depth >= drafter.max_depth:
        return drafter
    return drafter.truncated(depth)


def _head_bits(drafter: AnyDrafter) -> int | None:
    if isinstance(drafter, FeatureDrafter):
        return drafter.spec.head_bits
    return drafter.heads.head_bits if isinstance(drafter, MedusaDrafter) else None


def _coded_bytes(drafter: AnyDrafter) -> int | None:
    """The drafter's bytes with ``head_bits=4``; ``None``: it has them, or none."""
    return drafter.coded_nbytes if isinstance(drafter, MedusaDrafter | FeatureDrafter) else None


def make_chooser(setup: Setup, plan: MemoryPlan, graphs: GraphUse) -> TreeChooser:
    """The chooser of the part of the plan's tree that a step verifies. Times a few forward passes.

    With graphs, parts have one of :data:`GRAPH_SIZES` or :data:`PADDED_SIZES`. Chains have no known accuracy, but
    :data:`CHAIN_ACCURACY` as the prior.
    """
    drafter, agreed = setup.drafter, setup.ranks.broadcast_scalar
    rows = max(plan.prefill_chunk, plan.max_nodes)
    make_capture = graphs.capture_of(setup.facts.device, plan)
    capture, draft_seconds = make_capture and make_capture(), None
    if isinstance(drafter, HFDraftModel):
        draft_seconds = time_passes(drafter.hf_model, drafter.facts, rows, agreed)
    if isinstance(drafter, FeatureDrafter):
        draft_seconds = time_draft(drafter, setup.facts, plan.tree, plan.max_sequences, agreed, capture)
    prior = [[CHAIN_ACCURACY]] * plan.tree.max_depth if prefers_chain(drafter) else setup.accuracy
    pads = capture is not None and capture.pads and may_pad(drafter)
    sizes = (PADDED_SIZES if pads else GRAPH_SIZES) if graphs.wanted else None
    padded = partial(padded_sequences, most=plan.max_sequences) if pads else int
    seconds = time_passes(setup.model, setup.facts, rows, agreed, capture)
    acceptance: Acceptance
    recurrent = bool(setup.facts.mixers.mixers)
    if isinstance(plan.tree, TreeBudget):
        acceptance = RankAcceptance(plan.tree, prior)
    else:
        acceptance = RunningAcceptance(plan.tree, prior, chains=recurrent)
    return TreeChooser(plan.tree, acceptance, seconds, draft_seconds, sizes, agreed, recurrent, padded)


def _kernel_blocks(facts: ModelFacts, backend: str, kv_dtype: str | None) -> tuple[KernelConfig, ...] | None:
    """The backend's block sizes for the model's attention; of its widest heads where layers differ."""
    layer, num_qo_heads = max(_attention_sizes(facts), key=lambda pair: pair[0].head_dim)
    return ops.kernel_configs(backend, layer, num_qo_heads, page_dtype(kv_dtype))


def _attention_sizes(facts: ModelFacts) -> list[tuple[LayerKV, int]]:
    """The kinds of attention layers, each with its number of query heads."""
    return list(dict.fromkeys(zip(facts.layers, facts.num_qo_heads, strict=True)))


def _generation_shape(setup: Setup, graphs: GraphUse, limits: PlanLimits) -> GenerationShape:
    """The sizes that a memory plan needs, measured where they depend on the model's code."""
    kv_dtype, max_rows = limits.kv_dtype, limits.prefill_chunk
    model, facts, drafter, backend = setup.model, setup.facts, setup.drafter, setup.backend
    shapes = _attention_sizes(facts)
    chunks = [max_rows] if limits.budget is None else chunk_sizes(max_rows)
    (forward, logits), libraries = measure_passes(model, facts, chunks), measure_libraries(model, facts, max_rows)
    products = measure_quantised(model, facts, max_rows)
    if isinstance(drafter, HFDraftModel):
        shapes += _attention_sizes(drafter.facts)
        products = products.elementwise_max(measure_quantised(drafter.hf_model, drafter.facts, max_rows))
        draft_forward, draft_logits = measure_passes(drafter.hf_model, drafter.facts, chunks)
        libraries = libraries.elementwise_max(measure_libraries(drafter.hf_model, drafter.facts, max_rows))
        forward, logits = forward.elementwise_max(draft_forward), logits.elementwise_max(draft_logits)
    layers, state_size = facts.layers, facts.hidden_size
    if isinstance(drafter, FeatureDrafter):
        layers, state_size = (*layers, *drafter.layers), drafter.state_size
        shapes += [(layer, drafter.num_qo_heads) for layer in dict.fromkeys(drafter.layers)]
        forward = forward.elementwise_max(measure_advance(drafter, facts))
    codes = page_dtype(kv_dtype)
    splits = [ops.split_workspace(backend, layer, heads, codes) for layer, heads in shapes]
    captured = graphs.wanted and facts.device.type == "cuda"
    recorded = graphs.wanted and facts.device.type == "cpu" and limits.budget is not None
    workspace = max(ops.fixed_workspace(backend, layer, heads, codes) for layer, heads in shapes)
    workspace *= 1 + captured  # graphs have their own
    leaves = (facts.leaves, drafter.facts.leaves) if isinstance(drafter, HFDraftModel) else (facts.leaves,)
    lm_head = ops.linear_workspace(backend, facts.dtype, facts.hidden_size)
    drafting = drafter.workspace if isinstance(drafter, FeatureDrafter) else 0
    workspace += max(lm_head, drafting, *(each.workspace for each in leaves))
    # A model's own logits may be in float32.
    logit_bytes = facts.dtype.itemsize if facts.plain_lm_head and facts.exact_lm_head else 4
    return GenerationShape(
        kv_bytes_per_token=sum(layer.page_bytes_per_token(kv_dtype) for layer in layers),
        scratch_bytes_per_node=sum(layer.scratch_bytes for layer in layers)
        + sum(mixer.row_bytes for mixer in facts.mixers.specs),
        mixer_state_bytes=sum(mixer.state_bytes for mixer in facts.mixers.specs),
        beside_mixers=measure_beside_mixers(model, facts, max_rows),
        head_bytes=drafter.nbytes,
        coded_head_bytes=_coded_bytes(drafter),
        forward=forward,
        logits=logits,
        draw=draw_bytes(facts.vocab_size, logit_bytes, setup.ranks.size),
        products=products,
        state_bytes=KEPT_STATES * max(state_size, facts.hidden_size) * facts.dtype.itemsize,
        split_size=min(size for size, _ in splits),
        split_row_bytes=max(row for _, row in splits),
        drafter_kv_bytes_per_token=drafter.kv_bytes_per_token if isinstance(drafter, PagedDrafter) else 0,
        workspace_bytes=workspace,
        libraries=libraries,
        devices=len({layer.device for layer in facts.layers} | {facts.device}),
        kept_steps=max_steps(facts.device, limits.max_sequences) if graphs.wanted else 0,
        step_operators=count_results(model, facts) if recorded else 0,
        graphs=captured,
        page_objects=facts.device.type == "cpu",
    )
