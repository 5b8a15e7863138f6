"""What every attention layer calls during a step: attention over the pages, then the new keys' way to memory."""

from __future__ import annotations

import torch

from specmemo_kernels import ops
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.forward.batch import TreeBatch

Tensor = torch.Tensor


class StepAttention:
    """Attention of one forward pass.

    Prefill chunks go straight to pages, and so do roots where no tree has more. Nodes of other trees go to scratch
    slots, where they wait for the verdict: a rejected candidate never reaches a page. Where pages are quantised, that
    happens on the way into them.
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
        out, _ = ops.tree_attention(
            q, k, v, k_pages, v_pages, batch.block_table, batch.seq_lens, batch.qo_indptr, batch.tree_mask,
            scale=scale, window=window, softcap=softcap, sinks=sinks, max_qo_len=batch.max_qo_len,
            max_seq_len=batch.max_seq_len, k_scales=k_scales, v_scales=v_scales,
            min_qo_len=None if batch.tree is None else batch.tree.size, backend=self.backend,
        )  # fmt: skip
        if waiting := batch.num_scratch_nodes:
            pool.k_scratch[layer][:waiting] = k[:waiting]
            pool.v_scratch[layer][:waiting] = v[:waiting]
            k, v = k[waiting:], v[waiting:]
        if k.shape[0]:
            ops.append_paged_kv(
                k, v, k_pages, v_pages, *batch.decided, k_scales=k_scales, v_scales=v_scales, backend=self.backend
            )
        return out


def commit_accepted(pool: PagedKVPool, trees: TreeBatch, index: Tensor, length: Tensor, backend: str | None) -> None:
    """Write what the trees accepted (``accept_index``, ``accept_length``) from scratch to pages, behind the sequences'
    tokens, where a failed step may leave it. Roots alone are there already."""
    for group in pool.groups if trees.num_scratch_nodes else ():
        device = group.k_pages.device
        there = trees.to(device)
        ops.commit_paged_kv(
            group.k_scratch, group.v_scratch, group.k_pages, group.v_pages,
            there.block_table, there.seq_lens, there.qo_indptr,
            index.to(device), length.to(device), k_scales=group.k_scales, v_scales=group.v_scales,
            backend=backend,
        )  # fmt: skip
