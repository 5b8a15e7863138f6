"""Linear layers in passes of ``patch``: without oneDNN, which torch calls in 16 bits on a CPU.

It keeps compiled kernels for each size of matrix and number of rows, 0.65 MiB each, which no later pass uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from specmemo_kernels import ops
from specmemo_kernels.integrations.hf.compressed_matrix import CompressedMatrix
from specmemo_kernels.ops import Kernels

Tensor = torch.Tensor
#: Dtypes of the operators' linear layers.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Weights that :func:`exact_linear` converts at a time: a MiB in float32.
_SLICE = 2**18


class Linears(TorchFunctionMode):
    """Computes linear layers in ``dtypes`` on a CPU by ``linear(x, weight, bias)``, others as usual."""

    def __init__(
        self,
        linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        dtypes: Collection[torch.dtype] = (torch.bfloat16, torch.float16),
    ) -> None:
        super().__init__()
        self._linear, self._dtypes = linear, dtypes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (operands := _linear_operands(func, args, kwargs, self._dtypes)) is not None:
            return self._linear(*operands)
        return func(*args, **(kwargs or {}))


def _linear_operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, dtypes: Collection[torch.dtype]
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Input, weight and bias of a linear layer on the CPU in one of ``dtypes``; ``None`` for other calls."""
    if func is not functional.linear or kwargs or len(args) not in (2, 3):
        return None
    x, weight, bias = (*args, None)[:3]
    tensors = (x, weight) if bias is None else (x, weight, bias)
    supported = (
        all(type(t) in (Tensor, torch.nn.Parameter, CompressedMatrix) and t.device.type == "cpu" for t in tensors)
        and x.dtype in dtypes
        and {t.dtype for t in tensors} == {x.dtype}
        and weight.ndim == 2
        and weight.is_contiguous()
        and x.shape[-1:] == weight.shape[1:]
        and not torch.is_autocast_enabled("cpu")
    )
    return (x, weight, bias) if supported else None


def by_operators(backend: str, device: torch.device) -> AbstractContextManager[Any]:
    """Linear layers of passes in this block by the operators of ``backend``, if that is ``"cpu"``."""
    if backend != "cpu":
        return nullcontext()
    return Linears(partial(product, ops.kernels(backend, device), False))


def product(kernels: Kernels, invariant: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer by the operator; the weight may be compressed."""
    weight = weight.operand() if isinstance(weight, CompressedMatrix) else weight
    return kernels.linear(x, weight, bias, None, invariant)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` in float32 without a library's product, rounded once. For few rows."""
    weight = weight.decompressed() if isinstance(weight, CompressedMatrix) else weight  # once, not for each slice
    rows, step = x.reshape(-1, x.shape[-1]).float(), max(1, _SLICE // max(1, weight.shape[1]))
    slices = (part.float() for part in torch.split(weight, step))
    sums = torch.cat([torch.stack([(part * row).sum(1) for row in rows]) for part in slices], dim=1)
    total = sums if bias is None else sums + bias.float()
    return total.to(x.dtype).view(*x.shape[:-1], weight.shape[0])
