"""The C++ operators (``csrc/``). Arguments are not checked here.

Importing this module raises ``ImportError`` if the C++ module wasn't built. The kernels run on torch's threads
(``torch.get_num_threads()``) and with the best instruction set of the machine; ``SPECMEMO_CPU_ISA`` (``avx512bf16``,
``avx512``, ``avx2``, ``baseline``) forces one.
"""

from __future__ import annotations

from typing import Any

import torch

from specmemo_kernels.backends import _cpu

Tensor = torch.Tensor

SPLIT_TOKENS = 512  # of csrc/attention_tasks.h
_CPU = torch.device("cpu")
_KV_TYPES = {torch.int8: 1, torch.float8_e4m3fn: 2}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def isa() -> str:
    """The instruction set and the thread pool in use."""
    return f"{_cpu.isa()} on {_cpu.thread_runtime()}"


def check_device(tensor: Tensor) -> None:
    """Raise ``ValueError`` for a dtype that the kernels don't have."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(
            f"the cpu backend takes float32, bfloat16 or float16 tensors, not {tensor.dtype}; "
            "convert the model with model.to(torch.float32), or use backend='reference'"
        )


#: Online softmax over 64-key blocks, splits of 512 tokens merged in order: the same bits in any batch. ``max_qo_len``,
#: ``max_seq_len`` and ``min_qo_len`` are ignored: the exact lengths are on the host. Blocks and splits have fixed
#: positions; ``invariant`` excludes the kernel for up to 8 rows (nodes times query heads per KV head), which sums in
#: another order.
tree_attention = _cpu.tree_attention

#: Copy (or quantise) every new row to its sequence's pages.
append_paged_kv = _cpu.append_paged_kv

#: Copy (or quantise) the accepted nodes of all layers from scratch slots to pages.
commit_paged_kv = _cpu.commit_paged_kv

#: Follow, in each tree, the children that equal the target's tokens.
verify_tree_greedy = _cpu.verify_tree_greedy


def fixed_workspace(
    *,
    dtype: torch.dtype,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_dtype: torch.dtype | None,
    **_: Any,
) -> int:
    """Bytes of :func:`tree_attention`'s buffers on all threads, kept between calls and independent of the context.

    ``page_dtype``: that of quantised pages, which are dequantised a block at a time.
    """
    kv_type = 0 if page_dtype is None else _KV_TYPES[page_dtype]
    thread_bytes = _cpu.attention_workspace(_DTYPES[dtype], kv_type, num_qo_heads, num_kv_heads, head_dim, v_head_dim)
    return torch.get_num_threads() * thread_bytes


def split_workspace(*, num_qo_heads: int, num_kv_heads: int, v_head_dim: int, **_: Any) -> tuple[int, int]:
    """Tokens per split, and bytes per row and split; ``(0, 0)`` where a thread merges each split at once.

    Splits are kept where one sequence has fewer KV heads than there are threads.
    """
    if num_kv_heads >= torch.get_num_threads():
        return 0, 0
    columns = -(-v_head_dim // 16) * 16
    return SPLIT_TOKENS, num_qo_heads * 4 * (columns + 2)


def lm_head_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The best token of each row."""
    return lm_head_topk(hidden, weight, bias, 1)[1][:, 0]


def lm_head_topk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ``k`` best logits of each row and their tokens, best first; ties go to the lower token."""
    rows = hidden.shape[0]
    tokens = torch.empty(rows, k, dtype=torch.int64, device=_CPU)
    values = torch.empty(rows, k, dtype=torch.float32, device=_CPU)
    _cpu.lm_head_topk(hidden, weight, scales, bias, k, tokens, values, torch.get_num_threads())
    return values.to(hidden.dtype), tokens
