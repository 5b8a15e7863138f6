"""Decides the size of a model's tree: the tree given to ``patch``, or trees for the device, largest first."""

from __future__ import annotations

import dataclasses
from typing import Any

from specmemo_kernels.drafting.base import Drafter
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.integrations.distributed.ranks import SingleRank
from specmemo_kernels.integrations.hf.target import ModelFacts
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.device_probe import profile_of
from specmemo_kernels.planning.footprint import HeadsSpec
from specmemo_kernels.planning.model_config import DTYPE_BYTES
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.search import PlanRequest, best_tree, tree_paths
from specmemo_kernels.tree.acceptance import Accuracy, best_first_paths
from specmemo_kernels.tree.draft_tree import DraftTree

#: Context length of the predicted step. Attention is a small part of the step up to there.
_CONTEXT = 1024
#: Nodes without a device profile: devices that are neither CPUs nor CUDA or HIP, models of unknown sizes.
_UNKNOWN_TREE = 12


@dataclasses.dataclass(frozen=True)
class TreeCandidate:
    """A tree to plan for, and the plan's fields that describe it (predicted speed, reasons)."""

    tree: DraftTree
    plan_fields: dict[str, Any] = dataclasses.field(default_factory=dict)


def tree_candidates(
    tree: DraftTree | int | None,
    model: Any,
    facts: ModelFacts,
    drafter: Drafter,
    accuracy: Accuracy,
    ranks: SingleRank,
    kv_dtype: str | None,
) -> list[TreeCandidate]:
    """The trees of which the memory plan takes the first that the budget holds.

    There is one candidate for a ``tree`` given to ``patch`` and for drafters that prefer chains. Else the candidates
    suit the device: the largest tree that a step may verify, the tree that is predicted to be the fastest, then half as
    many nodes each, down to 2. In use, :class:`TreeChooser` selects how much of the tree a step verifies. Predictions
    use :mod:`specmemo_kernels.planning.cost`, :func:`profile_of` and a context of 1024 tokens, or the model's maximum.

    Raises:
        ValueError: the given tree is deeper than the drafter, or wider than the vocabulary.
    """
    if tree is None and not getattr(drafter, "prefers_chain", False):
        candidates: list[TreeCandidate] = ranks.broadcast_result(
            lambda: _device_trees(model, facts, drafter, accuracy, kv_dtype, ranks.size)
        )
        return candidates
    return [TreeCandidate(_given_tree(tree, drafter, facts, accuracy))]


def _given_tree(tree: DraftTree | int | None, drafter: Drafter, facts: ModelFacts, accuracy: Accuracy) -> DraftTree:
    """The given tree, the best tree of that many nodes, or (``None``) a chain of the drafter's depth."""
    if tree is None or (isinstance(tree, int) and getattr(drafter, "prefers_chain", False)):
        return DraftTree.chain(drafter.max_depth if tree is None else min(drafter.max_depth, tree - 1))
    if isinstance(tree, int):
        return DraftTree.from_paths(best_first_paths(accuracy[: drafter.max_depth], tree - 1))
    if tree.max_depth > drafter.max_depth:
        raise ValueError(f"the tree is {tree.max_depth} deep, the drafter guesses {drafter.max_depth} tokens ahead")
    if tree.width > facts.vocab_size:
        raise ValueError(f"the tree uses rank {tree.width - 1}, the vocabulary has {facts.vocab_size} tokens")
    return tree


def _device_trees(
    model: Any, facts: ModelFacts, drafter: Drafter, accuracy: Accuracy, kv_dtype: str | None, tp: int
) -> list[TreeCandidate]:
    tree, fastest, fields = _largest_tree(model, facts, drafter, accuracy, kv_dtype, tp)
    candidates = [TreeCandidate(tree, fields)]
    if fastest < tree.size:
        candidates.append(TreeCandidate(tree.pruned(fastest), fields))
    while (size := candidates[-1].tree.size) > 2:
        smaller = tree.pruned(max(2, size // 2))
        reason = f"the budget holds a tree of {smaller.size} nodes, fewer than would be fastest"
        candidates.append(TreeCandidate(smaller, {"reasons": (reason,)}))
    return candidates


def _largest_tree(
    model: Any, facts: ModelFacts, drafter: Drafter, accuracy: Accuracy, kv_dtype: str | None, tp: int
) -> tuple[DraftTree, int, dict[str, Any]]:
    """The largest tree, the predicted fastest size, and the plan's fields for that size."""
    dtype = str(facts.dtype).removeprefix("torch.")
    accuracy = accuracy[: drafter.max_depth]
    heads, with_heads = HeadsSpec(len(accuracy)), isinstance(drafter, MedusaDrafter)
    if isinstance(drafter, MedusaDrafter):
        heads = HeadsSpec(len(accuracy), drafter.heads.num_layers, drafter.heads.own_lm_head, drafter.heads.head_bits)
    try:
        spec = ModelSpec.from_config(model.config)
    except ValueError as error:
        return _small_tree(accuracy, str(error))
    if facts.device.type not in ("cpu", "cuda") or dtype not in DTYPE_BYTES:
        return _small_tree(accuracy, f"there is no profile for {dtype} on {facts.device}")
    spec = dataclasses.replace(spec, dtype=dtype)
    profile = profile_of(str(facts.device))
    if profile.compute_dtype(dtype) != dtype:
        rates = dict(profile.matmul_rate) | {dtype: min(profile.matmul_rate.values())}
        profile = dataclasses.replace(profile, matmul_rate=rates)
    work = Workload(max(2, min(_CONTEXT, spec.max_context)))
    request = PlanRequest(spec, profile, work, heads, accuracy, tp, kv_dtype=kv_dtype)
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
    return DraftTree.from_paths(tree_paths(request, largest.heads, largest.tree_size)), best.tree_size, {
        "tokens_per_step": best.tokens_per_step, "tokens_per_second": best.speed.tokens_per_second,
        "step_seconds": best.speed.step_seconds, "reasons": tuple(reasons),
    }  # fmt: skip


def _small_tree(accuracy: Accuracy, why: str) -> tuple[DraftTree, int, dict[str, Any]]:
    """A tree of a few nodes, which pays nearly everywhere."""
    paths = best_first_paths(accuracy, _UNKNOWN_TREE - 1)
    reason = f"{why}, so the tree has at most {_UNKNOWN_TREE} nodes"
    return DraftTree.from_paths(paths), len(paths) + 1, {"reasons": (reason,)}
