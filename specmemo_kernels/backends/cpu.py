"""The C++ operators (``csrc/``): this module hands tensors over; :mod:`specmemo_kernels.ops` checked the arguments.

Built with the package; importing this module fails with ``ImportError`` where it was not. The kernels run on the
threads that torch uses (``torch.get_num_threads()``) and the best instruction set of the machine;
``SPECMEMO_CPU_ISA`` (``avx512bf16``, ``avx512``, ``avx2``, ``baseline``) forces one.
"""

from __future__ import annotations

import torch

from specmemo_kernels import _cpu

Tensor = torch.Tensor

SPLIT_TOKENS = 512  # of csrc/attention_tasks.h
_CPU = torch.device("cpu")
_KV_TYPES = {torch.int8: 1, torch.float8_e4m3fn: 2}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def isa() -> str:
    """The instruction set in use and the thread pool, for reports."""
    return f"{_cpu.isa()} on {_cpu.thread_runtime()}"


def _dtype(name: str, tensor: Tensor) -> int:
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{name} has dtype {tensor.dtype}; backend 'cpu' computes float32, bfloat16 and float16")
    return code


def _kv_type(scales: Tensor | None, pages: Tensor) -> int:
    return 0 if scales is None else _KV_TYPES[pages.dtype]


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
) -> tuple[Tensor, Tensor]:
    """Online softmax over 64-key blocks, splits of 512 tokens merged in order: the same bits in any batch.

    ``max_qo_len``, ``max_seq_len`` and ``min_qo_len`` are for launches on a device; here the exact lengths are at
    hand. ``invariant`` asks for what always holds here: blocks and splits lie at fixed places, whatever the number of
    nodes.
    """
    code = _dtype("q", q)
    nodes, heads, _ = q.shape
    out = torch.empty(nodes, heads, v_new.shape[2], dtype=q.dtype, device=_CPU)
    lse = torch.empty(nodes, heads, dtype=torch.float32, device=_CPU)
    if sinks is not None:
        sinks = sinks.to(q.dtype)
    _cpu.tree_attention(
        code, _kv_type(k_scales, k_pages), q, k_new, v_new, k_pages, v_pages, k_scales, v_scales, block_table, seq_lens,
        qo_indptr, tree_mask, sinks, out, lse, scale, softcap or 0.0, window or 0, torch.get_num_threads(),
    )  # fmt: skip
    return out, lse


def fixed_workspace(
    dtype: torch.dtype,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_dtype: torch.dtype | None = None,
) -> int:
    """Bytes that :func:`tree_attention` works in on all threads, however long the context; kept between calls.

    ``page_dtype``: that of quantised pages, whose codes are turned back a block at a time.
    """
    kv = 0 if page_dtype is None else _KV_TYPES[page_dtype]
    each = _cpu.attention_workspace(_DTYPES[dtype], kv, num_qo_heads, num_kv_heads, head_dim, v_head_dim)
    return torch.get_num_threads() * each


def split_workspace(
    device: torch.device,
    dtype: torch.dtype,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_size: int,
    page_dtype: torch.dtype | None = None,
) -> tuple[int, int]:
    """Tokens per split, and bytes of one row in one split where splits are kept until all are done.

    That is where one sequence's KV heads are too few for the threads; else a thread merges each split at once.
    """
    if num_kv_heads >= torch.get_num_threads():
        return 0, 0
    columns = -(-v_head_dim // 16) * 16
    return SPLIT_TOKENS, num_qo_heads * 4 * (columns + 2)


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
    """Copy every new row to its sequence's pages, or quantise it on the way."""
    kv = _kv_type(k_scales, k_pages)
    _cpu.append_paged_kv(
        _dtype("k_new", k_new) if kv else 0, kv, k_new, v_new, k_pages, v_pages, k_scales, v_scales,
        block_table, seq_lens, qo_indptr,
    )  # fmt: skip


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
    """Copy the accepted nodes of all layers from the scratch slots to their pages, or quantise them on the way."""
    kv = _kv_type(k_scales, k_pages)
    _cpu.commit_paged_kv(
        _dtype("k_scratch", k_scratch) if kv else 0, kv, k_scratch, v_scratch, k_pages, v_pages, k_scales, v_scales,
        block_table, seq_lens, qo_indptr, accept_index, accept_length, torch.get_num_threads(),
    )  # fmt: skip


def verify_tree_greedy(
    draft_tokens: Tensor, target_tokens: Tensor, parents: Tensor, qo_indptr: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree from its root along children that equal what the target wrote."""
    batch = qo_indptr.shape[0] - 1
    accept_index = torch.empty(batch, max_depth + 1, dtype=torch.int32, device=_CPU)
    accept_length = torch.empty(batch, dtype=torch.int32, device=_CPU)
    bonus_token = torch.empty(batch, dtype=torch.int64, device=_CPU)
    _cpu.verify_tree_greedy(
        draft_tokens, target_tokens, parents, qo_indptr, max_depth, accept_index, accept_length, bonus_token
    )
    return accept_index, accept_length, bonus_token


def lm_head_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The best token of each row; logits exist a few at a time, in registers."""
    return lm_head_topk(hidden, weight, bias, 1)[1][:, 0]


def lm_head_topk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ``k`` best logits of each row and their tokens, best first; ties go to the lower token."""
    code = _dtype("hidden", hidden)
    rows = hidden.shape[0]
    tokens = torch.empty(rows, k, dtype=torch.int64, device=_CPU)
    values = torch.empty(rows, k, dtype=torch.float32, device=_CPU)
    _cpu.lm_head_topk(code, hidden, weight, scales, bias, k, tokens, values, torch.get_num_threads())
    return values.to(hidden.dtype), tokens
