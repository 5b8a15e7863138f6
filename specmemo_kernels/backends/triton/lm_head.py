"""The best tokens of each row without a ``[N, V]`` tensor: logits stay in registers, one vocabulary block at a time.

A candidate is one int64 key, ordered by logit and then by lower token, so the reduction over blocks is a maximum.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specmemo_kernels.backends.kernel_config import LM_HEAD_REDUCE_CONFIG, lm_head_config
from specmemo_kernels.backends.triton.primitives import wait_for_inputs
from specmemo_kernels.backends.triton.products import code_products, row_products
from specmemo_kernels.backends.triton.runtime import INTERPRETED, entry_point, launch_options, target_of

Tensor = torch.Tensor

NO_KEY = tl.constexpr(-(2**63))
# Below the order of -inf.
NO_ORDER = tl.constexpr(-(2**31))
NO_TOKEN = tl.constexpr(2147483647)
NAN_ORDER = tl.constexpr(0x7FC00000)


@triton.jit
def order_of(value):
    """float32 to int32 in torch.argmax's order: -0.0 equals 0.0, all NaNs are equal and the largest."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > 0x7F800000, NAN_ORDER, tl.where(bits < 0, -magnitude, magnitude))


@triton.jit
def pack_key(order, token):
    """The int64 key of a value's order and its token."""
    return (order.to(tl.int64) << 32) | (2147483647 - token).to(tl.int64)


@triton.jit
def unpack_key(key):
    """The value (float32) and token (int64) of a key."""
    order = (key >> 32).to(tl.int32)
    bits = tl.where(order < 0, -order | -2147483648, order)
    return bits.to(tl.float32, bitcast=True), 2147483647 - (key & 0xFFFFFFFF)


