"""Trees that suit a loaded model, its drafter and its device."""

from __future__ import annotations

import dataclasses
from typing import Any

from specmemo_kernels.drafting.base import FeatureDrafter, prefers_chain
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.integrations.hf.draft import Setup
from specmemo_kernels.integrations.hf.hybrid_sizes import with_mixers
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.device_probe import profile_of
from specmemo_kernels.planning.drafter_spec import DrafterSpec, HeadsSpec
from specmemo_kernels.planning.model_config import DTYPE_BYTES
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.search import PlanRequest, best_tree, tree_paths
from specmemo_kernels.tree.acceptance import Accuracy, best_first_paths, deepened
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import TreeBudget, Trees

#: Context length of the predicted step. Attention is a small part of the step up to there.
_CONTEXT = 1024
#: Maximum nodes where no speed can be predicted: an unsupported device or dtype, or unknown model sizes.
_UNKNOWN_TREE = 12

#: A tree to plan for, and the plan's fields that describe it (predicted speed, reasons).
Candidate = tuple[Trees, dict[str, Any]]


def tree_candidates(setup: Setup, tree: Trees | int | None, kv_dtype: str | None, recorded: bool) -> list[Candidate]:
    """The trees of which the memory plan takes the first that the budget holds.

    There is one candidate for a ``tree`` given to ``patch``. Else the first is the chain of a drafter that prefers
    chains, or trees that suit the device: the largest that a step may verify, and the one that is predicted to be the
    fastest. Trees of half as many nodes each follow, down to 2. :class:`TreeChooser` later selects the part of the tree
    for each step. Predictions use :mod:`specmemo_kernels.planning.cost`, :func:`profile_of` and a context of 1024
    tokens, or the model's maximum.

    Raises:
        ValueError: the given tree is deeper than the drafter, or wider than the vocabulary.
    """
    if tree is not None:
        return [(_given_tree(tree, setup), {})]
    if prefers_chain(setup.drafter):
        return _with_smaller([(DraftTree.chain(setup.drafter.max_depth), {})])
    return _with_smaller(setup.ranks.broadcast_result(lambda: _device_trees(setup, kv_dtype, recorded)))


def _with_smaller(candidates: list[Candidate]) -> list[Candidate]:
    """The candidates, and trees of half as many nodes as the last one each, down to 2."""
    candidates = list(candidates)
    while (size := candidates[-1][0].size) > 2:
        smaller = candidates[0][0].pruned(max(2, size // 2))
        reason = f"the budget holds a tree of {smaller.size} nodes, fewer than would be fastest"
        candidates.append((smaller, {"reasons": (reason,)}))
    return candidates


def _given_tree(tree: Trees | int, setup: Setup) -> Trees:
    """The given tree, or the best tree of that many nodes."""
    drafter = setup.drafter
    vocab_size = drafter.vocab_size if isinstance(drafter, FeatureDrafter) else setup.facts.vocab_size
    if isinstance(tree, TreeBudget) and not isinstance(drafter, FeatureDrafter):
        raise ValueError(
            f"tree is a TreeBudget, but {type(drafter).__name__} fills static trees; give a DraftTree or a number"
        )
    if isinstance(tree, int) and isinstance(drafter, FeatureDrafter):
        return drafter.spec.budget(tree, drafter.max_depth)
    if isinstance(tree, int) and prefers_chain(drafter):
        return DraftTree.chain(min(drafter.max_depth, tree - 1))
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


def _device_trees(setup: Setup, kv_dtype: str | None, recorded: bool) -> list[Candidate]:
    tree, fastest, fields = _largest_tree(setup, kv_dtype, recorded)
    sizes = [tree.size, fastest] if fastest < tree.size else [tree.size]
    return [(tree.pruned(size), fields) for size in sizes]


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
