"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from specmemo_kernels.engine.scores import TokenScore
from specmemo_kernels.integrations.serve.answers import Model


def completion_logprobs(
    model: Model, scores: Sequence[TokenScore], prompt: Sequence[int], prompt_text: str,
    prompt_scores: Sequence[TokenScore], start: int,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """The ``logprobs`` of a completion, or of a piece of it that begins at offset ``start``; and the offset of its end.

    Args:
        prompt: its tokens if they are echoed, else empty; the first one has no score. prompt_scores: of the others.
        prompt_text: what is echoed.
    """
    tokens = [*prompt, *(score.token for score in scores)]
    every = [*([None] * min(1, len(prompt))), *prompt_scores, *scores]
    decode = _decoder(model)
    texts = _prompt_texts(model, prompt, prompt_text, decode)
    texts += [decode(score.token) for score in scores]
    offsets, end = _offsets([_bytes(model, *item) for item in zip(tokens, texts, strict=True)], start)
    logprobs = {
        "tokens": texts,
        "token_logprobs": [None if score is None else _finite(score.logprob) for score in every],
        "top_logprobs": [None if score is None else _top(decode, score) for score in every],
        "text_offset": offsets,
    }
    return logprobs, end


def _offsets(pieces: Sequence[bytes], start: int) -> tuple[list[int], int]:
    """The character in which each piece of UTF-8 begins, if the first one is at offset ``start``; and the end's.

    Bytes of the form ``0b10xxxxxx`` belong to a character that has begun.
    """
    begun = [sum(byte & 0xC0 != 0x80 for byte in piece) for piece in pieces]
    *before, end = accumulate(begun, initial=start)
    inside = [bool(piece) and piece[0] & 0xC0 == 0x80 for piece in pieces]
    return [max(0, count - within) for count, within in zip(before, inside, strict=True)], end


def _prompt_texts(model: Model, prompt: Sequence[int], text: str, decode: Callable[[int], str]) -> list[str]:
    """The texts of a prompt's tokens; of special ones that its text has, as tokenizers add others at the beginning."""
    texts = []
    for token in reversed(prompt):
        if not (piece := decode(token)) and (name := model.decode([token], special=True)) in text:
            text, piece = text[: text.rindex(name)], name
        texts.append(piece)
    return texts[::-1]


def _decoder(model: Model) -> Callable[[int], str]:
    """The text of one token, decoded once: the scores of a prompt list some tokens again and again."""
    return cache(lambda token: model.decode([token]))


def _top(decode: Callable[[int], str], score: TokenScore) -> dict[str, float]:
    """The best tokens by text, and the token itself; of tokens with the same text, the best."""
    found: dict[str, float] = {}
    for token, value in (*score.top, (score.token, score.logprob)):
        found.setdefault(decode(token), _finite(value))
    return found


def _finite(logprob: float) -> float:
    """For one that JSON doesn't have, vLLM's -9999."""
    return logprob if math.isfinite(logprob) else -9999.0


def chat_logprobs(model: Model, scores: Sequence[TokenScore]) -> dict[str, Any]:
    """The ``logprobs`` of a message."""

    decode = _decoder(model)

    def entry(token: int, value: float) -> dict[str, Any]:
        text = decode(token)
        return {"token": text, "logprob": _finite(value), "bytes": list(_bytes(model, token, text))}

    content = [
        entry(score.token, score.logprob) | {"top_logprobs": [entry(*each) for each in score.top]} for score in scores
    ]
    return {"content": content, "refusal": None}


#: Bytes by their characters in the vocabularies of byte-level BPE.
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def _bytes(model: Model, token: int, text: str) -> bytes:
    """A token's bytes, from its text; of a part of a character those that byte-level BPE or SentencePiece's byte
    fallback has.
    """
    if "\ufffd" in text:
        piece = str(model.tokenizer.convert_ids_to_tokens(token))
        if match := _BYTE_FALLBACK.fullmatch(piece):
            return bytes.fromhex(match[1])
        if all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
    return text.encode()
