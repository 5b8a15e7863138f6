"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specmemo_kernels.engine.scores import TokenScore
from specmemo_kernels.integrations.serve.answers import Model


def completion_logprobs(
    model: Model, scores: Sequence[TokenScore], prompt: Sequence[int], prompt_scores: Sequence[TokenScore]
) -> dict[str, Any]:
    """The ``logprobs`` of a completion.

    Args:
        prompt: its tokens if they are echoed, else empty; the first one has no score. prompt_scores: of the others.
    """
    tokens = [*prompt, *(score.token for score in scores)]
    every = [*([None] * min(1, len(prompt))), *prompt_scores, *scores]
    texts = [model.decode([token]) for token in tokens]
    offsets, place = [], 0
    for text in texts:
        offsets.append(place)
        place += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if score is None else score.logprob for score in every],
        "top_logprobs": [None if score is None else _top(model, score) for score in every],
        "text_offset": offsets,
    }


def _top(model: Model, score: TokenScore) -> dict[str, float]:
    """The best tokens by text, and the token itself; of tokens with the same text, the best."""
    found: dict[str, float] = {}
    for token, value in (*score.top, (score.token, score.logprob)):
        found.setdefault(model.decode([token]), value)
    return found


def chat_logprobs(model: Model, scores: Sequence[TokenScore]) -> dict[str, Any]:
    """The ``logprobs`` of a message."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text = model.decode([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    content = [
        entry(score.token, score.logprob) | {"top_logprobs": [entry(*each) for each in score.top]} for score in scores
    ]
    return {"content": content, "refusal": None}
