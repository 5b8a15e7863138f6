"""Greedy verification when transformers' logits processors have a say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from specmemo_kernels.batch import TreeBatch
from specmemo_kernels.decode import SequenceState, TargetModel, TargetOutput, Verdict

Tensor = torch.Tensor


class ProcessedVerifier:
    """Walks each tree node by node: the target's token is the best *processed* score, and a processor has to see the
    tokens that lead to a node.

    Only rows on the accepted path are processed, each once and in order, as transformers would.

    Args:
        target: makes the logits, of one row at a time.
        processor: ``(input_ids [B, L], scores [B, V]) -> scores``, a ``LogitsProcessorList``.
        input_ids: ``[B, L]`` the prompts as generate got them, padding included.
        keep: remember logits and scores of every emitted token (batch 1).
    """

    needs_logits = True

    def __init__(
        self, target: TargetModel, processor: Callable[[Tensor, Tensor], Tensor], input_ids: Tensor, keep: bool
    ) -> None:
        self.target = target
        self.processor, self.input_ids, self.keep = processor, input_ids, keep
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict:
        assert batch.parents is not None, "a prefill chunk has no tree to verify"
        bounds, parents, drafts = batch.qo_indptr.tolist(), batch.parents.tolist(), batch.tokens.tolist()
        paths, emitted = [], []
        for row, sequence in enumerate(sequences):
            part = slice(bounds[row], bounds[row + 1])
            logits = partial(self._logits, output, bounds[row])
            path, tokens = self._walk(sequence, parents[part], drafts[part], logits, batch.max_depth)
            paths.append(path)
            emitted.append(tokens)
        index = torch.full((len(paths), batch.max_depth + 1), -1, dtype=torch.int32)
        for row, path in enumerate(paths):
            index[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
        device = batch.tokens.device
        length = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32, device=device)
        bonus = torch.tensor([tokens[-1] for tokens in emitted], device=device)
        return Verdict(index.to(device), length, bonus, emitted)

    def _logits(self, output: TargetOutput, first: int, node: int) -> Tensor:
        """``[V]`` of a node of the sequence whose rows begin at ``first``."""
        return self.target.row_logits(output, first + node)

    def _walk(
        self,
        sequence: SequenceState,
        parents: list[int],
        drafts: list[int],
        logits: Callable[[int], Tensor],
        max_depth: int,
    ) -> tuple[list[int], list[int]]:
        """The accepted path (node ids, root first) and the token that the target writes at each of its nodes."""
        device = self.input_ids.device
        new = torch.tensor(sequence.new_tokens, dtype=self.input_ids.dtype, device=device)
        ids = torch.cat([self.input_ids[sequence.index], new])
        path: list[int] = [0]
        tokens: list[int] = []
        while True:
            token = self._choose(ids, logits(path[-1]), sequence.index)
            tokens.append(token)
            ids = torch.cat([ids, ids.new_tensor([token])])
            if token in sequence.eos_token_ids or len(tokens) >= sequence.remaining or len(path) > max_depth:
                return path, tokens
            children = range(path[-1] + 1, len(parents))
            child = next((c for c in children if parents[c] == path[-1] and drafts[c] == token), None)
            if child is None:
                return path, tokens
            path.append(child)

    def _choose(self, ids: Tensor, logits: Tensor, index: int) -> int:
        """The best processed token of one row; processors may insist on the full batch, so all rows are this one."""
        batch = self.input_ids.shape[0]
        raw = logits.to(device=ids.device, dtype=torch.float32, copy=True).repeat(batch, 1)
        if self.keep:
            self.logits.append(raw.clone())
        scores = self.processor(ids.repeat(batch, 1), raw)
        if self.keep:
            self.scores.append(scores)
        return int(scores[index].argmax())
