"""The pages that sequences need: for the next step, and to their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specmemo_kernels.engine.sequence import SequenceState

#: New tokens of a sequence for which pages are allocated at once where no budget bounds the pages. A sequence that
#: reaches the end of its pages gets pages for twice the tokens that it has emitted.
FIRST_TOKENS = 4096


def first_tokens(max_new_tokens: int, emitted: int = 0) -> int:
    """New tokens for which a sequence without a budget has pages, after it emitted ``emitted``."""
    return min(max_new_tokens, max(FIRST_TOKENS, 2 * emitted))


@dataclass(frozen=True)
class PageDemand:
    """Pages needed by sequences.

    Attributes:
        page_size: tokens per page.
        slots_ahead: slots behind a sequence's last token. max_depth: those of one step.
        max_pages: most pages of the pool.
        growing: pages are allocated as they are needed (:func:`first_tokens`); else for the whole length.
    """

    page_size: int
    slots_ahead: int
    max_depth: int
    max_pages: int
    growing: bool

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def slots(self, prompt: int, new_tokens: int) -> int:
        """Most slots of a sequence, candidates behind its last token included."""
        return prompt + new_tokens + self.slots_ahead

    def to_end(self, sequence: SequenceState) -> int:
        """Most pages of a sequence, as far as they are allocated ahead."""
        tokens = sequence.max_new_tokens
        if self.growing:
            tokens = first_tokens(tokens, sequence.emitted)
        return self.pages_for(self.slots(len(sequence.prompt), tokens))

    def next_step(self, sequence: SequenceState) -> int:
        """Pages for a sequence's context and one step."""
        return self.pages_for(len(sequence.context) + 1 + self.max_depth)

    def of_pool(self, sequences: Sequence[SequenceState], num_pages: int, spare: bool) -> int:
        """Pages that a pool of ``num_pages`` should have for ``sequences``, oldest first.

        With ``spare``: to the ends of all sequences, at least ``num_pages``. Else to the end of the oldest one,
        and for one step of the others.
        """
        if spare or not sequences:
            pages = min(self.max_pages, sum(map(self.to_end, sequences))) if self.growing else self.max_pages
            return max(pages, num_pages)
        return min(self.max_pages, max(self.to_end(sequences[0]), sum(map(self.next_step, sequences))))
