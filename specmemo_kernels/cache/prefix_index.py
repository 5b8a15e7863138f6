"""Which pages hold the keys and values of which beginnings of texts, so that the next text needn't compute them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b


class PrefixIndex:
    """Labels of pages: the tokens in a page, and by a digest all tokens before it.

    Keys and values depend on a token, its position and the tokens before it, so equal beginnings have equal pages. A
    labelled page is never written to. Full pages can be read by any number of sequences. The last, partly filled page
    of a text can be taken over by the one that continues it, and loses its label then.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._after: dict[bytes, dict[int, tuple[int, ...]]] = {}
        self._home: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._home

    def pages(self) -> Iterable[int]:
        """All labelled ones."""
        return self._home.keys()

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The pages that hold the longest known beginning of ``tokens``, and how many of ``tokens`` they spare.

        At least the last token is left to be computed. A full page counts if it needn't be written to for that. A
        partly filled one, always the last of the pages, counts if ``tokens`` begins with all that it holds.
        """
        size, last = self.page_size, len(tokens) - 1
        found: list[int] = []
        before = b""
        while True:
            at = len(found) * size
            rest = tuple(tokens[at : at + size])
            known = self._after.get(before, {})
            spared, page = max(
                ((len(held), page) for page, held in known.items() if held == rest[: len(held)]), default=(0, -1)
            )
            if spared < size:
                known_tokens = min(at + spared, last)
                return ([*found, page], known_tokens) if known_tokens > at else (found, at)
            if at + size > last:
                return found, at
            found.append(page)
            before = _digest(before, rest)

    def label(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Say that ``pages`` hold ``tokens``; a page whose content another page has already gets no label."""
        before, size = b"", self.page_size
        for at, page in zip(range(0, len(tokens), size), pages, strict=False):
            held = tuple(tokens[at : at + size])
            known = self._after.get(before, {})
            if page not in self._home and not any(other[: len(held)] == held for other in known.values()):
                self._after.setdefault(before, {})[page] = held
                self._home[page] = before
            before = _digest(before, held)

    def drop(self, page: int) -> None:
        """Take a page's label away, if it has one."""
        before = self._home.pop(page, None)
        if before is not None:
            del self._after[before][page]
            if not self._after[before]:
                del self._after[before]

    def moved(self, place: dict[int, int]) -> PrefixIndex:
        """The same labels on the pages ``place`` names, those of other pages left out."""
        twin = PrefixIndex(self.page_size)
        for page, before in self._home.items():
            if page in place:
                twin._home[place[page]] = before
                twin._after.setdefault(before, {})[place[page]] = self._after[before][page]
        return twin


def _digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """16 bytes that stand for all tokens up to the end of a full page (of a chain of pages)."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()
