"""The speculative replacement of transformers' decoding loop: from generate's arguments to sequences and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import GreedyVerifier, Verifier
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENT
from specmemo_kernels.integrations.hf.checks import rope_limit
from specmemo_kernels.integrations.hf.processors import (
    ProcessedVerifier,
    needs_whole_batch,
    row_generators,
    row_processors,
)
from specmemo_kernels.integrations.hf.run import SequenceRun

if TYPE_CHECKING:
    from specmemo_kernels.integrations.hf.handle import SpecMemo

Tensor = torch.Tensor

#: Model arguments that a speculative call handles.
_SUPPORTED = {
    "attention_mask",
    "position_ids",
    CACHE_ARGUMENT,
    "use_cache",
    "cache_position",
    "logits_to_keep",
    "tokenizer",  # of stop_strings, which a criterion has
}


@dataclass(frozen=True)
class _Call:
    """The arguments of ``_sample``: a call of generate after transformers' preparation."""

    input_ids: Tensor
    logits_processor: Any
    stopping_criteria: StoppingCriteriaList
    config: Any
    synced_gpus: bool
    streamer: Any
    model_kwargs: dict[str, Any]

    def returns(self, name: str) -> bool:
        """Whether the returned dict has the output of option ``name`` (``output_...``)."""
        return bool(self.config.return_dict_in_generate and getattr(self.config, name))

    @property
    def attention_mask(self) -> Tensor:
        mask = self.model_kwargs.get("attention_mask")
        return torch.ones_like(self.input_ids) if mask is None else mask

    @property
    def eos_token_ids(self) -> frozenset[int]:
        criteria = (c for c in self.stopping_criteria if type(c) is EosTokenCriteria)
        return frozenset(token for c in criteria for token in c.eos_token_id.flatten().tolist())

    @property
    def max_length(self) -> int | None:
        """Length of a row, padding included, at which generation ends; ``None``: no limit."""
        return min((c.max_length for c in self.stopping_criteria if type(c) is MaxLengthCriteria), default=None)

    @property
    def other_criteria(self) -> StoppingCriteriaList:
        """The criteria that :class:`SequenceState` doesn't implement."""
        covered = (MaxLengthCriteria, EosTokenCriteria)
        return StoppingCriteriaList([c for c in self.stopping_criteria if type(c) not in covered])


