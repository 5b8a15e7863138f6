"""How the rows of a page follow each other in memory.

Pages have the shape ``[..., page_size, num_kv_heads, head_dim]``. Their memory is in the order of the shape
(FlashInfer's NHD), or holds one head after the other (HND). The second one is what this package makes: one head's keys
are one piece of memory per page, which hardware reads ahead by itself.
"""

from __future__ import annotations

import torch

from specmemo_kernels.cache.huge_pages import prefer_huge_pages

Tensor = torch.Tensor


def empty_pages(shape: tuple[int, ...], dim: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised pages ``[*shape, dim]``, head by head, or their scales ``[*shape]``.

    Args:
        shape: ``(..., page_size, num_kv_heads)``.
        dim: elements of a token and head; ``None``: one, without a dimension of its own.
    """
    *outer, page_size, heads = shape
    memory = torch.empty(*outer, heads, page_size, *(() if dim is None else (dim,)), dtype=dtype, device=device)
    prefer_huge_pages(memory)
    return swap_order(memory, scales=dim is None)


def swap_order(pages: Tensor, *, scales: bool = False) -> Tensor:
    """The same memory with tokens and heads exchanged in the shape: ``[..., page_size, num_kv_heads, dim]`` or back.

    ``scales``: the dimension of elements is missing.
    """
    return pages.transpose(-1, -2) if scales else pages.transpose(-2, -3)


def by_head(pages: Tensor) -> bool:
    """Whether pages that an operator takes hold one head after the other, the only order but that of their shape."""
    return not pages.is_contiguous()


def is_dense_by_head(pages: Tensor, *, scales: bool = False) -> bool:
    """Whether pages (or ``scales``) hold one head after the other without gaps; no tensor is made to tell."""
    token, head = (-2, -1) if scales else (-3, -2)
    order = list(range(pages.ndim))
    order[token], order[head] = order[head], order[token]
    expected = 1
    for dim in reversed(order):
        if pages.shape[dim] > 1 and pages.stride(dim) != expected:
            return False
        expected *= pages.shape[dim]
    return True
