"""Memory order of pages."""

from __future__ import annotations

import torch

from specmemo_kernels.cache.kv_storage import KVStorage, LayerKV
from specmemo_kernels.cache.page_order import by_head, empty_pages, swap_order


def test_the_pool_keeps_one_head_after_the_other() -> None:
    """All layers and single layers, keys, values of another width, and scales."""
    layer = LayerKV(num_kv_heads=3, head_dim=8, v_head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    storage = KVStorage([layer, layer], num_pages=5, page_size=4, max_nodes=1, kv_dtype="int8")
    for group in storage.groups:
        for pages in (group.k_pages, group.v_pages, storage.k_pages[1], storage.v_pages[0]):
            assert by_head(pages)
            assert swap_order(pages).is_contiguous()
        assert group.k_scales is not None
        assert group.k_scales.shape == (2, 5, 4, 3)
        assert swap_order(group.k_scales, scales=True).is_contiguous()
    page = empty_pages((5, 4, 3), 8, torch.float32, torch.device("cpu"))[2]
    assert page.stride() == (8, 32, 1), "a head's tokens follow each other"