class Generator:
    """Runs greedy and sampling calls speculatively, other calls in the model's own loop (one warning per reason)."""

    def __init__(self, handle: SpecMemo) -> None:
        self.handle = handle
        self._warned: set[str] = set()

    def sample(
        self,
        own_sample: Callable[..., Any],
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """``GenerationMixin._sample``; ``own_sample`` is the model's own method."""
        arguments = input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer
        call = _Call(*arguments, model_kwargs)
        if reason := self._unsupported(call):
            if reason not in self._warned:
                self._warned.add(reason)
                warnings.warn(f"specmemo: {reason}; the model's own generate runs instead", UserWarning, stacklevel=4)
            return own_sample(*arguments, **model_kwargs)
        lock = self.handle.generation_lock
        with lock.mutex(), lock.owned(), self.handle.ranks.guarded():
            return self._generate(call)

    def _unsupported(self, call: _Call) -> str:
        """Why this call can't speculate, or an empty string."""
        if self.handle.generation_lock.nested:
            return "a processor, criterion or streamer of this model's generation calls it"
        rows, at_once = call.input_ids.shape[0], self.handle.plan.max_sequences
        if rows > at_once and any(type(criterion) is MaxTimeCriteria for criterion in call.other_criteria):
            return f"max_time is one clock for all {rows} rows, and the plan runs {at_once} at once"
        reason = _unsupported_arguments(call) or self._unsupported_prompts(call)
        return reason or self.unsupported_model(call.max_length)

    def unsupported_model(self, max_length: int | None) -> str:
        """Why the model can't speculate up to ``max_length`` tokens in its present state, or an empty string."""
        model, facts = self.handle.model, self.handle.facts
        if model.training:
            return "the model is in training mode; call model.eval() first"
        if max_length is not None:
            # Candidates have positions beyond the newest token, and would switch the embedding early.
            limit = rope_limit(model.config)
            if limit is not None and max_length + self.handle.plan.tree.max_depth > limit:
                return "the rotary embedding changes with the length on the way"
            if facts.cached_tokens is not None and max_length > facts.cached_tokens:
                return f"the model's own cache keeps only {facts.cached_tokens} tokens"
            if facts.table_positions is not None and max_length > facts.table_positions + 1:  # the last isn't read
                return f"the model has embeddings of {facts.table_positions} positions, {max_length} tokens need more"
        return self.handle.changed()

    def _unsupported_prompts(self, call: _Call) -> str:
        ids, mask = call.input_ids, call.attention_mask
        vocabulary = self.handle.model.get_input_embeddings().weight.shape[0]
        if ids.dtype not in (torch.int32, torch.int64):
            return f"input_ids has the dtype {ids.dtype}, not torch.int64"
        if not ids.numel():
            return f"input_ids has the shape {list(ids.shape)} and no tokens"
        if (outside := ids[(ids < 0) | (ids >= vocabulary)]).numel():
            return f"input_ids has the token {int(outside[0])}, which is not one of 0 to {vocabulary - 1}"
        if mask.shape != ids.shape:
            return f"the attention_mask has the shape {list(mask.shape)}, not {list(ids.shape)} as input_ids"
        if not bool(((mask == 0) | (mask == 1)).all()):
            return "the attention_mask has other values than 0 and 1"
        if not bool(mask[:, -1].all()):
            return "the attention_mask hides the last token of a prompt (padding on the right)"
        if bool((mask[:, 1:] < mask[:, :-1]).any()):
            if any(self.handle.facts.windows):
                return "the attention_mask hides tokens inside a prompt, and the model's sliding window counts them"
            if self.handle.facts.mixers.mixers:
                return "the attention_mask hides tokens inside a prompt, and the model's recurrent layers count them"
        if not _usual_positions(call):
            return "position_ids that don't follow from the attention_mask are not supported"
        return ""

    def _generate(self, call: _Call) -> Any:
        device = call.input_ids.device
        if call.config.do_sample:
            self.handle.ranks.agree_on_random_state(device)
        generators = row_generators(device, len(call.input_ids)) if call.config.do_sample else None
        verifier = self._verifier(call, generators)
        scores = verifier.scores if isinstance(verifier, ProcessedVerifier) and call.returns("output_scores") else None
        columns = _Columns(call)
        sequences = self._sequences(call, scores, columns)
        running = SequenceRun(self.handle, sequences, verifier)
        try:
            while not running.scheduler.idle:
                running.step(sequences)
                columns.put(sequences)
        finally:
            running.close()
        columns.end()
        self.handle.ranks.finish(sequences)
        return self._result(call, columns.padded(sequences), verifier)

    def _sequences(self, call: _Call, scores: list[Tensor] | None, columns: _Columns) -> list[SequenceState]:
        limit = max(1, (call.max_length or 0) - call.input_ids.shape[1])  # criteria are checked after a token
        mask, eos = call.attention_mask.bool(), call.eos_token_ids
        return [
            SequenceState(
                prompt=call.input_ids[row][mask[row]].tolist(),
                max_new_tokens=limit,
                eos_token_ids=eos,
                stop=self.handle.ranks.stop(_stop(call, row, scores, columns)) if call.other_criteria else None,
                index=row,
            )
            for row in range(call.input_ids.shape[0])
        ]

    def _verifier(self, call: _Call, generators: Sequence[torch.Generator] | None) -> Verifier:
        scores, logits = call.returns("output_scores"), call.returns("output_logits")
        if not call.logits_processor and not scores and not logits and not generators:
            return GreedyVerifier(self.handle.target, self.handle.backend)
        rows = range(call.input_ids.shape[0])
        processors = [row_processors(call.logits_processor, row) for row in rows]
        return ProcessedVerifier(self.handle.target, processors, call.input_ids, scores or logits, generators)

    def _result(self, call: _Call, ids: Tensor, verifier: Verifier) -> Any:
        if not call.config.return_dict_in_generate:
            return ids
        new = ids.shape[1] - call.input_ids.shape[1]
        outputs: dict[str, Any] = {"sequences": ids}
        if isinstance(verifier, ProcessedVerifier):
            for name in ("scores", "logits"):
                outputs[name] = tuple(getattr(verifier, name)[:new]) if call.returns(f"output_{name}") else None
        return GenerateDecoderOnlyOutput(**outputs)


def _unsupported_arguments(call: _Call) -> str:
    config, kwargs, batch = call.config, call.model_kwargs, call.input_ids.shape[0]
    cache = kwargs.get(CACHE_ARGUMENT)
    extra = sorted(k for k, v in kwargs.items() if k not in _SUPPORTED and not _is_empty(v))
    keeps_scores = call.returns("output_scores") or call.returns("output_logits")
    whole = needs_whole_batch((*call.logits_processor, *call.other_criteria)) if batch > 1 else []
    checks = (
        (call.synced_gpus, "synced_gpus (FSDP, ZeRO-3) is not supported"),
        (bool(getattr(config, "is_assistant", False)), "the target model reads its assistant's scores and cache"),
        (cache is not None and cache.get_seq_length() > 0, f"{CACHE_ARGUMENT} can't be continued; pass all tokens"),
        # The model fills an empty cache that was passed; the caller may continue with it.
        (getattr(cache, "_is_user_defined", False), f"{CACHE_ARGUMENT} was passed; leave it out to speculate"),
        (config.cache_implementation is not None, f"cache_implementation={config.cache_implementation!r} was given"),
        (not kwargs.get("use_cache", True), "use_cache=False was given"),
        (isinstance(kwargs.get("logits_to_keep"), Tensor), "logits_to_keep is a tensor"),
        (call.returns("output_attentions"), "output_attentions needs the attention weights"),
        (call.returns("output_hidden_states"), "output_hidden_states needs every layer's states"),
        (batch > 1 and keeps_scores, "scores of a batch are not kept"),
        (bool(extra), f"the arguments {extra} are not supported"),
        (call.max_length is None, "there is no max_length"),
        (bool(whole), f"{' and '.join(whole)} may hold state or compare rows, which needs all rows of a batch at once"),
        (
            batch > 1 and bool(call.other_criteria) and not call.eos_token_ids,
            "batches with other stopping criteria need an eos_token_id",
        ),
        (
            any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in call.logits_processor),
            "classifier-free guidance runs the model by itself",
        ),
    )
    return next((reason for failed, reason in checks if failed), "")


