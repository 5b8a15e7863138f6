"""Products of few rows with matrices, in the inputs' dtype or in 4-bit codes; linear layers.

Linear layers of one input are one kernel, so that its start and end are paid for once, and their results have the bits
of separate calls.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from specmemo_kernels.backends.kernel_config import KernelConfig, linear_config, lm_head_config
from specmemo_kernels.backends.layers import refuse_invariant
from specmemo_kernels.backends.triton.primitives import matmul, wait_for_inputs
from specmemo_kernels.backends.triton.runtime import (
    INTERPRETED,
    entry_point,
    launch_options,
    multiprocessors,
    target_of,
)

Tensor = torch.Tensor

#: Most outputs of a program for a matrix in codes: 4096 rows have 128 programs, as many as large GPUs have
#: multiprocessors.
CODED_OUTPUT_BLOCK = 32
#: Most linear layers of one kernel (query, key and value), and the outputs of its programs.
MATRICES, OUTPUT_BLOCK = 3, 64


@triton.jit
def row_products(
    x_row_ptr, weight_ptr, n, valid, inside, INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_M, BLOCK_N]`` float32: rows of x times the weights of outputs ``n``."""
    h = tl.arange(0, BLOCK_K)
    weight_row_ptr = weight_ptr + n.to(tl.int64) * INPUTS
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        column = start + h
        if INPUTS % BLOCK_K == 0:
            x_mask, w_mask = valid[:, None], inside[:, None]
        else:
            filled = (column < INPUTS)[None, :]
            x_mask, w_mask = valid[:, None] & filled, inside[:, None] & filled
        a = tl.load(x_row_ptr[:, None] + column[None, :], mask=x_mask, other=0.0)
        b = tl.load(weight_row_ptr[:, None] + column[None, :], mask=w_mask, other=0.0)
        acc = matmul(a, tl.trans(b), acc, UPCAST)
    return acc


