"""Attention of one pass over the pages, and the writes of its keys and values to scratch slots and pages."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specmemo_kernels import ops
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.ops import checks

Tensor = torch.Tensor


class AttentionParams(NamedTuple):
    """A layer's parameters of :func:`specmemo_kernels.ops.tree_attention`, in its order."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class StepAttention:
    """Attention of all layers in one forward pass.

    Prefill chunks and single-node trees are written to pages at once. Nodes of larger trees go to scratch slots until
    they are verified, so a rejected candidate never reaches a page. Quantised pages are quantised at that write.
    """

    def __init__(self, pool: PagedKVPool, batch: TreeBatch, backend: str | None, invariant: bool = False) -> None:
        self.pool, self.batch, self.backend, self.invariant = pool, batch, backend, invariant
        self._kernels = ops.kernels(backend, pool.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, params: AttentionParams) -> Tensor:
        """Compute a layer's attention, and write its new keys and values to scratch or pages.

        ``q`` is ``[N, num_qo_heads, head_dim]``, ``k`` and ``v`` have KV heads; the result is
        ``[N, num_qo_heads, v_head_dim]``.
        """
        pool, batch = self.pool, self.batch.to(q.device)
        k_pages, v_pages = pool.k_pages[layer], pool.v_pages[layer]
        k_scales, v_scales = pool.k_scales[layer], pool.v_scales[layer]
        arguments = (
            q, k, v, k_pages, v_pages, batch.block_table, batch.seq_lens, batch.qo_indptr, batch.tree_mask,
            *params, batch.max_qo_len, batch.max_seq_len, self.invariant, k_scales, v_scales,
            batch.min_qo_len,
        )  # fmt: skip
        if batch.min_qo_len is None:  # passes with prompts; later steps have tensors of the same layout
            checks.tree_attention(*arguments)
        out, _ = self._kernels.tree_attention(*arguments)
        if scratch := batch.num_scratch_nodes:
            pool.k_scratch[layer][:scratch] = k[:scratch]
            pool.v_scratch[layer][:scratch] = v[:scratch]
            k, v = k[scratch:], v[scratch:]
        if k.shape[0]:
            self._kernels.append_paged_kv(k, v, k_pages, v_pages, *batch.append_metadata, k_scales, v_scales)
        return out


def commit_accepted(pool: PagedKVPool, trees: TreeBatch, index: Tensor, length: Tensor, backend: str | None) -> None:
    """Copy the accepted nodes from scratch slots to pages, behind the sequences' tokens.

    If the step fails later, the next one overwrites the copies. Single-node trees were already appended.

    Args:
        index, length: ``accept_index`` and ``accept_length`` of :func:`specmemo_kernels.ops.verify_tree_greedy`.
    """
    kernels = ops.kernels(backend, pool.device)
    for group in pool.groups if trees.num_scratch_nodes else ():
        if not group.k_scratch.shape[1]:  # a drafter's layers
            continue
        device = group.k_pages.device
        batch = trees.to(device)
        kernels.commit_paged_kv(
            group.k_scratch, group.v_scratch, group.k_pages, group.v_pages,
            batch.block_table, batch.seq_lens, batch.qo_indptr, index.to(device), length.to(device),
            group.k_scales, group.v_scales,
        )  # fmt: skip
