"""Sampling: a request's parameters, the distribution they give for a row of logits, and draws from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specmemo_kernels.arguments import as_integer, integer, number, positive_number, wrong_type

Tensor = torch.Tensor

#: Smallest and largest seed of a torch generator.
SEEDS = (-(1 << 63), (1 << 64) - 1)


#: Largest magnitude of a parameter; one over it is the least temperature.
_LARGEST = 1e30
#: Temperatures below this one are divided by after the best score is subtracted.
_COLD = 1e-3


@dataclass(frozen=True)
class TypicalAcceptance:
    """Lossy: a candidate is accepted if its probability is above ``min(epsilon, alpha * exp(-entropy))``.

    Medusa, arXiv 2401.10774, section 2.3.1; ``alpha = sqrt(epsilon)`` as recommended there. The output
    no longer has the model's distribution.
    """

    epsilon: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("alpha", self.alpha)):
            positive_number(f"typical acceptance: {name}", value, 1)

    def threshold(self, probabilities: Tensor) -> float:
        """The acceptance threshold for a row of ``probabilities`` ``[V]``."""
        entropy = -torch.special.xlogy(probabilities, probabilities).sum()
        return min(self.epsilon, self.alpha * math.exp(-float(entropy)))


@dataclass(frozen=True)
class Sampling:
    """How a request draws its tokens; ``None`` in its place is greedy decoding.

    Attributes:
        temperature: divides the logits; 0: always the best token.
        top_k: only this many best tokens; 0 for all.
        top_p: only the best tokens that together have at least this probability.
        seed: of the request's own generator. Tokens depend only on it and on the model, not on the drafter, the tree or
            the batch.
        typical: lossy acceptance by Medusa's rule.
        min_p: only tokens with at least this share of the best one's probability.
        repetition_penalty: divides the positive logits of tokens of prompt and answer, multiplies the negative ones
            (CTRL, arXiv 1909.05858); 1: none.
        presence_penalty, frequency_penalty: subtracted from the logits of the answer's tokens, once and for each time
            they occur (OpenAI's parameters).
        logit_bias: added to the logits of these tokens, before the penalties.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    typical: TypicalAcceptance | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        number("temperature", self.temperature, 0)
        positive_number("top_p", self.top_p, 1)
        number("min_p", self.min_p, 0, 1)
        positive_number("repetition_penalty", self.repetition_penalty)
        number("presence_penalty", self.presence_penalty)
        number("frequency_penalty", self.frequency_penalty)
        if not isinstance(self.logit_bias, Mapping):
            raise wrong_type("logit_bias", self.logit_bias, "a dict of token ids and numbers")
        bias = {}
        for token, value in self.logit_bias.items():
            if (index := as_integer(token)) is None or index < 0:
                raise wrong_type("a token of logit_bias", token, "an integer, at least 0")
            bias[index] = number(f"logit_bias of token {index}", value)
        object.__setattr__(self, "logit_bias", bias)
        object.__setattr__(self, "top_k", integer("top_k", self.top_k, 0, or_else=" (0: all tokens)"))
        object.__setattr__(self, "seed", integer("seed", self.seed, *SEEDS))
        if not isinstance(self.typical, TypicalAcceptance | None):
            raise wrong_type("typical", self.typical, "a TypicalAcceptance or None")
        if self.typical is not None and (self.changes_logits or not self.temperature or self.min_p):
            raise ValueError("typical acceptance has a temperature above 0 and no min_p, penalties or logit_bias")

    def with_seed(self, seed: int) -> Sampling:
        """A copy with another seed, which shares the logit bias: it may be as large as the vocabulary."""
        copied = copy.copy(self)
        object.__setattr__(copied, "seed", integer("seed", seed, *SEEDS))
        return copied

    def generator(self) -> torch.Generator:
        """A new generator with this seed, on the CPU, so that a seed gives the same tokens on every device."""
        return torch.Generator().manual_seed(self.seed)

    @property
    def penalises(self) -> bool:
        """Whether the distribution depends on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        """Whether it always draws the model's best token, as no sampling does."""
        return not self.temperature and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether the best token may be another one than the model's."""
        return self.penalises or bool(self.logit_bias)

    def probabilities(self, logits: Tensor, tokens: Sequence[int] = (), prompt_length: int = 0) -> Tensor:
        """``[V]`` float32 from ``logits`` ``[V]``: bias, penalties, temperature, top-k, top-p, min-p.

        That is transformers' order. All tokens tied with the k-th logit are kept.

        Args:
            tokens: prompt and answer so far, of which ``prompt_length`` are the prompt; read only if it
                :attr:`penalises`.
        """
        scores = self._changed_logits(logits.float(), tokens, prompt_length) if self.changes_logits else logits.float()
        if not self.temperature:
            return torch.zeros_like(scores).index_fill(0, scores.argmax(), 1.0)
        if self.temperature < _COLD:
            scores = scores - scores.max()  # so that no quotient overflows
        scores = scores / max(self.temperature, 1 / _LARGEST)
        if 0 < self.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[-1], -math.inf)
        if self.top_p < 1:
            scores = scores.masked_fill(_outside_nucleus(scores, self.top_p), -math.inf)
        probabilities = scores.softmax(0)
        if self.min_p:
            scores = scores.masked_fill(probabilities < self.min_p * probabilities.max(), -math.inf)
            probabilities = scores.softmax(0)
        return probabilities

    def _changed_logits(self, logits: Tensor, tokens: Sequence[int], prompt_length: int) -> Tensor:
        """``logits`` with bias and penalties."""
        if self.logit_bias:
            index = torch.tensor(list(self.logit_bias), device=logits.device)
            logits = logits.index_add(0, index, logits.new_tensor(list(map(_bounded, self.logit_bias.values()))))
        if self.repetition_penalty != 1:
            # The embedding may have tokens that the lm_head doesn't have.
            index = torch.tensor(
                sorted({t for t in tokens if t < len(logits)}), dtype=torch.int64, device=logits.device
            )
            seen, penalty = logits[index], max(_bounded(self.repetition_penalty), 1 / _LARGEST)
            logits = logits.scatter(0, index, torch.where(seen < 0, seen * penalty, seen / penalty))
        if self.presence_penalty or self.frequency_penalty:
            answer = torch.tensor(tokens[prompt_length:], dtype=torch.int64, device=logits.device)
            counts = torch.bincount(answer, minlength=len(logits))
            logits = logits - _bounded(self.frequency_penalty) * counts
            logits = logits - _bounded(self.presence_penalty) * (counts > 0)
        return logits.clamp(max=_COLD * torch.finfo(logits.dtype).max)


