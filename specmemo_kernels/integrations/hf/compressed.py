"""Modules whose bfloat16 weights are compressed without loss: a quarter less memory, and fewer bytes per step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from math import prod
from typing import Any, TypeGuard, cast

import torch
from torch import nn

from specmemo_kernels.cache.huge_pages import prefer_huge_pages
from specmemo_kernels.integrations.hf.compressed_matrix import CompressedMatrix
from specmemo_kernels.integrations.hf.experts import is_mixture, weight_names
from specmemo_kernels.integrations.hf.replaced import is_plain
from specmemo_kernels.ops.compressed_weights import compress, row_bytes
from specmemo_kernels.planning.mapped_files import MappedFiles

Tensor = torch.Tensor
#: Most bytes of a compressed matrix, relative to the matrix. Of narrow ones heads and unused ends of blocks take more.
_MOST_BYTES = 0.9
#: Least bytes of a block of memory for compressed matrices.
_BLOCK_BYTES = 64 << 20


class Compressed(nn.Module):
    """A linear layer, an embedding or experts with parameters that are compressed rows.

    Only passes of ``patch`` multiply the rows as they are. Other code that reads such an attribute gets a
    :class:`CompressedMatrix`. Saved, copied and pickled modules have the matrices.
    """

    _matrices: dict[str, CompressedMatrix]  # by the parameter's name

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if compressed_matrices(self) and fn(torch.empty(0, dtype=torch.bfloat16, device="cpu")).dtype != torch.bfloat16:
            raise RuntimeError(
                "compressed weights would be converted to another dtype; call specmemo_kernels.unpatch(model) first"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: matrix.plain() for name, matrix in compressed_matrices(self).items()})

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = {name: matrix.plain() for name, matrix in compressed_matrices(self).items()}
        state = vars(self) | {"_parameters": self._parameters | plain}
        del state["_matrices"]
        return object.__new__, (_plain_class(self),), state


def compressed_matrices(module: nn.Module) -> dict[str, CompressedMatrix]:
    """The compressed parameters of a module itself, by name."""
    if not isinstance(module, Compressed):
        return {}
    stored = module._parameters.items()
    return {name: module._matrices[name] for name, p in stored if p is not None and p.dtype == torch.uint8}


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is an ``nn.Linear`` and of no other class, with compressed weights or not."""
    return type(module) is nn.Linear or (bool(compressed_matrices(module)) and _plain_class(module) is nn.Linear)


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


@dataclass(frozen=True)
class _Users:
    """The modules that have a parameter, by their names, and its name there: several modules if they are tied."""

    parameter: nn.Parameter
    modules: dict[str, tuple[Any, str]]

    @property
    def size(self) -> tuple[int, ...]:
        """Of the compressed rows."""
        return *self.parameter.shape[:-1], row_bytes(self.parameter.shape[-1])


def compress_weights(model: nn.Module, undo: list[Callable[[], None]]) -> CompressedWeights:
    """Compress the weights of linear layers, embeddings and experts of ``model`` in place, one after the other.

    Quantised modules, modules with hooks or on other devices, matrices that wouldn't get a tenth smaller (such as of
    128 or 300 columns), and those that can't be compressed
    (:func:`specmemo_kernels.ops.compressed_weights.compress`) stay as they are.

    Args:
        undo: gets a function for each parameter, which decompresses it, and one that removes a hook of ``model``.

    Raises:
        ValueError: there are no bfloat16 weights.
    """
    names: list[str] = []
    nbytes = saved = 0
    candidates = list(_candidates(model))
    if not candidates:
        found = sorted({str(m.weight.dtype) for m in model.modules() if isinstance(m, nn.Linear)})
        remedy = "leave it out" + ", or load the model with dtype=torch.bfloat16" * (str(torch.bfloat16) not in found)
        raise ValueError(
            "compress is True, but no linear layer, embedding or expert has bfloat16 weights that would get a tenth "
            f"smaller (dtypes of linear layers: {', '.join(found) or 'none'}); {remedy}"
        )
    hooked: Any = model
    undo.append(hooked.register_load_state_dict_pre_hook(_refuse_to_load).remove)
    files = MappedFiles()
    for users, memory in _with_memory(candidates):
        parameter = users.parameter
        weight = parameter.data
        if (rows := compress(weight, memory)) is None:
            continue
        nbytes, saved = nbytes + rows.nbytes, saved + weight.nbytes - rows.nbytes
        undo.append(partial(_decompress, users, weight.shape[-1], parameter.requires_grad))
        parameter.requires_grad_(False).data = rows
        matrix = CompressedMatrix(parameter, weight.shape[-1])
        for module, key in users.modules.values():
            if not isinstance(module, Compressed):
                module.__class__ = _compressed_class(module.__class__, _supported(module))
                module._matrices = {}
            module._matrices[key] = matrix
        names += users.modules
        files.page_out(weight)
    return CompressedWeights(tuple(dict.fromkeys(names)), nbytes, saved)


