"""Logits processors and stopping criteria: verification with processors, and functions for single rows of a batch.

transformers calls a processor with all rows of a batch at the same length. Speculative rows advance by different
numbers of tokens, so in a batch only functions of a single row are supported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process, stopping_criteria

from specmemo_kernels.engine.sampling import draw
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import Verdict, verdict_of
from specmemo_kernels.engine.walk import accepted_path, host_trees, run_walks
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.target import TargetModel, TargetOutput

Tensor = torch.Tensor

#: Row-wise and stateless, by reading their code; other functions may hold state or compare rows. Names, as older
#: versions of transformers lack some.
_ROW_WISE_PROCESSORS = """
    MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor TemperatureLogitsWarper RepetitionPenaltyLogitsProcessor
    TopPLogitsWarper TopKLogitsWarper TopHLogitsWarper MinPLogitsWarper TypicalLogitsWarper EpsilonLogitsWarper
    EtaLogitsWarper NoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor NoBadWordsLogitsProcessor
    PrefixConstrainedLogitsProcessor ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor
    InfNanRemoveLogitsProcessor ExponentialDecayLengthPenalty LogitNormalization SuppressTokensAtBeginLogitsProcessor
    SuppressTokensLogitsProcessor WatermarkLogitsProcessor
"""
_ROW_WISE_CRITERIA = "MaxTimeCriteria StopStringCriteria"


def _types(module: Any, names: str) -> frozenset[type]:
    return frozenset(getattr(module, name) for name in names.split() if hasattr(module, name))


_ROW_WISE = _types(logits_process, _ROW_WISE_PROCESSORS) | _types(stopping_criteria, _ROW_WISE_CRITERIA)


class ProcessedVerifier:
    """Verifies node by node: processors need the tokens that lead to a node.

    The target's token has the best *processed* score, or is drawn from the processed scores (lossless, see
    :class:`SampledVerifier`). Only rows on the accepted path are processed, each once and in order, as in transformers.

    Args:
        processors: per row of the batch, ``(input_ids [1, L], scores [1, V]) -> scores [1, V]``.
        input_ids: ``[B, L]`` the prompts as passed to generate, padding included.
        keep: store logits and scores of every emitted token (batch 1).
        generators: per row, to draw tokens; ``None``: greedy.
    """

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
        walks = []
        for sequence, tree in zip(sequences, host_trees(batch), strict=True):
            walks.append(accepted_path(sequence, tree, batch.max_depth, partial(self._choose, sequence)))
        return verdict_of(batch, run_walks(walks, partial(self.target.row_logits, output)))

    def _choose(self, sequence: SequenceState, logits: Tensor, tokens: list[int]) -> int:
        """The target's token by a row's ``logits``, behind the sequence and the step's ``tokens``."""
        prompt, index = self.input_ids[sequence.index], sequence.index
        ids = torch.cat([prompt, prompt.new_tensor([*sequence.new_tokens, *tokens])])[None]
        raw = logits.to(device=ids.device, dtype=torch.float32, copy=True)[None]
        scores = self.processors[index](ids, raw)
        if self.generators is None:
            token = int(scores[0].argmax())
        else:
            token = draw(scores[0].softmax(0), self.generators[index])
        if self.keep:  # last, because a row that raises above is verified again
            self.logits.append(raw)  # not a copy: what processors write in place shows, as in transformers
            self.scores.append(scores)
        return token


def row_generators(device: torch.device, rows: int) -> list[torch.Generator]:
    """A generator per row of a batch.

    The first is torch's default generator on ``device``, as in transformers, so that a single prompt draws its tokens.
    The others have seeds from its state, so that no row's tokens depend on another row.
    """
    first, base = _default_generator(device), torch.Generator(device)
    base.set_state(first.get_state())
    seed = int(torch.randint(2**62, (1,), generator=base, device=device))
    return [first, *(torch.Generator(device).manual_seed(seed + row) for row in range(1, rows))]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def needs_whole_batch(functions: Iterable[Any]) -> list[str]:
    """Names of the processors or criteria that need all rows of a batch."""
    return sorted({type(function).__name__ for function in functions if type(function) not in _ROW_WISE})


def row_processors(processors: Iterable[Any], row: int) -> LogitsProcessorList:
    """``processors`` for row ``row`` of the batch: ``(input_ids [1, L], scores [1, V])``."""
    return LogitsProcessorList([_for_row(processor, row) for processor in processors])


def _for_row(processor: Any, row: int) -> Any:
    if type(processor) is logits_process.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return logits_process.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    ignored_lengths = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored_lengths, torch.Tensor):  # a repetition penalty has one number per row
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored_lengths[row : row + 1]
    return processor