@triton.jit(do_not_specialize=["rows", "vocabulary"])
def lm_head_block_kernel(
    keys_ptr, lse_ptr, hidden_ptr, weight_ptr, scales_ptr, bias_ptr, stride_hidden, rows, vocabulary,
    HIDDEN: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LSE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (row blocks, vocabulary blocks). Writes each row's K best keys of the block, best first, and with
    ``HAS_LSE`` the block's log-sum-exp to ``[rows, blocks]``.

    ``GROUP``: 4-bit codes per scale; 0 for weights in the model's dtype.
    """
    wait_for_inputs(OVERLAPPED)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    hidden_row_ptr = hidden_ptr + m.to(tl.int64) * stride_hidden
    valid, in_vocab = m < rows, token < vocabulary
    if GROUP:
        acc = code_products(
            hidden_row_ptr, weight_ptr, scales_ptr, token, valid, in_vocab, HIDDEN, BLOCK_M, BLOCK_V, GROUP, UPCAST
        )
    else:
        acc = row_products(
            hidden_row_ptr, weight_ptr, token, valid, in_vocab, HIDDEN, BLOCK_M, BLOCK_V, BLOCK_H, UPCAST
        )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + token, mask=in_vocab, other=0.0).to(tl.float32)[None, :]
    # Rounded as the model's linear layer rounds its logits, because that decides ties.
    logits = acc.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    if HAS_LSE:
        visible = tl.where(in_vocab[None, :], logits, float("-inf"))
        peak = tl.max(visible, 1)
        base = tl.where(peak == float("-inf"), 0.0, peak)  # all logits are -inf
        total = tl.sum(tl.exp2((visible - base[:, None]) * 1.4426950408889634), 1)
        tl.store(lse_ptr + m.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), base + tl.log(total), mask=valid)
    order = order_of(logits)
    order = tl.where(in_vocab[None, :], order, NO_ORDER)
    tokens = tl.broadcast_to(token[None, :], (BLOCK_M, BLOCK_V))
    out_ptr = keys_ptr + (m.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * K
    for rank in range(K):
        best = tl.max(order, 1)
        best_token = tl.min(tl.where(order == best[:, None], tokens, NO_TOKEN), 1)  # the lowest token of a tie
        tl.store(out_ptr + rank, pack_key(best, best_token), mask=valid)
        order = tl.where(tokens == best_token[:, None], NO_ORDER, order)


@triton.jit(do_not_specialize=["count"])
def lm_head_reduce_kernel(
    out_ptr, values_ptr, tokens_ptr, keys_ptr, count,
    K: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of keys). Writes the K best of BLOCK keys; ``LAST`` (one block) unpacks them."""
    wait_for_inputs(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(keys_ptr + row * count + index, mask=index < count, other=NO_KEY)
    for rank in range(K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, NO_KEY, keys)
        if LAST:
            value, token = unpack_key(best)
            tl.store(values_ptr + row * K + rank, value.to(values_ptr.dtype.element_ty))
            tl.store(tokens_ptr + row * K + rank, token)
        else:
            tl.store(out_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * K + rank, best)


def lm_head_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The best token of each row: ``[N]`` int64; ties go to the lower token. Errors as in :func:`lm_head_topk`."""
    return lm_head_topk(hidden, weight, bias, 1)[1].squeeze(1)


@entry_point
def lm_head_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``k`` best log-probabilities of each row, their tokens, and the log-sum-exp of all logits.

    Arguments and errors as in :func:`lm_head_topk`.

    Returns:
        log-probabilities ``[N, k]`` float32, tokens ``[N, k]`` int64 and log-sum-exp ``[N]`` float32.
    """
    values, tokens, parts = _best_logits(hidden, weight, bias, k, scales, torch.float32, with_lse=True)
    lse = parts.logsumexp(dim=1)
    return (values - lse[:, None]).clamp(max=0), tokens, lse


@entry_point
def lm_head_topk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ``k`` best logits of each row and their tokens, best first; ties go to the lower token.

    Arguments as in :func:`specmemo_kernels.ops.lm_head_topk`; rows of ``hidden`` may have any stride.

    Returns:
        values ``[N, k]`` in hidden's dtype and tokens ``[N, k]`` int64.

    Raises:
        ValueError: an unsupported device or dtype.
    """
    values, tokens, _ = _best_logits(hidden, weight, bias, k, scales, hidden.dtype, with_lse=False)
    return values, tokens


def _best_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, scales: Tensor | None, dtype: torch.dtype,
    *, with_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Logits ``[N, k]`` in ``dtype``, tokens, and the log-sum-exp of each block of the vocabulary if it is needed."""
    rows, hidden_size = hidden.shape
    vocabulary = weight.shape[0]
    values = hidden.new_empty(rows, k, dtype=dtype)
    tokens = torch.empty(rows, k, dtype=torch.int64, device=hidden.device)
    if rows == 0:
        return values, tokens, hidden.new_empty(0, 1, dtype=torch.float32)
    group = 0 if scales is None else 2 * weight.shape[1] // scales.shape[1]
    config = lm_head_config(target_of(hidden.device), rows, hidden.dtype)
    blocks = triton.cdiv(vocabulary, config.block_n)
    keys = torch.empty(rows, blocks * k, dtype=torch.int64, device=hidden.device)
    lse = hidden.new_empty(rows, blocks if with_lse else 0, dtype=torch.float32)
    lm_head_block_kernel[(triton.cdiv(rows, config.block_m), blocks)](
        keys, lse, hidden, weight, scales, bias, hidden.stride(0), rows, vocabulary,
        HIDDEN=hidden_size, K=k, HAS_BIAS=bias is not None, HAS_LSE=with_lse, GROUP=group, BLOCK_M=config.block_m,
        BLOCK_V=config.block_n, BLOCK_H=config.block_k, UPCAST=INTERPRETED, **launch_options(hidden.device, config),
    )  # fmt: skip
    _reduce(keys, values, tokens, k)
    return values, tokens, lse


def _reduce(keys: Tensor, values: Tensor, tokens: Tensor, k: int) -> None:
    """Reduce blocks of keys to their K best until one block is left, and unpack that into the result."""
    size = LM_HEAD_REDUCE_CONFIG.block_n
    options = launch_options(keys.device, LM_HEAD_REDUCE_CONFIG)
    while keys.shape[1] > size:
        blocks = triton.cdiv(keys.shape[1], size)
        out = keys.new_empty(keys.shape[0], blocks * k)
        lm_head_reduce_kernel[(keys.shape[0], blocks)](
            out, values, tokens, keys, keys.shape[1], K=k, BLOCK=size, LAST=False, **options
        )
        keys = out
    lm_head_reduce_kernel[(keys.shape[0], 1)](
        keys, values, tokens, keys, keys.shape[1], K=k, BLOCK=size, LAST=True, **options
    )
