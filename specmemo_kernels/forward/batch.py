"""A pass's metadata: all sequences' nodes packed in one ragged row, and the tensors that the operators read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from specmemo_kernels.tree.draft_tree import WORD, DraftTree
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor
#: Entries in the caches of tree layouts and candidate columns; the memory plan counts them.
CACHED_LAYOUTS = 8


@dataclass(frozen=True)
class TreeBatch:
    """The nodes of one forward pass: B sequences, N nodes.

    The first ``num_trees`` sequences verify trees and hold the first ``num_tree_nodes`` nodes; the others are prompt
    chunks. ``tokens`` and ``positions`` are ``[N]`` int64; ``parents`` ``[num_tree_nodes]`` int32 (``None`` without
    trees); ``tree_mask`` (``None`` without trees; zeros for chunks), ``qo_indptr``, ``seq_lens``, ``block_table`` as in
    :mod:`specmemo_kernels.ops`. ``max_*`` are host-side bounds, so that no launch needs a synchronisation. ``tree``:
    the tree, or the trees' size, of all sequences, in a batch without chunks. ``min_qo_len``: rows of each sequence,
    if they are as many in all batches of these sizes; ``None`` in passes with prompts.
    """

    tokens: Tensor
    positions: Tensor
    parents: Tensor | None
    tree_mask: Tensor | None
    qo_indptr: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_qo_len: int
    max_seq_len: int
    max_depth: int
    num_trees: int
    num_tree_nodes: int
    tree: Trees | None = None
    min_qo_len: int | None = None
    _elsewhere: dict[torch.device, TreeBatch] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_scratch_nodes(self) -> int:
        """Nodes held in scratch until verified; single-node trees bypass scratch."""
        return self.num_tree_nodes if self.max_depth else 0

    @cached_property
    def append_metadata(self) -> tuple[Tensor, Tensor, Tensor]:
        """``block_table``, ``seq_lens`` and ``qo_indptr`` (from 0) of the sequences whose nodes bypass scratch."""
        if not self.num_scratch_nodes:
            return self.block_table, self.seq_lens, self.qo_indptr
        first = self.num_trees
        return self.block_table[first:], self.seq_lens[first:], self.qo_indptr[first:] - self.num_tree_nodes

    def last_rows(self, accept_index: Tensor, accept_length: Tensor) -> Tensor:
        """``[num_trees]`` int32, the packed row of each tree's last accepted node."""
        last = accept_index.gather(1, accept_length[:, None].long())[:, 0]
        return self.qo_indptr[: self.num_trees] + last

    def to(self, device: torch.device) -> TreeBatch:
        """The same metadata on ``device``, copied once (for models with layers on several devices)."""
        if device == self.seq_lens.device:
            return self
        if device not in self._elsewhere:
            values = {f.name: getattr(self, f.name) for f in fields(self)}
            moved: dict[str, Any] = {n: v.to(device) for n, v in values.items() if isinstance(v, Tensor)}
            self._elsewhere[device] = replace(self, **moved, _elsewhere={})
        return self._elsewhere[device]


