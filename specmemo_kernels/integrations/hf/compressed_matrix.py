"""A compressed matrix as a read-only tensor, for code that reads a module's weight."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specmemo_kernels import ops

Tensor = torch.Tensor
#: What is known without decompressing.
_METADATA = frozenset((
    *(getattr(Tensor, name).__get__ for name in (
        "dtype", "shape", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad",
        "grad_fn", "is_cpu", "is_cuda", "is_meta", "is_quantized", "is_sparse", "is_nested",
    )),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__len__,
))  # fmt: skip
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]


class CompressedMatrix(Tensor):
    """The bfloat16 matrix ``[rows, columns]`` of a parameter that holds compressed rows.

    Its metadata are known. Functions of torch get the matrix, decompressed for each call; an embedding gets the rows
    that it looks up. A change in place raises ``RuntimeError``, because it would be lost.
    """

    parameter: nn.Parameter
    _plain: weakref.ref[nn.Parameter] | None

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, columns: int) -> CompressedMatrix:
        size = len(parameter), columns
        matrix: CompressedMatrix = Tensor._make_wrapper_subclass(cls, size, dtype=torch.bfloat16)
        matrix.parameter, matrix._plain = parameter, None
        return matrix

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in _DATA:
            raise RuntimeError(
                "the weights are compressed: a change of weight.data would be lost. Call "
                "specmemo_kernels.unpatch(model) to change them, or read weight.detach()"
            )
        if func is functional.embedding and isinstance(args[1], cls):
            return args[1].looked_up(args[0])
        # Changes of inference tensors raise. Autograd can't save them, so that a linear layer gets a normal one.
        with torch.inference_mode(func is not functional.linear):
            args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.decompressed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.__torch_function__(func, types, args, kwargs)  # of calls that bypass it

    @property
    def rows(self) -> Tensor:
        """The compressed rows."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.data

    def decompressed(self) -> Tensor:
        return ops.decompress(self.rows, self.shape[1])

    def looked_up(self, tokens: Tensor) -> Tensor:
        """Rows ``[..., columns]`` for ``tokens`` ``[...]``."""
        rows = self.rows.index_select(0, tokens.flatten())
        columns = self.shape[1]
        return ops.kernels(None, rows.device).decompress(rows, columns).view(*tokens.shape, columns)

    def plain(self) -> nn.Parameter:
        """The matrix as a parameter: while it is in use and unchanged, modules that share it get the same one."""
        found = None if self._plain is None else self._plain()
        if found is None or found._version:
            found = nn.Parameter(self.decompressed(), requires_grad=False)
            self._plain = weakref.ref(found)
        return found
