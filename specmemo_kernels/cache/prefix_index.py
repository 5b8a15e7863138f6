"""Prefix index: finds the pages that hold the keys and values of a prompt's beginning."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

LABEL_BYTES = 8  # of a token; a drafter's pages have pairs of tokens


class PrefixIndex:
    """Labels of pages: the tokens in a page, and a digest of all tokens before it.

    Keys and values depend on a token, its position and the tokens before it, so equal prefixes have equal pages. A
    labelled page is never written to. Any number of sequences can read full pages. The last, partly filled page goes to
    the first sequence that continues it, and loses its label. Labels are packed: there may be as many as pages.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._by_prefix: dict[bytes, tuple[int, ...]] = {}  # digest -> pages
        self._labels: dict[int, tuple[bytes, bytes]] = {}  # page -> digest, tokens

    def __contains__(self, page: int) -> bool:
        return page in self._labels

    def pages(self) -> Iterable[int]:
        """All labelled pages."""
        return self._labels.keys()

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
            rest = _packed(tokens[start : start + size])
            known = [(self._labels[page][1], page) for page in self._by_prefix.get(prefix, ())]
            matching = [(len(label) // LABEL_BYTES, page) for label, page in known if rest.startswith(label)]
            length, page = max(matching, default=(0, -1))
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
            label, others = _packed(tokens[start : start + size]), self._by_prefix.get(prefix, ())
            if page not in self._labels and not any(self._labels[other][1].startswith(label) for other in others):
                self._add(page, prefix, label)
            prefix = _digest(prefix, label)

    def _add(self, page: int, prefix: bytes, label: bytes) -> None:
        self._labels[page] = prefix, label
        self._by_prefix[prefix] = (*self._by_prefix.get(prefix, ()), page)

    def drop(self, page: int) -> None:
        """Remove a page's label, if it has one."""
        prefix, _ = self._labels.pop(page, (None, None))
        if prefix is not None:
            self._by_prefix[prefix] = tuple(other for other in self._by_prefix[prefix] if other != page)
            if not self._by_prefix[prefix]:
                del self._by_prefix[prefix]

    def moved(self, new_pages: dict[int, int]) -> PrefixIndex:
        """A copy for the pages that are keys of ``new_pages``, under their new numbers."""
        index = PrefixIndex(self.page_size)
        for page, (prefix, label) in self._labels.items():
            if page in new_pages:
                index._add(new_pages[page], prefix, label)
        return index


def _packed(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def _digest(prefix: bytes, label: bytes) -> bytes:
    """Chained digest of all tokens up to the end of a full page, 16 bytes."""
    return blake2b(prefix + label, digest_size=16).digest()
