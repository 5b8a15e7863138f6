"""The drafter protocols, filling a tree with candidates, and moving a drafter off its device and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.forward.batch import CACHED_LAYOUTS, DraftedTrees, TreeBatch
from specmemo_kernels.planning.feature_drafter_spec import FeatureDrafterSpec
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import Trees

#: Values of ``patch``'s ``heads`` for drafters without files of their own.
PROMPT_LOOKUP, MTP = "prompt-lookup", "mtp"


@dataclass(frozen=True)
class DraftInput:
    """Inputs of :meth:`Drafter.propose`.

    Attributes:
        tree: the tree to fill, the same for every sequence of the step.
        root_tokens: ``[B]`` int64, the newest emitted token of each sequence.
        hidden: ``[B, hidden_size]``, the target's last hidden state that predicted ``root_tokens`` (after the final
            norm, as the lm_head receives it).
        token_ids: prompt and output tokens of each sequence, ``root_tokens`` last.
        slots: identifies each sequence until :meth:`StatefulDrafter.close`, by a small number.
    """

    tree: DraftTree
    root_tokens: torch.Tensor
    hidden: torch.Tensor
    token_ids: Sequence[Sequence[int]]
    slots: Sequence[int] = ()


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; a bad proposal costs speed, never correctness.

    Implement these three members and pass the object to ``patch(model, heads=...)``. With ``prefers_chain = True`` the
    default tree is a chain.
    """

    @property
    def max_depth(self) -> int:
        """Maximum depth of a tree."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory, counted against the budget."""

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        """Propose a token for each node of ``inputs.tree``: ``[B, T]`` int64; column 0 (the root) is ignored.

        -1, or any token outside the vocabulary, means "no guess" and is never accepted. If the result is on the CPU,
        which needs no synchronisation, depths without a guess are dropped from the step.
        """


@runtime_checkable
class StatefulDrafter(Drafter, Protocol):
    """A drafter with state per sequence, identified by its slot from the first ``propose`` until ``close``.

    ``token_ids`` has the tokens accepted since the last step.
    """

    def close(self, slot: int) -> None:
        """Drop a sequence that finished, was aborted or preempted; another sequence may reuse the slot."""


@runtime_checkable
class StaticDrafter(Drafter, Protocol):
    """A drafter that computes candidates from hidden states only, without host reads: it runs in captured steps."""

    def candidates(self, hidden: torch.Tensor, depth: int, width: int) -> torch.Tensor:
        """``[B, depth * width]`` int64: ``width`` tokens for each of the next ``depth`` positions, best first."""


@dataclass(frozen=True)
class DraftRows:
    """Inputs of :meth:`FeatureDrafter.draft`: B sequences with their tokens in pages and a root each.

    Attributes:
        pool: the target's pages, which the drafter's layers share.
        roots: ``[B]`` int64, the newest tokens. states: ``[B, state_size]``, as :meth:`FeatureDrafter.advance` returns.
        seq_lens: ``[B]`` int32, tokens in pages. block_table: ``[B, max_pages]`` int32.
        max_seq_len: upper bound of ``seq_lens``.
    """

    pool: PagedKVPool
    roots: torch.Tensor
    states: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_seq_len: int


#: In place of an index in :attr:`FeatureDrafter.feature_ids`: the states behind the final norm.
POST_NORM = -1


@runtime_checkable
class FeatureDrafter(Protocol):
    """A drafter that reads the target's hidden states ("features") of every token.

    It keeps a state vector per sequence, and the keys and values of its own layers in the target's pages. After every
    pass it gets the features of prompt tokens and accepted nodes; what it computes while drafting is dropped. All of it
    runs on the device, with fixed sizes, so that a graph can capture it.
    """

    @property
    def max_depth(self) -> int:
        """Maximum depth of a tree."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""

    @property
    def coded_nbytes(self) -> int | None:
        """Bytes with matrices in 4 bits; ``None``: they are already, or can't be."""

    @property
    def workspace(self) -> int:
        """Bytes that the operators keep between calls for its products."""

    @property
    def layers(self) -> tuple[LayerKV, ...]:
        """Keys and values of its layers, which follow the target's layers in the pool."""

    @property
    def feature_ids(self) -> tuple[int, ...]:
        """The hidden states that are its features, concatenated: i is the input of the target's layer i, the number of
        layers is the last layer's output, :data:`POST_NORM` is that behind the final norm.
        """

    @property
    def num_qo_heads(self) -> int:
        """Query heads of its layers."""

    @property
    def state_size(self) -> int:
        """Elements of a sequence's state."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens that it can draft."""

    @property
    def beam(self) -> int:
        """Nodes per depth that it expands in dynamic trees."""

    @property
    def spec(self) -> FeatureDrafterSpec:
        """Its sizes for predictions."""

    def advance(self, batch: TreeBatch, features: torch.Tensor, keep: torch.Tensor, pool: PagedKVPool) -> torch.Tensor:
        """Compute the pairs of causal chunks, and write their keys and values to pages.

        Args:
            batch: chunks; ``tokens[r]`` is the token behind row r's position, ``positions[r]``.
            features: ``[N, F]`` of the rows, from the target.
            keep: ``[K]`` int64, rows whose states are needed.

        Returns:
            ``[K, state_size]``.
        """

    def draft(self, rows: DraftRows, tree: Trees) -> DraftedTrees:
        """Fill a tree for each sequence."""


