"""Acceptance for models with random weights, drawn from published statistics.

For each position of the text, the rank of the right token in each head is drawn. A system accepts the longest path of
its tree that follows these ranks. All systems get the same draws, so a smaller tree accepts less. Everything else
(forward passes, heads, verification, moves of keys and values) runs for real.

The ranks follow the heads' published accuracies, raised to a power (below 1: easier text). The power is chosen per turn
of a conversation, so that the published tree writes as many tokens per step as the published run in that turn. Heads
are assumed to be independent, as in :mod:`specmemo_kernels.tree.acceptance`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.step_attention import StepAttention
from specmemo_kernels.forward.target import TargetModel, TargetOutput
from specmemo_kernels.tree.acceptance import (
    DEFAULT_ACCURACY,
    Accuracy,
    best_first_paths,
    expected_tokens_per_step,
    extrapolated,
    rank_probabilities,
)
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """Medusa's published tree, and tokens per step of its published run by question and turn.

    Default: the best tree of the same size for the published accuracies, without a run.
    """

    tree: DraftTree = field(default_factory=lambda: DraftTree.from_paths(_default_paths()))
    tokens_per_step: dict[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, tree: str = "mc_sim_7b_63") -> Published:
        """From ``trees.json`` and ``mt_bench_7b.json``, whose steps count from 0 (``bench/acceptance.py``)."""
        paths = json.loads((folder / "trees.json").read_text())[tree]
        questions = json.loads((folder / "mt_bench_7b.json").read_text())["questions"]
        rates = {
            (q["question_id"], turn): tokens / (steps + 1)
            for q in questions
            for turn, (steps, tokens) in enumerate(zip(q["steps"], q["new_tokens"], strict=True))
        }
        return cls(DraftTree.from_paths(paths), rates)

    def ranks(self, question: int, turn: int, count: int) -> list[Ranks]:
        """For each position of the turn's text the rank at which each head holds the right token.

        Turns without a published run follow the accuracies.
        """
        table = extrapolated(DEFAULT_ACCURACY, self.tree.width)
        if (tokens_per_step := self.tokens_per_step.get((question, turn))) is not None:
            table = eased(table, self.tree, tokens_per_step)
        chances = rank_probabilities(table)
        source = random.Random(1000 * question + turn)
        return [tuple(_draw(chance, source) for chance in chances) for _ in range(count)]


def _default_paths() -> list[tuple[int, ...]]:
    """63 nodes besides the root, at most four deep, from ten guesses of each head, as in Medusa's trees."""
    return best_first_paths(extrapolated(DEFAULT_ACCURACY[:4], 10), 63)


def eased(table: Accuracy, tree: DraftTree, tokens_per_step: float) -> list[list[float]]:
    """The accuracies to the power at which ``tree`` is expected to write ``tokens_per_step``.

    Raises:
        ValueError: ``tokens_per_step`` isn't between 1 and the tree's depth + 1.
    """
    if not 1 < tokens_per_step < tree.max_depth + 1:
        raise ValueError(
            f"tokens per step must be above 1 and below {tree.max_depth + 1} (its depth + 1), got {tokens_per_step:.2f}"
        )
    low, high = 1e-4, 1e3
    for _ in range(80):
        power = (low * high) ** 0.5
        powered = [[chance**power for chance in row] for row in table]
        low, high = (power, high) if expected_tokens_per_step(tree, powered) > tokens_per_step else (low, power)
    return powered


@dataclass(frozen=True)
class PublishedChain:
    """How often chains of drafts are right: ``right[d]`` is the share of steps in which the first d + 1 drafts are.

    Default: EAGLE-3 for Llama-3.1-8B-Instruct, MT-Bench, greedy, seven drafts (github.com/vllm-project/vllm,
    issue 26191). Steps are drawn independently.
    """

    right: tuple[float, ...] = (0.74, 0.54, 0.41, 0.31, 0.23, 0.17, 0.13)

    def ranks(self, question: int, turn: int, count: int) -> list[Ranks]:
        """As :meth:`Published.ranks`: 0 for right drafts, 1, which no chain has, behind them."""
        source = random.Random(1000 * question + turn)
        draws = [source.random() for _ in range(count)]
        return [tuple(int(draw >= share) for share in self.right) for draw in draws]


def _draw(chance: Sequence[float], source: random.Random) -> int:
    """A random rank; ``len(chance)`` if no rank is right."""
    missed = max(0.0, 1.0 - sum(chance))
    return source.choices(range(len(chance) + 1), [*chance, missed])[0]


def walk_ranks(tree: DraftTree, ranks: Ranks) -> list[int]:
    """The longest path in ``tree`` that follows ``ranks``, root first."""
    children = {(parent, rank): node for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True))}
    path = [0]
    for rank in ranks:
        child = children.get((path[-1], rank))
        if child is None:
            break
        path.append(child)
    return path


class DrawCursor:
    """A position in the draws of a turn; the first token follows from the prompt, so its draw is skipped."""

    def __init__(self, ranks: list[Ranks]) -> None:
        self._ranks, self._next = ranks, 1

    def walk(self, tree: DraftTree) -> list[int]:
        """The path that the next step accepts; advances the position."""
        path = walk_ranks(tree, self._ranks[min(self._next, len(self._ranks) - 1)])
        self._next += len(path)
        return path


