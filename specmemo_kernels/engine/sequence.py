"""The state of one sequence while it is generated, and every change to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specmemo_kernels.engine.sampling import Sampling
from specmemo_kernels.engine.scores import TokenScore

if TYPE_CHECKING:
    from specmemo_kernels.cache.kv_storage import HostPages


@dataclass(frozen=True)
class SwappedSequence:
    """A preempted sequence in host memory: its pages, and its hidden state if it was past its prompt."""

    pages: HostPages
    hidden: torch.Tensor | None


@dataclass(eq=False)
class SequenceState:
    """One sequence being generated; compared by identity. Only its own methods change it.

    Attributes:
        prompt: its tokens without padding; at least one.
        max_new_tokens: upper bound of the emitted tokens.
        eos_token_ids: emitting one of these ends the sequence (they may occur in the prompt).
        stop: called after each new token with a list of all tokens so far; ``True`` ends the sequence.
        sampling: how tokens are drawn; ``None``: greedily.
        logprobs: how many of the best tokens each token's score lists; ``None``: no scores.
        prompt_logprobs: whether the prompt's tokens are scored too.
        failed: called with an error of this sequence alone, which ends it; ``None``: the error is raised.
        index: the caller's row.
        slot: its row of the block table while it is open, else -1.
        tokens: prompt and output so far.
        computed: leading tokens whose keys and values are in pages.
        lost: the most tokens that were in pages and have to be recomputed after a preemption.
        hidden: ``[hidden_size]``, the target's state that predicted the newest token; ``None`` before the first token.
        swapped: its copy in host memory while it is swapped out.
        finished, aborted: the sequence is complete, or was aborted on request.
        arrival: its position in the scheduler's order.
        steps, accepted, preemptions: verification steps, drafts accepted in them, and preemptions.
        scores, prompt_scores: of the emitted tokens, and of the prompt's tokens from its second on, if requested.
    """

    prompt: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop: Callable[[list[int]], bool] | None = None
    sampling: Sampling | None = None
    index: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    failed: Callable[[BaseException], None] | None = None
    slot: int = field(default=-1, init=False)
    tokens: list[int] = field(init=False)
    computed: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)
    hidden: torch.Tensor | None = field(default=None, init=False, repr=False)
    swapped: SwappedSequence | None = field(default=None, init=False, repr=False)
    finished: bool = field(default=False, init=False)
    aborted: bool = field(default=False, init=False)
    arrival: int = field(default=0, init=False)
    steps: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)
    scores: list[TokenScore] = field(default_factory=list, init=False, repr=False)
    prompt_scores: list[TokenScore] = field(default_factory=list, init=False, repr=False)
    _random: torch.Generator | None = field(default=None, init=False, repr=False)
    _memo: list[int] = field(default_factory=list, init=False, repr=False)
    _memo_start: int = field(default=0, init=False, repr=False)
    _stops: dict[int, bool] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def random(self, sampling: Sampling) -> torch.Generator:
        """The sequence's own random generator."""
        if self._random is None:
            self._random = sampling.generator()
        return self._random

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def emitted(self) -> int:
        """Number of tokens emitted so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be emitted."""
        return self.max_new_tokens - self.emitted

    @property
    def context(self) -> list[int]:
        """The tokens that must be in pages before the first step: all but the newest emitted one."""
        return self.tokens[:-1] if self.emitted else self.tokens

    def queue(self, arrival: int) -> None:
        self.arrival = arrival

    def open(self, slot: int, computed: int) -> None:
        """Hold row ``slot`` of the block table, whose pages contain the first ``computed`` tokens."""
        self.slot, self.computed = slot, computed

    def resume(self, hidden: torch.Tensor | None) -> None:
        """Continue from the copy in host memory, which is dropped; ``hidden`` is its state on the device."""
        assert self.swapped is not None, "the sequence is not swapped out"
        self.computed, self.hidden, self.swapped = self.swapped.pages.tokens, hidden, None

    def swap_out(self, pages: HostPages) -> None:
        """Keep ``pages`` and a copy of the hidden state in host memory."""
        self.swapped = SwappedSequence(pages, None if self.hidden is None else self.hidden.to("cpu", copy=True))

    def close(self) -> None:
        """Release the row and the state on the device."""
        self.slot, self.hidden = -1, None

    def preempt(self) -> None:
        """Count a preemption, and without a copy in host memory the tokens that must be recomputed."""
        if self.swapped is None:
            self.lost = max(self.lost, len(self.context) if self.hidden is not None else self.computed)
        self.preemptions += 1

    def abort(self) -> None:
        """End the sequence on request; no effect on a finished sequence."""
        if not self.finished:
            self.aborted = self.finished = True

    def finish(self) -> None:
        """Emit nothing more and drop the copy in host memory."""
        self.finished, self.swapped = True, None

    @property
    def unscored(self) -> int:
        """The first token of the prompt that must still be scored; the prompt's length if there is none."""
        return min(len(self.prompt), 1 + len(self.prompt_scores)) if self.prompt_logprobs else len(self.prompt)

    @property
    def shareable(self) -> list[int]:
        """The tokens of :attr:`context` whose pages may be another sequence's: not those that will be scored."""
        return self.context if self.unscored == len(self.prompt) else self.prompt[: self.unscored]

    def take_prompt_score(self, score: TokenScore) -> None:
        """Append the score of the prompt's token :attr:`unscored`."""
        self.prompt_scores.append(score)

    def take(self, emitted: Sequence[int], scores: Sequence[TokenScore] = ()) -> int:
        """Append tokens until one ends the sequence; returns how many were taken, 0 for a finished sequence.

        ``scores``: of these tokens, if requested.
        """
        if self.finished:
            return 0
        self.scores.extend(scores)
        count = self._take(emitted)
        del self.scores[self.emitted :]
        return count

    def _take(self, emitted: Sequence[int]) -> int:
        for count, token in enumerate(emitted, start=1):
            self.tokens.append(token)
            # A stop that aborts its own sequence ends it, whatever it returns.
            if self._stopped(self.tokens) or self.finished or token in self.eos_token_ids or self.remaining <= 0:
                self.finished = True
                return count
        return len(emitted)

    def _stopped(self, tokens: Sequence[int]) -> bool:
        """Whether ``stop`` ends a text of these tokens."""
        if self.stop is None:
            return False
        known = self._stops.get(len(tokens))
        return self.stop(list(tokens)) if known is None else known

    def rollback(self, length: int) -> None:
        """Remove all tokens behind the first ``length``, which a failed step appended."""
        del self.tokens[length:], self.scores[max(0, length - len(self.prompt)) :]
        self.finished = self.aborted

    def record_step(self, drafts: int) -> None:
        """Count a verification step that accepted ``drafts`` drafts, which are in pages now, as is the root."""
        self.steps += 1
        self.accepted += drafts
        self.computed += drafts + 1

    def record_prefill(self, size: int) -> int:
        """Count ``size`` more tokens of the context in pages; returns how many of them were recomputed."""
        recomputed = min(size, max(0, self.lost - self.computed))
        self.computed += size
        return recomputed

    def set_hidden(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    @property
    def num_memoised(self) -> int:
        """Number of chosen tokens behind the newest token (:meth:`memoise`)."""
        return max(0, self._memo_start + len(self._memo) - len(self.tokens))

    def memoised(self, ahead: int) -> int | None:
        """The memoised token ``ahead`` places behind the next token."""
        return self._memo[len(self.tokens) + ahead - self._memo_start] if ahead < self.num_memoised else None

    def memoise(self, token: int) -> int:
        """Keep the next chosen token until :meth:`take`, and return it.

        A step that fails after sampling is retried, perhaps with a smaller tree. With the memo a retry neither draws
        again nor calls a processor twice.
        """
        if not self.num_memoised:
            self._memo_start, self._memo, self._stops = len(self.tokens), [], {}
        self._memo.append(token)
        return token

    def memoised_stop(self, ahead: Sequence[int]) -> bool:
        """Whether ``stop`` ends the sequence with these memoised tokens; it is called once for each token."""
        if self.stop is None:
            return False
        tokens = [*self.tokens, *ahead]
        self._stops[len(tokens)] = stopped = self._stopped(tokens)
        return stopped
