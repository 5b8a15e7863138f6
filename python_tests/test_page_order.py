"""How pages lie in memory, told from sizes and strides."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specmemo_kernels.cache.kv_storage import KVStorage, LayerKV
from specmemo_kernels.cache.page_order import by_head, empty_pages, is_dense_by_head, swap_order

SIZES = st.lists(st.integers(1, 3), min_size=2, max_size=5)


@given(SIZES, st.booleans(), st.permutations(range(5)), st.integers(0, 4), st.integers(1, 2))
def test_any_view_is_judged_like_its_transposition(
    sizes: list[int], scales: bool, order: list[int], cut: int, step: int
) -> None:
    """Against torch's own word for contiguous, over permuted and sliced tensors."""
    if not scales and len(sizes) < 3:
        sizes = [2, *sizes]
    view = torch.empty(sizes).permute([dim for dim in order if dim < len(sizes)])
    dim = cut % len(sizes)
    view = view[(slice(None),) * dim + (slice(None, None, step),)]
    assert is_dense_by_head(view, scales=scales) == swap_order(view, scales=scales).is_contiguous()


def test_the_pool_keeps_one_head_after_the_other() -> None:
    """Whole layers and single ones, keys, values of another width, and scales."""
    layer = LayerKV(num_kv_heads=3, head_dim=8, v_head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    storage = KVStorage([layer, layer], num_pages=5, page_size=4, max_nodes=1, kv_dtype="int8")
    for group in storage.groups:
        for pages in (group.k_pages, group.v_pages, storage.k_pages[1], storage.v_pages[0]):
            assert by_head(pages)
            assert is_dense_by_head(pages)
        assert group.k_scales is not None
        assert group.k_scales.shape == (2, 5, 4, 3)
        assert is_dense_by_head(group.k_scales, scales=True)
    page = empty_pages((5, 4, 3), 8, torch.float32, torch.device("cpu"))[2]
    assert page.stride() == (8, 32, 1), "a head's tokens follow each other"
