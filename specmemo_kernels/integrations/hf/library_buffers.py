"""Buffers that MKL keeps for the products of a model's passes on a CPU.

MKL allocates another buffer, beside the old ones, for a product with more rows than any before: with 4 to 32 rows, one
after the other, 7.7 MiB for a matrix of 2048 x 512, instead of 1.6 MiB if 32 rows come first.
"""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from specmemo_kernels.planning.host_allocator import free_library_buffers, library_bytes

if TYPE_CHECKING:
    from specmemo_kernels.integrations.hf.target import ModelFacts

Tensor = torch.Tensor
#: Dtypes of matrices that MKL packs.
_PACKED = (torch.float32, torch.float64)


class LibraryBuffers:
    """Keeps MKL at one buffer per thread in the passes of ``model``, whose experts get any number of a pass's rows."""

    def __init__(self, model: Any, facts: ModelFacts) -> None:
        self.model, self.facts = model, facts
        self._rows = self._kept = self._thread = 0
        self._matrices: list[Tensor] = []

    def prepare(self, rows: int) -> None:
        """Call this before a pass over ``rows`` rows."""
        if self.facts.device.type != "cpu":
            return
        thread = threading.get_ident()
        if rows > self._rows or (self._matrices and thread != self._thread):
            self._rows, self._thread, self._kept = max(rows, self._rows), thread, 1
            free_library_buffers()
            self._matrices = self._of_experts()
        if self._matrices and library_bytes() < self._kept:  # others may have freed them
            with _disable_current_modes():  # a step may be recorded
                multiply(self._matrices, self._rows)
            self._kept = library_bytes()

    def _of_experts(self) -> list[Tensor]:
        """The matrices that MKL multiplies in passes of up to so many rows, if there are experts among them."""
        few_rows, leaves = self.facts.leaves.max_rows, self.facts.leaves.modules
        products = few_rows is None or self._rows <= few_rows
        matrices = packed_matrices(self.model, self.facts, leaves if products else frozenset())
        return matrices if any(matrix.dim() == 3 for matrix in matrices) else []


def packed_matrices(model: Any, facts: ModelFacts, replaced: Set[nn.Module]) -> list[Tensor]:
    """One matrix, or matrices of experts, of each shape and dtype that MKL multiplies in a pass, the largest first.

    ``replaced``: modules that operators compute.
    """
    embedding, lm_head = (
        getattr(module, "weight", None) for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    skipped = {id(embedding), id(lm_head)} if facts.exact_lm_head else {id(embedding)} - {id(lm_head)}
    skipped |= {id(parameter) for module in replaced for parameter in module.parameters(recurse=False)}
    found = {
        (parameter.dtype, parameter.shape): parameter
        for parameter in model.parameters()
        if parameter.dim() in (2, 3) and parameter.dtype in _PACKED and id(parameter) not in skipped
    }
    plain = [
        matrix for matrix in found.values()
        if type(matrix) is nn.Parameter and not matrix.is_meta and matrix.shape[-2] > 1  # not a depthwise convolution's
    ]  # fmt: skip
    return sorted(plain, key=lambda matrix: matrix.shape[-1] * matrix.shape[-2], reverse=True)


@torch.no_grad()
def multiply(matrices: list[Tensor], rows: int) -> None:
    """Multiply ``rows`` rows with each matrix; with an expert's in both orders, as one may be stored transposed."""
    for matrix in matrices:
        each = matrix if matrix.dim() == 2 else matrix[0]
        nn.functional.linear(each.new_zeros(rows, each.shape[1]), each)
        if matrix.dim() == 3:
            nn.functional.linear(each.new_zeros(rows, each.shape[0]), each.T)
