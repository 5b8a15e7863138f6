"""Prompt lookup: what followed the last tokens where they stood before; no weights, no memory of its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from specmemo_kernels.arguments import integer
from specmemo_kernels.drafting.base import DraftInput


class PromptLookupDrafter:
    """Looks for the longest run of newest tokens that occurs earlier, and guesses that what followed comes again.

    On a tree with several children at the root, rank r is the r-th latest such place whose next token is another one;
    below it only the first ranks are filled.

    Args:
        max_depth: most tokens guessed.
        max_ngram, min_ngram: lengths of the runs looked for, the longest first.
    """

    nbytes = 0
    prefers_chain = True

    def __init__(self, max_depth: int = 10, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.max_depth = integer("prompt lookup: max_depth", max_depth)
        self.max_ngram = integer("prompt lookup: max_ngram", max_ngram)
        self.min_ngram = integer("prompt lookup: min_ngram", min_ngram, 1, self.max_ngram, " (max_ngram)")

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        tree = inputs.tree
        guesses = torch.full((len(inputs.token_ids), tree.size), -1)  # on the CPU: depths without guesses are dropped
        if tree.max_depth == 0:
            return guesses
        ranks = 1 + max(path[0] for path in tree.paths)
        for row, tokens in enumerate(inputs.token_ids):
            found = self.continuations(tokens, tree.max_depth, ranks)
            for node, path in enumerate(tree.paths, start=1):
                if path[0] < len(found) and not any(path[1:]):
                    guesses[row, node] = found[path[0]][len(path) - 1]
        return guesses

    def continuations(self, tokens: Sequence[int], depth: int, count: int) -> list[list[int]]:
        """Up to ``count`` rows of ``depth`` tokens that may follow ``tokens``, no two with the same first token."""
        text = array("q", tokens)
        data, width = text.tobytes(), text.itemsize
        found: dict[int, list[int]] = {}
        for size in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            pattern = data[len(data) - size * width :]
            end = len(data) - width  # a place before the newest one
            while len(found) < count and (place := data.rfind(pattern, 0, end)) >= 0:
                end = place + size * width - 1
                if place % width == 0:  # else it begins inside of a token
                    row = _follow(text, place // width + size, depth)
                    found.setdefault(row[0], row)
        return list(found.values())


def _follow(text: array[int], start: int, depth: int) -> list[int]:
    """``depth`` tokens from ``start`` on; behind the end of the text comes what was copied itself."""
    period = len(text) - start
    return [text[start + i % period] for i in range(depth)]
