"""What a drafter is: anything that fills a tree with guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch

from specmemo_kernels.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class DraftInput:
    """What a drafter may look at.

    Attributes:
        tree: the tree to fill; the same for every sequence of the step.
        root_tokens: ``[B]`` int64, the newest emitted token of each sequence.
        hidden: ``[B, hidden_size]``, the target's last hidden state that predicted ``root_tokens`` (after the final
            norm, as the lm_head receives it).
        token_ids: per sequence all its tokens, prompt and output, ``root_tokens`` last.
        slots: a small number per sequence, its name until :meth:`StatefulDrafter.close` is called with it.
    """

    tree: DraftTree
    root_tokens: torch.Tensor
    hidden: torch.Tensor
    token_ids: Sequence[Sequence[int]]
    slots: Sequence[int] = ()


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; a bad proposal costs speed, never correctness.

    Implement these three and hand the object to ``patch(model, heads=...)``. One that has ``prefers_chain = True`` gets
    a chain where nobody asks for a tree.
    """

    @property
    def max_depth(self) -> int:
        """How many tokens ahead it can guess: the deepest tree it fills."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds (counted against the budget)."""

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        """``[B, T]`` int64: a token for each node of ``inputs.tree``; column 0 (the root) is ignored.

        -1, or any token outside the vocabulary, means "no guess" and is never accepted. Guesses on the CPU, which can
        be looked at for free, spare the step the depths at which there are none.
        """


@runtime_checkable
class StatefulDrafter(Drafter, Protocol):
    """A drafter that remembers something about each sequence between steps.

    A sequence is known by its slot from the first ``propose`` that names it until ``close``; what was accepted since
    the last step shows in ``token_ids``.
    """

    def close(self, slot: int) -> None:
        """The sequence of this slot left (finished, aborted or preempted); the next one of that number is another."""


@runtime_checkable
class StaticDrafter(Drafter, Protocol):
    """A drafter whose candidates follow from the hidden states alone, on their device and without asking the host, so
    that drafting can be part of a graph."""

    def candidates(self, hidden: torch.Tensor, depth: int, width: int) -> torch.Tensor:
        """``[B, depth * width]`` int64: ``width`` tokens for each of the next ``depth`` places, best first."""


def fill_tree(root_tokens: torch.Tensor, candidates: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``[B, T]`` int64: the tokens of the nodes of a tree with these :func:`candidate_columns`."""
    return torch.cat([root_tokens[:, None], candidates], dim=1).index_select(1, columns)


# The memory plan counts this many (footprint.KEPT_LAYOUTS).
@lru_cache(maxsize=8)
def candidate_columns(tree: DraftTree, width: int, device: torch.device) -> torch.Tensor:
    """``[T]`` int64: where each node's token stands in ``[root, depth 1's candidates, depth 2's, ...]``, ``width`` for
    each depth."""
    columns = [0] + [1 + (d - 1) * width + r for d, r in zip(tree.depths[1:], tree.ranks[1:], strict=True)]
    return torch.tensor(columns, device=device)


@runtime_checkable
class PagedDrafter(StatefulDrafter, Protocol):
    """A drafter with keys and values of its own, which the memory plan counts by the token."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token of a sequence."""

    @property
    def num_pages(self) -> int:
        """Pages that it may use (:meth:`allocate`); 0 after :meth:`release`."""

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages that it holds right now."""

    def behind(self, slot: int, tokens: Sequence[int]) -> int:
        """How many of a sequence's ``tokens``, the newest one apart, it would have to compute before it can guess."""

    def allocate(self, num_pages: int, page_size: int, max_sequences: int, prefill_chunk: int) -> None:
        """Pages for as many tokens and sequences as the target's pool has; what was known of sequences is forgotten.

        They may be made as late as in the first ``propose`` that needs them.
        Its forward passes may have ``prefill_chunk`` rows at most, or one per sequence.
        """

    def release(self) -> None:
        """Give the pages back."""


@runtime_checkable
class OffloadingDrafter(Drafter, Protocol):
    """A drafter that can leave its device while memory is scarce; it isn't asked then."""

    @property
    def offloadable(self) -> bool:
        """Whether its device has memory of its own, so that leaving it gives something back."""

    def offload(self) -> None:
        """Move to host memory, if it isn't there."""

    def restore(self) -> None:
        """Move back, if it isn't there; if memory doesn't suffice, all of it stays on the host."""
