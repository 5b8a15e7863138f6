"""Device functions shared by the kernels.

Dots accumulate in float32. ``UPCAST`` converts their operands to float32 first, for the interpreter only, which
multiplies the bit patterns of bfloat16.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Below any score and finite, so that a row without a visible key never computes inf - inf.
NO_SCORE = tl.constexpr(-1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def wait_for_inputs(OVERLAPPED: tl.constexpr):
    """With programmatic dependent launch: wait until the kernels before this one are complete, then let the next start.

    Nothing may be read or written before it. The other order gained nothing (``bench/results/gpu_overlap.json``).
    """
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def matmul(a, b, acc, UPCAST: tl.constexpr):
    """``acc + a @ b`` in float32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """tanh in float32, by its series near zero because ``1 - 2 / (exp(2x) + 1)`` cancels there."""
    square = x * x
    series = x * (1.0 - square * (0.33333333 - square * (0.13333333 - square * 0.05396825)))
    closed = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
    return tl.where(square < 0.01, series, closed)


@triton.jit
def popcount(word):
    """Set bits of each int64, as int32."""
    x = word.to(tl.uint64)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def load_page_ids(table_ptr, start, limit, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of the positions ``start .. start + BLOCK_N``: a scalar if one page holds all of them, else [BLOCK_N].

    Table entries behind ``limit`` are uninitialised and not read.
    """
    if PAGE_SIZE % BLOCK_N == 0:  # noqa: SIM108 - compiled for one branch; their shapes differ
        position = start
    else:
        position = start + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + position // PAGE_SIZE, mask=position < limit, other=0)


@triton.jit
def page_row(page, slot, head, num_heads, PAGE_SIZE: tl.constexpr, BY_HEAD: tl.constexpr):
    """The pool's row (int64) of a head of a token; ``page``, ``slot``: scalars or [N]."""
    page = page.to(tl.int64)
    if BY_HEAD:  # noqa: SIM108 - compiled for one branch
        row = (page * num_heads + head) * PAGE_SIZE + slot
    else:
        row = (page * PAGE_SIZE + slot) * num_heads + head
    return row


@triton.jit
def load_rows(row_ptr, valid, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr, other=0.0):
    """[R, BLOCK_DIM] elements from R row pointers; ``other`` in invalid rows (if ``MASKED``) and behind ``DIM``."""
    column = tl.arange(0, BLOCK_DIM)
    pointer = row_ptr[:, None] + column[None, :]
    if MASKED and DIM == BLOCK_DIM:
        rows = tl.load(pointer, mask=valid[:, None], other=other)
    elif MASKED:
        rows = tl.load(pointer, mask=valid[:, None] & (column < DIM)[None, :], other=other)
    elif DIM == BLOCK_DIM:
        rows = tl.load(pointer)
    else:
        rows = tl.load(pointer, mask=(column < DIM)[None, :], other=0.0)
    return rows


@triton.jit
def mask_row(mask_ptr, row, valid, mask_words):
    """The words of each tree_mask row or-ed together, and its set bits: int64 and int32, shaped like ``row``."""
    union = row * 0
    count = (row * 0).to(tl.int32)
    for index in range(mask_words):
        word = tl.load(mask_ptr + row * mask_words + index, mask=valid, other=0)
        union |= word
        count += popcount(word)
    return union, count


@triton.jit
def node_depth(mask_ptr, row, node, valid, mask_words, HAS_TREE: tl.constexpr):
    """Number of each node's ancestors; in a causal row all earlier nodes."""
    depth = node
    if HAS_TREE:
        union, count = mask_row(mask_ptr, row, valid, mask_words)
        depth = tl.where(union == 0, node, count - 1)
    return depth


@triton.jit
def causal_word(node, first):
    """64 causal mask bits (int64, shaped like ``node``): bit n is set if key ``first + n`` isn't behind ``node``."""
    count = node - first + 1
    short = (tl.full(node.shape, 1, tl.int64) << tl.minimum(tl.maximum(count, 0), 63).to(tl.int64)) - 1
    return tl.where(count >= 64, -1, short)


@triton.jit
def tree_word(mask_ptr, row, valid, first, mask_words):
    """64 tree mask bits: bit n is set if key ``first + n`` is an ancestor, or negative (a committed token).

    The 64 keys straddle two words of the mask.
    """
    index = row * 0 + (first >> 6)
    shift = (first & 63).to(tl.uint64)
    pointer = mask_ptr + row * mask_words + index
    low = tl.load(pointer, mask=valid & (index >= 0) & (index < mask_words), other=0).to(tl.uint64)
    high = tl.load(pointer + 1, mask=valid & (index + 1 < mask_words), other=0).to(tl.uint64)
    # Two shifts, because shifting by 64 is undefined.
    word = (low >> shift) | ((high << (63 - shift)) << 1)
    committed = (tl.full(row.shape, 1, tl.int64) << tl.minimum(tl.maximum(-first, 0), 63).to(tl.int64)) - 1
    return word.to(tl.int64) | tl.where(first <= -64, -1, committed)  # shifting by 64 is undefined


@triton.jit
def spread_bits(word, BLOCK_N: tl.constexpr):
    """[M] int64 words to [M, BLOCK_N] booleans, in 32-bit arithmetic to halve the registers."""
    n = tl.arange(0, BLOCK_N)
    half = word.to(tl.uint32)[:, None]
    if BLOCK_N > 32:
        half = tl.where((n < 32)[None, :], half, (word.to(tl.uint64) >> 32).to(tl.uint32)[:, None])
    return ((half >> (n & 31).to(tl.uint32)[None, :]) & 1) != 0


@triton.jit
def add_sink(total, peak, sink):
    """Add a sink logit to the softmax's total; ``peak`` is in base 2. Returns total, peak and the factor of acc."""
    new_peak = tl.maximum(peak, sink * LOG2_E)
    decay = tl.exp2(peak - new_peak)
    return total * decay + tl.exp2(sink * LOG2_E - new_peak), new_peak, decay


@triton.jit
def first_slot_and_size(
    length, nodes, num_splits, window, SPLIT_SIZE: tl.constexpr, FIXED_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """The first slot of a sequence's splits, and the slots of each: multiples of ``SPLIT_SIZE``.

    At most ``num_splits`` equal splits hold the visible tokens and the nodes; ``FIXED_SPLITS``: any number from slot 0.
    """
    if FIXED_SPLITS:
        return 0, SPLIT_SIZE
    lowest = 0
    if HAS_WINDOW:  # of the root; other nodes are further on
        lowest = tl.maximum(length - window + 1, 0) // SPLIT_SIZE * SPLIT_SIZE
    return lowest, tl.cdiv(tl.cdiv(length + nodes - lowest, SPLIT_SIZE), num_splits) * SPLIT_SIZE


@triton.jit
def sequence_of_row(qo_indptr_ptr, row, batch, BLOCK_B: tl.constexpr):
    """The sequence of packed row ``row``: the number of sequences that end at or before it."""
    sequence = 0
    for first in range(0, batch, BLOCK_B):
        index = first + tl.arange(0, BLOCK_B)
        end = tl.load(qo_indptr_ptr + index + 1, mask=index < batch, other=2147483647)
        sequence += tl.sum((end <= row).to(tl.int32), 0)
    return sequence
