"""Tree attention over pages: launches the kernels of one call, and gives plans their block sizes and workspace."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

from typing import Any

import torch
import triton

from specmemo_kernels.backends.kernel_config import (
    MERGE_CONFIG,
    KernelConfig,
    attention_configs,
    block_dim,
    launched_classes,
    max_state_bytes,
    num_splits,
)
from specmemo_kernels.backends.triton.attention_kernels import merge_splits_kernel, tree_attention_kernel
from specmemo_kernels.backends.triton.codes import as_codes, kv_type
from specmemo_kernels.backends.triton.runtime import (
    INTERPRETED,
    entry_point,
    launch_options,
    multiprocessors,
    rounds_by_bits,
    target_of,
)
from specmemo_kernels.cache.page_order import by_head

Tensor = torch.Tensor

MERGE_SPLITS = 16


@entry_point
def tree_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    tree_mask: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    max_qo_len: int | None,
    max_seq_len: int | None,
    invariant: bool = False,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    min_qo_len: int | None = None,
    *,
    configs: tuple[KernelConfig, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each node over its sequence's pages and its ancestors, without host reads.

    Arguments as in :func:`specmemo_kernels.ops.tree_attention`.

    Args:
        configs: replaces :func:`attention_configs`, for tuning.

    Returns:
        out ``[N, num_qo_heads, v_head_dim]`` in q's dtype and lse ``[N, num_qo_heads]`` float32.

    Raises:
        ValueError: an unsupported device or dtype, or a scale that isn't positive.
    """
    if scale <= 0:
        raise ValueError(f"scale is {scale}, the triton backend needs it to be positive")
    rows, heads, head_dim = q.shape
    kv_heads, v_dim, page_size = k_new.shape[1], v_new.shape[2], k_pages.shape[1]
    batch, group = seq_lens.shape[0], heads // kv_heads
    out = q.new_empty(rows, heads, v_dim)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    if rows == 0 or heads == 0 or batch == 0:
        return out, lse
    configs = configs or attention_configs(
        target_of(q.device), head_dim, v_dim, group, q.dtype, invariant, k_scales is not None
    )
    max_nodes = min(rows, rows if max_qo_len is None else max_qo_len)
    max_slots = max_nodes + (block_table.shape[1] * page_size if max_seq_len is None else max_seq_len)
    if min_qo_len is None and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "min_qo_len is None in a capture, but a graph may be replayed with other node counts; pass the smallest, "
            "in the capture and in the call before it, which compiles the kernels"
        )
    launched = launched_classes(configs, rows, batch, max_nodes, min_qo_len)
    splits = num_splits(launched, multiprocessors(q.device), rows, batch, max_nodes, max_slots, group, kv_heads)
    direct = splits == 1
    part = out if direct else q.new_empty(rows, heads, splits, v_dim, dtype=torch.float32)
    part_total, part_peak = (lse, lse) if direct else q.new_empty(2, rows, heads, splits, dtype=torch.float32).unbind()
    words = 0 if tree_mask is None else tree_mask.shape[1]
    flags = {"HAS_TREE": words > 0, "HAS_WINDOW": window is not None, "HAS_SINKS": sinks is not None}
    flags |= {"FIXED_SPLITS": launched[0].resident == 0}
    for config in launched:
        row_blocks = triton.cdiv(min(max_nodes, config.max_nodes) * group, config.block_m)
        tree_attention_kernel[row_blocks * kv_heads, splits, batch](
            out, lse, part, part_total, part_peak, q, k_new, v_new,
            as_codes(k_pages), as_codes(v_pages), k_scales, v_scales,
            block_table, seq_lens, qo_indptr, tree_mask, sinks,
            q.stride(0), q.stride(1), k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1),
            kv_heads, block_table.shape[1], words, splits, config.min_nodes, config.max_nodes,
            scale, softcap or 1.0, window or 0,
            GROUP=group, DK=head_dim, DV=v_dim, BLOCK_DK=block_dim(head_dim), BLOCK_DV=block_dim(v_dim),
            PAGE_SIZE=page_size, BY_HEAD=by_head(k_pages), BLOCK_M=config.block_m,
            BLOCK_N=config.direct_n if direct else config.block_n, NODES_N=config.nodes_n,
            SPLIT_SIZE=config.split_size, HAS_SOFTCAP=softcap is not None, DIRECT=direct, UPCAST=INTERPRETED,
            ROUND_BITS=rounds_by_bits(target_of(q.device), q.dtype), KV=kv_type(k_scales, k_pages), **flags,
            **launch_options(q.device, config),
        )  # fmt: skip
    if not direct:
        merge_splits_kernel[(rows, heads)](
            out, lse, part, part_total, part_peak, seq_lens, qo_indptr, tree_mask, sinks,
            heads, batch, words, splits, window or 0,
            DV=v_dim, BLOCK_DV=block_dim(v_dim), BLOCK_S=MERGE_SPLITS, BLOCK_B=64, SPLIT_SIZE=launched[0].split_size,
            **flags, **launch_options(q.device, MERGE_CONFIG),
        )  # fmt: skip
    return out, lse


def kernel_configs(
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_dtype: torch.dtype | None,
) -> tuple[KernelConfig, ...]:
    """The block sizes of :func:`tree_attention`, as in :func:`attention_configs`.

    Raises:
        ValueError: an unsupported device, dtype or head dimension.
    """
    target, group = target_of(device), num_qo_heads // num_kv_heads
    return attention_configs(target, head_dim, v_head_dim, group, dtype, quantised=page_dtype is not None)


def fixed_workspace(
    *, device: torch.device, num_qo_heads: int, num_kv_heads: int, v_head_dim: int, **sizes: Any
) -> int:
    """Maximum bytes of the split states of :func:`tree_attention`, in torch's allocator.

    Raises:
        ValueError: an unsupported device, dtype or head dimension.
    """
    configs = kernel_configs(
        device=device, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, v_head_dim=v_head_dim, **sizes
    )
    return max_state_bytes(configs, multiprocessors(device), v_head_dim)
