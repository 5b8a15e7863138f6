"""Memory order of pages.

Pages have the shape ``[..., page_size, num_kv_heads, head_dim]``. Their memory is contiguous in this order
(FlashInfer's NHD), or one head after the other (HND). The operators accept both. The pool allocates HND: the keys
of one head are contiguous in a page, which suits hardware prefetchers.
"""

from __future__ import annotations

import torch

from specmemo_kernels.cache.huge_pages import prefer_huge_pages

Tensor = torch.Tensor


def empty_pages(shape: tuple[int, ...], dim: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised pages ``[*shape, dim]`` in HND order; with ``dim=None`` their scales ``[*shape]``.

    ``shape`` is ``(..., page_size, num_kv_heads)``.
    """
    *outer, page_size, heads = shape
    memory = torch.empty(*outer, heads, page_size, *(() if dim is None else (dim,)), dtype=dtype, device=device)
    prefer_huge_pages(memory)
    return swap_order(memory, scales=dim is None)


def swap_order(pages: Tensor, *, scales: bool = False) -> Tensor:
    """View with tokens and heads exchanged; ``scales`` have no last dimension ``head_dim``."""
    return pages.transpose(-1, -2) if scales else pages.transpose(-2, -3)


def by_head(pages: Tensor) -> bool:
    """Whether pages, checked by an operator, are in HND order."""
    return not pages.is_contiguous()
