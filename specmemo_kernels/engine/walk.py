"""Walks along the accepted paths of sequences. Walks that run together share products with the lm_head.

A walk is a generator. It yields rows: the row that it reads next, then rows that it may read afterwards. It receives
the first row's content (logits, or the best token), and returns its result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise, zip_longest
from typing import TypeVar

import torch

from specmemo_kernels.engine.scores import TokenScore, token_score
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.target import LOGIT_ROWS

Tensor = torch.Tensor
#: The accepted nodes, root first, and the target's token at each of them.
Path = tuple[list[int], list[int]]
Read = TypeVar("Read")
Result = TypeVar("Result")
Walk = Generator[Sequence[int], Read, Result]


@dataclass(frozen=True)
class HostTree:
    """A sequence's tree on the host: the row of its root, and each node's parent and token."""

    first_row: int
    parents: list[int]
    tokens: list[int]

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The children of each node, in order; a node without a token is left out."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            if node and self.tokens[node] >= 0:
                children.setdefault(parent, []).append(node)
        return children

    def child(self, node: int, token: int) -> int | None:
        """The child that holds ``token``."""
        return next((child for child in self.children.get(node, ()) if self.tokens[child] == token), None)

    def rows(self, node: int) -> list[int]:
        """The rows of a node, of its first child, of that node's first child, and so on."""
        rows = [self.first_row + node]
        while node in self.children:
            node = self.children[node][0]
            rows.append(self.first_row + node)
        return rows


def host_trees(batch: TreeBatch) -> list[HostTree]:
    """The trees of a batch."""
    assert batch.parents is not None, "a prefill chunk has no tree to verify"
    bounds, parents, tokens = batch.qo_indptr.tolist(), batch.parents.tolist(), batch.tokens.tolist()
    return [HostTree(a, parents[a:b], tokens[a:b]) for a, b in pairwise(bounds)]


def accepted_path(
    sequence: SequenceState, tree: HostTree, max_depth: int, choose: Callable[[Read, list[int]], int]
) -> Walk[Read, Path]:
    """Follow, from the root, the children that hold the target's tokens.

    Args:
        choose: the target's token at a node, given its row's content and the step's tokens before it; called once per
            emitted token, in order (see :meth:`SequenceState.memoise`).
    """
    path: list[int] = [0]
    tokens: list[int] = []
    while True:
        token = sequence.memoised(len(tokens))
        if token is None:
            rows = tree.rows(path[-1])[: sequence.remaining - len(tokens)]
            token = sequence.memoise(choose((yield rows), tokens))
        tokens.append(token)
        # Finished: the token couldn't be drawn. `stop` is called before the next draw, which changes the random state.
        stopped = sequence.finished or sequence.memoised_stop(tokens)
        if stopped or token in sequence.eos_token_ids or len(tokens) >= sequence.remaining or len(path) > max_depth:
            return path, tokens
        child = tree.child(path[-1], token)
        if child is None:
            return path, tokens
        path.append(child)


def token_scores(requested: Sequence[tuple[int, int, int]]) -> Walk[Tensor, list[TokenScore]]:
    """The scores of tokens: ``(row, token, top)`` of each, see :func:`token_score`."""
    rows = [row for row, _, _ in requested]
    scores: list[TokenScore] = []
    for i, (_, token, top) in enumerate(requested):
        scores.append(token_score((yield rows[i : i + LOGIT_ROWS]), token, top))
    return scores


def run_walks(
    walks: Sequence[Walk[Read, Result]], read: Callable[[list[int]], Iterable[Read]], max_rows: int = LOGIT_ROWS
) -> list[Result]:
    """Run walks to their ends.

    Args:
        read: the contents of up to ``max_rows`` rows: each walk's next row, then rows that walks may read afterwards.
    """
    results: dict[int, Result] = {}
    pending: dict[int, Sequence[int]] = {}  # the rows that each unfinished walk has yielded

    def resume(index: int, row: Read | None) -> None:
        try:
            pending[index] = next(walks[index]) if row is None else walks[index].send(row)
        except StopIteration as end:
            results[index] = end.value
            pending.pop(index, None)
        except RuntimeError as error:
            if isinstance(error.__cause__, StopIteration):  # the caller's code raised it within the walk
                raise error.__cause__ from None
            raise

    for index in range(len(walks)):
        resume(index, None)
    while pending:
        rows = _next_rows(pending.values(), max_rows)
        unread = dict(zip(rows, read(rows), strict=True))
        for index in list(pending):
            while index in pending and pending[index][0] in unread:
                resume(index, unread.pop(pending[index][0]))
        unread.clear()  # frees a product before the next one
    return [results[index] for index in range(len(walks))]


def _next_rows(pending: Collection[Iterable[int]], max_rows: int) -> list[int]:
    """The rows of one call: the first row of each walk, then the second row of each, and so on."""
    rows = chain.from_iterable(zip_longest(*pending))
    return list(islice((row for row in rows if row is not None), max_rows))
