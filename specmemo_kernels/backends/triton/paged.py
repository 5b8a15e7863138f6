"""Writes pages: new rows of a prefill chunk, and the accepted nodes of a verified tree (all layers in one launch).

Rows are copied or quantised (``KV``, see :mod:`codes`).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specmemo_kernels.backends.kernel_config import COPY_CONFIG, block_dim
from specmemo_kernels.backends.triton.codes import as_codes, kv_type, quantise_token
from specmemo_kernels.backends.triton.primitives import page_row, sequence_of_row, wait_for_inputs
from specmemo_kernels.backends.triton.runtime import entry_point, launch_options
from specmemo_kernels.cache.page_order import by_head

Tensor = torch.Tensor

MAX_BLOCK = 1024


@triton.jit
def copy_token(
    source_ptr, stride_h, target_ptr, next_head, num_heads, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy one token's heads, ``stride_h`` elements apart in the source, ``next_head`` rows in the target."""
    for start in range(0, num_heads * DIM, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < num_heads * DIM
        head, column = (index // DIM).to(tl.int64), index % DIM
        value = tl.load(source_ptr + head * stride_h + column, mask=inside)
        tl.store(target_ptr + head * next_head * DIM + column, value, mask=inside)


@triton.jit
def write_token(
    source_ptr, stride_h, pages_ptr, scales_ptr, row, num_heads, DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, PAGE_SIZE: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Write one token's heads to pages; ``row`` is the first head's row of the pool."""
    next_head = PAGE_SIZE if BY_HEAD else 1
    if KV:
        quantise_token(
            source_ptr, stride_h, pages_ptr + row * DIM, scales_ptr + row, next_head, num_heads,
            DIM, BLOCK_DIM, HEADS, KV,
        )  # fmt: skip
    else:
        copy_token(source_ptr, stride_h, pages_ptr + row * DIM, next_head, num_heads, DIM, BLOCK)


@triton.jit
def first_row(
    block_table_ptr, sequence, position, max_pages, num_heads, PAGE_SIZE: tl.constexpr, BY_HEAD: tl.constexpr
):  # fmt: skip
    """The pool's row (int64) of the first head of a sequence's ``position``; negative where it has no page."""
    page = tl.load(block_table_ptr + sequence.to(tl.int64) * max_pages + position // PAGE_SIZE)
    return page_row(page, position % PAGE_SIZE, 0, num_heads, PAGE_SIZE, BY_HEAD)


@triton.jit(do_not_specialize=["batch", "max_pages"])
def append_paged_kv_kernel(
    k_new_ptr, v_new_ptr, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, seq_lens_ptr,
    qo_indptr_ptr, stride_kn, stride_kh, stride_vn, stride_vh, num_heads, batch, max_pages,
    DK: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BY_HEAD: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_V: tl.constexpr, KV: tl.constexpr, BLOCK_B: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (packed rows). Writes one row's keys and values, all heads."""
    wait_for_inputs(OVERLAPPED)
    row = tl.program_id(0)
    sequence = sequence_of_row(qo_indptr_ptr, row, batch, BLOCK_B)
    if sequence >= batch:
        return
    position = tl.load(seq_lens_ptr + sequence) + row - tl.load(qo_indptr_ptr + sequence)
    target = first_row(block_table_ptr, sequence, position, max_pages, num_heads, PAGE_SIZE, BY_HEAD)
    if target < 0:
        return
    source = row.to(tl.int64)
    write_token(
        k_new_ptr + source * stride_kn, stride_kh, k_pages_ptr, k_scales_ptr, target, num_heads,
        DK, BLOCK_K, BLOCK_DK, HEADS_K, KV, PAGE_SIZE, BY_HEAD,
    )  # fmt: skip
    write_token(
        v_new_ptr + source * stride_vn, stride_vh, v_pages_ptr, v_scales_ptr, target, num_heads,
        DV, BLOCK_V, BLOCK_DV, HEADS_V, KV, PAGE_SIZE, BY_HEAD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["places", "max_pages"])
def commit_paged_kv_kernel(
    k_scratch_ptr, v_scratch_ptr, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, seq_lens_ptr,
    qo_indptr_ptr, accept_index_ptr, accept_length_ptr, layer_scratch, layer_pages, num_heads, places, max_pages,
    DK: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BY_HEAD: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_V: tl.constexpr,
    KV: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (depths of the path, sequences, layers). ``layer_*``: a layer's tokens in scratch, its rows in pages."""
    wait_for_inputs(OVERLAPPED)
    depth = tl.program_id(0)
    sequence = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    if depth > tl.load(accept_length_ptr + sequence):
        return
    node = tl.load(qo_indptr_ptr + sequence) + tl.load(accept_index_ptr + sequence * places + depth)
    position = tl.load(seq_lens_ptr + sequence) + depth
    source = (layer * layer_scratch + node) * num_heads
    target = first_row(block_table_ptr, sequence, position, max_pages, num_heads, PAGE_SIZE, BY_HEAD)
    if target < 0:
        return
    target += layer * layer_pages
    write_token(
        k_scratch_ptr + source * DK, DK, k_pages_ptr, k_scales_ptr, target, num_heads,
        DK, BLOCK_K, BLOCK_DK, HEADS_K, KV, PAGE_SIZE, BY_HEAD,
    )  # fmt: skip
    write_token(
        v_scratch_ptr + source * DV, DV, v_pages_ptr, v_scales_ptr, target, num_heads,
        DV, BLOCK_V, BLOCK_DV, HEADS_V, KV, PAGE_SIZE, BY_HEAD,
    )  # fmt: skip


@entry_point
def append_paged_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Append every new row to its sequence's pages.

    Raises:
        ValueError: an unsupported device or dtype.
    """
    rows, heads, head_dim = k_new.shape
    v_dim, batch = v_new.shape[2], seq_lens.shape[0]
    if rows == 0 or heads == 0 or batch == 0:
        return
    append_paged_kv_kernel[(rows,)](
        k_new, v_new, as_codes(k_pages), as_codes(v_pages), k_scales, v_scales, block_table, seq_lens, qo_indptr,
        k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1), heads, batch, block_table.shape[1],
        PAGE_SIZE=k_pages.shape[1], BY_HEAD=by_head(k_pages), KV=kv_type(k_scales, k_pages), BLOCK_B=64,
        **copy_blocks(heads, head_dim, v_dim), **launch_options(k_pages.device, COPY_CONFIG),
    )  # fmt: skip


@entry_point
def commit_paged_kv(
    k_scratch: Tensor,
    v_scratch: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    accept_index: Tensor,
    accept_length: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Copy the accepted nodes of all layers from scratch to their pages.

    The counts stay on the device: the grid has the longest path of ``accept_index``.

    Raises:
        ValueError: an unsupported device or dtype.
    """
    layers, num_pages, page_size, heads, head_dim = k_pages.shape
    v_dim, (batch, places) = v_pages.shape[4], accept_index.shape
    if layers == 0 or heads == 0 or batch == 0 or places == 0:
        return
    commit_paged_kv_kernel[(places, batch, layers)](
        k_scratch, v_scratch, as_codes(k_pages), as_codes(v_pages), k_scales, v_scales, block_table, seq_lens,
        qo_indptr, accept_index, accept_length, k_scratch.shape[1], num_pages * page_size * heads, heads, places,
        block_table.shape[1],
        PAGE_SIZE=page_size, BY_HEAD=by_head(k_pages), KV=kv_type(k_scales, k_pages),
        **copy_blocks(heads, head_dim, v_dim), **launch_options(k_pages.device, COPY_CONFIG),
    )  # fmt: skip


def copy_blocks(heads: int, head_dim: int, v_dim: int) -> dict[str, int]:
    """Constexpr sizes: elements per copy (``BLOCK_*``) and heads per quantisation (``HEADS_*``)."""
    sizes: dict[str, int] = {}
    for side, dim in (("K", head_dim), ("V", v_dim)):
        block, padded = min(MAX_BLOCK, block_dim(heads * dim)), block_dim(dim)
        sizes |= {f"D{side}": dim, f"BLOCK_{side}": block, f"BLOCK_D{side}": padded}
        sizes[f"HEADS_{side}"] = max(1, block // padded)
    return sizes
