"""One step's requests: which rows are draft trees, and their new keys and values until they are committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
        sizes: nodes of each request's tree, 0 for a request that is a causal chunk.
        tree_mask: ``[N, words]`` int64; rows of zeros for chunks.
        depth_offsets: ``[N]`` int64: a row's depth in its tree less its place in it, 0 for chunks.
        trees, chunks: these requests; ``None`` if there are none.
    """

    sizes: tuple[int, ...]
    tree_mask: Tensor
    depth_offsets: Tensor
    trees: PackedRequests
    chunks: PackedRequests | None


def step_trees(tree: DraftTree, sizes: Sequence[int], lengths: Sequence[int], device: torch.device) -> StepTrees | None:
    """The trees of a step with ``lengths`` rows per request; ``None`` if no request has one.

    Args:
        sizes: nodes per request, a prefix of ``tree``'s; 0: no tree. A request with a tree has no other rows.
    """
    if not any(sizes):
        return None
    full, depths = tree.mask, torch.tensor(tree.depths)
    mask = full.new_zeros(sum(lengths), full.shape[1])
    offsets = torch.zeros(sum(lengths), dtype=torch.int64)
    in_tree = torch.tensor([size > 0 for size in sizes])
    begin = 0
    for size, length in zip(sizes, lengths, strict=True):
        mask[begin : begin + size] = full[:size]
        offsets[begin : begin + size] = depths[:size] - torch.arange(size)
        begin += length
    counts = torch.tensor(lengths)
    return StepTrees(
        tuple(sizes),
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

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._rows.values())

    def store(self, layer: str, key: Tensor, value: Tensor) -> None:
        """Keep rows ``[N, num_kv_heads, head_dim]``."""
        target = self._rows[layer]
        target[0, 0, : len(key)] = key
        target[1, 0, : len(value)] = value

    def layer(self, layer: str) -> tuple[Tensor, Tensor]:
        """``[1, rows, num_kv_heads, head_dim]`` keys and values."""
        keys, values = self._rows[layer]
        return keys, values
