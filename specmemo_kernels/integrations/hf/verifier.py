"""Verification when transformers' logits processors have a say, greedily or by sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from specmemo_kernels.engine.sampled import host_trees, verdict_of, walk
from specmemo_kernels.engine.sampling import draw
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import Verdict
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.target import TargetModel, TargetOutput

Tensor = torch.Tensor


class ProcessedVerifier:
    """Walks each tree node by node: the target's token is the best *processed* score, or one drawn by the processed
    scores (lossless, see :class:`SampledVerifier`), and a processor has to see the tokens that lead to a node.

    Only rows on the accepted path are processed, each once and in order, as transformers would.

    Args:
        target: makes the logits, of one row at a time.
        processors: for calls ``(input_ids [1, L], scores [1, V]) -> scores [1, V]`` of each row of the batch.
        input_ids: ``[B, L]`` the prompts as generate got them, padding included.
        keep: remember logits and scores of every emitted token (batch 1).
        generators: per row, to draw tokens with; ``None``: the best score wins.
    """

    needs_logits = True

    def __init__(
        self,
        target: TargetModel,
        processors: Sequence[Callable[..., Tensor]],
        input_ids: Tensor,
        keep: bool,
        generators: Sequence[torch.Generator] | None = None,
    ) -> None:
        self.target, self.generators = target, generators
        self.processors, self.input_ids, self.keep = processors, input_ids, keep
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []

    def is_greedy(self, sequences: Sequence[SequenceState]) -> bool:
        return False

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict:
        bounds, parents, drafts = host_trees(batch)
        found = []
        for row, sequence in enumerate(sequences):
            part = slice(bounds[row], bounds[row + 1])
            new = torch.tensor(sequence.new_tokens, dtype=self.input_ids.dtype, device=self.input_ids.device)
            known = torch.cat([self.input_ids[sequence.index], new])
            choose = partial(self._choose, known, output, bounds[row], sequence.index)
            found.append(walk(sequence, parents[part], drafts[part], batch.max_depth, choose))
        return verdict_of(batch, found)

    def _choose(self, known: Tensor, output: TargetOutput, first: int, index: int, node: int, tokens: list[int]) -> int:
        """The token of one row of the batch."""
        ids = torch.cat([known, known.new_tensor(tokens)])[None]
        logits = self.target.row_logits(output, first + node)
        raw = logits.to(device=ids.device, dtype=torch.float32, copy=True)[None]
        kept = raw.clone() if self.keep else raw
        scores = self.processors[index](ids, raw)
        if self.generators is None:
            token = int(scores[0].argmax())
        else:
            token = draw(scores[0].softmax(0), self.generators[index])
        if self.keep:  # only now: a row that failed on the way is looked at again
            self.logits.append(kept)
            self.scores.append(scores)
        return token


def row_generators(device: torch.device, rows: int) -> list[torch.Generator]:
    """A generator per row of a batch, all of which follow from the state of torch's own on ``device``.

    The first row's continues that one, so that a single prompt draws what transformers would draw; :func:`put_back`
    brings it back. The others have seeds of their own, so no row's tokens depend on another row.
    """
    first = torch.Generator(device)
    first.set_state(_default_generator(device).get_state())
    base = torch.Generator(device)
    base.set_state(first.get_state())
    seed = int(torch.randint(2**62, (1,), generator=base, device=device))
    return [first, *(torch.Generator(device).manual_seed(seed + row) for row in range(1, rows))]


def put_back(device: torch.device, generators: Sequence[torch.Generator]) -> None:
    """Torch's own generator goes on where the first row's has got to."""
    _default_generator(device).set_state(generators[0].get_state())


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
