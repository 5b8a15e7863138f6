"""Tree attention over pages: split-KV flash decoding, then a merge of the splits.

A sequence's keys are numbered by *slot*: committed tokens ``0 .. L-1`` in pages, then the step's own nodes
``L .. L+T-1`` in ``k_new``. Splits and tiles start at fixed slots, so a key is in the same tile as a draft and after
its commit, and tiles outside a row's view change none of its bits. A program computes ``BLOCK_M`` rows (nodes x query
heads of one KV head) of one split. Tiles of committed tokens need no mask, the last tiles have one 64-bit word per row.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specmemo_kernels.backends.kernel_config import (
    MERGE_CONFIG,
    KernelConfig,
    attention_configs,
    block_dim,
    launched_classes,
    split_state_bytes,
)
from specmemo_kernels.backends.triton.codes import as_codes, kv_type
from specmemo_kernels.backends.triton.primitives import (
    LN_2,
    LOG2_E,
    NO_SCORE,
    add_sink,
    load_rows,
    node_depth,
    sequence_of_row,
)
from specmemo_kernels.backends.triton.runtime import INTERPRETED, entry_point, launch_options, target_of
from specmemo_kernels.backends.triton.tiles import attend_committed, attend_nodes
from specmemo_kernels.cache.page_order import by_head

Tensor = torch.Tensor

MERGE_SPLITS = 16


@triton.jit(do_not_specialize=["max_pages", "mask_words", "num_splits", "min_nodes", "max_nodes", "window"])
def tree_attention_kernel(
    out_ptr, lse_ptr, part_ptr, part_total_ptr, part_peak_ptr,
    q_ptr, k_new_ptr, v_new_ptr, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr,
    block_table_ptr, seq_lens_ptr, qo_indptr_ptr, tree_mask_ptr, sinks_ptr,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
    num_kv_heads, max_pages, mask_words, num_splits, min_nodes, max_nodes, scale, softcap, window,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BY_HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, DIRECT: tl.constexpr, UPCAST: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Grid: (row blocks x KV heads, splits, sequences). Writes the result if ``DIRECT``, else one split's state."""
    head = tl.program_id(0) % num_kv_heads
    block = tl.program_id(0) // num_kv_heads
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(qo_indptr_ptr + sequence)
    nodes = tl.load(qo_indptr_ptr + sequence + 1) - first_row
    length = tl.load(seq_lens_ptr + sequence)
    if (nodes < min_nodes) | (nodes > max_nodes) | (block * BLOCK_M >= nodes * GROUP):
        return
    begin = split * SPLIT_SIZE
    # Parents come before children: a node sees no slot behind its own.
    last_node = tl.minimum(nodes, (block * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    end = tl.minimum(length + last_node, begin + SPLIT_SIZE)
    if begin >= end:
        return

    packed = block * BLOCK_M + tl.arange(0, BLOCK_M)
    node = packed // GROUP
    valid = node < nodes
    row = (first_row + node).to(tl.int64)
    query_head = head * GROUP + packed % GROUP
    depth = node
    if HAS_WINDOW:
        depth = node_depth(tree_mask_ptr, row, node, valid, mask_words, HAS_TREE)
        window_start = tl.min(tl.where(valid, length + depth, 2147483647), 0) - window + 1
        begin = tl.maximum(begin, tl.maximum(window_start, 0) // BLOCK_N * BLOCK_N)
        if begin >= end:
            return

    q = load_rows(q_ptr + row * stride_qn + query_head * stride_qh, valid, DK, BLOCK_DK, True)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), NO_SCORE, tl.float32)
    unit = LOG2_E if HAS_SOFTCAP else scale * LOG2_E
    table_ptr = block_table_ptr + sequence.to(tl.int64) * max_pages
    mixed = tl.minimum(length // BLOCK_N * BLOCK_N, end)
    acc, total, peak = attend_committed(
        q, acc, total, peak, unit, scale, softcap, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, head,
        num_kv_heads, table_ptr, begin, mixed, length + depth, window,
        DK, DV, BLOCK_DK, BLOCK_DV, PAGE_SIZE, BY_HEAD, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, UPCAST, KV,
    )  # fmt: skip
    acc, total, peak = attend_nodes(
        q, acc, total, peak, unit, scale, softcap, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, head,
        num_kv_heads, table_ptr, tl.maximum(begin, mixed), end, length,
        k_new_ptr + head * stride_kh, v_new_ptr + head * stride_vh,
        stride_kn, stride_vn, first_row, nodes, node, depth, valid, tree_mask_ptr, mask_words, window,
        DK, DV, BLOCK_DK, BLOCK_DV, PAGE_SIZE, BY_HEAD, BLOCK_N, HAS_TREE, HAS_WINDOW, HAS_SOFTCAP, UPCAST, KV,
    )  # fmt: skip

    peak = peak * unit
    out_row = row * (num_kv_heads * GROUP) + query_head
    column = tl.arange(0, BLOCK_DV)
    inside = valid[:, None] & (column < DV)[None, :]
    if DIRECT:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + query_head).to(tl.float32)
            total, peak, decay = add_sink(total, peak, sink)
            acc = acc * decay[:, None]
        tl.store(out_ptr + out_row[:, None] * DV + column[None, :], acc / total[:, None], mask=inside)
        tl.store(lse_ptr + out_row, (peak + tl.log2(total)) * LN_2, mask=valid)
    else:
        state = out_row * num_splits + split
        tl.store(part_ptr + state[:, None] * DV + column[None, :], acc, mask=inside)
        tl.store(part_total_ptr + state, total, mask=valid)
        tl.store(part_peak_ptr + state, peak, mask=valid)


@triton.jit(do_not_specialize=["batch", "mask_words", "num_splits", "nodes_1", "nodes_2", "window"])
def merge_splits_kernel(
    out_ptr, lse_ptr, part_ptr, part_total_ptr, part_peak_ptr,
    seq_lens_ptr, qo_indptr_ptr, tree_mask_ptr, sinks_ptr,
    num_qo_heads, batch, mask_words, num_splits, nodes_1, nodes_2, split_1, split_2, split_3, window,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_B: tl.constexpr,
    HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: (packed rows, query heads). Splits of a sequence of T nodes have ``split_1`` slots for T <= nodes_1, ..."""
    row = tl.program_id(0)
    query_head = tl.program_id(1)
    sequence = sequence_of_row(qo_indptr_ptr, row, batch, BLOCK_B)
    if sequence >= batch:
        return
    first_row = tl.load(qo_indptr_ptr + sequence)
    nodes = tl.load(qo_indptr_ptr + sequence + 1) - first_row
    node = row - first_row
    length = tl.load(seq_lens_ptr + sequence)
    split_size = tl.where(nodes <= nodes_1, split_1, tl.where(nodes <= nodes_2, split_2, split_3))
    first_split = 0
    if HAS_WINDOW:
        depth = node_depth(tree_mask_ptr, row.to(tl.int64), node, node >= 0, mask_words, HAS_TREE)
        first_split = tl.maximum(length + depth - window + 1, 0) // split_size
    end_split = (length + node) // split_size + 1  # a node sees no slot behind its own

    out_row = row.to(tl.int64) * num_qo_heads + query_head
    column = tl.arange(0, BLOCK_DV)
    acc = tl.zeros((BLOCK_DV,), dtype=tl.float32)
    total = 0.0
    peak = NO_SCORE
    # Blocks of splits start at multiples of BLOCK_S, so the order of the sums doesn't depend on other sequences.
    for start in range(first_split // BLOCK_S * BLOCK_S, end_split, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        written = (split >= first_split) & (split < end_split)
        state = out_row * num_splits + split
        peaks = tl.load(part_peak_ptr + state, mask=written, other=NO_SCORE)
        totals = tl.load(part_total_ptr + state, mask=written, other=0.0)
        inside = written[:, None] & (column < DV)[None, :]
        parts = tl.load(part_ptr + state[:, None] * DV + column[None, :], mask=inside, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(peaks - new_peak)
        total = total * decay + tl.sum(totals * weights, 0)
        acc = acc * decay + tl.sum(parts * weights[:, None], 0)
        peak = new_peak
    if HAS_SINKS:
        total, peak, decay = add_sink(total, peak, tl.load(sinks_ptr + query_head).to(tl.float32))
        acc = acc * decay
    tl.store(out_ptr + out_row * DV + column, acc / total, mask=column < DV)
    tl.store(lse_ptr + out_row, (peak + tl.log2(total)) * LN_2)


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
    replayed = q.is_cuda and torch.cuda.is_current_stream_capturing()
    launched, splits = launched_classes(configs, rows, batch, max_nodes, max_slots, replayed, min_qo_len or 1)
    direct = splits == 1
    part = out if direct else q.new_empty(rows, heads, splits, v_dim, dtype=torch.float32)
    part_total, part_peak = (lse, lse) if direct else q.new_empty(2, rows, heads, splits, dtype=torch.float32).unbind()
    words = 0 if tree_mask is None else tree_mask.shape[1]
    flags = {"HAS_TREE": words > 0, "HAS_WINDOW": window is not None, "HAS_SINKS": sinks is not None}
    for config in launched:
        row_blocks = triton.cdiv(min(max_nodes, config.max_nodes) * group, config.block_m)
        grid = (row_blocks * kv_heads, triton.cdiv(max_slots, config.split_size), batch)
        tree_attention_kernel[grid](
            out, lse, part, part_total, part_peak, q, k_new, v_new,
            as_codes(k_pages), as_codes(v_pages), k_scales, v_scales,
            block_table, seq_lens, qo_indptr, tree_mask, sinks,
            q.stride(0), q.stride(1), k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1),
            kv_heads, block_table.shape[1], words, splits, config.min_nodes, config.max_nodes,
            scale, softcap or 1.0, window or 0,
            GROUP=group, DK=head_dim, DV=v_dim, BLOCK_DK=block_dim(head_dim), BLOCK_DV=block_dim(v_dim),
            PAGE_SIZE=page_size, BY_HEAD=by_head(k_pages), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            SPLIT_SIZE=config.split_size, HAS_SOFTCAP=softcap is not None, DIRECT=direct, UPCAST=INTERPRETED,
            KV=kv_type(k_scales, k_pages), **flags,
            **launch_options(q.device, config),
        )  # fmt: skip
    if not direct:
        classes = (*configs, configs[-1], configs[-1])[:3]
        bounds, sizes = [c.max_nodes for c in classes[:2]], [c.split_size for c in classes]
        merge_splits_kernel[(rows, heads)](
            out, lse, part, part_total, part_peak, seq_lens, qo_indptr, tree_mask, sinks,
            heads, batch, words, splits, *bounds, *sizes, window or 0,
            DV=v_dim, BLOCK_DV=block_dim(v_dim), BLOCK_S=MERGE_SPLITS, BLOCK_B=64, **flags,
            **launch_options(q.device, MERGE_CONFIG),
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


def split_workspace(*, num_qo_heads: int, v_head_dim: int, **sizes: Any) -> tuple[int, int]:
    """The workspace of :func:`tree_attention`: minimum slots per split, and bytes of one row in one split.

    Raises:
        ValueError: an unsupported device, dtype or head dimension.
    """
    configs = kernel_configs(num_qo_heads=num_qo_heads, v_head_dim=v_head_dim, **sizes)
    return min(config.split_size for config in configs), split_state_bytes(1, num_qo_heads, v_head_dim, 2) // 2
