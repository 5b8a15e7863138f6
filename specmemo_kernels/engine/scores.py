"""Log-probabilities of tokens, for requests that ask for them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token's natural log-probability by the model's own logits, before temperature, penalties and biases."""

    token: int
    logprob: float
    #: Of :attr:`top`, an int32 and a float32 each: prompts have thousands of scores.
    packed: bytes = field(default=b"", repr=False)

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The most probable tokens with theirs, as many as requested, the best first."""
        return tuple(struct.iter_unpack("=if", self.packed))


def token_score(logits: Tensor, token: int, top: int) -> TokenScore:
    """The score of ``token`` by a row of ``logits`` ``[V]``, computed in float32."""
    log_p = logits.float().log_softmax(0)
    values, tokens = log_p.topk(min(top, len(log_p)))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return TokenScore(token, float(log_p[token]), b"".join(struct.pack("=if", *pair) for pair in pairs))
