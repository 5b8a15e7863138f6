"""A decoder's layers besides attention and products: RMSNorm, rotary embedding, activation of a gated MLP.

Each kernel rounds where torch's separate operators round.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from specmemo_kernels.backends.kernel_config import ELEMENTWISE_CONFIG, row_config
from specmemo_kernels.backends.layers import refuse_invariant
from specmemo_kernels.backends.triton.primitives import LOG2_E, tanh
from specmemo_kernels.backends.triton.runtime import entry_point, launch_options

Tensor = torch.Tensor

#: Values of the constexpr ``ACTIVATION``.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2}


@triton.jit
def rms_norm_kernel(
    out_ptr, sum_ptr, x_ptr, residual_ptr, weight_ptr, stride_x, eps, offset,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). With ``HAS_RESIDUAL``, normalises ``x + residual`` and writes the sum."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * SIZE + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * SIZE + column, x, mask=inside)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if ROUND_FIRST:
        wide = wide.to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, wide * (weight + offset), mask=inside)


@triton.jit
def rotary_kernel(
    out_ptr, x_ptr, cos_ptr, sin_ptr, stride_x, stride_head, stride_angle, heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens). Rotates all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    angle = token * stride_angle + column
    inside = column < HALF
    low_cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cos_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(sin_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    for first in range(0, heads, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        valid = (head < heads)[:, None] & inside[None, :]
        source = x_ptr + token * stride_x + head[:, None] * stride_head + column[None, :]
        low = tl.load(source, mask=valid, other=0.0)
        high = tl.load(source + HALF, mask=valid, other=0.0)
        a, b = low.to(tl.float32), high.to(tl.float32)
        new_low = (a * low_cos).to(low.dtype).to(tl.float32) - (b * low_sin).to(low.dtype).to(tl.float32)
        new_high = (b * high_cos).to(low.dtype).to(tl.float32) + (a * high_sin).to(low.dtype).to(tl.float32)
        target = out_ptr + (token * heads + head[:, None]) * (2 * HALF) + column[None, :]
        tl.store(target, new_low, mask=valid)
        tl.store(target + HALF, new_high, mask=valid)


@triton.jit(do_not_specialize=["count"])
def gate_kernel(gate_ptr, up_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (blocks of elements). ``gate = activation(gate) * up``, in place."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    gate = tl.load(gate_ptr + index, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    if ACTIVATION == 0:
        x = x / (1.0 + tl.exp2(-x * LOG2_E))
    elif ACTIVATION == 1:
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        x = tl.maximum(x, 0.0)
    up = tl.load(up_ptr + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(gate_ptr + index, x.to(gate.dtype).to(tl.float32) * up, mask=inside)


@entry_point
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * (weight + offset)`` of rows ``[..., size]``."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _normalise(out, out, rows, None, weight, eps, offset, round_first)
    return out


@entry_point
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """``x + residual`` and its :func:`rms_norm`; contiguous tensors ``[..., size]``."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    _normalise(out, total, x.view(-1, x.shape[-1]), residual, weight, eps, offset, round_first)
    return total, out


def _normalise(
    out: Tensor, total: Tensor, rows: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float,
    round_first: bool,
) -> None:  # fmt: skip
    count, size = rows.shape
    if count == 0 or size == 0:
        return
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    config = row_config(size)
    rms_norm_kernel[(count,)](
        out, total, rows, residual, weight, rows.stride(0), eps, offset,
        SIZE=size, BLOCK=config.block_n, HAS_RESIDUAL=residual is not None, ROUND_FIRST=round_first,
        **launch_options(rows.device, config),
    )  # fmt: skip


@entry_point
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + [-second half of x, first half of x] * sin``.

    Args:
        x: ``[tokens, heads, size]`` with contiguous heads.
        cos, sin: ``[tokens, size]`` with contiguous rows and equal strides.
    """
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = row_config(size // 2 * min(heads, 16))
    half = row_config(size // 2).block_n
    if tokens and heads:
        rotary_kernel[(tokens,)](
            out, x, cos, sin, x.stride(0), x.stride(1), cos.stride(0), heads,
            HALF=size // 2, BLOCK=half, BLOCK_H=max(1, config.block_n // half),
            **launch_options(x.device, config, fusion=False),  # a fused multiply-add would round once less
        )  # fmt: skip
    return out


@entry_point
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
    """``down(activation(gate(x)) * up(x))``: torch's products, and one kernel between them.

    Raises:
        ValueError: ``invariant`` is true.
    """
    refuse_invariant(invariant)
    gates = functional.linear(x, gate, gate_bias).contiguous()
    ups = functional.linear(x, up, up_bias).contiguous()
    if count := gates.numel():
        gate_kernel[(triton.cdiv(count, ELEMENTWISE_CONFIG.block_n),)](
            gates, ups, count, ACTIVATION=ACTIVATIONS[activation], BLOCK=ELEMENTWISE_CONFIG.block_n,
            **launch_options(x.device, ELEMENTWISE_CONFIG),
        )  # fmt: skip
    return functional.linear(gates, down, down_bias)


def few_rows(_: torch.dtype, transposed: bool = False) -> None:
    """No limit: the products are torch's own."""
    return