def _refuse_to_load(model: nn.Module, *_: Any) -> None:
    """A hook, before the first tensor is loaded: shapes of compressed rows aren't those of a state dict's matrices."""
    if any(map(compressed_matrices, model.modules())):
        raise RuntimeError(
            "load_state_dict would change compressed weights; call specmemo_kernels.unpatch(model) first, and patch it "
            "again afterwards"
        )


def _with_memory(candidates: list[_Users]) -> Iterator[tuple[_Users, Tensor]]:
    """Each candidate with memory for its compressed rows, in blocks that huge pages fit in.

    From huge pages products of small matrices (768 x 768) take 0.77 to 0.94 of the time, of large ones 0.96 to 0.98.
    """
    while candidates:
        ends = list(accumulate(prod(users.size) for users in candidates))
        count = 1 + bisect_left(ends, _BLOCK_BYTES, hi=len(ends) - 1)
        block = torch.empty(ends[count - 1], dtype=torch.uint8, device="cpu")
        prefer_huge_pages(block)
        for users, end in zip(candidates[:count], ends, strict=False):
            yield users, block[end - prod(users.size) : end].view(users.size)
        candidates = candidates[count:]


def _candidates(model: nn.Module) -> Iterator[_Users]:
    found: dict[int, _Users] = {}
    others: set[int] = set()  # addresses of parameters that other modules use
    for name, module in model.named_modules():
        supported = _supported(module)
        for key, parameter in module._parameters.items():
            if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
                continue
            address = parameter.data_ptr()
            users = found.setdefault(address, _Users(parameter, {}))
            if key in supported and users.parameter is parameter:
                users.modules[name] = module, key
            else:
                others.add(address)
    for address, users in found.items():
        weight = users.parameter
        plain = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()
        if plain and address not in others and row_bytes(weight.shape[-1]) <= _MOST_BYTES * 2 * weight.shape[-1]:
            yield users


def _supported(module: nn.Module) -> tuple[str, ...]:
    """The parameters that a module only multiplies rows with, or looks up rows of."""
    if not is_plain(module):
        return ()
    if type(module) is nn.Linear or (isinstance(module, nn.Embedding) and module.max_norm is None):
        return ("weight",)
    return () if not is_mixture(module) or module.is_transposed else weight_names(module)


@cache
def _compressed_class(plain: type[nn.Module], parameters: tuple[str, ...]) -> type[Compressed]:
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    readers = {name: property(partial(_read, name)) for name in parameters}
    return type(plain.__name__, (Compressed, plain), names | readers)


def _read(name: str, module: Compressed) -> Tensor | None:
    return compressed_matrices(module).get(name, module._parameters[name])


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return cast(type[nn.Module], type(module).__bases__[1])


@torch.inference_mode(False)  # the parameters can be trained afterwards
def _decompress(users: _Users, columns: int, requires_grad: bool) -> None:
    parameter = users.parameter
    if parameter.dtype == torch.uint8:
        parameter.data = CompressedMatrix(parameter, columns).decompressed()
        parameter.requires_grad_(requires_grad)
    for module, _ in users.modules.values():
        if isinstance(module, Compressed) and not compressed_matrices(module):
            object.__setattr__(module, "__class__", _plain_class(module))
            del module._matrices
