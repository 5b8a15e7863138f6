"""Replaces leaf modules of a model (linear layers, MLPs, experts, RMS norms) by operators, in our forward passes only.

A leaf is replaced if its type is known and the operator's result on random input agrees with the module's own. The
replacement is an attribute ``forward`` that exists while a pass runs: plain forward passes, training, copies and saved
models have the model's own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.backends.kernel_config import linear_config
from specmemo_kernels.integrations.hf.attention import (
    AttentionCall,
    LeafOperators,
    Windows,
    attention_call,
    leaf_operators,
)
from specmemo_kernels.integrations.hf.compressed import compressed_matrices
from specmemo_kernels.integrations.hf.leaf_kinds import LeafKind, best_match, leaf_kinds
from specmemo_kernels.integrations.hf.linears import DTYPES
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.replaced import OurForward, ReplacedForwards, is_plain
from specmemo_kernels.integrations.hf.row_functions import RowFunctions

Tensor = torch.Tensor
#: Operators that are faster than the modules, by backend; on some GPUs linear layers too (:func:`_faster`).
_FASTER = {
    "cpu": frozenset(("linear", "gated_mlp", "grouped_linear", "rms_norm")),
    "triton": frozenset(("gated_mlp", "rms_norm")),
}
FUSED_BACKENDS = tuple(_FASTER)
#: Those that never call torch's products: an expert's rows are a part of a pass's.
_WITHOUT_PRODUCTS = frozenset(("grouped_linear", "rms_norm"))
_SCALARS = (bool, int, float, str)
#: Attributes that passes, and ``train``, change.
_CHANGING = frozenset(("forward", "training"))


@dataclass(frozen=True)
class Leaf:
    """A replaced module.

    Attributes:
        name: the module's name in the model. kind: what computes it. call: the candidate that matches.
        dtype: of the input's rows.
        parts: the module and those inside of it.
        invariant: the module's own ``forward`` may not run instead in a pass.
    """

    module: nn.Module
    name: str
    kind: LeafKind
    call: Callable[..., Tensor]
    dtype: torch.dtype
    parts: tuple[_Part, ...]
    invariant: bool

    @property
    def compressed(self) -> bool:
        """Whether weights are compressed: then the module's own ``forward`` decompresses them."""
        return any(map(compressed_matrices, self.module.modules()))

    @property
    def unchanged(self) -> bool:
        """Whether no module, attribute or ``forward`` has been replaced, and no parameter by one of another kind, as by
        an adapter.
        """
        return all(part.unchanged for part in self.parts)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the operator, or the module's own ``forward`` outside of our passes and for other inputs.

        Raises:
            UnsupportedModel: the module changes inside of an invariant pass.
        """
        operators = leaf_operators()
        supported = (
            type(x) is Tensor and x.dtype == self.dtype and x.shape[-1:] == (self.kind.inputs,)
            and len(args) == (2 if self.kind.experts else 0) and not kwargs
        )  # fmt: skip
        # Inside of a pass autocast may begin, and adapters may add parametrizations.
        changed = torch._C._is_any_autocast_enabled() or not all(map(_Part.has_parameters, self.parts))
        if operators is not None and changed and self.invariant:
            raise UnsupportedModel(
                f"invariant is True, but a pass replaces parameters of {self.name} or runs it under autocast; use "
                "invariant=False"
            )
        if operators is None or not supported or changed:
            return type(self.module).forward(self.module, x, *args, **kwargs)
        kept, dim = operators.kept, x.ndim - 2  # experts take [rows, inputs], other modules [1, rows, inputs]
        if kept is None or dim != (0 if args else 1) or x.numel() != operators.rows * self.kind.inputs:
            return self.call(operators.kernels, x, *args)
        some = self.call(operators.kernels, *(rows.index_select(dim, kept) for rows in (x, *args)))
        return some.new_zeros(*x.shape[:-1], some.shape[-1]).index_copy_(dim, kept, some)


class _Part:
    """A module of a leaf as it was at patching. Parameters aren't referred to: torch swaps those of some classes only
    if nothing refers to them, and a replaced one's memory would stay in use.
    """

    def __init__(self, module: nn.Module) -> None:
        kind: Any = type(module)
        self._module, self._kind, self._forward = module, kind, kind.forward
        others = (vars(module), _attributes(module)), (module._modules, module._modules)
        self._values = tuple((owner, *item) for owner, values in others for item in values.items())
        self._parameters = tuple((key, id(p), _facts(p)) for key, p in module._parameters.items())
        self._names = frozenset(module._parameters)

    def has_parameters(self) -> bool:
        """Whether the module has its class and the names of its parameters; a parametrization changes both."""
        return type(self._module) is self._kind and self._module._parameters.keys() == self._names

    @property
    def unchanged(self) -> bool:
        forward, parameters = vars(self._module).get("forward"), self._module._parameters
        return (
            type(self._module) is self._kind
            and self._kind.forward is self._forward
            and (forward is None or type(forward) is OurForward)
            and all(_same(owner.get(key, _GONE), value) for owner, key, value in self._values)
            and len(parameters) == len(self._parameters)
            and all(
                id(now := parameters.get(key, _GONE)) == identity or _facts(now) == facts
                for key, identity, facts in self._parameters
            )
        )


#: No attribute or parameter.
_GONE = object()


def _same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(before, _SCALARS) and type(now) is type(before) and bool(now == before))


def _attributes(part: nn.Module) -> dict[str, Any]:
    """Those besides parameters, buffers and modules; without ``forward``, which passes replace."""
    return {key: value for key, value in vars(part).items() if not (key.startswith("_") or key in _CHANGING)}


def _facts(parameter: Any) -> tuple[Any, ...]:
    if not isinstance(parameter, Tensor):  # None, or _GONE
        return (type(parameter),)
    return type(parameter), parameter.shape, parameter.dtype, parameter.device, parameter.is_contiguous()


class FusedLeaves:
    """The replaced modules of a model.

    Attributes:
        leaves: the replaced modules. names: each leaf's operator by module name. modules: the leaves and their
            submodules.
        backend: computes the operators.
        invariant: a row's result doesn't depend on the other rows.
        max_rows: in passes over more rows, torch computes products of linear layers and MLPs; ``None``: never.
        workspace: bytes that the operators keep between calls.
        functions: what else passes of an invariant model compute by other means than torch's.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf] = (),
        backend: str = "",
        invariant: bool = False,
        max_rows: int | None = None,
        workspace: int = 0,
        functions: RowFunctions | None = None,
    ) -> None:
        self.leaves, self.backend, self.invariant = tuple(leaves), backend, invariant
        self.functions = functions or RowFunctions()
        self.max_rows, self.workspace = max_rows, max(workspace, self.functions.workspace)
        self.names: Mapping[str, str] = {leaf.name: leaf.kind.operator for leaf in leaves}
        self.modules = frozenset(module for leaf in leaves for module in leaf.module.modules())
        self._forwards = ReplacedForwards()

    def with_functions(self, functions: RowFunctions) -> FusedLeaves:
        """The same modules, in passes that compute ``functions`` too."""
        return FusedLeaves(self.leaves, self.backend, self.invariant, self.max_rows, self.workspace, functions)

    def change(self) -> str:
        """A message with the first leaf whose parameters or modules were replaced, or an empty string."""
        name = next((leaf.name for leaf in self.leaves if not leaf.unchanged), None)
        return "" if name is None else f"parameters or modules of {name} have been replaced"

    @contextmanager
    def running(
        self,
        rows: int,
        device: torch.device,
        call: AttentionCall,
        windows: Windows | None = None,
        last: tuple[int, Tensor] | None = None,
        products: bool = True,
    ) -> Iterator[None]:
        """A pass over ``rows`` rows in this block of code: attention by ``call``, unchanged modules by operators.

        Blocks of several threads may overlap.

        Args:
            last: the last layer with attention, and the rows ``[K]`` whose results are used: behind its attention
                nothing mixes rows, so that the others aren't computed.
            products: compute linear layers and MLPs as up to ``max_rows`` rows; ``False``: as more rows.
        """
        if not self.leaves and not self.functions.needed:
            with attention_call(call, windows):
                yield
            return
        kernels = ops.kernels(self.backend, device)
        if not products:
            kernels = ops.torch_products(self.backend, kernels)
        operators = LeafOperators(kernels)
        behind = None
        if last is not None and len(last[1]) < rows:  # so that the lm_head's input has another number of rows
            layer, kept = last
            behind = layer, LeafOperators(kernels, kept, rows)
        replaced = self._forwards.installed(self._replacements)
        with attention_call(call, windows, operators, behind), replaced, self.functions.running(kernels):
            yield

    def _replacements(self) -> list[OurForward]:
        return [OurForward(leaf.module, leaf.forward) for leaf in self.leaves if leaf.unchanged]


