"""Tree attention over pages: split-KV flash decoding, then a merge of the splits.

A sequence's keys are numbered by *slot*: committed tokens ``0 .. L-1`` in pages, then the step's own nodes
``L .. L+T-1`` in ``k_new``. A program computes ``BLOCK_M`` rows (nodes x query heads of one KV head) of one split.
Tiles of committed tokens need no mask, the last tiles have one 64-bit word per row.

The launcher chooses the number of splits that fills the GPU; the tokens and nodes of each sequence are divided into at
most as many equal splits, so that the split with the nodes has fewer tokens. With ``FIXED_SPLITS`` (invariant mode),
splits start at fixed slots instead: a key is in the same tile as a draft and after its commit, and tiles outside a
row's view change none of its bits.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from specmemo_kernels.backends.triton.primitives import (
    LN_2,
    LOG2_E,
    NO_SCORE,
    add_sink,
    first_slot_and_size,
    load_rows,
    node_depth,
    sequence_of_row,
    wait_for_inputs,
)
from specmemo_kernels.backends.triton.tiles import attend_committed, attend_nodes


@triton.jit(do_not_specialize=["max_pages", "mask_words", "num_splits", "min_nodes", "max_nodes", "window"])
def tree_attention_kernel(
    out_ptr, lse_ptr, part_ptr, part_total_ptr, part_peak_ptr,
    q_ptr, k_new_ptr, v_new_ptr, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr,
    block_table_ptr, seq_lens_ptr, qo_indptr_ptr, tree_mask_ptr, sinks_ptr,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
    num_kv_heads, max_pages, mask_words, num_splits, min_nodes, max_nodes, scale, softcap, window,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BY_HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NODES_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, FIXED_SPLITS: tl.constexpr, HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, DIRECT: tl.constexpr, UPCAST: tl.constexpr,
    ROUND_BITS: tl.constexpr, KV: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (row blocks x KV heads, splits, sequences). Writes the result if ``DIRECT``, else one split's state."""
    wait_for_inputs(OVERLAPPED)
    head = tl.program_id(0) % num_kv_heads
    block = tl.program_id(0) // num_kv_heads
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(qo_indptr_ptr + sequence)
    nodes = tl.load(qo_indptr_ptr + sequence + 1) - first_row
    length = tl.load(seq_lens_ptr + sequence)
    if (nodes < min_nodes) | (nodes > max_nodes) | (block * BLOCK_M >= nodes * GROUP):
        return
    # Parents come before children: a node sees no slot behind its own.
    last_slot = length + tl.minimum(nodes, (block * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    lowest, size = first_slot_and_size(length, nodes, num_splits, window, SPLIT_SIZE, FIXED_SPLITS, HAS_WINDOW)
    begin = lowest + split * size
    end = tl.minimum(last_slot, begin + size)
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
        DK, DV, BLOCK_DK, BLOCK_DV, PAGE_SIZE, BY_HEAD, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, UPCAST, ROUND_BITS, KV,
    )  # fmt: skip
    acc, total, peak = attend_nodes(
        q, acc, total, peak, unit, scale, softcap, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, head,
        num_kv_heads, table_ptr, tl.maximum(begin, mixed), end, length,
        k_new_ptr + head * stride_kh, v_new_ptr + head * stride_vh,
        stride_kn, stride_vn, first_row, nodes, node, depth, valid, tree_mask_ptr, mask_words, window,
        DK, DV, BLOCK_DK, BLOCK_DV, PAGE_SIZE, BY_HEAD, NODES_N, HAS_TREE, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
        ROUND_BITS, KV,
    )  # fmt: skip

    out_row = row * (num_kv_heads * GROUP) + query_head
    if DIRECT:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + query_head).to(tl.float32)
            total, peak, decay = add_sink(total, peak, sink)
            acc = acc * decay[:, None]
        acc = acc / total[:, None]
        tl.store(lse_ptr + out_row, (peak + tl.log2(total)) * LN_2, mask=valid)
        target = out_ptr + out_row * DV
    else:
        state = out_row * num_splits + split
        tl.store(part_total_ptr + state, total, mask=valid)
        tl.store(part_peak_ptr + state, peak, mask=valid)
        target = part_ptr + state * DV
    column = tl.arange(0, BLOCK_DV)
    inside = valid[:, None] & (column < DV)[None, :]
    tl.store(target[:, None] + column[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["batch", "mask_words", "num_splits", "window"])
def merge_splits_kernel(
    out_ptr, lse_ptr, part_ptr, part_total_ptr, part_peak_ptr,
    seq_lens_ptr, qo_indptr_ptr, tree_mask_ptr, sinks_ptr,
    num_qo_heads, batch, mask_words, num_splits, window,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_B: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, FIXED_SPLITS: tl.constexpr,
    HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (packed rows, query heads)."""
    wait_for_inputs(OVERLAPPED)
    row = tl.program_id(0)
    query_head = tl.program_id(1)
    sequence = sequence_of_row(qo_indptr_ptr, row, batch, BLOCK_B)
    if sequence >= batch:
        return
    first_row = tl.load(qo_indptr_ptr + sequence)
    node = row - first_row
    length = tl.load(seq_lens_ptr + sequence)
    nodes = tl.load(qo_indptr_ptr + sequence + 1) - first_row
    lowest, size = first_slot_and_size(length, nodes, num_splits, window, SPLIT_SIZE, FIXED_SPLITS, HAS_WINDOW)
    first_split = 0
    if HAS_WINDOW:
        depth = node_depth(tree_mask_ptr, row.to(tl.int64), node, node >= 0, mask_words, HAS_TREE)
        first_split = tl.maximum(length + depth - window + 1 - lowest, 0) // size
    end_split = (length + node - lowest) // size + 1  # a node sees no slot behind its own

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
