"""Prefix index: finds the pages that hold the keys and values of a prompt's beginning."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b


class PrefixIndex:
    """Labels of pages: the tokens in a page, and a digest of all tokens before it.

    Keys and values depend on a token, its position and the tokens before it, so equal prefixes have equal pages. A
    labelled page is never written to. Any number of sequences can read full pages. The last, partly filled page goes to
    the first sequence that continues it, and loses its label.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._by_prefix: dict[bytes, dict[int, tuple[int, ...]]] = {}  # digest -> page -> tokens
        self._prefix_of: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._prefix_of

    def pages(self) -> Iterable[int]:
        """All labelled pages."""
        return self._prefix_of.keys()

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Pages of the longest cached prefix of ``tokens``, and its length.

        The last token must be computed, which writes to its page, so a full page with the last token doesn't match. A
        partly filled page, always the last, matches if ``tokens`` has all its tokens.
        """
        size, last = self.page_size, len(tokens) - 1
        matches: list[int] = []
        prefix = b""
        while True:
            start = len(matches) * size
            rest = tuple(tokens[start : start + size])
            labels = self._by_prefix.get(prefix, {})
            length, page = max(
                ((len(label), page) for page, label in labels.items() if label == rest[: len(label)]), default=(0, -1)
            )
            if length < size:
                end = min(start + length, last)
                return ([*matches, page], end) if end > start else (matches, start)
            if start + size > last:
                return matches, start
            matches.append(page)
            prefix = _digest(prefix, rest)

    def label(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Label ``pages`` with ``tokens``, except pages that duplicate a labelled page."""
        prefix, size = b"", self.page_size
        for start, page in zip(range(0, len(tokens), size), pages, strict=False):
            label = tuple(tokens[start : start + size])
            labels = self._by_prefix.get(prefix, {})
            if page not in self._prefix_of and not any(other[: len(label)] == label for other in labels.values()):
                self._by_prefix.setdefault(prefix, {})[page] = label
                self._prefix_of[page] = prefix
            prefix = _digest(prefix, label)

    def drop(self, page: int) -> None:
        """Remove a page's label, if it has one."""
        prefix = self._prefix_of.pop(page, None)
        if prefix is not None:
            del self._by_prefix[prefix][page]
            if not self._by_prefix[prefix]:
                del self._by_prefix[prefix]

    def moved(self, new_pages: dict[int, int]) -> PrefixIndex:
        """A copy for the pages that are keys of ``new_pages``, under their new numbers."""
        index = PrefixIndex(self.page_size)
        for page, prefix in self._prefix_of.items():
            if page in new_pages:
                index._prefix_of[new_pages[page]] = prefix
                index._by_prefix.setdefault(prefix, {})[new_pages[page]] = self._by_prefix[prefix][page]
        return index


def _digest(prefix: bytes, tokens: Sequence[int]) -> bytes:
    """Chained digest of all tokens up to the end of a full page, 16 bytes."""
    return blake2b(prefix + array("q", tokens).tobytes(), digest_size=16).digest()
