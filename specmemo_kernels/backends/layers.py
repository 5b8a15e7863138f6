"""A decoder's layers besides attention, by torch's own operators: the reference, and the products on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

Tensor = torch.Tensor

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, invariant: bool) -> Tensor:
    """``x @ weight.T + bias``; a matrix in 4-bit codes is dequantised as a whole.

    Raises:
        ValueError: ``invariant`` is true.
    """
    refuse_invariant(invariant)
    return functional.linear(x, matrix_of(weight, scales, x), bias)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, invariant: bool) -> Tensor:
    """:func:`linear` of the rows from each end to the next, with one matrix each; zeros behind the last end.

    Raises:
        ValueError: ``invariant`` is true.
    """
    refuse_invariant(invariant)
    out, begin = x.new_zeros(x.shape[0], weight.shape[1]), 0
    for group, end in enumerate(ends.tolist()):
        if end > begin:
            matrix = matrix_of(weight[group], None, x)
            out[begin:end] = functional.linear(x[begin:end], matrix, None if bias is None else bias[group])
            begin = end
    return out


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
    """``down(activation(gate(x)) * up(x))``.

    Raises:
        ValueError: ``invariant`` is true.
    """
    refuse_invariant(invariant)
    gate, up = (matrix_of(weight, None, x) for weight in (gate, up))
    down = matrix_of(down, None, x.new_empty(0, gate.shape[0]))
    gates = ACTIVATION_FUNCTIONS[activation](functional.linear(x, gate, gate_bias))
    return functional.linear(gates * functional.linear(x, up, up_bias), down, down_bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * (weight + offset)``."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.contiguous().to(compute)
    rows = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        rows = rows.to(x.dtype).to(compute)
    return (rows * (weight.to(compute) + offset)).to(x.dtype)


def refuse_invariant(invariant: bool) -> None:
    if invariant:
        raise ValueError(
            "invariant is True, but only backend='cpu' has products whose bits don't depend on the number of rows; use "
            "it, or invariant=False"
        )


def matrix_of(weight: Tensor, scales: Tensor | None, like: Tensor) -> Tensor:
    """A matrix for rows like ``like``: in codes, compressed, or in their dtype."""
    if scales is not None:
        return dequantise(weight, scales, like)
    return decompress(weight, like.shape[-1]) if weight.dtype == torch.uint8 else weight


def decompress(rows: Tensor, columns: int) -> Tensor:
    """The bfloat16 matrix of compressed rows (layout: ``ops/compressed_weights.py``)."""
    high, count, exceptions = rows[:, :16], rows[:, 16:18], rows[:, 18:62]
    blocks = rows[:, 64:].reshape(len(rows), rows.shape[1] // 192, 192)
    low, codes = blocks[:, :, :128], blocks[:, :, 128:]
    codes = torch.cat([codes & 15, codes >> 4], dim=2)
    i = torch.arange(64, device=rows.device)
    places = i % 32 // 8 * 16 + i // 32 * 8 + i % 8
    places = torch.cat([places, places + 64])
    codes, low = (part[:, :, places].flatten(1)[:, :columns] for part in (codes, low))
    weights = torch.stack([low, high.gather(1, codes.long())], dim=2).view(torch.bfloat16)[:, :, 0]
    pairs = exceptions.contiguous().view(torch.uint16).view(len(rows), 11, 2)
    used = torch.arange(11, device=rows.device) < count.contiguous().view(torch.uint16).long()
    row = used.nonzero()[:, 0]
    weights[row, pairs[used][:, 0].long()] = pairs[used][:, 1].contiguous().view(torch.bfloat16)
    return weights


def dequantise(codes: Tensor, scales: Tensor, like: Tensor) -> Tensor:
    """Rows of 4-bit codes as ``(code - 8) * scale`` in ``like``'s width and dtype."""
    groups = codes.view(*scales.shape, codes.shape[1] // max(1, scales.shape[1]))
    values = torch.cat([groups & 15, groups >> 4], 2).to(scales.dtype) - 8
    wide = torch.promote_types(like.dtype, torch.float32)  # the product is exact in it
    return (values.to(wide) * scales.to(wide)[:, :, None]).flatten(1)[:, : like.shape[-1]].to(like.dtype)