@triton.jit
def weight_values(code, like, UPCAST: tl.constexpr):
    """``code - 8`` in ``like``'s dtype, by inserting the code into the bits of a power of two."""
    if UPCAST:
        value = code.to(tl.float32) - 8.0
    elif like.dtype == tl.float16:
        value = (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    elif like.dtype == tl.bfloat16:
        value = (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    else:
        value = (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    return value.to(like.dtype)


@triton.jit
def code_products(
    x_row_ptr, codes_ptr, scales_ptr, n, valid, inside, INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """:func:`row_products` of weights in 4-bit codes, one group at a time.

    A group's first half is in the low halves of its bytes. Sums, not weights, are multiplied by the scale in float32,
    so no weight is rounded.
    """
    HALF: tl.constexpr = GROUP // 2
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    half = tl.arange(0, HALF)
    codes_row_ptr = codes_ptr + n.to(tl.int64) * (GROUPS * HALF)
    scales_row_ptr = scales_ptr + n.to(tl.int64) * GROUPS
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(0, GROUPS):
        column = group * GROUP + half
        if INPUTS % GROUP == 0:
            low_mask, high_mask = valid[:, None], valid[:, None]
        else:
            low_mask = valid[:, None] & (column < INPUTS)[None, :]
            high_mask = valid[:, None] & (column + HALF < INPUTS)[None, :]
        low = tl.load(x_row_ptr[:, None] + column[None, :], mask=low_mask, other=0.0)
        high = tl.load(x_row_ptr[:, None] + (column + HALF)[None, :], mask=high_mask, other=0.0)
        codes = tl.load(codes_row_ptr[:, None] + (group * HALF + half)[None, :], mask=inside[:, None], other=0)
        scale = tl.load(scales_row_ptr + group, mask=inside, other=0.0).to(tl.float32)
        part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        part = matmul(low, tl.trans(weight_values(codes & 15, low, UPCAST)), part, UPCAST)
        part = matmul(high, tl.trans(weight_values(codes >> 4, high, UPCAST)), part, UPCAST)
        acc += part * scale[None, :]
    return acc


@triton.jit(do_not_specialize=["rows", "outputs"])
def coded_linear_kernel(
    out_ptr, x_ptr, codes_ptr, scales_ptr, bias_ptr, stride_x, rows, outputs,
    INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (row blocks, output blocks). ``x @ matrix.T + bias`` of a matrix in codes, ``GROUP`` of them per scale."""
    wait_for_inputs(OVERLAPPED)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid, inside = m < rows, n < outputs
    x_row_ptr = x_ptr + m.to(tl.int64) * stride_x
    acc = code_products(x_row_ptr, codes_ptr, scales_ptr, n, valid, inside, INPUTS, BLOCK_M, BLOCK_N, GROUP, UPCAST)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    out_row_ptr = out_ptr + m.to(tl.int64) * outputs
    tl.store(out_row_ptr[:, None] + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit
def load_inputs(row_ptr, valid, start, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """``[rows, BLOCK_K]`` of rows with ``INPUTS`` elements, from element ``start`` on; ``WHOLE``: all are valid."""
    column = start + tl.arange(0, BLOCK_K)
    pointer = row_ptr[:, None] + column[None, :]
    if INPUTS % BLOCK_K:
        rows = tl.load(pointer, mask=valid[:, None] & (column < INPUTS)[None, :], other=0.0)
    elif WHOLE:
        rows = tl.load(pointer)
    else:
        rows = tl.load(pointer, mask=valid[:, None], other=0.0)
    return rows


@triton.jit
def add_bias(acc, bias_ptr, n, inside, HAS_BIAS: tl.constexpr):
    """``acc`` ``[BLOCK_N, BLOCK_M]`` plus each output's bias."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    return acc


# A size of 1 would be specialised to a constant, which the branches can't replace.
@triton.jit(do_not_specialize=["rows", "outputs", "outputs_1", "outputs_2", "blocks", "more_blocks"])
def linear_kernel(
    out_ptr, out_1_ptr, out_2_ptr, x_ptr, weight_ptr, weight_1_ptr, weight_2_ptr, bias_ptr, bias_1_ptr, bias_2_ptr,
    stride_x, rows, outputs, outputs_1, outputs_2, blocks, more_blocks,
    INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (output blocks of all matrices). ``x @ weight.T + bias`` of each matrix; x has at most ``BLOCK_M`` rows.

    The first ``blocks`` programs are the first matrix's, the next ``more_blocks`` the second's. Weights are the first
    operand, because Hopper's instructions have at least 64 rows, and the second one as few as 8 columns.
    """
    wait_for_inputs(OVERLAPPED)
    block = tl.program_id(0)
    if block >= blocks + more_blocks:
        out_ptr, weight_ptr, bias_ptr, outputs = out_2_ptr, weight_2_ptr, bias_2_ptr, outputs_2
        block -= blocks + more_blocks
    elif block >= blocks:
        out_ptr, weight_ptr, bias_ptr, outputs = out_1_ptr, weight_1_ptr, bias_1_ptr, outputs_1
        block -= blocks
    if WHOLE:
        outputs = tl.multiple_of(outputs, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    valid, inside = m < rows, n < outputs
    x_row_ptr = x_ptr + m.to(tl.int64) * stride_x
    weight_row_ptr = weight_ptr + n.to(tl.int64) * INPUTS
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        weights = load_inputs(weight_row_ptr, inside, start, INPUTS, BLOCK_K, WHOLE)
        inputs = load_inputs(x_row_ptr, valid, start, INPUTS, BLOCK_K, False)
        acc = matmul(weights, tl.trans(inputs), acc, UPCAST)
    acc = add_bias(acc, bias_ptr, n, inside, HAS_BIAS)
    place = m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & valid[None, :])


def products_config(x: Tensor, programs: int, gated: bool = False) -> KernelConfig | None:
    """:func:`linear_config` of rows ``x`` on their device; ``None``: torch's product is as fast."""
    rows = x.numel() // max(1, x.shape[-1])
    return linear_config(target_of(x.device), rows, x.dtype, programs <= multiprocessors(x.device), gated)


@entry_point
def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """``x @ weight.T + bias`` of each matrix, ``[..., outputs]``; few kernels for few rows on some targets.

    Args:
        weights: ``[outputs, inputs]``. biases: one for each matrix, or only ``None``.
    """
    return multiply(x, weights, biases)


def multiply(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """:func:`linears` on the current device."""
    blocks = [triton.cdiv(weight.shape[0], OUTPUT_BLOCK) for weight in weights]
    config = products_config(x, sum(blocks))
    if config is None or not all(weight.is_contiguous() for weight in weights):
        return [functional.linear(x, *parameters) for parameters in zip(weights, biases, strict=True)]
    inputs, out = rows_of(x), [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
    for first in range(0, len(weights) if len(inputs) else 0, MATRICES):
        part = slice(first, first + MATRICES)
        sizes = [weight.shape[0] for weight in weights[part]]
        linear_kernel[(sum(blocks[part]),)](
            *_filled(out[part]), inputs, *_filled(weights[part]), *_filled(biases[part]), inputs.stride(0), len(inputs),
            *_filled(sizes), blocks[first], sum(blocks[first + 1 : first + 2]), INPUTS=inputs.shape[1],
            HAS_BIAS=biases[0] is not None, WHOLE=not any(size % OUTPUT_BLOCK for size in sizes),
            BLOCK_M=config.block_m, BLOCK_N=OUTPUT_BLOCK, BLOCK_K=config.block_k, UPCAST=INTERPRETED,
            **launch_options(x.device, config),
        )  # fmt: skip
    return out


def rows_of(x: Tensor) -> Tensor:
    """``x`` as ``[rows, inputs]`` with contiguous rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _filled(values: Sequence[Any]) -> list[Any]:
    """One value for each of the kernel's matrices; those of absent ones aren't read."""
    return [*values, *[values[0]] * (MATRICES - len(values))]


@entry_point
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, invariant: bool) -> Tensor:
    """``x @ weight.T + bias``: :func:`linears` of one matrix, or one kernel for a matrix in 4-bit codes.

    Raises:
        ValueError: ``invariant`` is true, or an unsupported device or dtype.
    """
    refuse_invariant(invariant)
    if scales is None:
        return multiply(x, [weight], [bias])[0]
    inputs, outputs = x.reshape(-1, x.shape[-1]).contiguous(), weight.shape[0]
    rows = len(inputs)
    out = x.new_empty(*x.shape[:-1], outputs)
    if out.numel() == 0:
        return out
    config = lm_head_config(target_of(x.device), rows, x.dtype)
    block_n = min(config.block_n, CODED_OUTPUT_BLOCK)
    coded_linear_kernel[(triton.cdiv(rows, config.block_m), triton.cdiv(outputs, block_n))](
        out, inputs, weight, scales, bias, inputs.stride(0), rows, outputs, INPUTS=inputs.shape[1],
        HAS_BIAS=bias is not None, GROUP=2 * weight.shape[1] // max(1, scales.shape[1]), BLOCK_M=config.block_m,
        BLOCK_N=block_n, UPCAST=INTERPRETED, **launch_options(x.device, config),
    )  # fmt: skip
    return out
