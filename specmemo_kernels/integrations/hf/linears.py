"""Linear layers in passes of ``patch``: without oneDNN, which torch calls in 16 bits on a CPU.

It keeps compiled kernels for each size of matrix and number of rows, 0.65 MiB each, which no later pass uses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from specmemo_kernels import ops
from specmemo_kernels.integrations.hf.compressed_matrix import CompressedMatrix

Tensor = torch.Tensor
#: Weights that :func:`exact_linear` converts at a time: a MiB in float32.
_SLICE = 2**18


class Linears(TorchFunctionMode):
    """Computes linear layers in 16 bits on a CPU by ``linear(x, weight, bias)``, others as usual."""

    def __init__(self, linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not kwargs and len(args) in (2, 3):
            x, weight, bias = (*args, None)[:3]
            if _in_16_bits(x, weight, bias):
                return self._linear(x, weight, bias)
        return func(*args, **(kwargs or {}))


def _in_16_bits(x: Any, weight: Any, bias: Any) -> bool:
    tensors = (x, weight) if bias is None else (x, weight, bias)
    known = all(type(t) in (Tensor, torch.nn.Parameter, CompressedMatrix) and t.device.type == "cpu" for t in tensors)
    return (
        known
        and x.dtype in (torch.bfloat16, torch.float16)
        and {t.dtype for t in tensors} == {x.dtype}
        and weight.ndim == 2
        and weight.is_contiguous()
        and x.shape[-1:] == weight.shape[1:]
        and not torch.is_autocast_enabled("cpu")
    )


def by_operators(backend: str, device: torch.device) -> AbstractContextManager[Any]:
    """Linear layers of passes in this block by the operators of ``backend``, if that is ``"cpu"``."""
    if backend != "cpu":
        return nullcontext()
    kernels = ops.kernels(backend, device)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.operand() if isinstance(weight, CompressedMatrix) else weight
        return kernels.linear(x, weight, bias, None, False)

    return Linears(linear)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` in float32 without a library's product, rounded once. For few rows."""
    weight = weight.decompressed() if isinstance(weight, CompressedMatrix) else weight  # once, not for each slice
    rows, step = x.reshape(-1, x.shape[-1]).float(), max(1, _SLICE // max(1, weight.shape[1]))
    slices = (part.float() for part in torch.split(weight, step))
    sums = torch.cat([torch.stack([(part * row).sum(1) for row in rows]) for part in slices], dim=1)
    total = sums if bias is None else sums + bias.float()
    return total.to(x.dtype).view(*x.shape[:-1], weight.shape[0])
