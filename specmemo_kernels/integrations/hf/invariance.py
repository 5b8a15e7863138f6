"""Invariant mode: whether a model's forward pass computes each row with the same bits in any pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from specmemo_kernels import ops
from specmemo_kernels.integrations.hf.linears import DTYPES, Linears, product
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.probe import like_attention
from specmemo_kernels.integrations.hf.row_functions import RowFunctions, has_one_tensor, in_whole_vectors
from specmemo_kernels.integrations.hf.target import ModelFacts, run_packed, tapped
from specmemo_kernels.planning.memory_tracker import is_composite

Tensor = torch.Tensor

#: Rows of the compared passes. Tiles have 4 or 8 rows: less than a tile, whole tiles, tiles and a remainder. 70 rows
#: take several passes over the weights, of 32 rows each.
_ROWS = (1, 3, 8, 21, 70)
#: Elements that don't fill a vector, and values of parts that begin in other places of a vector.
_FEW, _PLACES = 3, 1021
#: Namespaces of torch's operators. Others may multiply with matrices that are no tensors (quantised layers).
_TORCH = ("aten", "prims")


def check_invariant_arguments(backend: str, fuse: bool, kv_dtype: str | None) -> None:
    """Raise ``ValueError`` for arguments of ``patch`` that rule out invariant mode."""
    if backend != "cpu":
        raise ValueError(
            f"invariant is True, but backend {backend!r} has no invariant products; use backend='cpu' on a CPU, or "
            "invariant=False"
        )
    if not fuse:
        raise ValueError("invariant is True and fuse is False, but only fused layers are invariant; leave out fuse")
    if kv_dtype is not None:
        raise ValueError(
            f"invariant is True and kv_dtype is {kv_dtype!r}: a step reads its own keys unquantised, later steps read "
            "their codes; leave out kv_dtype"
        )


@torch.no_grad()
def check_invariance(model: Any, facts: ModelFacts) -> RowFunctions:
    """Find what a pass must compute in another way than torch, and compare rows' bits in passes of several sizes.

    Raises:
        UnsupportedModel: there are recurrent layers; or a pass multiplies with a matrix in another way than by linear
            layers and replaced modules (a quantised layer); or an element-wise operator rounds an element by its place
            inside of a larger function; or hidden states or logits differ, so that an operation depends on other rows.
    """
    name = type(model).__name__
    if facts.mixers.mixers:
        raise UnsupportedModel(
            f"{name} has recurrent layers, which compute prompts and steps in different ways; use invariant=False"
        )
    count = max(_ROWS)
    tokens = torch.arange(count, device="cpu") * 7919 % model.get_input_embeddings().weight.shape[0]
    positions = torch.arange(count, device="cpu") * 5 % max(1, min(count, _max_positions(model)))
    operators = Operators(model)
    functions = _FunctionFinder(operators, facts.leaves.backend)
    with facts.pass_mode(), operators, functions:
        run_packed(model, tokens, positions, like_attention, None, leaves=facts.leaves)
    if operators.product is not None:
        raise UnsupportedModel(
            f"{name} computes {operators.product} outside of linear layers, gated MLPs and mixtures of the model's "
            "dtype on the CPU: its bits may depend on the other rows; use invariant=False"
        )
    if dependent := functions.dependent():
        raise UnsupportedModel(
            f"{name} computes {', '.join(sorted(dependent))} outside of replaced modules: on this CPU the bits of an "
            "element depend on its place in the tensor, so on the number of rows; use invariant=False"
        )
    found = functions.found()
    leaves = facts.leaves.with_functions(found)
    expected: tuple[Tensor, Tensor] | None = None
    for rows in sorted(_ROWS, reverse=True):
        with facts.pass_mode(), tapped(cut=facts.plain_lm_head) as tap:
            logits = run_packed(model, tokens[:rows], positions[:rows], like_attention, None, leaves=leaves)[0]
        results = tap.hidden, logits
        expected = results if expected is None else expected
        if not all(torch.equal(result, all_rows[:rows]) for result, all_rows in zip(results, expected, strict=True)):
            raise UnsupportedModel(
                f"{name} computes other bits for {rows} rows than for {count}: an operation besides "
                "its linear layers depends on the number of rows; use invariant=False"
            )
    return found


class Operators(TorchDispatchMode):
    """Watches the operators of a pass.

    Attributes:
        product: the first one besides our own that computes with a matrix of the model and another tensor, unless it is
            element-wise, with the matrix's name; or that isn't torch's. ``None`` if there is none.
        dependent: names and dtypes of the operators of one tensor, since :meth:`begin`, whose bits for an element
            depend on its place.
        elementwise: all operators since then have one tensor and are element-wise or views.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.product: str | None = None
        named = (*model.named_parameters(), *model.named_buffers())
        self._matrices = {_memory(tensor): name for name, tensor in named if tensor.ndim > 1}
        self._depends: dict[tuple[Any, ...], bool] = {}
        self.begin()

    def begin(self) -> None:
        self.dependent: list[str] = []
        self.elementwise = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        pointwise = torch.Tag.pointwise in func.tags
        of_one = pointwise and len(tensors) == 1
        self.elementwise &= func.is_view or of_one
        if of_one and tensors[0].is_floating_point() and self._is_dependent(func, tensors[0].dtype, args, kwargs):
            self.dependent.append(f"{func} in {str(tensors[0].dtype).removeprefix('torch.')}")
        matrices = [self._matrices.get(_memory(tensor)) for tensor in tensors]
        others = [tensor for tensor, name in zip(tensors, matrices, strict=True) if name is None]
        matrix = next((name for name in matrices if name is not None), None)
        result = func(*args, **kwargs)
        if matrix is not None and not others:
            for tensor in tree_flatten(result)[0]:
                if isinstance(tensor, Tensor):
                    self._note(tensor, matrix)
        elif func.namespace != "specmemo" and not pointwise and any(map(torch.is_floating_point, others)):
            if matrix is not None:
                self.product = self.product or f"{func} with {matrix}"
            elif func.namespace not in _TORCH:
                self.product = self.product or str(func)
        return result

    def _note(self, tensor: Tensor, matrix: str) -> None:
        """Register what was computed from a matrix, until its memory is freed."""
        key, owner = _memory(tensor), tensor.untyped_storage() if _is_plain(tensor) else tensor
        if key not in self._matrices:
            self._matrices[key] = matrix
            weakref.finalize(owner, self._matrices.pop, key, None)

    def _is_dependent(self, func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compare the results for many values at once, and a few at a time."""
        key = func, dtype, str(tree_map_only(Tensor, lambda _: None, (args, kwargs)))
        if key not in self._depends:

            def result_of(values: Tensor) -> Tensor:
                own_args, own_kwargs = tree_map_only(Tensor, lambda _: values, (args, kwargs))
                result: Tensor = func(*own_args, **own_kwargs)
                return result.nan_to_num()

            # One call computes a strided tensor element by element. Some operators have other code for strided tensors,
            # so short contiguous ones confirm the differences.
            values = _sweep(dtype)
            whole = result_of(values.clone())  # the operator may write in place
            different = whole != result_of(torch.stack([values] * 2, dim=1)[:, 0])
            parts = [result_of(part) for part in torch.split(values[different], _FEW)]
            self._depends[key] = bool(parts) and not torch.equal(whole[different], torch.cat(parts))
        return self._depends[key]


class _FunctionFinder(Linears):
    """Finds the functions that :class:`RowFunctions` must compute; linear layers are computed as there."""

    def __init__(self, operators: Operators, backend: str) -> None:
        super().__init__(self._product, DTYPES)
        self._operators, self._backend = operators, backend
        self._elementwise: set[Callable[..., Any]] = set()
        self._others: set[str] = set()
        self._workspaces: list[int] = []

    def found(self) -> RowFunctions:
        linear = bool(self._workspaces)
        return RowFunctions(frozenset(self._elementwise), linear, max(self._workspaces, default=0))

    def dependent(self) -> set[str]:
        """Operators that depend on the place, outside of functions that can be computed otherwise."""
        self._end()
        return self._others

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._workspaces.append(ops.linear_workspace(self._backend, x.dtype, x.shape[-1]))
        return product(ops.kernels(self._backend, x.device), True, x, weight, bias)

    def _end(self) -> None:
        """The operators since the last function belong to none that can be computed otherwise."""
        self._others.update(self._operators.dependent)
        self._operators.begin()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._end()
        result = super().__torch_function__(func, types, args, kwargs)
        if self._operators.dependent and self._operators.elementwise and has_one_tensor(args, kwargs):
            new = isinstance(result, Tensor) and _memory(result) != _memory(args[0])
            if new and result.shape == args[0].shape and _is_exact_in_vectors(func, args, kwargs):
                self._elementwise.add(func)
                self._operators.begin()
        self._end()
        return result


def _is_exact_in_vectors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether :func:`in_whole_vectors` gives a value the same bits in other places."""

    def result_of(values: Tensor) -> Tensor:
        return in_whole_vectors(func, values, *args[1:], **kwargs).nan_to_num()

    values = _sweep(args[0].dtype)
    return torch.equal(result_of(values), torch.cat([result_of(part) for part in torch.split(values, _PLACES)]))


def _memory(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, or a tensor that has none."""
    return tensor.untyped_storage()._cdata if _is_plain(tensor) else id(tensor)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _sweep(dtype: torch.dtype) -> Tensor:
    """65,536 values: all of a 16-bit dtype, or one of each sign, exponent and beginning of the mantissa."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu")
    if dtype in (torch.bfloat16, torch.float16):
        return bits.short().view(dtype)
    return (bits * 2**16 + 2**15 + 1).view(torch.float32).to(dtype)


def _max_positions(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048)
