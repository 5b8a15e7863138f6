"""vLLM's KV blocks seen as pages of the operators."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def block_pages(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer's blocks, ``[pages, block_size, num_kv_heads, head_dim]`` each; no copy.

    vLLM gives a layer ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``, contiguous; what a block's bytes mean
    is up to the backend. Here the first half of a block has the keys of all heads and the second half the values, both
    as pages in HND order. So block ``b`` is the pages ``2 * b`` and ``2 * b + 1`` of one pool. The values are the same
    pool without its first page: keys and values of block ``b`` have the same page id, ``2 * b``.
    """
    blocks, heads, block_size, content = kv_cache.shape
    if not kv_cache.is_contiguous() or content % 2:
        raise ValueError(
            f"the KV cache has shape {tuple(kv_cache.shape)} and strides {kv_cache.stride()}; expected contiguous "
            "[num_blocks, num_kv_heads, block_size, 2 * head_dim] (vLLM's layout LBHNC)"
        )
    pages = kv_cache.view(2 * blocks, heads, block_size, content // 2).transpose(1, 2)
    return pages[:-1], pages[1:]


def page_table(block_table: Tensor) -> Tensor:
    """The page ids of :func:`block_pages`, ``[B, max_blocks]`` int32, from block ids."""
    return (block_table * 2).to(torch.int32)
