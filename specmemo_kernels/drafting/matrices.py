"""A drafter's matrices by name: in the model's dtype (``.weight``) or in 4-bit codes (``.codes`` and ``.scales``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from specmemo_kernels.ops import Kernels
from specmemo_kernels.ops.weight_codes import unpack

Tensor = torch.Tensor


def matrix(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor | None]:
    """The matrix ``name`` and ``None``, or its codes and scales."""
    codes = tensors.get(f"{name}.codes")
    return (tensors[f"{name}.weight"], None) if codes is None else (codes, tensors[f"{name}.scales"])


def has_matrix(tensors: Mapping[str, Tensor], name: str) -> bool:
    """Whether there is a matrix ``name``."""
    return f"{name}.weight" in tensors or f"{name}.codes" in tensors


def linear(kernels: Kernels, tensors: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """The linear layer ``name`` of ``x`` ``[N, inputs]``, with its bias if it has one."""
    weight, scales = matrix(tensors, name)
    return kernels.linear(x, weight, tensors.get(f"{name}.bias"), scales, False)


def embedding(tensors: Mapping[str, Tensor], name: str, tokens: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Rows ``[N, size]`` of the matrix ``name`` for ``tokens`` ``[N]``."""
    weight, scales = matrix(tensors, name)
    if scales is None:
        return torch.nn.functional.embedding(tokens, weight)
    return unpack(weight.index_select(0, tokens), scales.index_select(0, tokens), size).to(dtype)


def stored_keys(keys: Iterable[str]) -> list[str]:
    """The keys of a drafter's tensors as its file has them, without codes."""
    return [re.sub(r"\.codes$", ".weight", key) for key in keys if not key.endswith(".scales")]