def _is_empty(value: Any) -> bool:
    """Whether an argument is empty: transformers passes an empty dict for a prompt without images."""
    return value is None or (isinstance(value, dict | list | tuple) and not value)


def _usual_positions(call: _Call) -> bool:
    """Whether the position ids follow from the attention mask."""
    positions = call.model_kwargs.get("position_ids")
    if positions is None:
        return True
    mask = call.attention_mask
    expected = (mask.long().cumsum(-1) - 1)[mask.bool()]
    return positions.shape == mask.shape and torch.equal(positions[mask.bool()].long(), expected)


def _stop(call: _Call, row: int, scores: list[Tensor] | None, columns: _Columns) -> Callable[[list[int]], bool]:
    """The call's criteria for one row, and before them the row's streamer.

    ``scores``: ``[1, V]`` per new token, or ``None``.
    """
    padded, criteria = call.input_ids[row], call.other_criteria
    prompt_length = int(call.attention_mask[row].sum())

    def stop(tokens: list[int]) -> bool:
        if len(call.input_ids) == 1:  # transformers streams a token behind its criteria
            columns.put_rows([tokens[prompt_length:]], len(tokens) - prompt_length - 1)
        new = torch.tensor(tokens[prompt_length:], dtype=padded.dtype, device=padded.device)
        new_scores = None if scores is None else tuple(scores[: len(new)])
        return bool(criteria(torch.cat([padded, new])[None], new_scores)[0])

    return stop


class _Columns:
    """The growing output ``[B, L + new]``. Streamers receive it column by column, as from transformers."""

    def __init__(self, call: _Call) -> None:
        self.call, self.sent = call, 0
        pad = call.config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)

    def put(self, sequences: Sequence[SequenceState]) -> None:
        """Stream the columns that every unfinished row has reached; finished rows are padded."""
        rows = [s.new_tokens for s in sequences]
        ready = min((len(r) for r, s in zip(rows, sequences, strict=True) if not s.finished), default=None)
        self.put_rows(rows, max(map(len, rows)) if ready is None else ready)

    def put_rows(self, rows: Sequence[Sequence[int]], end: int) -> None:
        """Stream the columns before ``end`` that were not streamed yet."""
        while self.call.streamer is not None and self.sent < end:
            values = [r[self.sent] if self.sent < len(r) else self.pad for r in rows]
            self.call.streamer.put(torch.tensor(values, device="cpu"))
            self.sent += 1

    def end(self) -> None:
        if self.call.streamer is not None:
            self.call.streamer.end()

    def padded(self, sequences: Sequence[SequenceState]) -> Tensor:
        """Prompts and new tokens of all rows, padded on the right."""
        rows = [torch.tensor(s.new_tokens, dtype=torch.int64, device="cpu") for s in sequences]
        new = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad)
        return torch.cat([self.call.input_ids, new.to(self.call.input_ids.device)], dim=1)
