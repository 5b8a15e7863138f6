"""One sequence on its way: its tokens, its limits, and what was counted for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specmemo_kernels.engine.sampling import Sampling

if TYPE_CHECKING:
    from specmemo_kernels.cache.kv_storage import HostPages


@dataclass(frozen=True)
class SwappedSequence:
    """A preempted sequence in host memory: its pages, and its hidden state if it took steps already."""

    pages: HostPages
    hidden: torch.Tensor | None


@dataclass(eq=False)
class SequenceState:
    """One sequence being generated; two are equal only if they are the same object.

    Attributes:
        prompt: its tokens, padding excluded; at least one.
        max_new_tokens: where it ends at the latest.
        eos_token_ids: emitting one of these ends it (they may occur in the prompt).
        stop: asked after each new token; gets all tokens so far, ``True`` ends the sequence.
        sampling: how its tokens are drawn; ``None``: greedily.
        index: the caller's name for it (a row of the batch).
        slot: its row of the block table while it runs, else -1.
        tokens: prompt and output so far.
        computed: its first tokens, as many as have their keys and values in pages (while it has any). lost: how many
            had, before its pages were taken without a copy.
        hidden: ``[hidden_size]``, the target's state that its newest token came from, while it takes steps.
        swapped: its copy in host memory while it is swapped out.
        finished, aborted: it emits nothing more; on its own account, or because somebody wanted so.
        arrival: its place in the order of a scheduler.
        steps, accepted, preemptions: verification steps it took part in, drafts accepted in them, and how often its
            pages were taken for others.
    """

    prompt: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop: Callable[[list[int]], bool] | None = None
    sampling: Sampling | None = None
    index: int = 0
    slot: int = -1
    tokens: list[int] = field(init=False)
    computed: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)
    hidden: torch.Tensor | None = field(default=None, init=False, repr=False)
    swapped: SwappedSequence | None = field(default=None, init=False, repr=False)
    finished: bool = False
    aborted: bool = field(default=False, init=False)
    arrival: int = field(default=0, init=False)
    steps: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)
    _random: torch.Generator | None = field(default=None, init=False, repr=False)
    _decided: list[int] = field(default_factory=list, init=False, repr=False)
    _decided_from: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def random(self, sampling: Sampling) -> torch.Generator:
        """Its own source of random numbers."""
        if self._random is None:
            self._random = sampling.generator()
        return self._random

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def emitted(self) -> int:
        """How many tokens it emitted so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - self.emitted

    @property
    def context(self) -> list[int]:
        """What has to be in pages before it can take steps: all tokens but the newest emitted one."""
        return self.tokens[:-1] if self.emitted else self.tokens

    def take(self, emitted: Sequence[int]) -> int:
        """Append tokens until one ends the sequence, none if it has ended; returns how many were taken."""
        if self.finished:
            return 0
        for count, token in enumerate(emitted, start=1):
            self.tokens.append(token)
            stopped = self.stop is not None and self.stop(self.tokens)
            if stopped or token in self.eos_token_ids or self.remaining <= 0:
                self.finished = True
                return count
        return len(emitted)

    def rollback(self, length: int) -> None:
        """Take back all tokens but the first ``length``, which a failed step had appended."""
        del self.tokens[length:]
        self.finished = self.aborted

    @property
    def decided(self) -> int:
        """How many tokens behind the newest one are known already (:meth:`decide`)."""
        return max(0, self._decided_from + len(self._decided) - len(self.tokens))

    def decide(self, ahead: int, choose: Callable[[], int]) -> int:
        """The token ``ahead`` places behind the newest one's successor, from ``choose`` or as it was decided before.

        A step that fails behind its verdict is tried again, perhaps with a smaller tree. What was drawn or processed
        is kept until it is taken, so that the second try neither draws again nor shows a processor the same twice.
        """
        if not self.decided:
            self._decided_from, self._decided = len(self.tokens), []
        place = len(self.tokens) + ahead - self._decided_from
        if place == len(self._decided):
            self._decided.append(choose())
        return self._decided[place]