class ReplayedTarget:
    """A target with replayed acceptance: computes its argmax, then overwrites it along the drawn path.

    Replaces a handle's target; the rest of the loop runs unchanged, recorded steps included: the draws and the
    positions in them are tensors with fixed addresses, and no step reads them on the host. In a batch, the i-th
    sequence of a step takes the i-th sequence's draws. A node's rank is the number of its elder siblings.

    Args:
        sequences, positions, depth: sizes of the draws' tensor.
    """

    def __init__(self, target: TargetModel, sequences: int = 64, positions: int = 4096, depth: int = 8) -> None:
        self.target, self.device, self.vocab_size = target, target.device, target.vocab_size
        with torch.inference_mode(False):
            self._draws = torch.empty(sequences, positions, depth, dtype=torch.int8, device=target.device)
            self._next = torch.ones(sequences, dtype=torch.int64, device=target.device)
        self._batch: TreeBatch | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def begin(self, ranks: Sequence[list[Ranks]]) -> None:
        """Start texts with these draws, one list per sequence.

        Raises:
            ValueError: they have more sequences, positions or heads than the draws' tensor.
        """
        draws = torch.tensor(ranks, dtype=torch.int8)
        if any(size > limit for size, limit in zip(draws.shape, self._draws.shape, strict=True)):
            raise ValueError(f"draws of shape {tuple(draws.shape)}, at most {tuple(self._draws.shape)} are replayed")
        sequences, positions, depth = draws.shape
        kept = self._draws[:sequences]
        kept[:, :positions, :depth] = draws
        kept[:, :positions, depth:] = -1
        kept[:, positions:] = kept[:, positions - 1 : positions]  # behind the end the last draws are repeated
        self._next.fill_(1)  # the first token follows from the prompt, so its draw is skipped

    def forward(self, batch: TreeBatch, attention: StepAttention, keep: Tensor | None, logits: bool) -> TargetOutput:
        self._batch = batch
        return self.target.forward(batch, attention, keep, logits)

    def argmax(self, output: TargetOutput) -> Tensor:
        tokens, batch = self.target.argmax(output), self._batch
        assert batch is not None
        if batch.parents is None:
            return tokens
        trees, nodes = batch.num_trees, batch.num_tree_nodes
        shape = trees, nodes // trees
        parents = batch.parents.view(shape)
        place = self._next[:trees].clamp(max=self._draws.shape[1] - 1)
        drawn = self._draws[torch.arange(trees, device=self.device), place]
        drafts = batch.tokens[:nodes].view(shape)
        written, length = replayed(tokens[:nodes].view(shape), drafts, parents, drawn, batch.max_depth)
        self._next[:trees].add_(length)
        return torch.cat([written.flatten(), tokens[nodes:]])


def replayed(tokens: Tensor, drafts: Tensor, parents: Tensor, drawn: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """A target's ``tokens`` ``[B, T]``, overwritten so that verification accepts the drawn path.

    Args:
        drafts: ``[B, T]``, the trees' tokens. parents: ``[B, T]``, -1 for roots; parents come before children.
        drawn: ``[B, D]``, the rank of the right token at each depth; no node has rank -1.
        depth: of the trees.

    Returns:
        The tokens, and the nodes of each path ``[B]``.
    """
    size = parents.shape[1]
    elder = torch.ones(size, size, dtype=torch.bool, device=parents.device).tril(-1)
    ranks = ((parents[:, :, None] == parents[:, None, :]) & elder).sum(2)
    node = torch.zeros_like(parents[:, :1], dtype=torch.int64)
    going, length = torch.ones_like(node, dtype=torch.bool), torch.ones_like(node)
    for level in range(min(depth, drawn.shape[1])):
        right = (parents == node) & (ranks == drawn[:, level : level + 1]) & going
        going, child = right.any(1, keepdim=True), right.int().argmax(1, keepdim=True)
        tokens = tokens.scatter(1, node, torch.where(going, drafts.gather(1, child), tokens.gather(1, node)))
        node, length = torch.where(going, child, node), length + going
    # The last node's token must be none of its children: itself, or the lowest that is none.
    children, last = parents == node, tokens.gather(1, node)
    numbers = torch.arange(size + 1, device=parents.device)
    taken = ((drafts[:, None, :] == numbers[:, None]) & children[:, None, :]).any(2)
    wrong = ((drafts == last) & children).any(1, keepdim=True)
    free = taken.int().argmin(1, keepdim=True)
    return tokens.scatter(1, node, torch.where(wrong, free, last)), length[:, 0]


class ReplayedAccept:
    """Replayed acceptance for Medusa as published: computes its own path, then returns the drawn one."""

    def __init__(self, tree: DraftTree, paths: Sequence[Sequence[int]], accept: Any) -> None:
        self.tree, self.accept = tree, accept
        self.begin([])
        self._leaf = {node: (leaf, depth) for leaf, path in enumerate(paths) for depth, node in enumerate(path)}

    def begin(self, ranks: list[Ranks]) -> None:
        """Start a text with these draws."""
        self._cursor = DrawCursor(ranks)

    def __call__(self, candidates: Tensor, logits: Tensor) -> tuple[int, int]:
        self.accept(candidates, logits)
        return self._leaf[self._cursor.walk(self.tree)[-1]]
