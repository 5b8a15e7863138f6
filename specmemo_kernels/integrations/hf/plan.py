"""The tree and the memory plan of a loaded model, and the tree chooser."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial
from typing import Any

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
from specmemo_kernels.integrations.hf.draft import HFDraftModel, Setup
from specmemo_kernels.integrations.hf.feature_drafter import (
    count_draft_results,
    measure_advance,
    measure_draft,
    time_draft,
)
from specmemo_kernels.integrations.hf.hybrid_sizes import with_mixers
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
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.device_probe import kernel_target, profile_of
from specmemo_kernels.planning.drafter_spec import CHAIN_ACCURACY, DrafterSpec, HeadsSpec
from specmemo_kernels.planning.footprint import KEPT_STATES, GenerationShape, draw_bytes, recorded_bytes
from specmemo_kernels.planning.memory_plan import BudgetError, MemoryPlan, chunk_sizes, divide_budget, format_bytes
from specmemo_kernels.planning.model_config import DTYPE_BYTES
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.search import PlanRequest, best_tree, tree_paths
from specmemo_kernels.tree.acceptance import (
    Acceptance,
    Accuracy,
    RankAcceptance,
    RunningAcceptance,
    best_first_paths,
    deepened,
)
from specmemo_kernels.tree.choice import TreeChooser
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import TreeBudget, Trees

#: Maximum share of the budget for graphs, unless graph=True.
GRAPH_SHARE = 0.1
#: Nodes of the partial trees that steps verify from graphs, besides the whole tree. Each size is captured once.
GRAPH_SIZES = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
#: The same where captures are so slow that steps are padded. Of ten batches one after the other these write up to 1.18
#: times as many tokens per second as :data:`GRAPH_SIZES` (``bench/padded_steps.py``, a simulation).
PADDED_SIZES = frozenset((1, 2, 4, 8, 16, 32, 64))
#: Context length of the predicted step. Attention is a small part of the step up to there.
_CONTEXT = 1024
#: A token of a prompt and a new one, where ``patch`` is given no ``context``.
LEAST_CONTEXT = 2
#: Maximum nodes where no speed can be predicted: an unsupported device or dtype, or unknown model sizes.
_UNKNOWN_TREE = 12


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


#: A tree to plan for, and the plan's fields that describe it (predicted speed, reasons).
_Candidate = tuple[Trees, dict[str, Any]]


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
    for candidate, fields in _tree_candidates(setup, tree, limits.kv_dtype, graphs.wanted):
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
    )


def _tree_candidates(setup: Setup, tree: Trees | int | None, kv_dtype: str | None, recorded: bool) -> list[_Candidate]:
    """The trees of which the memory plan takes the first that the budget holds.

    There is one candidate for a ``tree`` given to ``patch`` and for drafters that prefer chains. Else the candidates
    suit the device: the largest tree that a step may verify, the tree that is predicted to be the fastest, then half as
    many nodes each, down to 2. :class:`TreeChooser` later selects the part of the tree for each step. Predictions use
    :mod:`specmemo_kernels.planning.cost`, :func:`profile_of` and a context of 1024 tokens, or the model's maximum.

    Raises:
        ValueError: the given tree is deeper than the drafter, or wider than the vocabulary.
    """
    if tree is None and not prefers_chain(setup.drafter):
        candidates: list[_Candidate] = setup.ranks.broadcast_result(lambda: _device_trees(setup, kv_dtype, recorded))
        return candidates
    return [(_given_tree(tree, setup), {})]


def _given_tree(tree: Trees | int | None, setup: Setup) -> Trees:
    """The given tree, the best tree of that many nodes, or (``None``) a chain of the drafter's depth."""
    drafter = setup.drafter
    vocab_size = drafter.vocab_size if isinstance(drafter, FeatureDrafter) else setup.facts.vocab_size
    if isinstance(tree, TreeBudget) and not isinstance(drafter, FeatureDrafter):
        raise ValueError(
            f"tree is a TreeBudget, but {type(drafter).__name__} fills static trees; give a DraftTree or a number"
        )
    if isinstance(tree, int) and isinstance(drafter, FeatureDrafter):
        return drafter.spec.budget(tree, drafter.max_depth)
    if tree is None or (isinstance(tree, int) and prefers_chain(drafter)):
        return DraftTree.chain(drafter.max_depth if tree is None else min(drafter.max_depth, tree - 1))
    if isinstance(tree, int):
        return DraftTree.from_paths(best_first_paths(setup.accuracy[: drafter.max_depth], tree - 1))
    if tree.max_depth > drafter.max_depth:
        raise ValueError(
            f"the tree is {tree.max_depth} deep, the drafter guesses {drafter.max_depth} tokens ahead; "
            "give a tree that is no deeper, or its number of nodes"
        )
    if tree.width > vocab_size:
        raise ValueError(
            f"the tree uses rank {tree.width - 1}, the vocabulary has {vocab_size} tokens; ranks must be "
            f"from 0 to {vocab_size - 1}"
        )
    return tree


