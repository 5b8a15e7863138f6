"""One step's requests: which rows are draft trees, and their new keys and values until they are committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specmemo_kernels.forward.batch import TreeBatch, chunk_batch
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor


@dataclass(frozen=True)
class PackedRequests:
    """Some requests of a step and their rows.

    Attributes:
        rows: of the step, in order; ``None``: all.
        requests: indices in the batch; ``None``: all.
        qo_indptr: ``[B + 1]`` int32, where each request's rows begin among ``rows``.
    """

    rows: Tensor | None
    requests: Tensor | None
    qo_indptr: Tensor

    def of_rows(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor.index_select(0, self.rows)

    def of_requests(self, tensor: Tensor) -> Tensor:
        return tensor if self.requests is None else tensor.index_select(0, self.requests)


@dataclass(frozen=True)
class StepTrees:
    """The draft trees of a step.

    Attributes:
        tree_mask: ``[N, words]`` int64; rows of zeros for chunks.
        depth_offsets: ``[N]`` int64: a row's depth in its tree less its place in it, 0 for chunks.
        trees, chunks: the requests with a tree, and the others; ``None`` if there are none.
    """

    tree_mask: Tensor
    depth_offsets: Tensor
    trees: PackedRequests
    chunks: PackedRequests | None


def step_trees(trees: Sequence[DraftTree | None], lengths: Sequence[int], device: torch.device) -> StepTrees | None:
    """The trees of a step with ``lengths`` rows per request; ``None`` if no request has one.

    A request with a tree has no other rows.
    """
    in_tree = torch.tensor([tree is not None for tree in trees])
    if not bool(in_tree.any()):
        return None
    words = max(tree.mask.shape[1] for tree in trees if tree is not None)
    mask = torch.zeros(sum(lengths), words, dtype=torch.int64)
    offsets = torch.zeros(sum(lengths), dtype=torch.int64)
    begin = 0
    for tree, length in zip(trees, lengths, strict=True):
        if tree is not None:
            mask[begin : begin + length, : tree.mask.shape[1]] = tree.mask
            offsets[begin : begin + length] = torch.tensor(tree.depths) - torch.arange(length)
        begin += length
    counts = torch.tensor(lengths)
    return StepTrees(
        mask.to(device),
        offsets.to(device),
        _packed(in_tree, counts, device),
        None if bool(in_tree.all()) else _packed(~in_tree, counts, device),
    )


def _packed(chosen: Tensor, lengths: Tensor, device: torch.device) -> PackedRequests:
    qo_indptr = torch.zeros(int(chosen.sum()) + 1, dtype=torch.int32)
    qo_indptr[1:] = lengths[chosen].cumsum(0)
    if bool(chosen.all()):
        return PackedRequests(None, None, qo_indptr.to(device))
    rows = chosen.repeat_interleave(lengths).nonzero()[:, 0]
    return PackedRequests(rows.to(device), chosen.nonzero()[:, 0].to(device), qo_indptr.to(device))


class TreeScratch:
    """New keys and values of a step's trees, of all layers, until the accepted ones are committed.

    Args:
        shapes: of each layer, ``(num_kv_heads, head_dim)``.
        rows: most rows of trees in a step.
    """

    def __init__(self, shapes: dict[str, tuple[int, int]], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = {
            name: torch.empty(2, 1, rows, *shape, dtype=dtype, device=device) for name, shape in shapes.items()
        }

    def store(self, layer: str, key: Tensor, value: Tensor) -> None:
        """Keep rows ``[N, num_kv_heads, head_dim]``."""
        target = self._rows[layer]
        target[0, 0, : len(key)] = key
        target[1, 0, : len(value)] = value

    def layer(self, layer: str) -> tuple[Tensor, Tensor]:
        """``[1, rows, num_kv_heads, head_dim]`` keys and values."""
        keys, values = self._rows[layer]
        return keys, values


@dataclass(frozen=True)
class CommittedRows:
    """The rows of a step whose keys and values are in blocks now: of each request a chunk, or its accepted path.

    Attributes:
        hidden: ``[N, hidden_size]``, of all rows of the step, behind the final norm.
        aux: inputs of the layers that the drafter reads, ``[N, hidden_size]`` each; ``None``: it reads none.
        rows: ``[K]`` int64, those committed, in order of requests and positions.
        following: ``[K]`` int64, the token behind each.
        counts: rows of each request, at least one.
        context_lens: tokens of each request in blocks before the step.
        block_table: ``[B, max_blocks]`` int32 page ids, of the drafter's layers.
        draft_caches: the blocks of the drafter's layers.
    """

    hidden: Tensor
    aux: list[Tensor] | None
    rows: Tensor
    following: Tensor
    counts: Sequence[int]
    context_lens: Sequence[int]
    block_table: Tensor
    draft_caches: list[Tensor]

    @property
    def ends(self) -> Tensor:
        """``[B]`` int64: behind each request's rows among ``rows``."""
        return torch.tensor(self.counts).cumsum(0).to(self.rows.device)

    @property
    def last_rows(self) -> Tensor:
        """``[B]`` int64, each request's last committed row of the step."""
        return self.rows[self.ends - 1]

    @property
    def roots(self) -> Tensor:
        """``[B]`` int64, the token behind each request's last committed row."""
        return self.following[self.ends - 1]

    def features(self, indices: Sequence[int]) -> Tensor:
        """``[K, F]``, states of the committed rows: of ``aux`` by index, -1 for ``hidden``."""
        states = [self.hidden if index < 0 else (self.aux or [])[index] for index in indices]
        return torch.cat([tensor.index_select(0, self.rows) for tensor in states], dim=1)

    def chunk_batch(self) -> TreeBatch:
        """The committed rows as chunks with the tokens behind them, as drafters read them."""
        return chunk_batch(torch.split(self.following, list(self.counts)), self.context_lens, self.block_table)
