"""How much of the planned tree a step verifies: as much as gives the most expected tokens per second."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from specmemo_kernels.acceptance import RunningAcceptance
from specmemo_kernels.tree import DraftTree

#: After so many steps the choice is looked at anew.
_REVIEW = 16
#: Another part of the tree has to be better by this share to be taken.
_WORTH_IT = 0.01
#: What looking at the whole tree now and then may cost of the speed, by the estimates of the time.
_EXPLORATION = 0.01
#: Weight of the newest step in the running mean of what steps take beside the model's pass.
_NEWEST = 0.1


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


class TreeChooser:
    """Decides for each step which part of the planned tree it verifies.

    The part with the most expected tokens per second: its nodes' running shares of acceptance over the seconds of a
    pass with so many rows, which were measured while patching, and what steps were seen to take beside the pass. Any
    number of nodes is considered, the likeliest ones first; small ties go to the part in use.

    A part says nothing about the nodes that it lacks. So now and then a step verifies the whole tree, as rarely as it
    takes to lose at most one per cent of the speed by that.

    Args:
        tree: the planned one: the largest that a step may verify.
        acceptance: the running estimate for its nodes.
        seconds: of the target's pass, by its rows.
        draft_seconds: of one pass of a drafter that makes one per depth; ``None``: drafting costs the same for any
            part.
    """

    def __init__(
        self,
        tree: DraftTree,
        acceptance: RunningAcceptance,
        seconds: PassSeconds,
        draft_seconds: PassSeconds | None = None,
    ) -> None:
        self.tree, self.acceptance, self.seconds, self.draft_seconds = tree, acceptance, seconds, draft_seconds
        self._beside = 0.0
        self._chosen: dict[int, DraftTree] = {}
        self._every: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._steps = self._explored = 0

    def tree_for(self, sequences: int) -> DraftTree:
        """What the next step of so many sequences verifies; the same until :meth:`stepped`."""
        if sequences not in self._fresh:
            self._fresh.add(sequences)
            self._review(sequences)
        if self._steps - self._explored >= self._every[sequences]:
            return self.tree
        return self._chosen[sequences]

    def stepped(self, tree: DraftTree, last: Sequence[int], seconds: float | None = None) -> None:
        """A step verified ``tree`` for each of some sequences and accepted the path to node ``last[b]``.

        ``seconds``: how long it took, if it did nothing else.
        """
        if self.tree_for(len(last)) is self.tree:
            self._explored = self._steps + 1
        self.acceptance.record(tree, last)
        self._steps += 1
        if seconds is not None:
            expected = self._pass_seconds(len(last), tree.size, tree.max_depth)
            # A step that was held up by something else tells little.
            beside = min(max(0.0, seconds - expected), 4 * expected)
            self._beside += (beside - self._beside) * (_NEWEST if self._beside else 1)
        if self._steps % _REVIEW == 0:
            self._fresh.clear()

    def _pass_seconds(self, sequences: int, size: int, depth: int) -> float:
        seconds = self.seconds.at(sequences * size)
        return seconds if self.draft_seconds is None else seconds + depth * self.draft_seconds.at(sequences)

    def _review(self, sequences: int) -> None:
        """Choose anew for so many sequences, and how rarely to look at the whole tree."""
        gains = self.acceptance.gains()
        order = sorted(range(self.tree.size), key=lambda node: (-gains[node], node))  # parents before children
        best, speed, tokens, depth = 1, 0.0, 0.0, 0
        for size, node in enumerate(order, start=1):
            tokens += gains[node]
            depth = max(depth, self.tree.depths[node])
            seconds = self._pass_seconds(sequences, size, depth) + self._beside
            if tokens / seconds > speed * (1 + 1e-9):
                best, speed = size, tokens / seconds
        current = self._chosen.get(sequences)
        if current is None or self._speed(sequences, current, gains) * (1 + _WORTH_IT) < speed:
            current = self._chosen[sequences] = self.tree.part(order[:best])
        speed = self._speed(sequences, current, gains)
        whole = self._pass_seconds(sequences, self.tree.size, self.tree.max_depth) + self._beside
        lost = whole - tokens / speed  # seconds, beside those in which the part would write as many tokens
        step = sum(self._gains_of(current, gains)) / speed
        self._every[sequences] = max(_REVIEW, math.ceil(lost / (_EXPLORATION * step)))

    def _gains_of(self, part: DraftTree, gains: Sequence[float]) -> list[float]:
        place = {path: node for node, path in enumerate(self.tree.paths, start=1)}
        return [1.0, *(gains[place[path]] for path in part.paths)]

    def _speed(self, sequences: int, part: DraftTree, gains: Sequence[float]) -> float:
        """Expected tokens per second of a sequence."""
        seconds = self._pass_seconds(sequences, part.size, part.max_depth) + self._beside
        return sum(self._gains_of(part, gains)) / seconds
