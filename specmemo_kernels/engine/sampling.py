"""Sampling: a request's parameters, the distribution they give for a row of logits, and draws from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from specmemo_kernels.arguments import integer, positive_number, wrong_type

Tensor = torch.Tensor

#: Smallest and largest seed of a torch generator.
SEEDS = (-(1 << 63), (1 << 64) - 1)


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
        temperature: divides the logits, above 0.
        top_k: only this many best tokens; 0 for all.
        top_p: only the best tokens that together have at least this probability.
        seed: of the request's own generator. Tokens depend only on it and on the model, not on the drafter, the tree or
            the batch.
        typical: lossy acceptance by Medusa's rule.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    typical: TypicalAcceptance | None = None

    def __post_init__(self) -> None:
        positive_number("temperature", self.temperature, hint=" (leave sampling out for greedy decoding)")
        positive_number("top_p", self.top_p, 1)
        object.__setattr__(self, "top_k", integer("top_k", self.top_k, 0, or_else=" (0: all tokens)"))
        object.__setattr__(self, "seed", integer("seed", self.seed, *SEEDS))
        if not isinstance(self.typical, TypicalAcceptance | None):
            raise wrong_type("typical", self.typical, "a TypicalAcceptance or None")

    def with_seed(self, seed: int) -> Sampling:
        """A copy with another seed."""
        return replace(self, seed=seed)

    def generator(self) -> torch.Generator:
        """A new generator with this seed, on the CPU, so that a seed gives the same tokens on every device."""
        return torch.Generator().manual_seed(self.seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """``[V]`` float32 from ``logits`` ``[V]``: temperature, then top-k, then top-p, as transformers orders them.

        All tokens tied with the k-th logit are kept.
        """
        scores = logits.float() / self.temperature
        if 0 < self.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[-1], -math.inf)
        if self.top_p < 1:
            ascending, order = scores.sort()
            below = ascending.softmax(0).cumsum(0) <= 1 - self.top_p
            below[-1] = False
            scores = scores.masked_fill(torch.zeros_like(below).scatter(0, order, below), -math.inf)
        return scores.softmax(0)


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