def _outside_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """``[V]``: the least probable tokens, as many as have at most ``1 - top_p`` together. Among equal scores, those of
    lower token ids are outside first.

    On a CPU numpy sorts 32,000 scores in 0.1 ms; ``torch.sort``, which also returns the order, takes 2.3 ms (AVX512).
    """
    host = scores.device.type == "cpu"
    ascending = torch.from_numpy(np.sort(scores.detach().numpy())) if host else scores.sort().values
    below = ascending.softmax(0).cumsum(0) <= 1 - top_p
    count = min(int(below.sum()), len(scores) - 1)
    worst = ascending[count]
    outside = scores < worst
    equal = count - int(outside.sum())  # tokens outside with the score of the worst token inside
    if equal:
        outside[(scores == worst).nonzero()[:equal, 0]] = True
    return outside


def _bounded(value: float) -> float:
    """A parameter that is finite in float32 too."""
    return max(-_LARGEST, min(value, _LARGEST))


def draw(probabilities: Tensor, generator: torch.Generator | None) -> int:
    """Draw a token from ``[V]`` probabilities, on the generator's device; ``None``: torch's default generator.

    A failed draw leaves the generator unchanged.
    """
    if generator is None:
        return int(torch.multinomial(probabilities, 1))
    before = generator.get_state()
    try:
        return int(torch.multinomial(probabilities.to(generator.device), 1, generator=generator))
    except BaseException:
        generator.set_state(before)
        raise
