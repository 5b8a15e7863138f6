"""What every attention layer calls during a step: attention over the pages, then the new keys' way to memory."""

from __future__ import annotations

import torch

from specmemo_kernels import ops
from specmemo_kernels.batch import TreeBatch
from specmemo_kernels.paged_kv import PagedKVPool

Tensor = torch.Tensor


class StepAttention:
    """Attention of one forward pass.

    Prefill chunks go straight to pages. Tree nodes go to scratch slots, where they wait for the verdict: a rejected
    candidate never reaches a page. Where pages are quantised, that happens on the way into them.
    """

    def __init__(self, pool: PagedKVPool, batch: TreeBatch, backend: str | None) -> None:
        self.pool, self.batch, self.backend = pool, batch, backend

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """``[N, num_qo_heads, v_head_dim]``; ``q`` ``[N, num_qo_heads, head_dim]``, ``k`` and ``v`` likewise."""
        pool, batch = self.pool, self.batch.to(q.device)
        k_pages, v_pages = pool.k_pages[layer], pool.v_pages[layer]
        k_scales, v_scales = pool.k_scales[layer], pool.v_scales[layer]
        # Straight to the operator: patching has checked every shape that ops.tree_attention would check again.
        out, _ = torch.ops.specmemo.tree_attention(
            q, k, v, k_pages, v_pages, batch.block_table, batch.seq_lens, batch.qo_indptr, batch.tree_mask,
            scale, window, softcap, sinks, batch.max_qo_len, batch.max_seq_len, False, k_scales, v_scales,
            None if batch.tree is None else batch.tree.size, self.backend,
        )  # fmt: skip
        nodes = batch.num_tree_nodes
        if nodes:
            pool.k_scratch[layer][:nodes] = k[:nodes]
            pool.v_scratch[layer][:nodes] = v[:nodes]
        if nodes < k.shape[0]:
            torch.ops.specmemo.append_paged_kv(
                k[nodes:], v[nodes:], k_pages, v_pages, *batch.chunks, k_scales, v_scales, self.backend
            )
        result: Tensor = out
        return result


def commit_accepted(pool: PagedKVPool, trees: TreeBatch, index: Tensor, length: Tensor, backend: str | None) -> None:
    """Write what the trees accepted (``accept_index``, ``accept_length``) from scratch to pages, behind the sequences'
    tokens, where a failed step may leave it."""
    for group in pool.groups:
        device = group.k_pages.device
        there = trees.to(device)
        ops.commit_paged_kv(
            group.k_scratch, group.v_scratch, group.k_pages, group.v_pages,
            there.block_table, there.seq_lens, there.qo_indptr,
            index.to(device), length.to(device), k_scales=group.k_scales, v_scales=group.v_scales,
            backend=backend,
        )  # fmt: skip
