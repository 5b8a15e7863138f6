"""Online softmax over tiles of keys: tiles of committed tokens, then tiles with the step's own nodes."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from specmemo_kernels.backends.triton.codes import load_codes
from specmemo_kernels.backends.triton.primitives import (
    causal_word,
    load_page_ids,
    load_rows,
    mask_row,
    matmul,
    node_depth,
    page_row,
    spread_bits,
    tanh,
    tree_word,
)


@triton.jit
def round_weights(weights, like, ROUND_BITS: tl.constexpr):
    """Weights (float32, not negative) in ``like``'s dtype.

    ``ROUND_BITS``: to bfloat16 by two integer instructions, ties up, on a GPU that would need six for its conversion.
    """
    if ROUND_BITS:
        bits = weights.to(tl.int32, bitcast=True) + 0x8000
        rounded = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = weights.to(like.dtype)
    return rounded


@triton.jit
def attend(
    q, k, v, visible, acc, total, peak, unit, scale, softcap,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, ROUND_BITS: tl.constexpr,
):  # fmt: skip
    """One tile of online softmax.

    q [M, Dk], k [N, Dk], v [N, Dv], visible [M, N]. ``unit`` > 0 converts scores to base 2, in one fused multiply-add
    with the subtraction of the peak. Returns the new acc [M, Dv] (unnormalised), total [M] (sum of weights) and peak
    [M] (largest score so far, in base 2).
    """
    zeros = tl.zeros((q.shape[0], k.shape[0]), dtype=tl.float32)
    scores = matmul(q, tl.trans(k), zeros, UPCAST)
    if HAS_SOFTCAP:
        scores = tanh(scores * (scale / softcap)) * softcap
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
    weights = tl.exp2(scores * unit - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    acc = matmul(round_weights(weights, v, ROUND_BITS), v, acc * decay[:, None], UPCAST)
    return acc, total, new_peak


@triton.jit
def attend_committed(
    q, acc, total, peak, unit, scale, softcap, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, head,
    num_kv_heads, table_ptr, begin, end, position, window,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BY_HEAD: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr, ROUND_BITS: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Attend to the slots ``begin .. end`` (whole tiles of committed tokens), visible to every row in its window.

    position [M]: the position of each row's node. Page ids are loaded one tile ahead: otherwise Triton doesn't pipeline
    the loads of keys and values.
    """
    ids = load_page_ids(table_ptr, begin, end, PAGE_SIZE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        next_ids = load_page_ids(table_ptr, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
        slot = (start + tl.arange(0, BLOCK_N)) % PAGE_SIZE
        kv_row = page_row(ids, slot, head, num_kv_heads, PAGE_SIZE, BY_HEAD)
        if KV:
            k = load_codes(k_pages_ptr + kv_row * DK, k_scales_ptr + kv_row, None, q, DK, BLOCK_DK, False, KV)
            v = load_codes(v_pages_ptr + kv_row * DV, v_scales_ptr + kv_row, None, q, DV, BLOCK_DV, False, KV)
        else:
            k = load_rows(k_pages_ptr + kv_row * DK, None, DK, BLOCK_DK, False)
            v = load_rows(v_pages_ptr + kv_row * DV, None, DV, BLOCK_DV, False)
        visible = None
        if HAS_WINDOW:
            visible = position[:, None] - (start + tl.arange(0, BLOCK_N))[None, :] < window
        acc, total, peak = attend(
            q, k, v, visible, acc, total, peak, unit, scale, softcap, HAS_WINDOW, HAS_SOFTCAP, UPCAST, ROUND_BITS
        )  # fmt: skip
        ids = next_ids
    return acc, total, peak


@triton.jit
def attend_nodes(
    q, acc, total, peak, unit, scale, softcap, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, head,
    num_kv_heads, table_ptr, begin, end, length, k_new_ptr, v_new_ptr, stride_kn, stride_vn, first_row, nodes, node,
    depth, valid, mask_ptr, mask_words, window,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BY_HEAD: tl.constexpr, BLOCK_N: tl.constexpr, HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, ROUND_BITS: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Attend to the slots ``begin .. end``: the step's own nodes, and committed tokens in the same tile.

    node, depth, valid [M]: of each row's node. A row's mask of a tile is one 64-bit word. One or two tiles: pipelining
    their loads would only take registers from the tiles of committed tokens.
    """
    row = (first_row + node).to(tl.int64)
    causal = valid
    if HAS_TREE:
        union, _ = mask_row(mask_ptr, row, valid, mask_words)
        causal = union == 0
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        first = start - length
        key = first + tl.arange(0, BLOCK_N)
        committed = key < 0
        new = (key >= 0) & (key < nodes)
        key_row = (first_row + key).to(tl.int64)
        word = causal_word(node, first)
        if HAS_TREE:
            word = tl.where(causal, word, tree_word(mask_ptr, row, valid, first, mask_words))
        visible = spread_bits(word, BLOCK_N)
        if HAS_WINDOW:
            key_depth = node_depth(mask_ptr, key_row, key, new, mask_words, HAS_TREE)
            visible = visible & (depth[:, None] - tl.where(committed, key, key_depth)[None, :] < window)
        ids = load_page_ids(table_ptr, start, length, PAGE_SIZE, BLOCK_N)
        slot = (start + tl.arange(0, BLOCK_N)) % PAGE_SIZE
        kv_row = page_row(ids, slot, head, num_kv_heads, PAGE_SIZE, BY_HEAD)
        # Two loads, the second over the first: the compiler can't prove the alignment of selected pointers.
        if KV:
            k = load_codes(k_pages_ptr + kv_row * DK, k_scales_ptr + kv_row, committed, q, DK, BLOCK_DK, True, KV)
            v = load_codes(v_pages_ptr + kv_row * DV, v_scales_ptr + kv_row, committed, q, DV, BLOCK_DV, True, KV)
        else:
            k = load_rows(k_pages_ptr + kv_row * DK, committed, DK, BLOCK_DK, True)
            v = load_rows(v_pages_ptr + kv_row * DV, committed, DV, BLOCK_DV, True)
        k = load_rows(k_new_ptr + key_row * stride_kn, new, DK, BLOCK_DK, True, k)
        v = load_rows(v_new_ptr + key_row * stride_vn, new, DV, BLOCK_DV, True, v)
        acc, total, peak = attend(
            q, k, v, visible, acc, total, peak, unit, scale, softcap, True, HAS_SOFTCAP, UPCAST, ROUND_BITS
        )  # fmt: skip
    return acc, total, peak
