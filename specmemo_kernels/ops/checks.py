"""Argument checks of the operators: metadata only, no device synchronisation, messages with both values.

Each takes the operator's arguments in order, without the backend.
"""

from __future__ import annotations

import torch

from specmemo_kernels.cache.page_order import is_dense_by_head
from specmemo_kernels.ops.weight_codes import GROUP, groups_of

Tensor = torch.Tensor


def _shape(name: str, tensor: Tensor, expected: tuple[int | None, ...], meaning: str) -> None:
    actual = tensor.shape
    if len(actual) == len(expected):
        for size, wanted in zip(actual, expected, strict=True):
            if wanted is not None and size != wanted:
                break
        else:
            return
    wanted_text = ", ".join("*" if size is None else str(size) for size in expected)
    raise ValueError(f"{name} has shape {tuple(actual)}, expected [{wanted_text}] ({meaning})")


def _dtype(name: str, tensor: Tensor, expected: torch.dtype) -> None:
    if tensor.dtype != expected:
        raise ValueError(f"{name} has dtype {tensor.dtype}, expected {expected}")


def _device(name: str, tensor: Tensor, expected: torch.device) -> None:
    if tensor.device != expected:
        raise ValueError(f"{name} is on {tensor.device}, expected {expected}")


def _contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()}")


def positive(**values: float | None) -> None:
    """Optional numbers that must be above zero when given."""
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}, it must be positive (or None)")


def metadata(block_table: Tensor, seq_lens: Tensor, qo_indptr: Tensor, pages: Tensor) -> None:
    """The three tensors that say where each sequence's tokens are."""
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens), ("qo_indptr", qo_indptr)):
        _dtype(name, tensor, torch.int32)
        _device(name, tensor, pages.device)
        _contiguous(name, tensor)
    _shape("seq_lens", seq_lens, (None,), "[B]")
    batch = seq_lens.shape[0]
    _shape("block_table", block_table, (batch, None), "[B, max_pages]")
    _shape("qo_indptr", qo_indptr, (batch + 1,), "[B + 1]")


def _rows(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have a contiguous last dimension, its strides are {tensor.stride()}")


Scales = tuple[Tensor | None, Tensor | None]
QUANTISED = (torch.int8, torch.float8_e4m3fn)


def page_dtype(k_pages: Tensor, v_pages: Tensor, scales: Scales, rows: Tensor, name: str) -> None:
    """Pages of the rows' own dtype without scales, or quantised pages with one scale per token and head."""
    _dtype("v_pages", v_pages, k_pages.dtype)
    if k_pages.dtype not in QUANTISED:
        _dtype(name, rows, k_pages.dtype)
        if any(tensor is not None for tensor in scales):
            raise ValueError(f"scales are for pages of int8 or float8_e4m3fn, k_pages has dtype {k_pages.dtype}")
        return
    if rows.dtype in QUANTISED:
        raise ValueError(f"{name} has dtype {rows.dtype}, only pages are quantised")
    for label, tensor in zip(("k_scales", "v_scales"), scales, strict=True):
        if tensor is None:
            raise ValueError(f"{label} is None, pages of {k_pages.dtype} need it: one scale per token and head")
        _shape(label, tensor, tuple(k_pages.shape[:-1]), "as k_pages without head_dim")
        _dtype(label, tensor, torch.float32)
        _device(label, tensor, k_pages.device)


def page_order(k_pages: Tensor, v_pages: Tensor, scales: Scales) -> None:
    """All in the order of their shapes, or all head by head within each page."""
    names = ("k_pages", "v_pages", "k_scales", "v_scales")
    given = [(name, t) for name, t in zip(names, (k_pages, v_pages, *scales), strict=True) if t is not None]
    if all(tensor.is_contiguous() for _, tensor in given):
        return
    for name, tensor in given:
        if not is_dense_by_head(tensor, scales=name.endswith("scales")):
            raise ValueError(
                f"{name} must be contiguous, or, like all pages and scales of the call, once tokens and heads are "
                f"exchanged; its shape is {tuple(tensor.shape)}, its strides are {tensor.stride()}"
            )


def new_rows(k_new: Tensor, v_new: Tensor, k_pages: Tensor, v_pages: Tensor, scales: Scales) -> None:
    """New keys and values against the pages that they go to (or are read beside)."""
    _shape("k_pages", k_pages, (None, None, None, None), "[num_pages, page_size, num_kv_heads, head_dim]")
    num_pages, page_size, heads, head_dim = k_pages.shape
    _shape("v_pages", v_pages, (num_pages, page_size, heads, None), "[num_pages, page_size, num_kv_heads, v_head_dim]")
    _shape("k_new", k_new, (None, heads, head_dim), "[N, num_kv_heads, head_dim]")
    _shape("v_new", v_new, (k_new.shape[0], heads, v_pages.shape[3]), "[N, num_kv_heads, v_head_dim]")
    page_dtype(k_pages, v_pages, scales, k_new, "k_new")
    _dtype("v_new", v_new, k_new.dtype)
    for name, tensor in (("k_new", k_new), ("v_new", v_new), ("v_pages", v_pages)):
        _device(name, tensor, k_pages.device)
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        _rows(name, tensor)
    page_order(k_pages, v_pages, scales)


def append_paged_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    new_rows(k_new, v_new, k_pages, v_pages, (k_scales, v_scales))
    metadata(block_table, seq_lens, qo_indptr, k_pages)


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
    invariant: bool,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    min_qo_len: int | None,
) -> None:
    new_rows(k_new, v_new, k_pages, v_pages, (k_scales, v_scales))
    metadata(block_table, seq_lens, qo_indptr, k_pages)
    _shape("q", q, (k_new.shape[0], None, k_new.shape[2]), "[N, num_qo_heads, head_dim]")
    _dtype("q", q, k_new.dtype)
    _device("q", q, k_pages.device)
    _rows("q", q)
    if q.shape[1] % k_new.shape[1]:
        raise ValueError(f"num_qo_heads {q.shape[1]} is not a multiple of num_kv_heads {k_new.shape[1]}")
    if tree_mask is not None:
        _shape("tree_mask", tree_mask, (q.shape[0], None), "[N, ceil(T/64)]")
        _dtype("tree_mask", tree_mask, torch.int64)
        _device("tree_mask", tree_mask, q.device)
        _contiguous("tree_mask", tree_mask)
    if sinks is not None:
        _shape("sinks", sinks, (q.shape[1],), "[num_qo_heads]")
        _device("sinks", sinks, q.device)
        _contiguous("sinks", sinks)
    positive(window=window, softcap=softcap, max_qo_len=max_qo_len, min_qo_len=min_qo_len)