AnyDrafter = Drafter | FeatureDrafter


def drafts_on_device(drafter: AnyDrafter) -> bool:
    """Whether a drafter runs without the host, inside a captured step; else its trees are filled before the step."""
    return isinstance(drafter, StaticDrafter | FeatureDrafter)


def fill_tree(root_tokens: torch.Tensor, candidates: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``[B, T]`` int64: the tokens of a tree's nodes, by its :func:`candidate_columns`."""
    return torch.cat([root_tokens[:, None], candidates], dim=1).index_select(1, columns)


@lru_cache(maxsize=CACHED_LAYOUTS)
def candidate_columns(tree: DraftTree, width: int, device: torch.device) -> torch.Tensor:
    """``[T]`` int64: the column of each node's token in ``[root, *candidates]``, ``width`` candidates per depth."""
    columns = [0] + [1 + (d - 1) * width + r for d, r in zip(tree.depths[1:], tree.ranks[1:], strict=True)]
    return torch.tensor(columns, device=device)


@runtime_checkable
class PagedDrafter(StatefulDrafter, Protocol):
    """A drafter with its own KV cache, which the memory plan counts per token."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token of a sequence."""

    @property
    def num_pages(self) -> int:
        """Pages granted by :meth:`allocate`; 0 after :meth:`release`."""

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages that are allocated now."""

    def behind(self, slot: int, tokens: Sequence[int]) -> int:
        """Tokens of a sequence, without the newest token, that the drafter must compute before it drafts."""

    def allocate(self, num_pages: int, page_size: int, max_sequences: int, prefill_chunk: int) -> None:
        """Grant as many pages and sequences as the target's pool has, and drop all sequences.

        The drafter may allocate the pages in the first ``propose``. Its forward passes may have at most
        ``prefill_chunk`` rows, or one per sequence.
        """

    def release(self) -> None:
        """Free the pages."""


@runtime_checkable
class OffloadingDrafter(Drafter, Protocol):
    """A drafter that can move to host memory when memory is low; it isn't called while offloaded."""

    @property
    def offloadable(self) -> bool:
        """Whether offloading frees memory: false on a CPU."""

    def offload(self) -> None:
        """Move to host memory; no effect if already there."""

    def restore(self) -> None:
        """Move back to the device; if memory doesn't suffice, everything stays on the host."""


def prefers_chain(drafter: AnyDrafter) -> bool:
    """Whether a drafter's default tree is a chain (:class:`Drafter`)."""
    return getattr(drafter, "prefers_chain", False)


def can_offload(drafter: AnyDrafter) -> bool:
    """Whether a drafter can free memory while it isn't in use."""
    return isinstance(drafter, PagedDrafter) or (isinstance(drafter, OffloadingDrafter) and drafter.offloadable)


class DrafterResidency:
    """Moves ``drafter`` on and off its device; on it, it has as many pages as the target's ``pool``."""

    def __init__(self, drafter: AnyDrafter, pool: PagedKVPool) -> None:
        self.drafter, self.pool = drafter, pool

    def ensure(self, on_device: bool, prefill_chunk: int) -> None:
        """Restore or offload the drafter; after an error the next call completes the move."""
        if isinstance(self.drafter, OffloadingDrafter):
            if on_device:
                self.drafter.restore()
            else:
                self.drafter.offload()
        pages = self.pool.num_pages if on_device else 0
        if not isinstance(self.drafter, PagedDrafter) or pages == self.drafter.num_pages:
            return
        self.drafter.release()
        if pages:
            self.drafter.allocate(pages, self.pool.page_size, self.pool.block_table.shape[0], prefill_chunk)
