"""Verification: the candidates of a step that are accepted, greedily or by sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from specmemo_kernels import ops
from specmemo_kernels.engine.sampling import Sampling, TypicalAcceptance, draw
from specmemo_kernels.engine.scores import TokenScore
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.walk import (
    HostTree,
    Path,
    Walk,
    accepted_path,
    host_trees,
    run_walks,
    token_scores,
)
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.target import TargetModel, TargetOutput

Tensor = torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes of a step, read by the host.

    ``accept_index``, ``accept_length``: as of :func:`specmemo_kernels.ops.verify_tree_greedy`, on the device.
    ``tokens``: ``[B, max_depth + 1]`` int64 on the device, the target's token at each accepted node. ``emitted``: the
    same on the host, without padding. ``paths``: the accepted nodes of each sequence, root first. ``scores``: of the
    emitted tokens of each sequence, empty for one without; no list at all where no sequence wants them.
    """

    accept_index: Tensor
    accept_length: Tensor
    tokens: Tensor
    emitted: list[list[int]]
    paths: list[list[int]]
    scores: list[list[TokenScore]] = field(default_factory=list)


@dataclass(frozen=True)
class DeviceVerdict:
    """The results of :func:`specmemo_kernels.ops.verify_tree_greedy`, and one tensor for the host.

    ``rows`` ``[B, 2 * max_depth + 3]`` int64: the target's tokens at the accepted nodes, these nodes (both padded), and
    ``accept_length``.
    """

    accept_index: Tensor
    accept_length: Tensor
    bonus_token: Tensor
    rows: Tensor

    @property
    def tokens(self) -> Tensor:
        """As in :class:`Verdict`."""
        return self.rows[:, : self.accept_index.shape[1]]


