"""The C++ operators (``csrc/``). Arguments are not checked here.

Importing this module raises ``ImportError`` if the C++ module wasn't built. The kernels run on torch's threads
(``torch.get_num_threads()``) and with the best instruction set of the machine; ``SPECMEMO_CPU_ISA`` (``avx512bf16``,
``avx512``, ``avx2``, ``baseline``; on ARM ``neonbf16``, ``neon``) forces one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from specmemo_kernels.backends import _cpu
from specmemo_kernels.backends.layers import ACTIVATION_FUNCTIONS

Tensor = torch.Tensor

SPLIT_TOKENS = 512  # of csrc/attention_tasks.h
_CPU = torch.device("cpu")
_KV_TYPES = {torch.int8: 1, torch.float8_e4m3fn: 2}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2}  # csrc/kernels.h

#: Rows up to which :func:`linear` replaces torch's product, where torch has a fast one. Ratios are of Llama matrices
#: (125M to 8B) on EPYCs. In float32 with AVX2 it replaces any number: 128 rows are 0.98 to 1.8 times as fast, 256 rows
#: 0.91 to 1.4 times, 512 rows 0.86 to 1.2 times.
_FEW_ROWS = {torch.float32: 128, torch.bfloat16: 32, torch.float16: 32}
#: From this Zen generation on it replaces torch's product of any number, by dtype and whether the weight is transposed.
#: On Zen 4, 64 to 256 rows of float32 are 1.1 to 1.7 times as fast; of bfloat16 64 rows 1.2 to 1.6 times, 256 and 1024
#: rows 0.92 to 1.08 times. On Zen 5, 32 to 512 rows of float32 are 2.0 to 3.6 times as fast, transposed 4 to 256 rows
#: 1.5 to 3.3 times; of bfloat16 33 to 192 rows 1.02 to 1.6 times, 256 to 1024 rows 0.94 to 1.05 times.
_ANY_ROWS_FROM_ZEN = {(torch.float32, False): 4, (torch.bfloat16, False): 4, (torch.float32, True): 5}
#: oneDNN keeps compiled kernels for each number of rows, 0.65 MiB for each size of matrix, so that prompts of 33 to 256
#: tokens would take hundreds of MiB. Its products have a multiple of these rows; our products have the rest.
_ROWS_OF_16_BITS = 32
#: The same for a weight ``[inputs, outputs]``. In float32 on Emerald Rapids, 32 rows are 1.0 to 1.2 times as fast, 128
#: rows 0.7 times.
_FEW_ROWS_TRANSPOSED = 32
#: Most bytes of decompressed weights, and of results, in a product of torch with a compressed matrix.
_SLICE_BYTES = 1 << 20


def isa() -> str:
    """The instruction set and the thread pool in use."""
    return f"{_cpu.isa()} on {_cpu.thread_runtime()}"


#: End the worker threads that OpenMP keeps for the calling thread, until its next loop. libgomp's workers spin between
#: loops only while the process has no more of them than cores: with a second thread's workers, a pass of 100 rows
#: takes 29 ms instead of 21 (8 layers of 256, 2 cores).
release_threads = _cpu.release_threads


def check_device(tensor: Tensor) -> None:
    """Raise ``ValueError`` for a dtype that the kernels don't have."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(
            f"the cpu backend takes float32, bfloat16 or float16 tensors, not {tensor.dtype}; "
            "convert the model with model.to(torch.float32), or use backend='reference'"
        )


#: Online softmax over 64-key blocks; splits of 512 tokens are merged in order. Blocks and splits have fixed positions,
#: so a row's bits don't depend on the batch. Up to 8 rows (nodes times query heads per KV head) use a kernel that sums
#: in another order, unless ``invariant``. ``max_qo_len``, ``max_seq_len`` and ``min_qo_len`` are ignored: the exact
#: lengths are on the host.
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
    """The argmax token of each row; ties go to the lower token."""
    return lm_head_topk(hidden, weight, bias, 1)[1][:, 0]


def lm_head_topk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ``k`` best logits of each row and their tokens, best first; ties go to the lower token."""
    values, tokens = _best_logits(hidden, weight, bias, k, scales, None)
    return values.to(hidden.dtype), tokens


def lm_head_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``k`` best log-probabilities of each row and their tokens, and the log-sum-exp of all logits."""
    lse = torch.empty(hidden.shape[0], dtype=torch.float32, device=_CPU)
    values, tokens = _best_logits(hidden, weight, bias, k, scales, lse)
    return values, tokens, lse