@torch.no_grad()
def find_leaves(model: Any, dtype: torch.dtype, backend: str, invariant: bool) -> FusedLeaves:
    """The modules of ``model`` that ``backend``'s operators compute.

    Results are compared once for all modules that are :func:`_alike`.

    Args:
        dtype: of the hidden states. Modules with other weights are left alone.
    """
    device = next(model.parameters()).device
    kernels = ops.kernels(backend, device)
    leaves: list[Leaf] = []
    inside: set[nn.Module] = set()
    matches: dict[Hashable, int | None] = {}
    faster = _faster(backend, device, dtype)
    for name, module in model.named_modules():
        if module in inside or not _is_replaceable(module, dtype, device):
            continue
        for kind in leaf_kinds(module, invariant):
            if kind.operator not in faster:
                continue
            like = kind.operator, _alike(module)
            if like not in matches:
                matches[like] = best_match(module, kind, kernels, dtype)
            if (match := matches[like]) is not None:
                parts = tuple(map(_Part, module.modules()))
                leaves.append(Leaf(module, name, kind, kind.calls[match], dtype, parts, invariant))
                inside.update(module.modules())
                break
    products = {product for leaf in leaves for product in leaf.kind.products}
    workspace = max((ops.linear_workspace(backend, dtype, *product) for product in products), default=0)
    if any(leaf.compressed for leaf in leaves):
        workspace += ops.decompression_workspace(backend, dtype)
    few = {
        ops.few_rows(backend, dtype, transposed)
        for leaf in leaves if leaf.kind.operator not in _WITHOUT_PRODUCTS
        for *_, transposed in leaf.kind.products
    }  # fmt: skip
    limits = [rows for rows in few if rows is not None]
    max_rows = None if invariant else min(limits, default=None)
    return FusedLeaves(leaves, backend, invariant, max_rows, workspace)


