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
from specmemo_kernels.backends.triton.paged import copy_token
from specmemo_kernels.backends.triton.primitives import LOG2_E, matmul, tanh, wait_for_inputs
from specmemo_kernels.backends.triton.products import (
    OUTPUT_BLOCK,
    add_bias,
    load_inputs,
    multiply,
    products_config,
    rows_of,
)
from specmemo_kernels.backends.triton.runtime import INTERPRETED, entry_point, launch_options

Tensor = torch.Tensor

#: Values of the constexpr ``ACTIVATION``.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2}


@triton.jit
def rms_norm_kernel(
    out_ptr, sum_ptr, x_ptr, residual_ptr, weight_ptr, stride_x, eps, offset,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ROUND_FIRST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). With ``HAS_RESIDUAL``, normalises ``x + residual`` and writes the sum."""
    wait_for_inputs(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)  # loads in parallel with x
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * SIZE + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * SIZE + column, x, mask=inside)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if ROUND_FIRST:
        wide = wide.to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, wide * (weight + offset), mask=inside)


@triton.jit(do_not_specialize=["heads", "more_heads"])  # 1 would be a constant, which the branch can't replace
def rotary_kernel(
    out_ptr, x_ptr, stride_x, stride_head, heads, more_out_ptr, more_x_ptr, more_stride_x, more_stride_head, more_heads,
    cos_ptr, sin_ptr, stride_angle, keys_ptr, values_ptr, v_ptr, stride_v, stride_v_head,
    HALF: tl.constexpr, V: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, tensors, blocks of heads). Rotates heads of one token in one of at most two tensors.

    ``STORED``: the second tensor's programs write their result to ``keys_ptr`` too, and those of a third tensor copy
    the values, heads of size ``V``, to ``values_ptr``.
    """
    wait_for_inputs(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = tl.program_id(2) * BLOCK_H
    if STORED:  # noqa: SIM102 - compiled or not
        if part == 2:
            source = v_ptr + token * stride_v + first * stride_v_head
            target = values_ptr + (token * more_heads + first) * V
            copy_token(source, stride_v_head, target, 1, tl.minimum(more_heads - first, BLOCK_H), V, BLOCK * BLOCK_H)
            return
    if part == 1:
        out_ptr, x_ptr, stride_x, stride_head, heads = (
            more_out_ptr, more_x_ptr, more_stride_x, more_stride_head, more_heads
        )  # fmt: skip
    column = tl.arange(0, BLOCK)
    angle = token * stride_angle + column
    inside = column < HALF
    low_cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cos_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(sin_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    head = first + tl.arange(0, BLOCK_H)
    valid = (head < heads)[:, None] & inside[None, :]
    source = x_ptr + token * stride_x + head[:, None] * stride_head + column[None, :]
    low = tl.load(source, mask=valid, other=0.0)
    high = tl.load(source + HALF, mask=valid, other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    new_low = (a * low_cos).to(low.dtype).to(tl.float32) - (b * low_sin).to(low.dtype).to(tl.float32)
    new_high = (b * high_cos).to(low.dtype).to(tl.float32) + (a * high_sin).to(low.dtype).to(tl.float32)
    place = (token * heads + head[:, None]) * (2 * HALF) + column[None, :]
    tl.store(out_ptr + place, new_low, mask=valid)
    tl.store(out_ptr + place + HALF, new_high, mask=valid)
    if STORED:  # noqa: SIM102 - compiled or not
        if part == 1:
            tl.store(keys_ptr + place, new_low, mask=valid)
            tl.store(keys_ptr + place + HALF, new_high, mask=valid)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """``activation(gate) * up`` in float32, the activation rounded to the inputs' dtype."""
    x = gate.to(tl.float32)
    if ACTIVATION == 0:
        x = x / (1.0 + tl.exp2(-x * LOG2_E))
    elif ACTIVATION == 1:
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        x = tl.maximum(x, 0.0)
    return x.to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def gate_kernel(
    gate_ptr, up_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAPPED: tl.constexpr
):  # fmt: skip
    """Grid: (blocks of elements). ``gate = activation(gate) * up``, in place."""
    wait_for_inputs(OVERLAPPED)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    gate = tl.load(gate_ptr + index, mask=inside, other=0.0)
    up = tl.load(up_ptr + index, mask=inside, other=0.0)
    tl.store(gate_ptr + index, gated(gate, up, ACTIVATION), mask=inside)


@triton.jit(do_not_specialize=["rows", "outputs"])
def gated_linear_kernel(
    out_ptr, x_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, stride_x, rows, outputs,
    INPUTS: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: (output blocks). ``activation(gate(x)) * up(x)`` of at most ``BLOCK_M`` rows, as ``linear_kernel``."""
    wait_for_inputs(OVERLAPPED)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid, inside = m < rows, n < outputs
    x_row_ptr = x_ptr + m.to(tl.int64) * stride_x
    gate_row_ptr = gate_ptr + n.to(tl.int64) * INPUTS
    up_row_ptr = up_ptr + n.to(tl.int64) * INPUTS
    gates = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        gate_weights = load_inputs(gate_row_ptr, inside, start, INPUTS, BLOCK_K, WHOLE)
        up_weights = load_inputs(up_row_ptr, inside, start, INPUTS, BLOCK_K, WHOLE)
        inputs = tl.trans(load_inputs(x_row_ptr, valid, start, INPUTS, BLOCK_K, False))
        gates = matmul(gate_weights, inputs, gates, UPCAST)
        ups = matmul(up_weights, inputs, ups, UPCAST)
    kind = out_ptr.dtype.element_ty
    gates = add_bias(gates, gate_bias_ptr, n, inside, HAS_GATE_BIAS).to(kind)
    ups = add_bias(ups, up_bias_ptr, n, inside, HAS_UP_BIAS).to(kind)
    place = m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out_ptr + place, gated(gates, ups, ACTIVATION).to(kind), mask=inside[:, None] & valid[None, :])


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
    return _rotated([x], cos, sin, None)[0]


@entry_point
def rotary_pair(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """:func:`rotary` of two tensors of the same tokens and size in one kernel."""
    return _rotated([x, y], cos, sin, None)


@entry_point
def rotary_stored(
    x: Tensor, y: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor
) -> list[Tensor]:
    """:func:`rotary_pair` in one kernel with the copies of the rotated ``y`` to ``keys`` and of ``v`` to ``values``.

    Args:
        v: ``[tokens, heads of y, size]`` with contiguous heads.
        keys, values: contiguous tensors of the shapes of ``y`` and ``v``.
    """
    return _rotated([x, y], cos, sin, (keys, values, v))


def _rotated(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, stored: tuple[Tensor, Tensor, Tensor] | None
) -> list[Tensor]:
    tokens, _, size = tensors[0].shape
    heads = max(x.shape[1] for x in tensors)
    out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
    config = row_config(size // 2 * min(heads, 16))
    half = row_config(size // 2).block_n
    block_heads = max(1, config.block_n // half)
    if tokens and heads:
        parts = [(to, x, x.stride(0), x.stride(1), x.shape[1]) for to, x in zip(out, tensors, strict=True)]
        keys, values, v = stored or (cos, cos, tensors[0])
        rotary_kernel[tokens, len(tensors) + (stored is not None), triton.cdiv(heads, block_heads)](
            *parts[0], *parts[-1], cos, sin, cos.stride(0), keys, values, v, v.stride(0), v.stride(1),
            HALF=size // 2, V=v.shape[2], STORED=stored is not None, BLOCK=half, BLOCK_H=block_heads,
            **launch_options(cos.device, config, fusion=False),  # a fused multiply-add would round once less
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
    """``down(activation(gate(x)) * up(x))``, with one kernel before ``down`` for few rows on some targets.

    Raises:
        ValueError: ``invariant`` is true.
    """
    refuse_invariant(invariant)
    gates = _gated_rows(x, gate, up, gate_bias, up_bias, ACTIVATIONS[activation])
    return multiply(gates, [down], [down_bias])[0]


def _gated_rows(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, activation: int
) -> Tensor:
    """``activation(gate(x)) * up(x)``; without a kernel for the products, torch's and one kernel behind them."""
    blocks = triton.cdiv(gate.shape[0], OUTPUT_BLOCK)
    config = products_config(x, 2 * blocks, gated=True)
    if config is not None and gate.is_contiguous() and up.is_contiguous():
        inputs, out = rows_of(x), x.new_empty(*x.shape[:-1], gate.shape[0])
        if out.numel():
            gated_linear_kernel[(blocks,)](
                out, inputs, gate, up, gate_bias, up_bias, inputs.stride(0), len(inputs), gate.shape[0],
                INPUTS=inputs.shape[1], HAS_GATE_BIAS=gate_bias is not None, HAS_UP_BIAS=up_bias is not None,
                ACTIVATION=activation, WHOLE=gate.shape[0] % OUTPUT_BLOCK == 0, BLOCK_M=config.block_m,
                BLOCK_N=OUTPUT_BLOCK, BLOCK_K=config.block_k, UPCAST=INTERPRETED, **launch_options(x.device, config),
            )  # fmt: skip
        return out
    gates, ups = functional.linear(x, gate, gate_bias).contiguous(), functional.linear(x, up, up_bias).contiguous()
    if count := gates.numel():
        gate_kernel[(triton.cdiv(count, ELEMENTWISE_CONFIG.block_n),)](
            gates, ups, count, ACTIVATION=activation, BLOCK=ELEMENTWISE_CONFIG.block_n,
            **launch_options(x.device, ELEMENTWISE_CONFIG),
        )  # fmt: skip
    return gates


def few_rows(_: torch.dtype, transposed: bool = False) -> None:
    """No limit: products of many rows are torch's own."""
    return
