"""The C++ operators (``csrc/``): this module hands tensors over; :mod:`specmemo_kernels.ops` checked the arguments.

Built with the package; importing this module fails with ``ImportError`` where it was not. The kernels run on the
threads that torch uses (``torch.get_num_threads()``) and the best instruction set of the machine;
``SPECMEMO_CPU_ISA`` (``avx512bf16``, ``avx512``, ``avx2``, ``baseline``) forces one.
"""

from __future__ import annotations

import torch

from specmemo_kernels.backends import _cpu

Tensor = torch.Tensor

SPLIT_TOKENS = 512  # of csrc/attention_tasks.h
_CPU = torch.device("cpu")
_KV_TYPES = {torch.int8: 1, torch.float8_e4m3fn: 2}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def isa() -> str:
    """The instruction set in use and the thread pool, for reports."""
    return f"{_cpu.isa()} on {_cpu.thread_runtime()}"


def check_device(tensor: Tensor) -> None:
    """Refuse what the kernels can't compute with.

    Raises:
        ValueError: another dtype.
    """
    if tensor.dtype not in _DTYPES:
        raise ValueError(
            f"the cpu backend takes float32, bfloat16 or float16 tensors, not {tensor.dtype}; "
            "convert the model with model.to(torch.float32), or use backend='reference'"
        )


#: Online softmax over 64-key blocks, splits of 512 tokens merged in order: the same bits in any batch. ``max_qo_len``,
#: ``max_seq_len`` and ``min_qo_len`` are for launches on a device; here the exact lengths are at hand. Blocks and
#: splits lie at fixed places whatever the number of nodes; ``invariant`` keeps sequences of up to 8 rows (nodes times
#: query heads per KV head) from a kernel that sums in another order.
tree_attention = _cpu.tree_attention

#: Copy every new row to its sequence's pages, or quantise it on the way.
append_paged_kv = _cpu.append_paged_kv

#: Copy the accepted nodes of all layers from the scratch slots to their pages, or quantise them on the way.
commit_paged_kv = _cpu.commit_paged_kv

#: Walk each tree from its root along children that equal what the target wrote.
verify_tree_greedy = _cpu.verify_tree_greedy


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


def lm_head_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The best token of each row; logits exist a few at a time, in registers."""
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
