"""Compressed matrices as a read-only tensor, for code that reads a module's weight."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from specmemo_kernels import ops

Tensor = torch.Tensor
#: A function of torch that makes a view.
View = Callable[[Tensor], Tensor]

_LOST = "{} would change compressed weights, and the change would be lost; call specmemo_kernels.unpatch(model) first"
#: Methods that read a tensor's memory.
_READS = frozenset(
    getattr(Tensor, name)
    for name in ("tolist", "numpy", "__array__", "__repr__", "__format__", "__reduce_ex__", "__deepcopy__")
)


class CompressedMatrix(Tensor):
    """The bfloat16 matrices ``[..., rows, columns]`` whose compressed rows ``stored`` has.

    Its size and dtype are known, and views of it are made without decompressing. Functions of torch get it decompressed
    for each call; an embedding gets the rows that it looks up. A change in place raises ``RuntimeError``, because it
    would be lost.
    """

    stored: Tensor
    columns: int  # of the matrices, whatever the view
    _like: Tensor  # on the meta device
    _views: tuple[View, ...]  # of the decompressed matrices
    _plain: weakref.ref[nn.Parameter] | None

    @staticmethod
    def __new__(cls, stored: Tensor, columns: int) -> CompressedMatrix:
        like = torch.empty(*stored.shape[:-1], columns, dtype=torch.bfloat16, device="meta")
        return cls._of(stored, columns, like, ())

    @classmethod
    def _of(cls, stored: Tensor, columns: int, like: Tensor, views: tuple[View, ...]) -> CompressedMatrix:
        size = like.shape, like.stride(), like.storage_offset()
        with torch.inference_mode(False):  # as views of normal tensors are: torch gives them the tensor's version
            matrix: CompressedMatrix = Tensor._make_wrapper_subclass(cls, *size, dtype=like.dtype)
        matrix.stored, matrix.columns, matrix._like, matrix._views, matrix._plain = stored, columns, like, views, None
        return matrix

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding and len(args) == 2 and kwargs.get("max_norm") is None:
            tokens, matrix = args
            if isinstance(matrix, cls) and not matrix._views:
                return matrix.looked_up(tokens)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise RuntimeError(_LOST.format("weight.data = ..."))
        if func in _READS:
            args = tree_map_only(cls, cls.decompressed, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        changed = (args[:1], kwargs.get("out")) if func._schema.is_mutable else ()
        if any(isinstance(leaf, cls) for leaf in tree_leaves(changed)):
            raise RuntimeError(_LOST.format(func))
        if func.is_view and isinstance(args[0], cls):
            return args[0]._viewed(func, args[1:], kwargs)
        args, kwargs = tree_map_only(cls, cls.decompressed, (args, kwargs))
        return func(*args, **kwargs)

    def _viewed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.select.int and self.ndim > 2 and args[0] == 0 and not self._views:  # an expert
            return CompressedMatrix(self.stored[args[1]], self.columns)

        def call(matrices: Tensor) -> Any:
            return func(matrices, *args, **kwargs)

        def item(i: int) -> View:
            return lambda matrices: call(matrices)[i]

        def viewed(like: Tensor, view: View) -> CompressedMatrix:
            return self._of(self.stored, self.columns, like, (*self._views, view))

        like = call(self._like)
        return viewed(like, call) if isinstance(like, Tensor) else [viewed(x, item(i)) for i, x in enumerate(like)]

    def operand(self) -> Tensor:
        """What operators take: the compressed rows, or of a view the decompressed matrix."""
        return self.decompressed() if self._views else self.stored.detach()

    def decompressed(self) -> Tensor:
        rows = self.stored.detach()
        matrices = ops.decompress(rows.flatten(0, -2), self.columns).view(*rows.shape[:-1], self.columns)
        for view in self._views:
            matrices = view(matrices)
        return matrices

    def looked_up(self, tokens: Tensor) -> Tensor:
        """Rows ``[..., columns]`` of a single matrix for ``tokens`` ``[...]``."""
        rows = self.stored.detach().index_select(0, tokens.flatten())
        return ops.kernels(None, rows.device).decompress(rows, self.columns).view(*tokens.shape, self.columns)

    def plain(self) -> nn.Parameter:
        """The matrices as a parameter: while it is in use and unchanged, modules that share it get the same one."""
        found = None if self._plain is None else self._plain()
        if found is None or found._version:
            found = nn.Parameter(self.decompressed(), requires_grad=False)
            self._plain = weakref.ref(found)
        return found
