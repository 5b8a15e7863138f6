"""Text of tokens as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Prompt tokens that are decoded together with the first new ones: some tokenizers write the space before a token only
#: where another token precedes it.
_CONTEXT = 6
#: What decoders write for bytes that aren't a whole character yet.
_INCOMPLETE = "\ufffd"
#: Most tokens whose text is held back because it ends inside a character: each of them decodes all of them. Text of
#: whole characters has a boundary in every few tokens.
_LONGEST = 64


class TextStream:
    """Decodes tokens one by one.

    Text that ends inside a character, or that may be the beginning of a stop string, is held back.

    Args:
        prompt: tokens before the first one.
        stop: strings that end the text, none of them empty; they aren't part of it.
        special: special tokens are part of the text.

    Attributes:
        stopped: a stop string was found.
        tokens: number of tokens taken, the one that completed the stop string included.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = (), *, special: bool = False
    ) -> None:
        self._tokenizer, self._stop, self._special = tokenizer, list(stop), special
        self._ids = list(prompt[-_CONTEXT:])
        # The ids from `_from` to `_to` are decoded as the beginning of what follows them.
        self._from, self._to = 0, len(self._ids)
        self._text, self._sent = "", 0
        self.stopped, self.tokens = False, 0

    def feed(self, tokens: Sequence[int]) -> str:
        """Take tokens until a stop string; returns the text that is certain now."""
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            self._ids.append(token)
            self._extend(_INCOMPLETE)
        return self._take(self._held())

    def end(self) -> str:
        """The rest of the text."""
        if not self.stopped:
            self._extend("")
        return self._take(0)

    def _extend(self, incomplete: str) -> None:
        """Decode what isn't in the text yet, unless it ends with ``incomplete``."""
        known, text = self._decode(self._to), self._decode(len(self._ids))
        unknown = len(text) <= len(known) or (incomplete and text.endswith(incomplete))
        if unknown and len(self._ids) - self._to < _LONGEST:
            return
        self._text += text[len(known) :]
        self._from, self._to = self._to, len(self._ids)
        places = [place for stop in self._stop if (place := self._text.find(stop, self._sent)) >= 0]
        if places:
            self._text, self.stopped = self._text[: min(places)], True

    def _decode(self, end: int) -> str:
        return text_of(self._tokenizer, self._ids[self._from : end], special=self._special)

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        if self.stopped:
            return 0
        unsent = self._text[self._sent :]
        return max((_overlap(unsent, stop) for stop in self._stop), default=0)

    def _take(self, held: int) -> str:
        end = max(self._sent, len(self._text) - held)
        text, self._sent = self._text[self._sent : end], end
        return text


def text_of(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    """The text of tokens, with all of its characters: a cleaned up text isn't its pieces' texts in a row."""
    text = tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return str(text)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` and isn't all of it."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((k for k in lengths if stop.startswith(text[-k:])), 0)
