"""``generate_batch``: many requests through one patched model, each with its own parameters."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specmemo_kernels.arguments import as_integer, flag, integer, integers, shown, wrong_type
from specmemo_kernels.engine.sampling import Sampling
from specmemo_kernels.engine.scores import TokenScore
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import SampledVerifier
from specmemo_kernels.integrations.hf.generation_lock import LockOwner
from specmemo_kernels.integrations.hf.handle import SpecMemo, handle_of
from specmemo_kernels.integrations.hf.run import Piece, PieceReader, SequenceRun

Prompt = Sequence[int] | torch.Tensor


@dataclass(frozen=True)
class Request:
    """A prompt and its generation parameters.

    Attributes:
        prompt: token ids without padding.
        max_new_tokens: maximum of new tokens.
        eos_token_ids: tokens that end the request; ``None``: those of the model's generation config.
        sampling: sampling parameters; ``None``: greedy.
        stop: called after each new token with all tokens so far; ``True`` ends the request.
        logprobs: score every new token by the model's logits, with this many of the best tokens beside it.
        prompt_logprobs: score the prompt's tokens too, from the second on; needs ``logprobs``. Their keys and values
            are computed again, even if an earlier request has left them.
    """

    prompt: Prompt
    max_new_tokens: int = 256
    eos_token_ids: Sequence[int] | None = None
    sampling: Sampling | None = None
    stop: Callable[[list[int]], bool] | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class Completion:
    """The result of a request.

    Attributes:
        tokens: new tokens, the ending token included.
        finish_reason: ``"eos"``, ``"length"``, ``"stop"`` or ``"aborted"``.
        steps: verification steps. accepted: accepted drafts. preemptions: number of preemptions.
        scores, prompt_scores: of the tokens, and of the prompt's from the second on, if requested.
    """

    tokens: list[int]
    finish_reason: str
    steps: int
    accepted: int
    preemptions: int
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per step: accepted drafts and the target's own token; 0 without a step."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0


class BatchRun:
    """A running batch: an iterator of :class:`Piece` in the order of generation.

    The batch locks the model until it is exhausted or closed (``with`` closes it). Until then, another generation of
    the same model, ``unpatch`` and ``release`` wait, or raise if called from the same thread.
    """

    def __init__(self, handle: SpecMemo, requests: Sequence[Request]) -> None:
        self._handle = handle
        self._running: SequenceRun | None = None
        # Locked during a step and while closing: one thread at a time uses the scheduler. `abort` needs no lock.
        self._scheduler_lock = threading.RLock()
        self._stepping = self._closing = False
        self._ready: list[Piece] = []
        self._aborted: deque[int] = deque()
        with handle.ranks.guarded():
            self._sequences = [sequence_of(handle, i, request) for i, request in enumerate(requests)]
        self._readers = [PieceReader(sequence) for sequence in self._sequences]
        if not self._sequences:
            return
        self._lock_owner = LockOwner(self)
        try:
            handle.generation_lock.acquire(self._lock_owner)
            with handle.ranks.guarded():
                longest = max(len(s.prompt) + s.max_new_tokens for s in self._sequences)
                if reason := handle.generator.unsupported_model(longest):
                    raise ValueError(f"a batch can't be generated: {reason}")
                self._running = SequenceRun(handle, self._sequences, SampledVerifier(handle.target, handle.backend))
        except BaseException:
            handle.generation_lock.release(self._lock_owner)
            raise

    def __iter__(self) -> Iterator[Piece]:
        return self

    @torch.no_grad()
    def __next__(self) -> Piece:
        with self._scheduler_lock:
            if self._stepping:
                raise RuntimeError("a stop function or drafter of this batch asks for its next piece; return first")
            while not self._ready:
                running = self._running
                if running is None or self._closing:
                    raise StopIteration
                try:
                    self._step(running)
                except StopIteration as error:  # would end the iteration as if the requests were finished
                    self.close()
                    raise RuntimeError("a stop function, drafter or model raised StopIteration") from error
                except BaseException:
                    self.close()
                    raise
                self._ready += [piece for reader in self._readers if (piece := reader.read()) is not None]
                if running.scheduler.idle:
                    self.close()
            return self._ready.pop(0)

    def _step(self, running: SequenceRun) -> None:
        self._stepping = True
        try:
            with self._handle.ranks.guarded():
                running.step(self._sequences, [self._aborted.popleft() for _ in range(len(self._aborted))])
                if running.scheduler.idle:
                    self._handle.ranks.finish(self._sequences)
        finally:
            self._stepping = False

    def abort(self, index: int) -> None:
        """Abort a request, from any thread. Its pages are freed, and the next step yields its last piece.

        While another thread runs a step, the request ends after that step, perhaps with the step's tokens. For a tensor
        parallel model only rank 0's calls have an effect, from the next step on.

        Raises:
            TypeError, ValueError: there is no such request.
        """
        sequence = self._sequences[integer("index", index, 0, len(self._sequences) - 1)]
        running = self._running
        if self._handle.ranks.size > 1:
            self._aborted.append(index)
        elif running is not None:  # a closed batch has nothing to abort
            running.scheduler.abort(sequence)

    def close(self) -> None:
        """Abort the unfinished requests and unlock the model, from any thread; waits for another thread's step.

        If a stop function of this batch calls ``close``, the batch closes at the end of the step.
        """
        self._closing = True
        with self._scheduler_lock:
            running = self._running
            if running is None:
                return
            if self._stepping:
                for sequence in self._sequences:
                    running.scheduler.abort(sequence)
                return
            self._running = None
            try:
                running.close()
            finally:
                self._handle.generation_lock.release(self._lock_owner)

    def completions(self) -> list[Completion]:
        """The result of each request, in the order of the input.

        Raises:
            RuntimeError: requests are still running.
        """
        if running := sum(not s.finished for s in self._sequences):
            raise RuntimeError(f"{running} of {len(self._sequences)} requests still run; iterate to the end, or close")
        return [completion_of(sequence) for sequence in self._sequences]

    def __enter__(self) -> BatchRun:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is not None and self._running is not None:
                self._handle.ranks.fail(error)
        finally:
            self.close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_running", None) is not None and not finalizing():  # module globals are None by then
            self.close()


def generate_batch(
    model: Any,
    prompts: Sequence[Prompt | Request],
    *,
    max_new_tokens: int = 256,
    eos_token_ids: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    on_piece: Callable[[Piece], None] | None = None,
) -> list[Completion]:
    """Continue many prompts, as many at once as the plan holds; further prompts are queued.

    Args:
        model: patched by :func:`specmemo_kernels.patch`.
        prompts: token ids without padding, or :class:`Request` with its own parameters.
        max_new_tokens, eos_token_ids, sampling: for prompts that aren't a :class:`Request`. With ``sampling`` the
            i-th prompt's seed is ``sampling.seed + i``; without it decoding is greedy. Of the model's generation
            configuration only ``eos_token_id`` is read.
        on_piece: called with each :class:`Piece` in the order of generation.

    Returns:
        One :class:`Completion` per prompt, in order.

    Raises:
        BudgetError: a request can never fit the plan. TypeError, ValueError: a wrong argument, with its value.
    """
    if on_piece is not None and not callable(on_piece):
        raise wrong_type("on_piece", on_piece, "a function of a Piece, or None")
    with stream_batch(
        model, prompts, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, sampling=sampling
    ) as run:
        for piece in run:
            if on_piece is not None:
                on_piece(piece)
        return run.completions()


def stream_batch(
    model: Any,
    prompts: Sequence[Prompt | Request],
    *,
    max_new_tokens: int = 256,
    eos_token_ids: Sequence[int] | None = None,
    sampling: Sampling | None = None,
) -> BatchRun:
    """:func:`generate_batch` as an iterator of pieces; requests can be aborted meanwhile."""
    handle = patched_handle(model)
    if not isinstance(sampling, Sampling | None):
        raise wrong_type("sampling", sampling, "a Sampling or None")
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise wrong_type("prompts", prompts, "a list of prompts")
    requests = []
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, Request):
            prompt = Request(prompt, max_new_tokens, eos_token_ids, sampling and sampling.with_seed(sampling.seed + i))
        requests.append(prompt)
    return BatchRun(handle, requests)


def patched_handle(model: Any) -> SpecMemo:
    """The handle of a patched model.

    Raises:
        ValueError: the model isn't patched.
    """
    handle = handle_of(model)
    if handle is None:
        raise ValueError("the model isn't patched; call specmemo_kernels.patch(model, heads) first")
    return handle


def sequence_of(handle: SpecMemo, index: int, request: Request) -> SequenceState:
    """The state of a request that hasn't begun.

    Raises:
        TypeError, ValueError: a wrong field, with its value.
    """
    prompt = integers(request.prompt)
    vocabulary, drawn = handle.model.get_input_embeddings().weight.shape[0], handle.facts.vocab_size
    if not prompt or min(prompt) < 0 or max(prompt) >= vocabulary:
        got = shown(request.prompt if prompt is None else prompt)
        raise ValueError(f"prompt {index} must be one row of token ids from 0 to {vocabulary - 1}, got {got}")
    max_new_tokens = integer(f"max_new_tokens of prompt {index}", request.max_new_tokens)
    eos = request.eos_token_ids
    if eos is None:
        default = handle.model.generation_config.eos_token_id
        eos = [] if default is None else default if as_integer(default) is None else [default]
    eos_ids = integers(eos)
    if eos_ids is None:
        raise wrong_type(f"eos_token_ids of prompt {index}", eos, "a list of token ids or None")
    if not isinstance(request.sampling, Sampling | None):
        raise wrong_type(f"sampling of prompt {index}", request.sampling, "a Sampling or None")
    if request.sampling is not None and (high := [t for t in request.sampling.logit_bias if t >= drawn]):
        raise ValueError(f"logit_bias of prompt {index} has the token {high[0]}, the last one is {drawn - 1}")
    if request.stop is not None and not callable(request.stop):
        raise wrong_type(f"stop of prompt {index}", request.stop, "a function of the tokens so far, or None")
    stop = None if request.stop is None else handle.ranks.stop(request.stop)
    sampling = None if request.sampling is None or request.sampling.greedy else request.sampling
    flag(f"prompt_logprobs of prompt {index}", request.prompt_logprobs)
    logprobs = request.logprobs
    if logprobs is not None:
        logprobs = integer(f"logprobs of prompt {index}", logprobs, 0, drawn, or_else=" or None")
    elif request.prompt_logprobs:
        raise ValueError(f"prompt {index} has prompt_logprobs and no logprobs; give logprobs, 0 for no other tokens")
    if request.prompt_logprobs and not handle.facts.exact_lm_head:
        raise ValueError(
            f"prompt_logprobs of prompt {index}: {type(handle.model).__name__} changes its lm_head's logits, so that "
            "all rows of a prompt would have logits at once; leave prompt_logprobs out"
        )
    return SequenceState(
        prompt, max_new_tokens, frozenset(eos_ids), stop, sampling, index, logprobs, request.prompt_logprobs
    )


def completion_of(sequence: SequenceState) -> Completion:
    """The result of a finished sequence."""
    tokens = sequence.new_tokens
    if sequence.aborted:
        reason = "aborted"
    elif tokens[-1] in sequence.eos_token_ids:
        reason = "eos"
    else:
        reason = "length" if sequence.remaining <= 0 else "stop"
    counts = sequence.steps, sequence.accepted, sequence.preemptions
    return Completion(tokens, reason, *counts, list(sequence.scores), list(sequence.prompt_scores))