def commit_paged_kv(
    k_scratch: Tensor,
    v_scratch: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    index: Tensor,
    length: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    metadata(block_table, seq_lens, qo_indptr, k_pages)
    batch = seq_lens.shape[0]
    _shape("k_pages", k_pages, (None,) * 5, "[num_layers, num_pages, page_size, num_kv_heads, head_dim]")
    layers, num_pages, page_size, heads, head_dim = k_pages.shape
    _shape("v_pages", v_pages, (layers, num_pages, page_size, heads, None), "as k_pages, head_dim may differ")
    _shape("k_scratch", k_scratch, (layers, None, heads, head_dim), "[num_layers, N, num_kv_heads, head_dim]")
    _shape("v_scratch", v_scratch, (layers, k_scratch.shape[1], heads, v_pages.shape[4]), "[num_layers, N, ...]")
    page_dtype(k_pages, v_pages, (k_scales, v_scales), k_scratch, "k_scratch")
    _dtype("v_scratch", v_scratch, k_scratch.dtype)
    for name, tensor in (("v_pages", v_pages), ("k_scratch", k_scratch), ("v_scratch", v_scratch)):
        _device(name, tensor, k_pages.device)
    for name, tensor in (("k_scratch", k_scratch), ("v_scratch", v_scratch)):
        _contiguous(name, tensor)
    page_order(k_pages, v_pages, (k_scales, v_scales))
    _shape("accept_length", length, (batch,), "[B]")
    _shape("accept_index", index, (batch, None), "[B, max_depth + 1]")
    for name, tensor in (("accept_index", index), ("accept_length", length)):
        _dtype(name, tensor, torch.int32)
        _device(name, tensor, k_pages.device)
        _contiguous(name, tensor)


def verify_tree_greedy(draft: Tensor, target: Tensor, parents: Tensor, qo_indptr: Tensor, max_depth: int) -> None:
    _shape("draft_tokens", draft, (None,), "[N]")
    nodes = draft.shape[0]
    for name, tensor, dtype in (
        ("draft_tokens", draft, torch.int64),
        ("target_tokens", target, torch.int64),
        ("parents", parents, torch.int32),
    ):
        _shape(name, tensor, (nodes,), "[N]")
        _dtype(name, tensor, dtype)
        _device(name, tensor, draft.device)
        _contiguous(name, tensor)
    _shape("qo_indptr", qo_indptr, (None,), "[B + 1]")
    _dtype("qo_indptr", qo_indptr, torch.int32)
    _device("qo_indptr", qo_indptr, draft.device)
    _contiguous("qo_indptr", qo_indptr)
    if max_depth < 0:
        raise ValueError(f"max_depth is {max_depth}, it must be at least 0")


def lm_head_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _lm_head(hidden, weight, bias, None)
    if not weight.shape[0]:
        raise ValueError("weight has 0 rows, lm_head_argmax needs at least 1 token to choose from")


def lm_head_topk(hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None) -> None:
    _lm_head(hidden, weight, bias, scales)


def _lm_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None) -> None:
    _shape("hidden", hidden, (None, None), "[N, hidden_size]")
    if scales is None:
        _shape("weight", weight, (None, hidden.shape[1]), "[V, hidden_size]")
        _dtype("weight", weight, hidden.dtype)
    else:
        groups = groups_of(hidden.shape[1])
        _shape("weight", weight, (None, groups * (GROUP // 2)), f"4-bit codes, two a byte, whole groups of {GROUP}")
        _dtype("weight", weight, torch.uint8)
        _shape("scales", scales, (weight.shape[0], groups), f"[V, ceil(hidden_size / {GROUP})]")
        _dtype("scales", scales, torch.float16)
        _device("scales", scales, hidden.device)
        _contiguous("scales", scales)
    _device("weight", weight, hidden.device)
    _rows("hidden", hidden)
    _contiguous("weight", weight)
    if bias is not None:
        _shape("bias", bias, (weight.shape[0],), "[V]")
        _dtype("bias", bias, hidden.dtype)
        _device("bias", bias, hidden.device)
        _contiguous("bias", bias)
