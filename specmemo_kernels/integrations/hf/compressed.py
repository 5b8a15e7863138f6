"""Linear layers whose bfloat16 weights are compressed without loss: a quarter less memory, and fewer bytes per step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeGuard

import torch
from torch import nn

from specmemo_kernels.cache.huge_pages import prefer_huge_pages
from specmemo_kernels.integrations.hf.replaced import is_plain
from specmemo_kernels.ops.compressed_weights import compress, decompress, row_bytes
from specmemo_kernels.planning.mapped_files import MappedFiles

Tensor = torch.Tensor
#: Most bytes of a compressed matrix, relative to the matrix. Narrower ones (up to 256 columns) have too large heads.
_MOST_BYTES = 0.9
#: Least bytes of a block of memory for compressed matrices.
_BLOCK_BYTES = 64 << 20


class _ReadOnly(Tensor):
    """An inference tensor without ``data``: torch refuses to change it in place."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def _no_data(self, *_: Any) -> Any:
        raise RuntimeError(
            "the weights are compressed: a change of weight.data would be lost. Call specmemo_kernels.unpatch(model) "
            "to change them, or read weight.detach()"
        )

    data = property(_no_data, _no_data)


class CompressedLinear(nn.Linear):
    """An ``nn.Linear`` whose parameter ``weight`` is compressed rows, ``[out_features, row_bytes(in_features)]`` uint8.

    Only passes of ``patch`` multiply the rows as they are. Other code that reads ``module.weight`` gets the matrix,
    decompressed for each access; a change of it in place raises, because it would be lost. Saved, copied and pickled
    modules have the matrix.
    """

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        with torch.inference_mode():
            return self.decompressed().as_subclass(_ReadOnly)

    def decompressed(self) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None, "a linear layer has a weight"
        return decompress(weight.data, self.in_features) if weight.dtype == torch.uint8 else weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.decompressed(), self.bias)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.decompressed().detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        parameters = self._parameters | {"weight": nn.Parameter(self.decompressed().detach(), requires_grad=False)}
        return object.__new__, (nn.Linear,), vars(self) | {"_parameters": parameters}


def is_compressed(module: Any) -> TypeGuard[CompressedLinear]:
    """Whether a module's ``weight`` is compressed."""
    return isinstance(module, CompressedLinear) and stored_weight(module).dtype == torch.uint8


def stored_weight(module: Any) -> Any:
    """A module's ``weight``, or its compressed rows; ``None`` if it has none."""
    is_ours = isinstance(module, CompressedLinear)
    return module._parameters["weight"] if is_ours else getattr(module, "weight", None)


@dataclass(frozen=True)
class CompressedWeights:
    """The modules whose weights are compressed.

    Attributes:
        names: of the modules. nbytes: of their compressed weights. saved_bytes: of their weights before, minus nbytes.
    """

    names: tuple[str, ...] = ()
    nbytes: int = 0
    saved_bytes: int = 0


def compress_linears(model: nn.Module, undo: list[Callable[[], None]]) -> CompressedWeights:
    """Compress the weights of the linear layers of ``model`` in place, one after the other.

    Tied and quantised layers, layers with hooks or on other devices, layers of up to 256 inputs, and matrices that
    can't be compressed (:func:`specmemo_kernels.ops.compressed_weights.compress`) stay as they are.

    Args:
        undo: gets a function for each layer, which decompresses it.

    Raises:
        ValueError: no layer has bfloat16 weights.
    """
    names, nbytes, saved = [], 0, 0
    candidates = list(_candidates(model))
    if not candidates:
        found = sorted({str(m.weight.dtype) for m in model.modules() if isinstance(m, nn.Linear)})
        raise ValueError(
            "compress is True, but no linear layer has bfloat16 weights of its own and more than 256 inputs (dtypes of "
            f"linear layers: {', '.join(found) or 'none'}); leave it out, or load the model with dtype=torch.bfloat16"
        )
    files = MappedFiles()
    for name, module, memory in _with_memory(candidates):
        weight = module.weight.data
        if (rows := compress(weight, memory)) is None:
            continue
        nbytes, saved = nbytes + rows.nbytes, saved + module.weight.nbytes - rows.nbytes
        undo.append(partial(_decompress, module, module.weight.requires_grad))
        module.weight.requires_grad_(False).data = rows
        module.__class__ = CompressedLinear
        names.append(name)
        files.page_out(weight)
    return CompressedWeights(tuple(names), nbytes, saved)


def _with_memory(candidates: list[tuple[str, nn.Linear]]) -> Iterator[tuple[str, nn.Linear, Tensor]]:
    """Each layer with memory for its compressed rows, in blocks that huge pages fit in.

    From huge pages products of small matrices (768 x 768) take 0.77 to 0.94 of the time, of large ones 0.96 to 0.98.
    """
    while candidates:
        sizes = [(len(module.weight), row_bytes(module.in_features)) for _, module in candidates]
        ends = list(accumulate(rows * nbytes for rows, nbytes in sizes))
        count = 1 + bisect_left(ends, _BLOCK_BYTES, hi=len(ends) - 1)
        block = torch.empty(ends[count - 1], dtype=torch.uint8)
        prefer_huge_pages(block)
        for (name, module), size, end in zip(candidates[:count], sizes, ends, strict=False):
            yield name, module, block[end - size[0] * size[1] : end].view(size)
        candidates = candidates[count:]


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    parameters = (p for m in model.modules() for p in m._parameters.values() if type(p) is nn.Parameter)
    users = Counter(p.data_ptr() for p in parameters if type(p.data) is Tensor)
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or not is_plain(module):
            continue
        weight = module._parameters.get("weight")
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or users[weight.data_ptr()] > 1:
            continue
        plain = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()
        if plain and row_bytes(weight.shape[1]) <= _MOST_BYTES * 2 * weight.shape[1]:
            yield name, module


def _decompress(module: nn.Module, requires_grad: bool) -> None:
    if is_compressed(module):
        parameter = module._parameters["weight"]
        assert parameter is not None, "it is compressed"
        parameter.data = module.decompressed()
        parameter.requires_grad_(requires_grad)
    if isinstance(module, CompressedLinear):
        object.__setattr__(module, "__class__", nn.Linear)