def _best_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits ``[N, k]`` float32, or with ``lse``, which the call fills, log-probabilities; and tokens."""
    rows = hidden.shape[0]
    tokens = torch.empty(rows, k, dtype=torch.int64, device=_CPU)
    values = torch.empty(rows, k, dtype=torch.float32, device=_CPU)
    _cpu.lm_head_topk(hidden, weight, scales, bias, k, tokens, values, lse, torch.get_num_threads())
    return values, tokens


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, invariant: bool) -> Tensor:
    """``x @ weight.T + bias``; reads the weights once per 32 or 64 rows, and uses torch above :func:`few_rows`."""
    if scales is None and not invariant and _many_rows(x, transposed=not weight.is_contiguous()):
        return _by_torch(x, weight, bias)
    return _cpu.linear(_rows(x), weight, bias, scales, invariant)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """:func:`linear` of the same rows with several contiguous matrices, in one loop.

    Args:
        weights: ``[outputs, inputs]``, all compressed or none. biases: one for each matrix, or only ``None``.
    """
    if _many_rows(x):
        return [_by_torch(x, *parameters) for parameters in zip(weights, biases, strict=True)]
    return _cpu.linears(_rows(x), weights, biases)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, invariant: bool) -> Tensor:
    """:func:`linear` of groups of rows, with one matrix each; always invariant, for groups have few rows."""
    return _cpu.grouped_linear(_rows(x), weight, bias, ends)


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    invariant: bool,
) -> Tensor:
    """``down(activation(gate(x)) * up(x))``; by torch for more than :func:`few_rows`."""
    if not invariant and _many_rows(x):
        return _gated_mlp_by_torch(x, (gate, up, down, gate_bias, up_bias, down_bias), activation)
    return _cpu.gated_mlp(_rows(x), gate, up, down, gate_bias, up_bias, down_bias, _ACTIVATIONS[activation], invariant)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * (weight + offset)``, one pass over each row."""
    return _cpu.rms_norm(x.contiguous(), weight, eps, offset, round_first)


#: ``(x + residual, rms_norm(x + residual, ...))`` of contiguous tensors ``[..., size]``, rounded as in two operators.
#: Arguments: x, residual, weight, eps, offset, round_first.
add_rms_norm = _cpu.add_rms_norm

#: ``x * cos + [-second half of x, first half of x] * sin``, rounded as in separate operators. x: ``[tokens, heads,
#: size]`` with contiguous heads, cos and sin: ``[tokens, size]`` with contiguous rows, alike.
rotary = _cpu.rotary

#: Copy rows ``[N, heads, size]`` to a contiguous tensor like them. Arguments: to, from.
copy_rows = _cpu.copy_rows

#: ``record(blocks, inputs, function, kept)``: a program that repeats the calls of :data:`RECORDED` operators that
#: ``function`` makes on tensors like ``inputs``. It returns copies of the function's results.
record = _cpu.record
#: ``Blocks(limit)``: the memory of programs that never run at once, at most ``limit`` bytes; ``MemoryError`` beyond.
#: ``trim()`` returns it to the system until a program runs.
Blocks = _cpu.Blocks
RECORDED = frozenset((
    linear, linears, grouped_linear, gated_mlp, rms_norm, add_rms_norm, rotary, tree_attention, append_paged_kv,
    copy_rows,
))  # fmt: skip


def linear_workspace(dtype: torch.dtype, inputs: int, middle: int = 0, transposed: bool = False) -> int:
    """Bytes that :func:`linear` (with ``middle``: :func:`gated_mlp`) keeps between calls, for any number of rows.

    ``transposed``: with a weight that is a transposed ``[inputs, outputs]``.
    """
    return _cpu.linear_workspace(_DTYPES[dtype], inputs, middle, transposed, torch.get_num_threads())


