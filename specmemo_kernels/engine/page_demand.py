"""The pages that sequences need: for the next step, and to their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specmemo_kernels.cache.paged_kv import pages_for
from specmemo_kernels.engine.sequence import SequenceState

#: New tokens of a sequence for which pages are allocated at once where no budget bounds the pages. A sequence that
#: reaches the end of its pages gets pages for twice the tokens that it has emitted.
FIRST_TOKENS = 4096


def slots_to_end(sequence: SequenceState, slots_ahead: int, growing: bool) -> int:
    """Most KV slots of a sequence, with ``slots_ahead`` for candidates behind its last token.

    ``growing``: pages grow with the sequence; count only the part allocated ahead (:data:`FIRST_TOKENS`).
    """
    tokens = sequence.max_new_tokens
    if growing:
        tokens = min(tokens, max(FIRST_TOKENS, 2 * sequence.emitted))
    return len(sequence.prompt) + tokens + slots_ahead


@dataclass(frozen=True)
class PageDemand:
    """Pages needed by sequences.

    Attributes:
        page_size: tokens per page.
        slots_ahead: slots behind a sequence's last token. max_depth: slots of one step among them.
        max_pages: most pages of the pool.
        growing: pages are allocated as they are needed (:func:`slots_to_end`); else for the whole length.
    """

    page_size: int
    slots_ahead: int
    max_depth: int
    max_pages: int
    growing: bool

    def to_end(self, sequence: SequenceState) -> int:
        """Pages for a sequence's whole length, or with ``growing`` for the part allocated ahead."""
        return pages_for(slots_to_end(sequence, self.slots_ahead, self.growing), self.page_size)

    def next_step(self, sequence: SequenceState) -> int:
        """Pages for a sequence's context and one step."""
        return pages_for(len(sequence.context) + 1 + self.max_depth, self.page_size)

    def of_pool(self, sequences: Sequence[SequenceState], num_pages: int, spare: bool) -> int:
        """Pages that a pool of ``num_pages`` should have for ``sequences``, oldest first.

        With ``spare``: never fewer than ``num_pages``; ``max_pages``, or with ``growing`` only :meth:`to_end` of all
        sequences. Else to the end of the oldest sequence, and one step of the others.
        """
        if spare or not sequences:
            pages = min(self.max_pages, sum(map(self.to_end, sequences))) if self.growing else self.max_pages
            return max(pages, num_pages)
        return min(self.max_pages, max(self.to_end(sequences[0]), sum(map(self.next_step, sequences))))
