"""Prompt lookup: drafts from earlier occurrences of the newest tokens, without weights or device memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from specmemo_kernels.arguments import integer
from specmemo_kernels.drafting.base import DraftInput


class PromptLookupDrafter:
    """Guesses the continuation of the longest n-gram of newest tokens that occurs earlier in the text.

    If the root has several children, rank r gets the r-th latest occurrence with a new next token. Below the first
    level only rank 0 is filled.

    Args:
        max_depth: maximum number of guessed tokens.
        max_ngram, min_ngram: lengths of the n-grams, tried longest first.
    """

    nbytes = 0
    prefers_chain = True

    def __init__(self, max_depth: int = 10, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.max_depth = integer("prompt lookup: max_depth", max_depth)
        self.max_ngram = integer("prompt lookup: max_ngram", max_ngram)
        self.min_ngram = integer("prompt lookup: min_ngram", min_ngram, 1, self.max_ngram, " (max_ngram)")

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        tree = inputs.tree
        # On the CPU: depths without guesses are dropped.
        guesses = torch.full((len(inputs.token_ids), tree.size), -1, device="cpu")
        if tree.max_depth == 0:
            return guesses
        ranks = 1 + max(path[0] for path in tree.paths)
        for row, tokens in enumerate(inputs.token_ids):
            rows = self.continuations(tokens, tree.max_depth, ranks)
            for node, path in enumerate(tree.paths, start=1):
                if path[0] < len(rows) and not any(path[1:]):
                    guesses[row, node] = rows[path[0]][len(path) - 1]
        return guesses

    def continuations(self, tokens: Sequence[int], depth: int, count: int) -> list[list[int]]:
        """Up to ``count`` rows of ``depth`` tokens that may follow ``tokens``, with different first tokens."""
        text = array("q", tokens)
        data, width = text.tobytes(), text.itemsize
        rows: dict[int, list[int]] = {}
        for size in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            pattern = data[len(data) - size * width :]
            end = len(data) - width  # an occurrence before the newest one
            while len(rows) < count and (offset := data.rfind(pattern, 0, end)) >= 0:
                end = offset + size * width - 1
                if offset % width == 0:  # else the match begins inside a token's bytes
                    row = _follow(text, offset // width + size, depth)
                    rows.setdefault(row[0], row)
        return list(rows.values())


def _follow(text: array[int], start: int, depth: int) -> list[int]:
    """``depth`` tokens from ``start`` on, repeated at the end of the text."""
    period = len(text) - start
    return [text[start + i % period] for i in range(depth)]
