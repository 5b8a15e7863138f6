"""Functions outside of replaced modules, computed so that rows don't affect each other: invariant mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from specmemo_kernels.integrations.hf.linears import DTYPES, Linears, product
from specmemo_kernels.ops import Kernels

Tensor = torch.Tensor

#: torch computes a tensor in vectors, two at a time (64 elements of 16 bits with AVX512), and the remaining elements
#: one by one; from 32,768 elements on it does so in a part for each thread, of any number of elements.
_VECTORS, _SERIAL = 64, 2**14


@dataclass(frozen=True)
class RowFunctions:
    """What a pass computes in another way than torch.

    Attributes:
        elementwise: functions of one tensor that round an element by its place in the tensor.
        linear: functional.linear is called outside of replaced modules, as by the routers of mixtures.
        workspace: bytes that its operator keeps between calls.
    """

    elementwise: frozenset[Callable[..., Any]] = frozenset()
    linear: bool = False
    workspace: int = 0

    @property
    def needed(self) -> bool:
        """Whether there are any."""
        return self.linear or bool(self.elementwise)

    def running(self, kernels: Kernels) -> AbstractContextManager[Any]:
        """A pass of this thread in a block of code."""
        return _Functions(self.elementwise, kernels) if self.needed else nullcontext()


class _Functions(Linears):
    def __init__(self, elementwise: frozenset[Callable[..., Any]], kernels: Kernels) -> None:
        super().__init__(partial(product, kernels, True), DTYPES)
        self._elementwise = elementwise

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._elementwise and has_one_tensor(args, kwargs or {}):
            return in_whole_vectors(func, *args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def has_one_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first of a function's arguments is a floating-point tensor, and the only tensor."""
    return (
        bool(args)
        and type(args[0]) is Tensor
        and args[0].is_floating_point()
        and not any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values()))
    )


def in_whole_vectors(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``func(x, *args, **kwargs)`` of an element-wise function, whose bits for an element don't depend on its place.

    Parts of x are computed by one thread each, the last one with zeros up to a whole number of vectors. It is always
    copied, so that memory grows with the rows.
    """
    flat = x.reshape(-1)
    out = torch.empty_like(flat)
    for part, result in zip(torch.split(flat, _SERIAL), torch.split(out, _SERIAL), strict=True):
        count = len(part)
        if count < _SERIAL:
            part = functional.pad(part, (0, -count % _VECTORS))
        result.copy_(func(part, *args, **kwargs)[:count])
    return out.view(x.shape)
