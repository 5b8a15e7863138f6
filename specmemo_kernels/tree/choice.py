"""Adaptive trees: each step verifies the part of the planned tree with the most expected tokens per second."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from specmemo_kernels.tree.acceptance import Acceptance
from specmemo_kernels.tree.tree_budget import Trees

#: Steps between two choices.
_REVIEW = 16
#: With ``by_depth``, also a choice after so many steps over trees of a new kind.
_FIRST_SAMPLES = 2
#: Maximum share of the time spent on exploration: steps that verify the whole tree.
_EXPLORATION = 0.01
#: Minimum weight of the newest sample in a running mean.
_NEWEST = 0.1
#: Samples are clamped to this multiple of the expected time. Without the clamp, delays of up to 20x in 2 % of the steps
#: cost 10 to 18 % of the speed (simulated).
_OUTLIER = 4


@dataclass(frozen=True)
class PassSeconds:
    """Measured seconds of a forward pass by its rows: ``points`` are ``(rows, seconds)``, rows rising."""

    points: tuple[tuple[int, float], ...]

    def at(self, rows: float) -> float:
        """Piecewise linear interpolation; beyond the last point with the slope of the last two."""
        if len(self.points) == 1 or rows <= self.points[0][0]:
            return self.points[0][1]
        right = min(bisect_left(self.points, (rows, 0.0)), len(self.points) - 1)
        (low, a), (high, b) = self.points[right - 1 : right + 1]
        return a + (rows - low) * max(0.0, b - a) / (high - low)


@dataclass(frozen=True)
class DraftBacklog:
    """Work before a drafter's next proposal.

    ``behind``: tokens of all sequences that the drafter must compute first, besides the newest token of each.
    ``remaining``: mean number of tokens that a sequence may still write.
    """

    behind: int = 0
    remaining: float = math.inf


class _Overhead:
    """Running mean of measured seconds beyond the expected ones; 0 at first."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, seconds: float, expected: float) -> None:
        """Add a sample of ``seconds`` beyond ``expected`` ones, clamped."""
        self.count += 1
        sample = min(max(-expected, seconds), _OUTLIER * expected)
        self.value += (sample - self.value) * max(_NEWEST, 1 / self.count)


@dataclass(frozen=True)
class _Choice:
    """The fastest part for a number of sequences.

    ``explore``: extra seconds of a step over the whole tree. ``gain``: seconds saved per token, compared to steps
    without drafts.
    """

    part: Trees
    explore: float
    gain: float


@dataclass(frozen=True)
class _Step:
    """Arguments of :meth:`TreeChooser.stepped`; ``explored``: the step verified the whole tree for its samples."""

    tree: Trees
    paths: Sequence[Sequence[int]]
    seconds: float | None
    drafting: float | None
    behind: int
    explored: bool


