"""Log-probabilities of tokens, for requests that ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class TokenScore:
    """A token's natural log-probability by the model's own logits, before temperature, penalties and biases.

    ``top``: the most probable tokens with theirs, as many as requested, the best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_score(logits: Tensor, token: int, top: int) -> TokenScore:
    """The score of ``token`` by a row of ``logits`` ``[V]``, computed in float32."""
    log_p = logits.float().log_softmax(0)
    values, tokens = log_p.topk(min(top, len(log_p)))
    return TokenScore(token, float(log_p[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
