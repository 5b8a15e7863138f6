"""Peers on a GPU: FlashInfer's paged prefill with a custom mask and its XQA decode with a tree mask, if installed."""

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


def xqa(inputs: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """A call of FlashInfer's XQA decode, as :func:`flashinfer`; needs compute capability 9, 10 or 12.

    Raises:
        ImportError: FlashInfer isn't installed, or is too old for a mask.
    """
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    batch, nodes = len(inputs["seq_lens"]), int(inputs["qo_indptr"][1])
    length, device = int(inputs["seq_lens"][0]), inputs["q"].device
    _write_nodes(inputs, length, nodes)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    lengths = torch.full((batch,), length + nodes, dtype=torch.int32, device=device).view(torch.uint32)
    more = {"mask": packed_mask(inputs["tree_mask"], batch, nodes), "q_len_per_req": nodes} if nodes > 1 else {}

    def run(k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = xqa_batch_decode_with_kv_cache(
            inputs["q"], (swap_order(k), swap_order(v)), workspace, inputs["block_table"], lengths, length + nodes,
            bmm1_scale=inputs["scale"], bmm2_scale=1.0, kv_layout="HND", **more,
        )  # fmt: skip
        return out.view(inputs["q"].shape)  # of several nodes: [batch, nodes, heads, head_dim]

    return run


def packed_mask(tree_mask: Tensor, batch: int, nodes: int) -> Tensor:
    """Rows of :func:`ops.tree_attention`'s mask as XQA reads them: ``[batch, nodes, 2 * ceil(nodes / 32)]`` uint16."""
    halves = tree_mask.contiguous().view(torch.uint16).view(batch, nodes, -1)  # little-endian, as every CUDA host
    return halves[:, :, : 2 * -(-nodes // 32)].contiguous()


PEERS = {"flashinfer": flashinfer, "xqa": xqa}


def _write_nodes(inputs: dict[str, Any], length: int, nodes: int) -> None:
    """Write the nodes' keys and values behind the committed tokens."""
    page = inputs["k_pages"].shape[1]
    position = length + torch.arange(nodes, device=inputs["q"].device)
    for sequence, table in enumerate(inputs["block_table"].long()):
        rows = slice(sequence * nodes, (sequence + 1) * nodes)
        for side in ("k", "v"):
            inputs[f"{side}_pages"][table[position // page], position % page] = inputs[f"{side}_new"][rows]
