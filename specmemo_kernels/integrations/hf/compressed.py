"""Modules whose bfloat16 weights are compressed without loss: a quarter less memory, and fewer bytes per step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeGuard, cast

import torch
from torch import nn

from specmemo_kernels.cache.huge_pages import prefer_huge_pages
from specmemo_kernels.integrations.hf.compressed_matrix import CompressedMatrix
from specmemo_kernels.integrations.hf.replaced import is_plain
from specmemo_kernels.ops.compressed_weights import compress, row_bytes
from specmemo_kernels.planning.mapped_files import MappedFiles

Tensor = torch.Tensor
#: Most bytes of a compressed matrix, relative to the matrix. Narrower ones (up to 256 columns) have too large heads.
_MOST_BYTES = 0.9
#: Least bytes of a block of memory for compressed matrices.
_BLOCK_BYTES = 64 << 20


class Compressed(nn.Module):
    """A linear layer or an embedding whose parameter ``weight`` is compressed rows.

    Only passes of ``patch`` multiply the rows as they are. Other code that reads ``module.weight`` gets a
    :class:`CompressedMatrix`. Saved, copied and pickled modules have the matrix.
    """

    matrix: CompressedMatrix

    @property
    def weight(self) -> Tensor:
        return self.matrix if is_compressed(self) else cast(Tensor, self._parameters["weight"])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if is_compressed(self):
            destination[prefix + "weight"] = self.matrix.plain()

    def __reduce_ex__(self, protocol: Any) -> Any:
        parameters = self._parameters | ({"weight": self.matrix.plain()} if is_compressed(self) else {})
        state = vars(self) | {"_parameters": parameters}
        return object.__new__, (_plain_class(self),), {name: value for name, value in state.items() if name != "matrix"}


class CompressedLinear(Compressed, nn.Linear):  # type: ignore[misc]
    """An ``nn.Linear`` with compressed weights."""


def is_compressed(module: Any) -> TypeGuard[Compressed]:
    """Whether a module's ``weight`` is compressed."""
    return isinstance(module, Compressed) and getattr(stored_weight(module), "dtype", None) == torch.uint8


def is_plain_linear(module: Any) -> TypeGuard[nn.Linear]:
    """Whether a module is an ``nn.Linear``, compressed or not, and of no other class."""
    return type(module) is nn.Linear or (type(module) is CompressedLinear and is_compressed(module))


def stored_weight(module: Any) -> Any:
    """A module's ``weight``, or its compressed rows; ``None`` if it has none."""
    is_ours = isinstance(module, Compressed)
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


def compress_weights(model: nn.Module, undo: list[Callable[[], None]]) -> CompressedWeights:
    """Compress the weights of linear layers and embeddings of ``model`` in place, one matrix after the other.

    Quantised modules, modules with hooks or on other devices, up to 256 columns, and matrices that can't be compressed
    (:func:`specmemo_kernels.ops.compressed_weights.compress`) stay as they are.

    Args:
        undo: gets a function for each matrix, which decompresses it.

    Raises:
        ValueError: no linear layer or embedding has bfloat16 weights.
    """
    names: list[str] = []
    nbytes = saved = 0
    candidates = list(_candidates(model))
    if not candidates:
        found = sorted({str(m.weight.dtype) for m in model.modules() if isinstance(m, nn.Linear)})
        raise ValueError(
            "compress is True, but no linear layer or embedding has bfloat16 weights and more than 256 columns (dtypes "
            f"of linear layers: {', '.join(found) or 'none'}); leave it out, or load the model with "
            "dtype=torch.bfloat16"
        )
    files = MappedFiles()
    for users, memory in _with_memory(candidates):
        parameter = users.parameter
        weight = parameter.data
        if (rows := compress(weight, memory)) is None:
            continue
        nbytes, saved = nbytes + rows.nbytes, saved + weight.nbytes - rows.nbytes
        undo.append(partial(_decompress, users, parameter.requires_grad))
        parameter.requires_grad_(False).data = rows
        matrix = CompressedMatrix(parameter, weight.shape[1])
        for module in users.modules.values():
            module.matrix = matrix
            module.__class__ = _compressed_class(type(module))
        names += users.modules
        files.page_out(weight)
    return CompressedWeights(tuple(names), nbytes, saved)


@dataclass(frozen=True)
class _Users:
    """The modules of a parameter by name: several if they are tied."""

    parameter: nn.Parameter
    modules: dict[str, Any]

    @property
    def size(self) -> tuple[int, int]:
        """Of the compressed rows."""
        rows, columns = self.parameter.shape
        return rows, row_bytes(columns)


def _with_memory(candidates: list[_Users]) -> Iterator[tuple[_Users, Tensor]]:
    """Each candidate with memory for its compressed rows, in blocks that huge pages fit in.

    From huge pages products of small matrices (768 x 768) take 0.77 to 0.94 of the time, of large ones 0.96 to 0.98.
    """
    while candidates:
        ends = list(accumulate(rows * nbytes for rows, nbytes in (users.size for users in candidates)))
        count = 1 + bisect_left(ends, _BLOCK_BYTES, hi=len(ends) - 1)
        block = torch.empty(ends[count - 1], dtype=torch.uint8)
        prefer_huge_pages(block)
        for users, end in zip(candidates[:count], ends, strict=False):
            yield users, block[end - users.size[0] * users.size[1] : end].view(users.size)
        candidates = candidates[count:]


def _candidates(model: nn.Module) -> Iterator[_Users]:
    found: dict[int, _Users] = {}
    others: set[int] = set()  # addresses of parameters that other modules use
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
                continue
            address = parameter.data_ptr()
            users = found.setdefault(address, _Users(parameter, {}))
            if key == "weight" and users.parameter is parameter and _is_supported(module):
                users.modules[name] = module
            else:
                others.add(address)
    for address, users in found.items():
        weight = users.parameter
        plain = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()
        if address in others or weight.ndim != 2 or not plain:
            continue
        if row_bytes(weight.shape[1]) <= _MOST_BYTES * 2 * weight.shape[1]:
            yield users


def _is_supported(module: nn.Module) -> bool:
    """Whether a module reads its weight only as a matrix of a product, or to look up rows."""
    if not is_plain(module):
        return False
    return type(module) is nn.Linear or (isinstance(module, nn.Embedding) and module.max_norm is None)


def _compressed_class(plain: type[nn.Module]) -> type[Compressed]:
    if plain is nn.Linear:
        return CompressedLinear
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (Compressed, plain), names)


def _plain_class(module: Compressed) -> type[nn.Module]:
    return cast(type[nn.Module], type(module).__bases__[1])


def _decompress(users: _Users, requires_grad: bool) -> None:
    for module in users.modules.values():
        if is_compressed(module) and users.parameter.dtype == torch.uint8:
            users.parameter.data = module.matrix.decompressed()
            users.parameter.requires_grad_(requires_grad)
        if isinstance(module, Compressed):
            object.__setattr__(module, "__class__", _plain_class(module))
            del module.matrix
