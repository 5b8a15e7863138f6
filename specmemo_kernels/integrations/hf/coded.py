"""Layers with quantised weights: how they are recognised, and the memory of their products.

A quantised layer is a module of the package that quantised it, and runs its own code. That code may dequantise the
whole matrix in each product: inside of an operator, in memory of a foreign library, or for inputs above a threshold
only. So each kind of layer is run by itself, with small and with large inputs, and the peak of the process counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specmemo_kernels.integrations.hf.compressed import compressed_matrices, stored_weight
from specmemo_kernels.integrations.hf.target import local_part
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.planning.pass_bytes import PassBytes, ProductBytes
from specmemo_kernels.planning.resident import peak_of

Tensor = torch.Tensor
#: Magnitudes of random inputs. bitsandbytes dequantises the columns of inputs above 6.
_MAGNITUDES = (1.0, 100.0)
#: Rows of the measured products, besides the most rows of a pass: methods have other code for few rows.
_FEW_ROWS = (1, 2, 8)


def plain_weight(module: Any) -> Tensor | None:
    """The matrix ``[V, H]`` of a linear layer that is in memory in a floating-point dtype of two bytes or more, or is
    sharded by rows, or its compressed rows; ``None`` for other layers: quantised, adapted, offloaded, not contiguous.
    """
    weight = stored_weight(module)
    if compressed_matrices(module):
        return cast(Tensor, weight)
    if type(module) is not nn.Linear or not isinstance(weight, Tensor) or _is_code(weight):
        return None
    if not all(local_part(p).is_contiguous() for p in (weight, module.bias) if p is not None):
        return None
    if hasattr(weight, "placements"):
        sharded = all(placement.is_shard(0) or placement.is_replicate() for placement in weight.placements)
        return weight if sharded else None
    return weight if type(weight) in (nn.Parameter, Tensor) and not weight.is_meta else None


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, or of the tensors inside of a tensor subclass."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(tensor_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def _is_code(tensor: Tensor) -> bool:
    """Whether a tensor is a packed or quantised matrix."""
    if hasattr(tensor, "placements"):
        return False
    return is_traceable_wrapper_subclass(tensor) or not tensor.is_floating_point() or tensor.element_size() < 2


def coded_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules without submodules that have a quantised matrix."""
    for module in model.modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        if compressed_matrices(module):
            continue
        if not module._modules and any(t is not None and t.dim() > 1 and _is_code(t) for t in tensors):
            yield module


@contextmanager
def _recorded_inputs(modules: list[nn.Module]) -> Iterator[dict[nn.Module, tuple[Tensor, ...]]]:
    """The arguments that modules are called with in a block of code."""
    inputs: dict[nn.Module, tuple[Tensor, ...]] = {}

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            inputs.setdefault(module, args)

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(record))
        yield inputs


def measure_products(
    model: nn.Module, run: Callable[[], object], mode: Callable[[], AbstractContextManager[Any]], max_rows: int
) -> ProductBytes:
    """Measure what the products of quantised layers take beyond the tensors that :class:`MemoryTracker` sees.

    Args:
        run: runs a forward pass. mode: the mode of passes. max_rows: most rows of a pass.

    Returns:
        An upper bound of one product, for any input; products follow each other.
    """
    modules = list(coded_modules(model))
    if not modules:
        return ProductBytes()
    with _recorded_inputs(modules) as inputs:
        run()
    measured: dict[Hashable, ProductBytes] = {}
    for module, args in inputs.items():
        if (kind := _kind_of(module, args)) not in measured:
            with mode():
                measured[kind] = _measure(module, args, max_rows)
    bound = ProductBytes()
    for product in measured.values():
        bound = bound.elementwise_max(product)
    return bound


def _kind_of(module: nn.Module, args: tuple[Tensor, ...]) -> Hashable:
    tensors = (t for t in (*module.parameters(), *module.buffers()))
    return type(module), args[0].shape[-1], args[0].dtype, tuple((type(t), t.dtype, t.shape) for t in tensors)


@dataclass(frozen=True)
class _Peaks:
    beyond: int
    whole: int


def _measure(module: nn.Module, args: tuple[Tensor, ...], max_rows: int) -> ProductBytes:
    few = [_peaks(module, args, rows) for rows in _FEW_ROWS]
    many = _peaks(module, args, max(max_rows, _FEW_ROWS[-1] + 1))
    least = max(peaks.beyond for peaks in few)
    beyond = PassBytes.between((_FEW_ROWS[-1], least), (max(max_rows, _FEW_ROWS[-1] + 1), max(least, many.beyond)))
    return ProductBytes(beyond, type(module).__name__, max(peaks.whole for peaks in (*few, many)))


def _peaks(module: nn.Module, args: tuple[Tensor, ...], rows: int) -> _Peaks:
    """Peak bytes of a product over ``rows`` rows: beyond the tensors that the tracker sees in a pass, and in all."""
    first, *others = args
    beyond = whole = 0
    for magnitude in _MAGNITUDES:
        x = _random(first, rows if not others else None, magnitude)

        def call(x: Tensor = x) -> None:
            module(x, *others)

        call()  # what stays after the first call isn't a product's
        if magnitude == _MAGNITUDES[0]:
            with MemoryTracker() as tracker:
                call()
        peak = peak_of(call, first.device)
        beyond, whole = max(beyond, peak - tracker.peak), max(whole, peak, tracker.peak)
    return _Peaks(beyond, whole)


def _random(like: Tensor, rows: int | None, magnitude: float) -> Tensor:
    """Random rows of ``like``'s size, dtype and device; ``None``: in its shape."""
    shape = like.shape if rows is None else (*[1] * (like.dim() - 2), rows, like.shape[-1])
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return (magnitude * values).to(like.device, like.dtype)
