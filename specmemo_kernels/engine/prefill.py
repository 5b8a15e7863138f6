"""Chunked prefill: the prompt tokens that one forward pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.batch import TreeBatch, chunk_batch, tree_batch
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """The prompt tokens that one forward pass computes.

    Attributes:
        parts: ``(sequence, size)`` in the order of their rows.
        batch: the rows' metadata.
        fresh: sequences whose prompt it completes and whose first token is to be found.
        ended: these, and behind them preempted sequences whose context it completes.
        last_rows: ``[len(ended)]`` int64, the last row of each of ``ended`` in the chunk.
        first_trees: the last rows of ``fresh`` as single-node trees for the verifier; ``None`` without any.
    """

    parts: list[tuple[SequenceState, int]]
    batch: TreeBatch
    fresh: list[SequenceState]
    ended: list[SequenceState]
    last_rows: Tensor
    first_trees: TreeBatch | None


def next_chunk(prefilling: Sequence[SequenceState], room: int, pool: PagedKVPool, device: torch.device) -> Chunk:
    """Pick the next tokens, at most ``room``, of the contexts still to be computed, oldest first."""
    parts = []
    for sequence in prefilling:
        if size := min(room, len(sequence.context) - sequence.computed):
            parts.append((sequence, size))
            room -= size
    tokens = [torch.tensor(s.context[s.computed : s.computed + size], device=device) for s, size in parts]
    slots = torch.tensor([s.slot for s, _ in parts], device=device)
    batch = chunk_batch(tokens, [s.computed for s, _ in parts], pool.block_table[slots])
    ends = torch.tensor([size for _, size in parts]).cumsum(0).tolist()
    done = [(s, end - 1) for (s, size), end in zip(parts, ends, strict=True) if s.computed + size == len(s.context)]
    done.sort(key=lambda item: item[0].emitted > 0)
    rows = torch.tensor([row for _, row in done], dtype=torch.int64, device=device)
    fresh = [s for s, _ in done if not s.emitted]
    first = _first_trees(fresh, pool, device) if fresh else None
    return Chunk(parts, batch, fresh, [s for s, _ in done], rows, first)


def _first_trees(fresh: Sequence[SequenceState], pool: PagedKVPool, device: torch.device) -> TreeBatch:
    roots = torch.tensor([s.prompt[-1] for s in fresh], device=device)[:, None]
    lengths = torch.tensor([len(s.prompt) - 1 for s in fresh], dtype=torch.int32, device=device)
    table = pool.block_table[torch.tensor([s.slot for s in fresh], device=device)]
    return tree_batch(DraftTree.chain(0), roots, lengths, table, max(len(s.prompt) for s in fresh) - 1)