class Verifier(Protocol):
    """Selects the accepted nodes."""

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict: ...

    def is_greedy(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether the verdict for these sequences depends on the target's best tokens alone, not on rows of logits."""


class GreedyVerifier:
    """Accepts the path that greedy decoding would generate."""

    def __init__(self, target: TargetModel, backend: str | None) -> None:
        self.target, self.backend = target, backend

    def is_greedy(self, sequences: Sequence[SequenceState]) -> bool:
        return True

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict:
        verdict = self.verify_on_device(batch, output)
        emitted, paths = read_rows(verdict.rows)  # the one transfer to the host
        return Verdict(verdict.accept_index, verdict.accept_length, verdict.tokens, emitted, paths)

    def verify_on_device(self, batch: TreeBatch, output: TargetOutput) -> DeviceVerdict:
        """The verdict without a transfer to the host."""
        assert batch.parents is not None, "a prefill chunk has no tree to verify"
        target_tokens = self.target.argmax(output)
        if not batch.max_depth:  # single-node trees: nothing to verify
            length = torch.zeros(batch.num_trees, dtype=torch.int32, device=target_tokens.device)
            rows = torch.nn.functional.pad(target_tokens[:, None], (0, 2))
            return DeviceVerdict(length[:, None], length, target_tokens, rows)
        kernels = ops.kernels(self.backend, target_tokens.device)
        index, length, bonus = kernels.verify_tree_greedy(
            batch.tokens, target_tokens, batch.parents, batch.qo_indptr, batch.max_depth
        )
        # The emitted tokens are the target's tokens at the accepted nodes.
        node = batch.qo_indptr[:-1, None] + index.clamp(min=0)
        emitted = target_tokens.index_select(0, node.flatten()).view(node.shape)
        rows = torch.cat([emitted, index, length[:, None]], dim=1)  # int64, as the tokens
        return DeviceVerdict(index, length, bonus, rows)


def read_rows(rows: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Each sequence's emitted tokens and its accepted nodes, from :attr:`DeviceVerdict.rows`."""
    host_rows, width = rows.tolist(), rows.shape[1] // 2
    return [row[: row[-1] + 1] for row in host_rows], [row[width : width + row[-1] + 1] for row in host_rows]


class SampledVerifier:
    """Verifies each sequence by its own :class:`Sampling`, or greedily without one.

    Lossless verification with deterministic candidates accepts a child with the target's probability of its token,
    else removes that token, renormalises and goes on to the next child (Leviathan et al., arXiv 2211.17192; Miao et
    al., arXiv 2305.09781, section 4.3). Drawing a token from the target's distribution and following its child is
    equivalent: both accept the child of token x with probability p(x), and the other tokens keep their proportions. So
    one draw per emitted token suffices, and a seed gives the same tokens as without speculation. Logits are computed
    for the accepted paths and the first drafts behind them (:func:`specmemo_kernels.engine.walk.run_walks`).
    """

    def __init__(self, target: TargetModel, backend: str | None) -> None:
        self.target, self.greedy = target, GreedyVerifier(target, backend)

    def is_greedy(self, sequences: Sequence[SequenceState]) -> bool:
        return all(sequence.sampling is None and sequence.logprobs is None for sequence in sequences)

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict:
        if self.is_greedy(sequences):
            return self.greedy(batch, sequences, output)
        trees = host_trees(batch)
        greedy: dict[int, Walk[int, Path]] = {}
        drawn: dict[int, Walk[Tensor, Path]] = {}
        for index, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
            if sequence.sampling is None:
                greedy[index] = accepted_path(sequence, tree, batch.max_depth, _best_token)
            elif sequence.sampling.typical is not None:
                drawn[index] = _typical(sequence, tree, sequence.sampling, sequence.sampling.typical)
            else:
                choose = partial(_draw_token, sequence, sequence.sampling)
                drawn[index] = accepted_path(sequence, tree, batch.max_depth, choose)
        best = self.target.argmax(output).tolist() if greedy else []
        paths = dict(
            zip(greedy, run_walks(list(greedy.values()), lambda rows: [best[row] for row in rows]), strict=True)
        )
        logits = partial(self.target.row_logits, output)
        paths.update(zip(drawn, run_walks(list(drawn.values()), logits), strict=True))
        verdict = verdict_of(batch, [paths[index] for index in range(len(trees))])
        if all(sequence.logprobs is None for sequence in sequences):
            return verdict
        scores = [_scores(s, tree, paths[index]) for index, (s, tree) in enumerate(zip(sequences, trees, strict=True))]
        return replace(verdict, scores=run_walks(scores, logits))


def verdict_of(batch: TreeBatch, paths: Sequence[Path]) -> Verdict:
    """The verdict of one path per sequence."""
    width = batch.max_depth + 1
    rows = [
        [len(path) - 1, *path, *[-1] * (width - len(path)), *tokens, *[0] * (width - len(tokens))]
        for path, tokens in paths
    ]
    table = torch.tensor(rows, device=batch.tokens.device)  # one transfer
    length, index = table[:, 0].int(), table[:, 1 : 1 + width].int()
    nodes, texts = [path for path, _ in paths], [tokens for _, tokens in paths]
    return Verdict(index, length, table[:, 1 + width :], texts, nodes)


def _scores(sequence: SequenceState, tree: HostTree, path: Path) -> Walk[Tensor, list[TokenScore]]:
    """The scores of a path's tokens, if requested."""
    if sequence.logprobs is None:
        return token_scores([])
    steps = zip(*path, strict=True)
    return token_scores([(tree.first_row + node, token, sequence.logprobs) for node, token in steps])


def _best_token(best: int, _: list[int]) -> int:
    return best


def _nothing_to_choose(_: Tensor, tokens: list[int]) -> int:
    raise AssertionError(f"token {len(tokens)} of the step should have been memoised")


def _draw_token(sequence: SequenceState, sampling: Sampling, logits: Tensor, ahead: list[int]) -> int:
    tokens = [*sequence.tokens, *ahead] if sampling.penalises else ()
    return _drawn(sequence, sampling, sampling.probabilities(logits, tokens, len(sequence.prompt)))


def _drawn(sequence: SequenceState, sampling: Sampling, probabilities: Tensor) -> int:
    """A token by ``probabilities`` ``[V]``; if they are NaN the sequence fails, and the token has no meaning."""
    try:
        return draw(probabilities, sequence.random(sampling))
    except RuntimeError:
        if sequence.failed is None or not bool(probabilities.isnan().any()):
            raise
    text = f"the logits of token {len(sequence.tokens)} are NaN or infinite; check the model's weights and dtype"
    sequence.failed(FloatingPointError(text))
    sequence.abort()
    return 0


def _typical(
    sequence: SequenceState, tree: HostTree, sampling: Sampling, rule: TypicalAcceptance
) -> Walk[Tensor, Path]:
    """The longest path of typical candidates (ties: the likeliest); the token behind it is drawn."""
    if sequence.num_memoised:
        return (yield from accepted_path(sequence, tree, sequence.num_memoised - 1, _nothing_to_choose))
    log_chance = {0: 0.0}
    depth = {0: 0}
    for node in range(len(tree.parents)):  # parents come before children
        if node not in log_chance or node not in tree.children:
            continue
        later = [n for n in sorted(log_chance) if n > node and n in tree.children]
        rows = [tree.first_row + node, *(tree.first_row + n for n in later), *tree.rows(node)[1:]]
        for child, chance in _typical_children((yield list(dict.fromkeys(rows))), tree, node, sampling, rule):
            log_chance[child] = log_chance[node] + math.log(chance)
            depth[child] = depth[node] + 1
    last = max(log_chance, key=lambda node: (depth[node], log_chance[node], -node))
    path = [last]
    while path[-1]:
        path.append(tree.parents[path[-1]])
    path.reverse()
    bonus = _drawn(sequence, sampling, sampling.probabilities((yield tree.rows(last))))
    tokens = [*(tree.tokens[node] for node in path[1:]), bonus]
    return path, [sequence.memoise(token) for token in tokens]


def _typical_children(
    logits: Tensor, tree: HostTree, node: int, sampling: Sampling, rule: TypicalAcceptance
) -> list[tuple[int, float]]:
    """The children of ``node`` that the rule accepts, with their probabilities."""
    probabilities = (logits.float() / sampling.temperature).softmax(0)
    threshold = rule.threshold(probabilities)
    chances = [(child, float(probabilities[tree.tokens[child]])) for child in tree.children[node]]
    return [(child, chance) for child, chance in chances if chance > threshold]
