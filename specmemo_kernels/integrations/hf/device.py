"""Which tree suits a loaded model on the device that it lies on."""

from __future__ import annotations

import dataclasses
from typing import Any

from specmemo_kernels.drafting.base import Drafter
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.integrations.hf.target import ModelFacts
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.device_probe import profile_of
from specmemo_kernels.planning.footprint import HeadsSpec
from specmemo_kernels.planning.model_config import DTYPE_BYTES
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.search import PlanRequest, best_tree, tree_paths
from specmemo_kernels.tree.acceptance import Accuracy, best_first_paths
from specmemo_kernels.tree.draft_tree import DraftTree

#: Tokens of context for which the step is timed: attention is a small part of it up to there.
_CONTEXT = 1024
#: Nodes where there is no profile to ask: devices that are neither CPUs nor CUDA or HIP, models of unknown sizes.
_UNKNOWN_TREE = 12


def device_tree(
    model: Any, facts: ModelFacts, drafter: Drafter, accuracy: Accuracy, kv_dtype: str | None = None, tp: int = 1
) -> tuple[DraftTree, int, dict[str, Any]]:
    """The largest tree that a step for one sequence may come to verify: what memory is set aside for.

    How much of it a step verifies, the running :class:`TreeChooser` decides; here the times are those of
    :mod:`specmemo_kernels.planning.cost` for the device of :func:`profile_of`, for a context of 1024 tokens, or as many
    as the model was made for.

    Returns:
        The tree, best nodes first; how many of them are predicted to be the fastest; and the plan's fields
        ``tokens_per_step``, ``tokens_per_second``, ``step_seconds`` (for that many) and ``reasons``.
    """
    dtype = str(facts.dtype).removeprefix("torch.")
    known = accuracy[: drafter.max_depth]
    heads, with_heads = HeadsSpec(len(known)), isinstance(drafter, MedusaDrafter)
    if isinstance(drafter, MedusaDrafter):
        heads = HeadsSpec(len(known), drafter.heads.num_layers, drafter.heads.own_lm_head, drafter.heads.head_bits)
    try:
        spec = ModelSpec.from_config(model.config)
    except ValueError as error:
        return _unknown(known, str(error))
    if facts.device.type not in ("cpu", "cuda") or dtype not in DTYPE_BYTES:
        return _unknown(known, f"there is no profile for {dtype} on {facts.device}")
    spec = dataclasses.replace(spec, dtype=dtype)
    profile = profile_of(str(facts.device))
    if profile.compute_dtype(dtype) != dtype:
        rates = dict(profile.matmul_rate) | {dtype: min(profile.matmul_rate.values())}
        profile = dataclasses.replace(profile, matmul_rate=rates)
    work = Workload(max(2, min(_CONTEXT, spec.max_context)))
    problem = PlanRequest(spec, profile, work, heads, known, tp, kv_dtype=kv_dtype)
    best, largest, plain = best_tree(problem, with_heads)
    gain = best.speed.tokens_per_second / plain.speed.tokens_per_second
    cost = best.speed.step_seconds / plain.speed.step_seconds
    reason = (
        f"on {profile.name} a step over {best.tree_size} nodes is predicted to take {cost:.2f} times a plain step and "
        f"to write {best.tokens_per_step:.2f} tokens: {gain:.2f} times the plain speed; no other tree gives more"
    )
    reasons = [reason]
    if largest.tree_size > best.tree_size:
        reasons.append(
            f"steps may verify up to {largest.tree_size} nodes where the text is easier to guess or the device faster"
        )
    return DraftTree.from_paths(tree_paths(problem, largest.heads, largest.tree_size)), best.tree_size, {
        "tokens_per_step": best.tokens_per_step, "tokens_per_second": best.speed.tokens_per_second,
        "step_seconds": best.speed.step_seconds, "reasons": tuple(reasons),
    }  # fmt: skip


def _unknown(accuracy: Accuracy, why: str) -> tuple[DraftTree, int, dict[str, Any]]:
    """A tree of a few nodes, which pays nearly everywhere."""
    paths = best_first_paths(accuracy, _UNKNOWN_TREE - 1)
    reason = f"{why}, so the tree has at most {_UNKNOWN_TREE} nodes"
    return DraftTree.from_paths(paths), len(paths) + 1, {"reasons": (reason,)}
