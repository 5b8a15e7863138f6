"""Verification by rows of logits: lossless and typical sampling, and the tree walk that both share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from specmemo_kernels.engine.sampling import Sampling, TypicalAcceptance, draw
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import GreedyVerifier, Verdict
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.target import TargetModel, TargetOutput

Tensor = torch.Tensor
Path = tuple[list[int], list[int]]


class SampledVerifier:
    """Verifies each sequence by its own :class:`Sampling`, or greedily without one.

    Lossless verification with deterministic candidates accepts a child with the target's probability of its token,
    else removes that token, renormalises and goes on to the next child (Leviathan et al., arXiv 2211.17192; Miao et
    al., arXiv 2305.09781, section 4.3). That equals drawing a token from the target's distribution and following the
    child that holds it: the child of token x is accepted with probability p(x) either way, and the rest is distributed
    like p without the children. So one draw per emitted token suffices, and a seed gives the same tokens as without
    speculation. Logits exist for one row at a time, on the walked path only.
    """

    def __init__(self, target: TargetModel, backend: str | None, samplings: Sequence[Sampling | None] = ()) -> None:
        self.target, self.greedy = target, GreedyVerifier(target, backend)
        #: Read if any of the ``samplings`` is not ``None``.
        self.needs_logits = any(sampling is not None for sampling in samplings)

    def is_greedy(self, sequences: Sequence[SequenceState]) -> bool:
        return all(sequence.sampling is None for sequence in sequences)

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict:
        if self.is_greedy(sequences):
            return self.greedy(batch, sequences, output)
        best: list[int] = []
        if any(sequence.sampling is None for sequence in sequences):
            best = self.target.argmax(output).tolist()
        bounds, parents, drafts = host_trees(batch)
        paths: list[Path] = []
        for row, sequence in enumerate(sequences):
            first, part = bounds[row], slice(bounds[row], bounds[row + 1])
            tree = parents[part], drafts[part]
            if sequence.sampling is None:
                paths.append(walk(sequence, *tree, batch.max_depth, partial(_best_token, best[part])))
                continue
            logits = partial(self._logits, output, first)
            if sequence.sampling.typical is not None:
                paths.append(_typical(sequence, *tree, logits, sequence.sampling, sequence.sampling.typical))
            else:
                choose = partial(_draw_token, sequence, sequence.sampling, logits)
                paths.append(walk(sequence, *tree, batch.max_depth, choose))
        return verdict_of(batch, paths)

    def _logits(self, output: TargetOutput, first: int, node: int) -> Tensor:
        """``[V]``, the logits of a node of the sequence whose rows begin at ``first``."""
        return self.target.row_logits(output, first + node)


def host_trees(batch: TreeBatch) -> tuple[list[int], list[int], list[int]]:
    """``qo_indptr``, ``parents`` and tokens of a batch of trees, on the host."""
    assert batch.parents is not None, "a prefill chunk has no tree to verify"
    return batch.qo_indptr.tolist(), batch.parents.tolist(), batch.tokens.tolist()


def walk(
    sequence: SequenceState,
    parents: list[int],
    drafts: list[int],
    max_depth: int,
    choose: Callable[[int, list[int]], int],
) -> Path:
    """Follow, from the root, the children that hold the target's tokens.

    Args:
        choose: the target's token at a node, given the tokens that this step emitted before; called once per emitted
            token, in order (see :meth:`SequenceState.memoised_token`).

    Returns:
        The accepted path (node ids, root first) and the target's token at each of its nodes.
    """
    path: list[int] = [0]
    tokens: list[int] = []
    while True:
        token = sequence.memoised_token(len(tokens), partial(choose, path[-1], tokens))
        tokens.append(token)
        if token in sequence.eos_token_ids or len(tokens) >= sequence.remaining or len(path) > max_depth:
            return path, tokens
        children = range(path[-1] + 1, len(parents))
        child = next((c for c in children if parents[c] == path[-1] and drafts[c] == token), None)
        if child is None:
            return path, tokens
        path.append(child)


def verdict_of(batch: TreeBatch, paths: Sequence[Path]) -> Verdict:
    """The verdict of one path and its tokens per sequence."""
    index = torch.full((len(paths), batch.max_depth + 1), -1, dtype=torch.int32)
    for row, (path, _) in enumerate(paths):
        index[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
    device = batch.tokens.device
    length = torch.tensor([len(path) - 1 for path, _ in paths], dtype=torch.int32, device=device)
    bonus = torch.tensor([tokens[-1] for _, tokens in paths], device=device)
    last = [path[-1] for path, _ in paths]
    return Verdict(index.to(device), length, bonus, [tokens for _, tokens in paths], last)


def _best_token(best: list[int], node: int, _: list[int]) -> int:
    return best[node]


def _nothing_to_choose(node: int, tokens: list[int]) -> int:
    raise AssertionError(f"token {len(tokens)} of the step, at node {node}, should have been memoised")


def _draw_token(
    sequence: SequenceState, sampling: Sampling, logits: Callable[[int], Tensor], node: int, _: list[int]
) -> int:
    return draw(sampling.probabilities(logits(node)), sequence.random(sampling))


def _typical(
    sequence: SequenceState,
    parents: list[int],
    drafts: list[int],
    logits: Callable[[int], Tensor],
    sampling: Sampling,
    rule: TypicalAcceptance,
) -> Path:
    """The longest path of typical candidates, the likeliest of equally long ones; the token behind it is drawn."""
    if sequence.num_memoised:
        return walk(sequence, parents, drafts, sequence.num_memoised - 1, _nothing_to_choose)
    log_chance = {0: 0.0}
    depth = {0: 0}
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if node and drafts[node] >= 0:
            children.setdefault(parent, []).append(node)
    for node in range(len(parents)):  # parents come before children, so each row of logits is computed once
        if node not in log_chance or node not in children:
            continue
        probabilities = (logits(node).float() / sampling.temperature).softmax(0)
        threshold = rule.threshold(probabilities)
        for child in children[node]:
            chance = float(probabilities[drafts[child]])
            if chance > threshold:
                log_chance[child] = log_chance[node] + float(torch.tensor(chance).log())
                depth[child] = depth[node] + 1
    last = max(log_chance, key=lambda node: (depth[node], log_chance[node], -node))
    path = [last]
    while path[-1]:
        path.append(parents[path[-1]])
    path.reverse()
    bonus = draw(sampling.probabilities(logits(last)), sequence.random(sampling))
    tokens = [*(drafts[node] for node in path[1:]), bonus]
    return path, [sequence.memoised_token(ahead, partial(int, token)) for ahead, token in enumerate(tokens)]
