"""Logits processors and stopping criteria for single rows of a batch.

transformers calls a processor with all rows of a batch at the same length. Speculative rows advance by different
numbers of tokens, so in a batch only functions of a single row are supported. Those of transformers are listed by type;
others may hold state or compare rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process, stopping_criteria

#: Row-wise and stateless, by reading their code. Names, as older versions of transformers lack some.
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