@dataclass(frozen=True)
class TreeLayout:
    """The part of a batch that depends only on tree and batch size; cached. ``row``: each node's sequence."""

    parents: Tensor
    depths: Tensor
    tree_mask: Tensor
    qo_indptr: Tensor
    row: Tensor

    def first(self, sequences: int) -> TreeLayout:
        """The layout of the first sequences."""
        nodes = sequences * (len(self.row) // (len(self.qo_indptr) - 1))
        parents, depths, mask, row = (t[:nodes] for t in (self.parents, self.depths, self.tree_mask, self.row))
        return TreeLayout(parents, depths, mask, self.qo_indptr[: sequences + 1], row)


@lru_cache(maxsize=CACHED_LAYOUTS)
def tree_layout(tree: DraftTree, sequences: int, device: torch.device) -> TreeLayout:
    parents = torch.tensor(tree.parents, dtype=torch.int32, device="cpu").repeat(sequences)
    depths = torch.tensor(tree.depths, dtype=torch.int64, device="cpu").repeat(sequences)
    indptr = torch.arange(sequences + 1, dtype=torch.int32, device="cpu") * tree.size
    row = torch.arange(sequences, device="cpu").repeat_interleave(tree.size)
    parts = (parents, depths, tree.mask.repeat(sequences, 1), indptr, row)
    return TreeLayout(*(part.to(device) for part in parts))


@dataclass(frozen=True)
class DraftedTrees:
    """A tree for each of B sequences, T nodes each; the root is node 0, parents come before children.

    ``tokens``: ``[B, T]`` int64, -1 for no guess. ``parents``: ``[B, T]`` int32, -1 for roots. ``depths``: ``[B, T]``
    int64.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor

    def layout(self, max_depth: int) -> TreeLayout:
        """The trees' part of a batch's metadata. ``max_depth``: an upper bound of the depths."""
        sequences, size = self.tokens.shape
        indptr, row, own = uniform_rows(sequences, size, self.tokens.device)
        parents = self.parents.clamp(min=0).long()[..., None].expand(-1, -1, own.shape[1])
        mask = own = own.view(sequences, size, -1)
        for _ in range(max_depth):  # the bits of one more ancestor
            mask = mask.gather(1, parents) | own
        return TreeLayout(self.parents.flatten(), self.depths.flatten(), mask.flatten(0, 1), indptr, row)


@lru_cache(maxsize=CACHED_LAYOUTS)
def uniform_rows(sequences: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For ``size`` rows per sequence: ``qo_indptr``, each row's sequence, and a ``tree_mask`` of each row's own bit."""
    with torch.inference_mode(False):
        node = torch.arange(size, device="cpu")
        own = torch.zeros(size, -(-size // WORD), dtype=torch.int64, device="cpu")
        own[node, node // WORD] = torch.ones(size, dtype=torch.int64, device="cpu") << node % WORD
        indptr = torch.arange(sequences + 1, dtype=torch.int32, device="cpu") * size
        row = torch.arange(sequences, device="cpu")[:, None].expand(-1, size).flatten()
        return indptr.to(device), row.to(device), own.repeat(sequences, 1).to(device)


def tree_batch(
    tree: Trees,
    draft_tokens: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seq_len: int,
    layout: TreeLayout | None = None,
) -> TreeBatch:
    """A verification batch: ``draft_tokens`` ``[B, T]`` int64.

    ``layout``: the trees' metadata; ``None``: ``tree``, the same for every sequence.
    """
    sequences = seq_lens.shape[0]
    if layout is None:
        assert isinstance(tree, DraftTree), "dynamic trees have a layout"
        layout = tree_layout(tree, sequences, seq_lens.device)
    return TreeBatch(
        tokens=draft_tokens.reshape(-1),
        positions=seq_lens.index_select(0, layout.row) + layout.depths,
        parents=layout.parents,
        tree_mask=layout.tree_mask,
        qo_indptr=layout.qo_indptr,
        seq_lens=seq_lens,
        block_table=block_table,
        max_qo_len=tree.size,
        max_seq_len=max_seq_len,
        max_depth=tree.max_depth,
        num_trees=sequences,
        num_tree_nodes=len(layout.parents),
        tree=tree,
        min_qo_len=tree.size,
    )


def chunk_batch(chunks: Sequence[Tensor], starts: Sequence[int], block_table: Tensor) -> TreeBatch:
    """A prefill batch: ``chunks[b]`` (int64 tokens) continues sequence b behind its ``starts[b]`` tokens in pages."""
    device = block_table.device
    sizes = [len(chunk) for chunk in chunks]
    indptr = torch.tensor([0, *sizes], device="cpu").cumsum(0).to(device=device, dtype=torch.int32)
    positions = [torch.arange(start, start + size, device="cpu") for start, size in zip(starts, sizes, strict=True)]
    return TreeBatch(
        tokens=torch.cat(list(chunks)),
        positions=torch.cat(positions).to(device),
        parents=None,
        tree_mask=None,
        qo_indptr=indptr,
        seq_lens=torch.tensor(list(starts), dtype=torch.int32, device=device),
        block_table=block_table,
        max_qo_len=max(sizes),
        max_seq_len=max(starts),
        max_depth=0,
        num_trees=0,
        num_tree_nodes=0,
    )


def continued_batch(tokens: Tensor, seq_lens: Tensor, block_table: Tensor, max_seq_len: int) -> TreeBatch:
    """A causal chunk of equal size for each sequence: ``tokens`` ``[B, R]`` int64 behind its ``seq_lens`` tokens."""
    sequences, size = tokens.shape
    indptr = uniform_rows(sequences, size, tokens.device)[0]
    return TreeBatch(
        tokens=tokens.flatten(),
        positions=(seq_lens.long()[:, None] + torch.arange(size, device=tokens.device)).flatten(),
        parents=None,
        tree_mask=None,
        qo_indptr=indptr,
        seq_lens=seq_lens,
        block_table=block_table,
        max_qo_len=size,
        max_seq_len=max_seq_len,
        max_depth=0,
        num_trees=0,
        num_tree_nodes=0,
        min_qo_len=size,
    )


def concat_batches(trees: TreeBatch, other: TreeBatch) -> TreeBatch:
    """One batch: the rows of ``trees`` (no chunks), then those of ``other`` (either trees or chunks).

    Chunks get rows of zeros in the tree mask, which are causal.
    """
    assert trees.parents is not None, "trees come first"
    assert trees.tree_mask is not None, "trees come first"
    words = max(trees.tree_mask.shape[1], 1 if other.tree_mask is None else other.tree_mask.shape[1])
    mask = trees.tree_mask.new_zeros(len(trees.tokens) + len(other.tokens), words)
    mask[: len(trees.tokens), : trees.tree_mask.shape[1]] = trees.tree_mask
    if other.tree_mask is not None:
        mask[len(trees.tokens) :, : other.tree_mask.shape[1]] = other.tree_mask
    return TreeBatch(
        tokens=torch.cat([trees.tokens, other.tokens]),
        positions=torch.cat([trees.positions, other.positions]),
        parents=trees.parents if other.parents is None else torch.cat([trees.parents, other.parents]),
        tree_mask=mask,
        qo_indptr=torch.cat([trees.qo_indptr, other.qo_indptr[1:] + len(trees.tokens)]),
        seq_lens=torch.cat([trees.seq_lens, other.seq_lens]),
        block_table=torch.cat([trees.block_table, other.block_table]),
        max_qo_len=max(trees.max_qo_len, other.max_qo_len),
        max_seq_len=max(trees.max_seq_len, other.max_seq_len),
        max_depth=max(trees.max_depth, other.max_depth),
        num_trees=trees.num_trees + other.num_trees,
        num_tree_nodes=trees.num_tree_nodes + other.num_tree_nodes,
    )
