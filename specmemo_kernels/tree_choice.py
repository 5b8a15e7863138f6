"""How large a tree pays for how many sequences: expected tokens of a step over the seconds that it takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specmemo_kernels.acceptance import Accuracy, extrapolated, rank_probabilities
from specmemo_kernels.tree import DraftTree

#: How often a chain's running acceptance is looked at anew, in steps.
_REVIEW = 16


@dataclass(frozen=True)
class PassSeconds:
    """Measured seconds of a forward pass by its rows: ``points`` are ``(rows, seconds)``, rows rising."""

    points: tuple[tuple[int, float], ...]

    def at(self, rows: float) -> float:
        """On straight lines through the points; beyond the last one with the slope of the last two."""
        if len(self.points) == 1 or rows <= self.points[0][0]:
            return self.points[0][1]
        place = min(bisect_left(self.points, (rows, 0.0)), len(self.points) - 1)
        (low, a), (high, b) = self.points[place - 1 : place + 1]
        return a + (rows - low) * max(0.0, b - a) / (high - low)


def node_gains(tree: DraftTree, cumulative: Accuracy) -> list[float]:
    """How often a step accepts each node, heads taken as independent; 1 for the root (its own token always counts)."""
    chance = rank_probabilities(extrapolated(cumulative, tree.width))
    gains = [1.0]
    for node in range(1, tree.size):
        gains.append(gains[tree.parents[node]] * chance[tree.depths[node] - 1][tree.ranks[node]])
    return gains


def chain_gains(depth: int, accepted_at_depth: Sequence[int], offered_at_depth: Sequence[int]) -> list[float]:
    """The same for a chain, from what was accepted of what was offered so far; at first as if every other were right.

    Depths that were hardly offered continue the share by which the ones before fell.
    """
    gains, rate = [1.0], 0.5
    for d in range(depth):
        offered = offered_at_depth[d] if d < len(offered_at_depth) else 0
        accepted = accepted_at_depth[d] if d < len(accepted_at_depth) else 0
        if offered:
            reached = (accepted + 8 * gains[-1] * rate) / (offered + 8)
            rate = min(1.0, reached / gains[-1])
        gains.append(gains[-1] * rate)
    return gains


class TreeChooser:
    """The best first nodes of a tree for the number of sequences that share a step.

    Args:
        tree: best nodes first.
        gains: asked now and then for each node's share of acceptance.
        seconds: of the target's pass.
        draft_seconds: of one pass of a drafter that makes one per depth; ``None``: drafting costs next to nothing.
        least_sequences: fewer than these always get the whole tree.
        explores: gains change with what is accepted, so now and then a step verifies the whole tree to see.
    """

    def __init__(
        self,
        tree: DraftTree,
        gains: Callable[[], Sequence[float]],
        seconds: PassSeconds,
        draft_seconds: PassSeconds | None = None,
        least_sequences: int = 2,
        explores: bool = False,
    ) -> None:
        self.explores = explores
        self.tree, self.gains, self.seconds = tree, gains, seconds
        self.draft_seconds, self.least_sequences = draft_seconds, least_sequences
        self._known: dict[int, DraftTree] = {}
        self._age = 0

    def tree_for(self, sequences: int) -> DraftTree:
        """The part of the tree with the most expected tokens per second; small ties go to fewer nodes."""
        if sequences < self.least_sequences or (self.explores and self._age % _REVIEW == 0):
            return self.tree
        if sequences not in self._known:
            self._known[sequences] = self.tree.pruned(self._best_size(sequences))
        return self._known[sequences]

    def stepped(self) -> None:
        """A step was made: now and then acceptance is looked at again."""
        self._age += 1
        if self._age % _REVIEW == 0:
            self._known.clear()

    def _best_size(self, sequences: int) -> int:
        best, speed, tokens, depth = 1, 0.0, 0.0, 0
        for size, gain in enumerate(self.gains(), start=1):
            tokens += gain
            depth = max(depth, self.tree.depths[size - 1])
            seconds = self.seconds.at(sequences * size)
            if self.draft_seconds is not None:
                seconds += depth * self.draft_seconds.at(sequences)
            if tokens / seconds > 1.01 * speed:
                best, speed = size, tokens / seconds
        return best
