"""How much of the planned tree a step verifies: as much as gives the most expected tokens per second."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from specmemo_kernels.tree.acceptance import RunningAcceptance
from specmemo_kernels.tree.draft_tree import DraftTree

#: After so many steps the choice is looked at anew.
_REVIEW = 16
#: Another part of the tree has to be better by this share to be taken.
_WORTH_IT = 0.01
#: What looking at the whole tree now and then may cost of the speed, by the estimates of the time.
_EXPLORATION = 0.01
#: Least weight of the newest step in the running means of what steps and drafts take beside what is known of them.
_NEWEST = 0.1
#: A time this many times beyond what is known of it was held up by something else.
_HELD_UP = 4


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


@dataclass(frozen=True)
class DraftBacklog:
    """What asking the drafter has before it: how many tokens of all sequences, the newest ones apart, it would have to
    compute first (``behind``), and how many more each sequence may write (``remaining``, on average)."""

    behind: int = 0
    remaining: float = math.inf


class _RunningMean:
    """Of what is beyond the known, the newest counting most; nothing at first."""

    def __init__(self) -> None:
        self.value, self._count = 0.0, 0

    def add(self, beyond: float, known: float) -> None:
        """One more; what is many times the ``known`` tells little, as something else held it up."""
        beyond = min(max(-known, beyond), _HELD_UP * known)
        self._count += 1
        self.value += (beyond - self.value) * max(_NEWEST, 1 / self._count)


class _StepOverhead:
    """What steps take beyond the known seconds of their passes, by the passes' rows.

    The known ones were measured once and can be off by more than two sizes of a tree differ.
    """

    def __init__(self) -> None:
        self._means: dict[int, _RunningMean] = {}

    def add(self, rows: int, beyond: float, known: float) -> None:
        self._means.setdefault(rows, _RunningMean()).add(beyond, known)

    def at(self, rows: int) -> float:
        """Of steps with so many rows; of those seen that come nearest, else."""
        if not self._means:
            return 0.0
        return self._means[min(self._means, key=lambda seen: (abs(seen - rows), seen))].value


@dataclass(frozen=True)
class _Choice:
    """For a number of sequences: the ``part`` of the tree that is the fastest; the seconds that a ``look`` at the
    whole tree loses beside it; the seconds that each token gains (``gain``) over steps without drafts."""

    part: DraftTree
    look: float
    gain: float


class TreeChooser:
    """Decides for each step which part of the planned tree it verifies.

    The part with the most expected tokens per second: its nodes' running shares of acceptance over the seconds of a
    pass with so many rows, which were measured while patching, what the drafter was seen to take for such a part, and
    what steps were seen to take beside both. Any number of nodes is considered, the likeliest ones first; small ties
    go to the part in use. The root alone asks no drafter.

    A drafter that would first have to compute what it doesn't know yet (a draft model and a new prompt) is asked if
    the part's gain over the root alone, on the tokens still wanted, makes up for that.

    A part says nothing about the nodes that it lacks. So now and then a step verifies the whole tree, when what that
    loses, the drafter's catching up included, is at most one per cent of the time since the last such step.

    Args:
        tree: the planned one: the largest that a step may verify.
        acceptance: the running estimate for its nodes.
        seconds: of the target's pass, by its rows.
        draft_seconds: of one pass of a drafter that makes one per depth; ``None``: drafting costs the same for any
            part but the root alone.
        sizes: numbers of nodes that a part may have, beside the whole tree; ``None``: any.
    """

    def __init__(
        self,
        tree: DraftTree,
        acceptance: RunningAcceptance,
        seconds: PassSeconds,
        draft_seconds: PassSeconds | None = None,
        sizes: Collection[int] | None = None,
    ) -> None:
        self.tree, self.acceptance, self.seconds, self.draft_seconds = tree, acceptance, seconds, draft_seconds
        self.sizes = range(1, tree.size) if sizes is None else sizes
        self._root = tree.pruned(1)
        # Beyond known times: seconds of a step, seconds of a drafter's pass, and the share of its catching up.
        self._beside, self._asking, self._catching_up = _StepOverhead(), _RunningMean(), _RunningMean()
        self._choices: dict[int, _Choice] = {}
        self._fresh: set[int] = set()
        self._steps = self._looked = 0
        self._since = 0.0  # seconds since a step last verified the whole tree to see what it is worth
        self._next: dict[int, DraftTree] = {}

    def tree_for(self, sequences: int, outlook: Callable[[], DraftBacklog] = DraftBacklog) -> DraftTree:
        """What the next step of so many sequences verifies; the same until :meth:`stepped`.

        Args:
            outlook: tells what lies before drafter and sequences; asked once, and only if that matters.
        """
        if sequences not in self._next:
            if sequences not in self._fresh:
                self._fresh.add(sequences)
                self._review(sequences)
            self._next[sequences] = self._choose(sequences, outlook)
        return self._next[sequences]

    def _choose(self, sequences: int, outlook: Callable[[], DraftBacklog]) -> DraftTree:
        choice, spare = self._choices[sequences], _EXPLORATION * self._since
        look = self._steps - self._looked >= _REVIEW and choice.look <= spare and choice.part.size < self.tree.size
        if not look and choice.part.size == 1:
            return choice.part
        ahead = outlook()
        late = self._known_catch_up(sequences, ahead.behind) * (1 + self._catching_up.value)
        if look and choice.look + late <= spare:
            return self.tree
        return choice.part if not late or late < ahead.remaining * choice.gain else self._root

    def stepped(
        self,
        tree: DraftTree,
        last: Sequence[int],
        seconds: float | None = None,
        drafting: float | None = None,
        behind: int = 0,
    ) -> None:
        """A step verified ``tree`` for each of some sequences and accepted the path to node ``last[b]``.

        Args:
            seconds: how long it took beside the drafter, if it did nothing else.
            drafting: how long the drafter took.
            behind: as :class:`DraftBacklog` has it, before the step.
        """
        sequences = len(last)
        looked = self.tree_for(sequences) is self.tree
        self.acceptance.record(tree, last)
        self._steps += 1
        rows = sequences * tree.size
        target = self.seconds.at(rows)
        if seconds is not None:
            self._beside.add(rows, seconds - target, target)
        passes, known = self._passes(sequences, tree.max_depth)
        if drafting is not None and passes:
            late = self._known_catch_up(sequences, behind)
            beyond = drafting - known - late
            if late <= known:
                self._asking.add(beyond / passes, (known or target) / passes)
            else:
                self._catching_up.add((beyond - passes * self._asking.value) / late, 1.0)
        self._since += self._step_seconds(sequences, tree.size, tree.max_depth)
        if looked:
            self._looked, self._since = self._steps, 0.0
        self._next.clear()
        if self._steps % _REVIEW == 0:
            self._fresh.clear()

    def _passes(self, sequences: int, depth: int) -> tuple[int, float]:
        """How often the drafter works for a tree of this depth, and what is known beforehand of the seconds of that."""
        if self.draft_seconds is None:
            return min(depth, 1), 0.0
        return depth, depth * self.draft_seconds.at(sequences)

    def _step_seconds(self, sequences: int, size: int, depth: int) -> float:
        passes, known = self._passes(sequences, depth)
        rows = sequences * size
        return self.seconds.at(rows) + self._beside.at(rows) + known + passes * self._asking.value

    def _known_catch_up(self, sequences: int, behind: int) -> float:
        """The seconds that so many tokens beside the newest ones add to a drafter's first pass, by its rows alone."""
        if self.draft_seconds is None or not behind:
            return 0.0
        return self.draft_seconds.at(sequences + behind) - self.draft_seconds.at(sequences)

    def _review(self, sequences: int) -> None:
        """Choose anew for so many sequences."""
        gains = self.acceptance.gains()
        order = sorted(range(self.tree.size), key=lambda node: (-gains[node], node))  # parents before children
        best, speed, tokens, depth = 1, 0.0, 0.0, 0
        for size, node in enumerate(order, start=1):
            tokens += gains[node]
            depth = max(depth, self.tree.depths[node])
            if size not in self.sizes and size < self.tree.size:
                continue
            seconds = self._step_seconds(sequences, size, depth)
            if tokens / seconds > speed * (1 + 1e-9):
                best, speed = size, tokens / seconds
        before = self._choices.get(sequences)
        if before is None or self._speed(sequences, before.part, gains) * (1 + _WORTH_IT) < speed:
            part = self.tree.part(order[:best])
        else:
            part = before.part
        speed = self._speed(sequences, part, gains)
        # Seconds beside those in which the part would write as many tokens.
        look = self._step_seconds(sequences, self.tree.size, self.tree.max_depth) - tokens / speed
        self._choices[sequences] = _Choice(part, look, self._step_seconds(sequences, 1, 0) - 1 / speed)

    def _speed(self, sequences: int, part: DraftTree, gains: Sequence[float]) -> float:
        """Expected tokens per second of a sequence."""
        place = {path: node for node, path in enumerate(self.tree.paths, start=1)}
        tokens = 1.0 + sum(gains[place[path]] for path in part.paths)
        return tokens / self._step_seconds(sequences, part.size, part.max_depth)