class TreeChooser:
    """Chooses the part of the planned tree that each step verifies.

    The part has the most expected tokens per second: the sum of its nodes' estimated acceptance, over the seconds of a
    pass with that many rows plus the drafter's. Candidates are the likeliest n nodes, for each n. A one-node tree skips
    the drafter.

    A drafter that lags behind (a draft model and a new prompt) is used if the gain on the remaining tokens exceeds the
    time to catch up.

    Steps over a part give no samples of the other nodes. So a step verifies the whole tree when the extra time, with
    the drafter's catch-up time, is at most 1 % of the time since the last such step.

    Args:
        tree: the planned tree, the largest that a step may verify.
        acceptance: the running estimate for its nodes.
        seconds: the target's pass by its rows, measured while patching; attention and lm_head excluded.
        draft_seconds: one pass of a drafter that runs once per depth; ``None``: the drafter runs once per step.
        sizes: allowed numbers of nodes, besides the whole tree's; ``None``: any.
        agreed: maps a measured time to the time that all ranks use.
        by_depth: a pass's time also depends on the tree's depth (recurrent layers).
        padded: maps a number of sequences to that of the pass that runs them.
    """

    def __init__(
        self,
        tree: Trees,
        acceptance: Acceptance,
        seconds: PassSeconds,
        draft_seconds: PassSeconds | None = None,
        sizes: Collection[int] | None = None,
        agreed: Callable[[float], float] = float,
        by_depth: bool = False,
        padded: Callable[[int], int] = int,
    ) -> None:
        self._by_depth, self._padded = by_depth, padded
        self.tree, self.acceptance, self.seconds, self.draft_seconds = tree, acceptance, seconds, draft_seconds
        self.sizes, self._agreed = range(1, tree.size) if sizes is None else sizes, agreed
        self._root = tree.pruned(1)
        # A mean per number of rows (and depth) corrects pass times that were measured on a busy machine. A single mean
        # then costs 15 % of the speed (bench_adapt, 64 nodes); with correct pass times there is no difference.
        self._step_overhead: dict[tuple[bool, int, int], _Overhead] = {}
        self._draft_overhead = _Overhead()  # of one pass
        self._choices: dict[int, _Choice] = {}
        self._next: dict[int, Trees] = {}
        self._steps_taken: list[_Step] = []  # since the last review
        self._steps = self._explored = 0
        self._since = 0.0  # seconds since the last exploration

    def tree_for(self, sequences: int, backlog: Callable[[], DraftBacklog] = DraftBacklog) -> Trees:
        """The tree of the next step of this many sequences; the same until :meth:`stepped`.

        ``backlog`` is called at most once, and only if the result depends on it.
        """
        sequences = self._padded(sequences)
        if sequences not in self._next:
            if sequences not in self._choices:
                self._choices[sequences] = self._choose(sequences)
            self._next[sequences] = self._explore_or_use(self._choices[sequences], sequences, backlog)
        return self._next[sequences]

    def _explore_or_use(self, choice: _Choice, sequences: int, backlog: Callable[[], DraftBacklog]) -> Trees:
        spare = _EXPLORATION * self._since
        due = self._steps - self._explored >= _REVIEW and choice.explore <= spare and choice.part != self.tree
        if not due and (choice.part.size == 1 or self.draft_seconds is None):
            return choice.part
        pending = backlog()
        catch_up = self._catch_up(sequences, pending.behind)
        if due and choice.explore + catch_up <= spare:
            return self.tree
        return choice.part if not catch_up or catch_up < pending.remaining * choice.gain else self._root

    def stepped(
        self,
        tree: Trees,
        paths: Sequence[Sequence[int]],
        seconds: float | None = None,
        drafting: float | None = None,
        behind: int = 0,
    ) -> None:
        """Record a step over ``tree``; ``paths[b]``: the accepted nodes of sequence b, root first.

        Args:
            seconds: of the step without drafting; ``None`` if the step also did other work.
            drafting: seconds of the drafter; ``None``: they are part of ``seconds``.
            behind: :attr:`DraftBacklog.behind` before the step.
        """
        explored = self.tree_for(len(paths)) is self.tree
        self._steps_taken.append(_Step(tree, paths, seconds, drafting, behind, explored))
        self._next.clear()
        if explored or self._by_depth or len(self._steps_taken) == _REVIEW:
            self.review()

    def review(self) -> None:
        """Learn from the steps since the last review.

        Between two steps of 1.8 ms this code leaves the caches: together 16 steps take a third of the time.
        """
        for step in self._steps_taken:
            self._learn(step)
        self._steps_taken.clear()

    def _learn(self, step: _Step) -> None:
        seconds, drafting = (None if t is None else self._agreed(t) for t in (step.seconds, step.drafting))
        tree, sequences, surprised = step.tree, self._padded(len(step.paths)), False
        self.acceptance.record(tree, step.paths)
        self._steps += 1
        rows = sequences * tree.size
        target = self.seconds.at(rows)
        passes, expected = self._drafting(sequences, tree.max_depth)
        if seconds is not None:
            beyond = seconds - target - (expected if drafting is None else 0.0)
            kind = self._kind(sequences, tree.size, tree.max_depth)
            overhead = self._step_overhead.setdefault(kind, _Overhead())
            overhead.add(beyond, target)
            # Passes were measured over chains, so that trees first seem faster than they are.
            surprised = self._by_depth and overhead.count == _FIRST_SAMPLES
        if drafting is not None and passes:
            beyond = drafting - expected - self._catch_up(sequences, step.behind)
            self._draft_overhead.add(beyond / passes, (expected or target) / passes)
        self._since += self._step_seconds(sequences, tree.size, tree.max_depth)
        if step.explored:
            self._explored, self._since = self._steps, 0.0
        if surprised or self._steps % _REVIEW == 0:
            self._choices.clear()

    def _drafting(self, sequences: int, depth: int) -> tuple[int, float]:
        """Passes of the drafter for a tree of this depth, and their expected seconds."""
        if self.draft_seconds is None:
            return min(depth, 1), 0.0
        return depth, depth * self.draft_seconds.at(sequences)

    def _kind(self, sequences: int, size: int, depth: int) -> tuple[bool, int, int]:
        """Steps with the same overhead: whether the trees are chains, the rows, the depth."""
        rows = sequences * size
        return (size == depth + 1, rows, depth) if self._by_depth else (False, rows, 0)

    def _step_seconds(self, sequences: int, size: int, depth: int) -> float:
        passes, drafting = self._drafting(sequences, depth)
        (chain, rows, levels), overhead = self._kind(sequences, size, depth), 0.0
        alike = [seen for seen in self._step_overhead if seen[0] == chain]
        if alike:
            nearest = min(alike, key=lambda seen: (abs(seen[1] - rows), abs(seen[2] - levels), seen))
            overhead = self._step_overhead[nearest].value
        return self.seconds.at(rows) + overhead + drafting + passes * self._draft_overhead.value

    def _catch_up(self, sequences: int, behind: int) -> float:
        """Extra seconds of the drafter's first pass for ``behind`` more tokens (off by 50 % costs 1 % of the speed)."""
        if self.draft_seconds is None or not behind:
            return 0.0
        return self.draft_seconds.at(sequences + behind) - self.draft_seconds.at(sequences)

    def _choose(self, sequences: int) -> _Choice:
        best, speed, tokens = None, 0.0, 0.0
        for part in self.acceptance.parts(self.sizes):
            candidate = part.tokens / self._step_seconds(sequences, part.size, part.depth)
            if candidate > speed * (1 + 1e-9):
                best, speed = part, candidate
            tokens = part.tokens  # the last part is the whole tree
        assert best is not None, "a tree has a root"
        # Extra seconds over the time in which the part writes as many tokens.
        explore = self._step_seconds(sequences, self.tree.size, self.tree.max_depth) - tokens / speed
        return _Choice(best.make(), explore, self._step_seconds(sequences, 1, 0) - 1 / speed)