def _device_trees(setup: Setup, kv_dtype: str | None, recorded: bool) -> list[_Candidate]:
    tree, fastest, fields = _largest_tree(setup, kv_dtype, recorded)
    candidates = [(tree, fields)]
    if fastest < tree.size:
        candidates.append((tree.pruned(fastest), fields))
    while (size := candidates[-1][0].size) > 2:
        smaller = tree.pruned(max(2, size // 2))
        reason = f"the budget holds a tree of {smaller.size} nodes, fewer than would be fastest"
        candidates.append((smaller, {"reasons": (reason,)}))
    return candidates


def _largest_tree(setup: Setup, kv_dtype: str | None, recorded: bool) -> tuple[Trees, int, dict[str, Any]]:
    """The largest tree, the predicted fastest size, and the plan's fields for that size."""
    facts, drafter = setup.facts, setup.drafter
    dtype = str(facts.dtype).removeprefix("torch.")
    accuracy = setup.accuracy[: drafter.max_depth]
    heads: DrafterSpec = HeadsSpec(len(accuracy))
    with_heads = isinstance(drafter, MedusaDrafter | FeatureDrafter)
    if isinstance(drafter, FeatureDrafter):
        heads = drafter.spec
        accuracy = deepened(accuracy, drafter.max_depth)
    if isinstance(drafter, MedusaDrafter):
        heads = HeadsSpec(len(accuracy), drafter.heads.num_layers, drafter.heads.own_lm_head, drafter.heads.head_bits)
    try:
        spec = ModelSpec.from_config(setup.model.config)
    except ValueError as error:
        return _small_tree(heads, accuracy, str(error))
    if facts.device.type not in ("cpu", "cuda") or dtype not in DTYPE_BYTES:
        return _small_tree(heads, accuracy, f"there is no profile for {dtype} on {facts.device}")
    spec = with_mixers(dataclasses.replace(spec, dtype=dtype), setup.model, facts.mixers, len(facts.layers))
    profile = profile_of(str(facts.device), torch_products=False)
    weights = spec.quantised.on(profile.kernel_target, profile.backend == "cpu")
    spec = dataclasses.replace(spec, quantised=weights)
    if profile.compute_dtype(dtype) != dtype:
        rates = dict(profile.matmul_rate) | {dtype: min(profile.matmul_rate.values())}
        profile = dataclasses.replace(profile, matmul_rate=rates)
    work = Workload(max(2, min(_CONTEXT, spec.max_context)))
    request = PlanRequest(spec, profile, work, heads, accuracy, setup.ranks.size, kv_dtype=kv_dtype, recorded=recorded)
    best, largest, plain = best_tree(request, with_heads)
    gain = best.speed.tokens_per_second / plain.speed.tokens_per_second
    cost = best.speed.step_seconds / plain.speed.step_seconds
    reasons = [
        f"on {profile.name} a step over {best.tree_size} nodes is predicted to take {cost:.2f} times a plain step and "
        f"to write {best.tokens_per_step:.2f} tokens: {gain:.2f} times the plain speed; no other tree gives more"
    ]
    if largest.tree_size > best.tree_size:
        reasons.append(
            f"steps may verify up to {largest.tree_size} nodes where the text is easier to guess or the device faster"
        )
    return heads.tree(tree_paths(request, largest.heads, largest.tree_size)), best.tree_size, {
        "tokens_per_step": best.tokens_per_step, "tokens_per_second": best.speed.tokens_per_second,
        "step_seconds": best.speed.step_seconds, "reasons": tuple(reasons),
    }  # fmt: skip


def _small_tree(heads: DrafterSpec, accuracy: Accuracy, why: str) -> tuple[Trees, int, dict[str, Any]]:
    """A tree of a few nodes, which is faster than no tree on nearly every device."""
    tree = heads.tree(best_first_paths(accuracy, _UNKNOWN_TREE - 1))
    return tree, tree.size, {"reasons": (f"{why}, so the tree has at most {_UNKNOWN_TREE} nodes",)}
