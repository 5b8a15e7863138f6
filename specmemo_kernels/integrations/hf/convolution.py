"""Depthwise convolutions of 16-bit rows on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor
_HALVES = (torch.bfloat16, torch.float16)


def fast_convolutions(rows: Tensor) -> AbstractContextManager[object]:
    """Compute the depthwise convolutions of modules that get ``rows`` by :func:`depthwise_conv1d`, where torch is slow.

    Torch multiplies 16-bit channels one after the other on a CPU without AVX512: 31 ms instead of 0.1 ms for 1536
    channels and one token on an EPYC with AVX2, beside other work.
    """
    slow = rows.device.type == "cpu" and rows.dtype in _HALVES
    return _DepthwiseConvolutions() if slow else nullcontext()


class _DepthwiseConvolutions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _conv1d(*args, **(kwargs or {})) if func is torch.conv1d else None
        return func(*args, **(kwargs or {})) if result is None else result


def _conv1d(
    input: Tensor,  # the names of torch.conv1d
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """The result of ``torch.conv1d`` if it is a depthwise convolution of 16-bit rows, or ``None``."""
    sides = padding if isinstance(padding, int) else padding[0]
    if (
        not len(weight) == groups == input.shape[-2]
        or not isinstance(sides, int)
        or any(size not in (1, (1,), [1]) for size in (stride, dilation))
        or input.dtype not in _HALVES
        or any(other is not None and other.dtype != input.dtype for other in (weight, bias))
        or input.shape[-1] + 2 * sides < weight.shape[-1]
    ):
        return None
    return depthwise_conv1d(input, weight, bias, sides)


def depthwise_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """``[..., C, L + 2 padding + 1 - K]``: ``x`` ``[..., C, L]`` convolved with ``weight`` ``[C, 1, K]``, ``bias``
    ``[C]`` added.

    Computed in float32 and rounded once, as by torch. The order of the sums depends on no other row.
    """
    wide, taps = nn.functional.pad(x.float(), (padding, padding)), weight[:, 0].float()
    size = wide.shape[-1] + 1 - taps.shape[-1]
    result = wide[..., :size] * taps[:, :1]
    for i in range(1, taps.shape[-1]):
        result.addcmul_(wide[..., i : i + size], taps[:, i : i + 1])
    if bias is not None:
        result += bias.float()[:, None]
    return result.to(x.dtype)
