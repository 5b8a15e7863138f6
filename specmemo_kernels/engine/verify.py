"""Verification: the candidates of a step that are accepted, greedily or by sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from specmemo_kernels import ops
from specmemo_kernels.engine.sampling import Sampling, TypicalAcceptance, draw
from specmemo_kernels.engine.scores import TokenScore, token_score
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.target import TargetModel, TargetOutput

Tensor = torch.Tensor
#: The accepted nodes, root first, and the target's token at each of them.
Path = tuple[list[int], list[int]]


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
    for one row at a time, on the walked path only.
    """

    def __init__(self, target: TargetModel, backend: str | None) -> None:
        self.target, self.greedy = target, GreedyVerifier(target, backend)

    def is_greedy(self, sequences: Sequence[SequenceState]) -> bool:
        return all(sequence.sampling is None and sequence.logprobs is None for sequence in sequences)

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
        verdict = verdict_of(batch, paths)
        if any(sequence.logprobs is not None for sequence in sequences):
            scores = [self._scores(s, output, bounds[row], paths[row]) for row, s in enumerate(sequences)]
            verdict = replace(verdict, scores=scores)
        return verdict

    def _scores(self, sequence: SequenceState, output: TargetOutput, first: int, path: Path) -> list[TokenScore]:
        """Of the tokens behind the nodes of a path; ``first`` is the first row of its sequence."""
        if sequence.logprobs is None:
            return []
        pairs = zip(*path, strict=True)
        return [token_score(self._logits(output, first, node), token, sequence.logprobs) for node, token in pairs]

    def _logits(self, output: TargetOutput, first: int, node: int) -> Tensor:
        """``[V]``, the logits of a node; ``first`` is the first row of its sequence."""
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
        choose: the target's token at a node, given the step's tokens before it; called once per emitted token, in order
            (see :meth:`SequenceState.memoised_token`).
    """
    path: list[int] = [0]
    tokens: list[int] = []
    while True:
        token = sequence.memoised_token(len(tokens), partial(choose, path[-1], tokens))
        tokens.append(token)
        # Finished: the token couldn't be drawn. `stop` is called before the next draw, which changes the random state.
        stopped = sequence.finished or sequence.memoised_stop(tokens)
        if stopped or token in sequence.eos_token_ids or len(tokens) >= sequence.remaining or len(path) > max_depth:
            return path, tokens
        children = range(path[-1] + 1, len(parents))
        child = next((c for c in children if parents[c] == path[-1] and drafts[c] == token), None)
        if child is None:
            return path, tokens
        path.append(child)


def verdict_of(batch: TreeBatch, paths: Sequence[Path]) -> Verdict:
    """The verdict of one path per sequence."""
    index = torch.full((len(paths), batch.max_depth + 1), -1, dtype=torch.int32)
    emitted = torch.zeros(index.shape, dtype=torch.int64)
    for row, (path, tokens) in enumerate(paths):
        index[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
        emitted[row, : len(tokens)] = torch.tensor(tokens)
    device = batch.tokens.device
    length = torch.tensor([len(path) - 1 for path, _ in paths], dtype=torch.int32, device=device)
    nodes, texts = [path for path, _ in paths], [tokens for _, tokens in paths]
    return Verdict(index.to(device), length, emitted.to(device), texts, nodes)


def _best_token(best: list[int], node: int, _: list[int]) -> int:
    return best[node]


def _nothing_to_choose(node: int, tokens: list[int]) -> int:
    raise AssertionError(f"token {len(tokens)} of the step, at node {node}, should have been memoised")


def _draw_token(
    sequence: SequenceState, sampling: Sampling, logits: Callable[[int], Tensor], node: int, ahead: list[int]
) -> int:
    tokens = [*sequence.tokens, *ahead] if sampling.penalises else ()
    return _drawn(sequence, sampling, sampling.probabilities(logits(node), tokens, len(sequence.prompt)))


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
    sequence: SequenceState,
    parents: list[int],
    drafts: list[int],
    logits: Callable[[int], Tensor],
    sampling: Sampling,
    rule: TypicalAcceptance,
) -> Path:
    """The longest path of typical candidates (ties: the likeliest); the token behind it is drawn."""
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
    bonus = _drawn(sequence, sampling, sampling.probabilities(logits(last)))
    tokens = [*(drafts[node] for node in path[1:]), bonus]
    return path, [sequence.memoised_token(ahead, partial(int, token)) for ahead, token in enumerate(tokens)]