def _alike(module: nn.Module) -> Hashable:
    """Equal for modules that differ in the values of parameters only."""

    def of(part: nn.Module) -> Hashable:
        attributes = _attributes(part).items()
        values = tuple((key, value if isinstance(value, _SCALARS) else id(value)) for key, value in attributes)
        return type(part), values, tuple(parameter.shape for parameter in part.parameters(recurse=False))

    return tuple(map(of, module.modules()))


def _faster(backend: str, device: torch.device, dtype: torch.dtype) -> frozenset[str]:
    """The operators that are faster than the modules. Where ``linear`` is torch's own, calling it only takes time."""
    if backend != "triton":
        return _FASTER[backend]
    from specmemo_kernels.backends.triton.runtime import target_of

    own = linear_config(target_of(device), 1, dtype, alone=True) is not None
    return _FASTER[backend] | ({"linear"} if own else set())


def _is_replaceable(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a module has no foreign hooks, no buffers, whose values may change what it computes, and only contiguous
    parameters in ``dtype`` on ``device``, compressed or not.
    """
    parts = list(module.modules())
    compressed = {id(part._parameters[name]) for part in parts for name in compressed_matrices(part)}
    parameters = list(module.parameters())
    return bool(parameters) and all(map(is_plain, parts)) and not any(True for _ in module.buffers()) and all(
        type(p) is nn.Parameter and type(p.data) is Tensor and p.device == device and p.is_contiguous()
        and dtype in DTYPES and dtype == (torch.bfloat16 if id(p) in compressed else p.dtype)
        for p in parameters
    )  # fmt: skip
