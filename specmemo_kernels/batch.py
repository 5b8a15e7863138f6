"""One step's metadata: every sequence's nodes packed in one ragged row, and the tensors the operators read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from specmemo_kernels.tree import DraftTree

Tensor = torch.Tensor


@dataclass(frozen=True)
class TreeBatch:
    """What one forward pass works on: B sequences, N nodes.

    ``tokens`` and ``positions`` are ``[N]`` int64; ``parents`` ``[N]`` int32 (``None`` for prefill chunks);
    ``tree_mask``, ``qo_indptr``, ``seq_lens``, ``block_table`` as in :mod:`specmemo_kernels.ops`.
    ``max_*`` are bounds known on the host, so that no launch needs a synchronisation.
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
    _elsewhere: dict[torch.device, TreeBatch] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_sequences(self) -> int:
        return self.seq_lens.shape[0]

    def to(self, device: torch.device) -> TreeBatch:
        """The same metadata on ``device``, copied once (layers of one model may live on several)."""
        if device == self.seq_lens.device:
            return self
        if device not in self._elsewhere:
            moved: dict[str, Any] = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
            self._elsewhere[device] = replace(self, **moved, _elsewhere={})
        return self._elsewhere[device]


@dataclass(frozen=True)
class TreeLayout:
    """The part of a batch that depends on tree and batch size alone, made once and kept."""

    parents: Tensor
    depths: Tensor
    tree_mask: Tensor
    qo_indptr: Tensor
    row: Tensor


# The memory plan counts this many (footprint.KEPT_LAYOUTS).
@lru_cache(maxsize=8)
def tree_layout(tree: DraftTree, sequences: int, device: torch.device) -> TreeLayout:
    """``sequences`` copies of ``tree`` side by side."""
    parents = torch.tensor(tree.parents, dtype=torch.int32).repeat(sequences)
    depths = torch.tensor(tree.depths, dtype=torch.int64).repeat(sequences)
    indptr = torch.arange(sequences + 1, dtype=torch.int32) * tree.size
    row = torch.arange(sequences).repeat_interleave(tree.size)
    parts = (parents, depths, tree.mask.repeat(sequences, 1), indptr, row)
    return TreeLayout(*(part.to(device) for part in parts))


def tree_batch(
    tree: DraftTree, draft_tokens: Tensor, seq_lens: Tensor, block_table: Tensor, max_seq_len: int
) -> TreeBatch:
    """A verification step: ``draft_tokens`` ``[B, T]`` int64 over the same tree for every sequence."""
    sequences = seq_lens.shape[0]
    layout = tree_layout(tree, sequences, seq_lens.device)
    return TreeBatch(
        tokens=draft_tokens.reshape(-1),
        positions=seq_lens.long()[layout.row] + layout.depths,
        parents=layout.parents,
        tree_mask=layout.tree_mask,
        qo_indptr=layout.qo_indptr,
        seq_lens=seq_lens,
        block_table=block_table,
        max_qo_len=tree.size,
        max_seq_len=max_seq_len,
        max_depth=tree.max_depth,
    )


def chunk_batch(chunks: Sequence[Tensor], starts: Sequence[int], block_table: Tensor) -> TreeBatch:
    """A prefill step: ``chunks[b]`` (int64 tokens) continues sequence b, ``starts[b]`` of whose tokens are in pages."""
    device = block_table.device
    sizes = [len(chunk) for chunk in chunks]
    indptr = torch.tensor([0, *sizes]).cumsum(0).to(device=device, dtype=torch.int32)
    positions = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
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
    )
