"""Peers on a GPU: FlashInfer's paged prefill with a custom mask, if installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specmemo_kernels.cache.page_order import swap_order

Tensor = torch.Tensor


def flashinfer(inputs: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """A planned call of attention over pages in HND order, with the tree's own nodes written to the pages.

    Args:
        inputs: keyword arguments of ``ops.tree_attention``, all sequences of one length and tree.

    Raises:
        ImportError: FlashInfer isn't installed.
    """
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    from specmemo_kernels.backends.reference import ancestors

    batch, nodes = len(inputs["seq_lens"]), int(inputs["qo_indptr"][1])
    length, page = int(inputs["seq_lens"][0]), inputs["k_pages"].shape[1]
    used = -(-(length + nodes) // page)
    _write_nodes(inputs, length, nodes)
    device = inputs["q"].device
    seen, _ = ancestors(inputs["tree_mask"][:nodes], nodes, device)
    mask = torch.cat([seen.new_ones(nodes, length), seen], dim=1).flatten().repeat(batch)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(512 << 20, dtype=torch.uint8, device=device), "HND")
    wrapper.plan(
        inputs["qo_indptr"],
        torch.arange(batch + 1, dtype=torch.int32, device=device) * used,
        inputs["block_table"][:, :used].flatten().contiguous(),
        torch.full((batch,), (length + nodes - 1) % page + 1, dtype=torch.int32, device=device),
        inputs["q"].shape[1],
        inputs["k_new"].shape[1],
        inputs["q"].shape[2],
        page,
        custom_mask=mask,
        sm_scale=inputs["scale"],
        q_data_type=inputs["q"].dtype,
        kv_data_type=inputs["k_pages"].dtype,
    )
    return lambda k, v: wrapper.run(inputs["q"], (swap_order(k), swap_order(v)))  # type: ignore[no-any-return]


def _write_nodes(inputs: dict[str, Any], length: int, nodes: int) -> None:
    """Write the nodes' keys and values behind the committed tokens."""
    page = inputs["k_pages"].shape[1]
    position = length + torch.arange(nodes, device=inputs["q"].device)
    for sequence, table in enumerate(inputs["block_table"].long()):
        rows = slice(sequence * nodes, (sequence + 1) * nodes)
        for side in ("k", "v"):
            inputs[f"{side}_pages"][table[position // page], position % page] = inputs[f"{side}_new"][rows]