@functools.cache
def few_rows(dtype: torch.dtype, transposed: bool = False) -> int | None:
    """Rows up to which :func:`linear` is at least as fast as torch's product; ``None``: any number.

    Without 16-bit instructions torch converts element by element: with AVX2 its product of 64 rows takes 2.6 to 5 times
    as long as in float32, and 6 to 7 times as long as ours (``bench/results/linear_avx2_cpu.json``); with AVX512 alone,
    four times and 4.5 times as long, although oneDNN lists bfloat16 as supported.
    """
    if slow_in_torch(dtype) or _cpu.zen() >= _ANY_ROWS_FROM_ZEN.get((dtype, transposed), sys.maxsize):
        return None
    if dtype == torch.float32 and not transposed and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return None
    limit = _FEW_ROWS.get(dtype)
    return min(limit, _FEW_ROWS_TRANSPOSED) if limit is not None and transposed else limit


def compress(weight: Tensor, out: Tensor) -> bool:
    """Compress a matrix to ``out`` (:mod:`specmemo_kernels.ops.compressed_weights`); ``False``: it has too many
    exceptions.
    """
    return _cpu.compress(weight, out, torch.get_num_threads())


def decompress(compressed: Tensor, columns: int) -> Tensor:
    """The matrix that was compressed."""
    out = torch.empty(len(compressed), columns, dtype=torch.bfloat16, device=_CPU)
    _cpu.decompress(compressed, out, torch.get_num_threads())
    return out


def slow_in_torch(dtype: torch.dtype) -> bool:
    """Whether torch's products of ``dtype`` have no instructions of their own."""
    supported = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    check = getattr(torch.ops.mkldnn, supported[dtype], None) if dtype in supported else None
    if check is None:
        return False
    emulated = (
        dtype == torch.bfloat16 and torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    )
    return emulated or not check()


def _many_rows(x: Tensor, transposed: bool = False) -> bool:
    limit = few_rows(x.dtype, transposed)
    return limit is not None and x.numel() > limit * x.shape[-1]


@torch.no_grad()
def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's product; in 16 bits of a multiple of :data:`_ROWS_OF_16_BITS` rows."""
    if weight.dtype == torch.uint8:
        return _by_torch_in_slices(x, weight, bias)
    if x.dtype.itemsize > 2:
        return functional.linear(x, weight, bias)
    rows = _rows(x).view(-1, x.shape[-1])
    out = x.new_empty(len(rows), weight.shape[0])
    count = len(rows) // _ROWS_OF_16_BITS * _ROWS_OF_16_BITS
    if count > 0:
        if bias is None:
            torch.mm(rows[:count], weight.t(), out=out[:count])
        else:
            torch.addmm(bias, rows[:count], weight.t(), out=out[:count])
    if count < len(rows):
        out[count:] = _cpu.linear(rows[count:], weight, bias, None, False)
    return out.view(*x.shape[:-1], weight.shape[0])


def _gated_mlp_by_torch(x: Tensor, parameters: Sequence[Any], activation: str) -> Tensor:
    """``parameters``: gate, up and down, then their biases, as of :func:`gated_mlp`."""
    gate, up, down = zip(parameters[:3], parameters[3:], strict=True)
    gates = ACTIVATION_FUNCTIONS[activation](_by_torch(x, *gate))
    return _by_torch(gates.mul_(_by_torch(x, *up)), *down)


#: The operators for more rows than :func:`few_rows`, which take any number of rows. They aren't invariant.
TORCH_PRODUCTS = {
    "linear": lambda x, weight, bias, *_: _by_torch(x, weight, bias),
    "gated_mlp": lambda x, *rest: _gated_mlp_by_torch(x, rest[:6], rest[6]),
}


def _by_torch_in_slices(x: Tensor, compressed: Tensor, bias: Tensor | None) -> Tensor:
    """The same with a compressed matrix, a few outputs at a time."""
    columns, outputs = x.shape[-1], len(compressed)
    out = x.new_empty(*x.shape[:-1], outputs)
    step = max(1, _SLICE_BYTES // (x.itemsize * max(1, columns, x.numel() // max(1, columns))))
    for first in range(0, outputs, step):
        part = slice(first, first + step)
        matrix = decompress(compressed[part], columns)
        out[..., part] = _by_torch(x, matrix, None if bias is None else bias[part])
    return out


def decompression_workspace(dtype: torch.dtype) -> int:
    """Bytes that :func:`linear` of compressed weights takes besides its result, in passes of more than
    :func:`few_rows`.
    """
    return 0 if few_rows(dtype) is None else 2 * _SLICE_BYTES


def _rows(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1) else x.contiguous()
