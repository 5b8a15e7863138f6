"""Replaces leaf modules of a model (linear layers, gated MLPs, RMS norms) by operators, inside our forward passes only.

A leaf is replaced if its type is known and the operator's result on random input agrees with the module's own. The
replacement is an attribute ``forward`` that exists while a pass runs: plain forward passes, training, copies and saved
models have the model's own modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.backends.layers import ACTIVATION_FUNCTIONS
from specmemo_kernels.integrations.hf.attention import (
    AttentionCall,
    LeafOperators,
    Windows,
    attention_call,
    leaf_operators,
)
from specmemo_kernels.integrations.hf.replaced import OurForward, ReplacedForwards
from specmemo_kernels.ops import Kernels

Tensor = torch.Tensor
#: Computes a module's result with a backend's operators.
Operator = Callable[[Kernels, Tensor], Tensor]
#: A module's attribute: its dict, its key, and a weak reference to the value.
Attached = tuple[dict[str, Any], str, Callable[[], Any]]

#: Operators that are faster than the modules, by backend.
_FASTER = {"cpu": ("linear", "gated_mlp", "rms_norm"), "triton": ("gated_mlp", "rms_norm")}
FUSED_BACKENDS = tuple(_FASTER)
#: Those that are faster for any number of rows.
_ALWAYS_FASTER = frozenset(("rms_norm",))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PACKAGE = __name__.split(".")[0]
_SCALARS = (bool, int, float, str)
#: Rows and magnitudes of the random input; a clamp, or an epsilon in another place, shows at one magnitude.
_ROWS, _MAGNITUDES = 5, (1e-2, 1.0, 30.0)
#: Largest distance of a result from the module's own, relative to its norm: a few roundings.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


@dataclass(frozen=True)
class Leaf:
    """A replaced module.

    Attributes:
        name: the module's name in the model. operator: the operator's name. call: computes the result.
        inputs, dtype: size and dtype of the input's rows.
        own: the ``forward`` of the module's class.
        attached: the parameters and modules inside of the module. parts: the attributes of it and of these modules.
    """

    module: nn.Module
    name: str
    operator: str
    call: Operator
    inputs: int
    dtype: torch.dtype
    own: Callable[..., Any]
    attached: tuple[Attached, ...]
    parts: tuple[dict[str, Any], ...]

    @property
    def unchanged(self) -> bool:
        """Whether no parameter, module or ``forward`` has been replaced, as by an adapter."""
        return (
            type(self.module).forward is self.own
            and all(values.get(key, _GONE) is reference() for values, key, reference in self.attached)
            and all(isinstance(part.get("forward"), OurForward | None) for part in self.parts)
        )

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the operator, or the module's own ``forward`` outside of our passes and for other inputs."""
        operators = leaf_operators()
        supported = type(x) is Tensor and x.dtype == self.dtype and x.shape[-1:] == (self.inputs,)
        if operators is None or not supported or args or kwargs:
            return type(self.module).forward(self.module, x, *args, **kwargs)
        kept = operators.kept
        if kept is None or x.shape[:-1] != (1, operators.rows):
            return self._computed(operators, x)
        some = self._computed(operators, x[:, kept])
        return some.new_zeros(1, operators.rows, some.shape[-1]).index_copy_(1, kept, some)

    def _computed(self, operators: LeafOperators, x: Tensor) -> Any:
        if self.operator in operators.names:
            return self.call(operators.kernels, x)
        return type(self.module).forward(self.module, x)


#: No parameter or module of a leaf.
_GONE = object()


def _attached(module: nn.Module) -> Iterator[Attached]:
    for part in module.modules():
        values: dict[str, Any]
        for values in (part._parameters, part._modules):
            for key, value in values.items():
                yield values, key, _nothing if value is None else weakref.ref(value)


def _nothing() -> None:
    return None


class FusedLeaves:
    """The replaced modules of a model.

    Attributes:
        leaves: the replaced modules. names: each leaf's operator by module name. modules: the leaves and their
            submodules.
        backend: computes the operators.
        invariant: a row's result doesn't depend on the other rows.
        max_rows: in passes over more rows, linear layers and MLPs run their own ``forward``; ``None``: no limit.
        workspace: bytes that the operators keep between calls.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf] = (),
        backend: str = "",
        invariant: bool = False,
        max_rows: int | None = None,
        workspace: int = 0,
    ) -> None:
        self.leaves, self.backend, self.invariant = tuple(leaves), backend, invariant
        self.max_rows, self.workspace = max_rows, workspace
        self.names: Mapping[str, str] = {leaf.name: leaf.operator for leaf in leaves}
        self._operators = frozenset(self.names.values())
        self.modules = frozenset(module for leaf in leaves for module in leaf.module.modules())
        self._forwards = ReplacedForwards()

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
    ) -> Iterator[None]:
        """A pass over ``rows`` rows in this block of code: attention by ``call``, unchanged modules by operators.

        Blocks of several threads may overlap.

        Args:
            last: the last layer with attention, and the rows ``[K]`` whose results are used: behind its attention
                nothing mixes rows, so that the others aren't computed.
        """
        if not self.leaves:
            with attention_call(call, windows):
                yield
            return
        kernels = ops.kernels(self.backend, device)
        operators = LeafOperators(self._names(rows), kernels)
        behind = None
        if last is not None and len(last[1]) < rows:  # so that the lm_head's input has another number of rows
            layer, kept = last
            behind = layer, LeafOperators(self._names(len(kept)), kernels, kept, rows)
        installed = self._forwards.installed(self._replacements) if operators.names or behind else nullcontext()
        with attention_call(call, windows, operators, behind), installed:
            yield

    def _names(self, rows: int) -> frozenset[str]:
        """The operators that are faster than the modules for so many rows."""
        return self._operators if self.multiply(rows) else self._operators & _ALWAYS_FASTER

    def multiply(self, rows: int) -> bool:
        """Whether linear layers and MLPs are operators in passes over so many rows."""
        return self.max_rows is None or rows <= self.max_rows

    def _replacements(self) -> list[OurForward]:
        return [OurForward(leaf.module, leaf.forward) for leaf in self.leaves if leaf.unchanged]


@torch.no_grad()
def find_leaves(model: Any, dtype: torch.dtype, backend: str, invariant: bool) -> FusedLeaves:
    """The modules of ``model`` that ``backend``'s operators compute.

    Results are compared once for all modules with the same type, scalar attributes and parameter sizes.

    Args:
        dtype: of the hidden states. Modules with other weights are left alone.
    """
    device = next(model.parameters()).device
    kernels = ops.kernels(backend, device)
    leaves: list[Leaf] = []
    inside: set[nn.Module] = set()
    matches: dict[Hashable, int | None] = {}
    for name, module in model.named_modules():
        if module in inside or not _is_replaceable(module, dtype, device):
            continue
        for operator in _FASTER[backend]:
            candidates = _OPERATORS[operator]
            if calls := candidates(module, invariant):
                scalars = {key: value for key, value in vars(module).items() if isinstance(value, _SCALARS)}
                sizes = tuple(parameter.shape for parameter in module.parameters())
                kind = (type(module), operator, sizes, tuple(scalars.items()))
                if kind not in matches:
                    matches[kind] = _best_match(module, calls, kernels, dtype)
                if (match := matches[kind]) is not None:
                    attached, parts = tuple(_attached(module)), tuple(part.__dict__ for part in module.modules())
                    own, inputs = type(module).forward, sizes[0][-1]
                    leaves.append(Leaf(module, name, operator, calls[match], inputs, dtype, own, attached, parts))
                    inside.update(module.modules())
                    break
    matrices = {(leaf.inputs, _middle(leaf.module)) for leaf in leaves if leaf.operator != "rms_norm"}
    workspace = max((ops.linear_workspace(backend, dtype, *each) for each in matrices), default=0)
    max_rows = None if invariant else ops.few_rows(backend, dtype)
    return FusedLeaves(leaves, backend, invariant, max_rows, workspace)


def _middle(module: nn.Module) -> int:
    """Intermediate size of a gated MLP; 0 for a linear layer."""
    parts = _gated_parts(module)
    return 0 if parts is None else parts[-1].in_features


def _is_replaceable(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a module has no foreign hooks, and only contiguous parameters in ``dtype`` on ``device``."""
    parameters = list(module.parameters())
    return bool(parameters) and all(map(_is_plain, module.modules())) and all(
        type(p) is nn.Parameter and type(p.data) is Tensor and p.dtype == dtype and dtype in _DTYPES
        and p.device == device and p.is_contiguous()
        for p in parameters
    )  # fmt: skip


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has no replaced ``forward`` and no hooks except this package's."""
    attached = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    foreign = (hook for hooks in attached for hook in hooks.values() if hook.__module__.split(".")[0] != _PACKAGE)
    forward = getattr(vars(module).get("forward"), "__func__", vars(module).get("forward"))
    own = forward is None or forward is type(module).forward  # a copy may have its own as an attribute
    return own and "_hf_hook" not in vars(module) and not any(True for _ in foreign)


def _linear(module: nn.Module, invariant: bool) -> list[Operator]:
    if type(module) is not nn.Linear:
        return []
    return [lambda kernels, x: kernels.linear(x, *_matrix(module), None, invariant)]


def _gated_mlp(module: nn.Module, invariant: bool) -> list[Operator]:
    """Operators for linear layers with the names of a :data:`_GATED` entry and a supported activation."""
    parts = _gated_parts(module)
    function = next((f for name in _ACTIVATIONS if (f := getattr(module, name, None)) is not None), nn.functional.silu)
    activation = next((name for name, known in ACTIVATION_FUNCTIONS.items() if _same_function(function, known)), None)
    if parts is None or activation is None:
        return []

    def call(kernels: Kernels, x: Tensor) -> Tensor:
        weights, biases = _gated_matrices(parts)
        return kernels.gated_mlp(x, *weights, *biases, activation, invariant)

    return [call]


def _gated_parts(module: nn.Module) -> list[nn.Linear] | None:
    """The linear layers of a gated MLP in the order of :data:`_GATED`; the last one is the projection down."""
    parts = {name: part for name, part in module.named_children() if any(True for _ in part.parameters())}
    names = next((names for names in _GATED if set(names) == set(parts)), None)
    layers = [part for name in names or () if type(part := parts[name]) is nn.Linear]
    return layers if names is not None and len(layers) == len(names) else None


def _gated_matrices(parts: list[nn.Linear]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Weights and biases of gate, up and down."""
    *inner, down = map(_matrix, parts)
    if len(inner) == 1:  # gate and up in one matrix, one after the other
        weight, bias = inner[0]
        inner = list(zip(weight.chunk(2), (None, None) if bias is None else bias.chunk(2), strict=True))
    weights, biases = zip(*inner, down, strict=True)
    return weights, biases


def _rms_norm(module: nn.Module, _: bool) -> list[Operator]:
    """Operators for a class named ``...RMSNorm`` with a weight and an epsilon: the known variants."""
    attributes = vars(module)
    eps = next((name for name in _EPSILONS if isinstance(attributes.get(name), float)), None)
    if not type(module).__name__.endswith("RMSNorm") or eps is None or set(module._parameters) != {"weight"}:
        return []

    def call_with(offset: float, round_first: bool) -> Operator:
        return lambda kernels, x: kernels.rms_norm(
            x, module._parameters["weight"], attributes[eps], offset, round_first
        )

    return [call_with(offset, round_first) for offset in (0.0, 1.0) for round_first in (True, False)]


#: Gate, up and down of Llama and of LFM2; Phi-3 and GLM have gate and up in one matrix.
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"))
#: A module without one of these attributes may call SiLU directly.
_ACTIVATIONS = ("act_fn", "activation_fn")
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_OPERATORS: dict[str, Callable[[nn.Module, bool], list[Operator]]] = {
    "linear": _linear,
    "gated_mlp": _gated_mlp,
    "rms_norm": _rms_norm,
}


def _matrix(module: Any) -> tuple[Tensor, Tensor | None]:
    return module._parameters["weight"], module._parameters["bias"]


def _same_function(function: Any, known: Callable[[Tensor], Tensor]) -> bool:
    """Whether two activations give the same bits."""
    x = torch.linspace(-12, 12, 1001)
    try:
        return torch.equal(function(x), known(x))
    except Exception:  # not an activation of one tensor
        return False


def _best_match(module: nn.Module, calls: list[Operator], kernels: Kernels, dtype: torch.dtype) -> int | None:
    """The index of the call whose results agree within rounding errors, with the fewest different elements."""
    generator = torch.Generator().manual_seed(0)
    size = next(p.shape[-1] for p in module.parameters())
    rows = [magnitude * torch.randn(1, _ROWS, size, generator=generator) for magnitude in _MAGNITUDES]
    x = torch.cat(rows, dim=1).to(next(module.parameters()).device, dtype)
    try:
        expected = type(module).forward(module, x)
        results = [call(kernels, x) for call in calls]
    except (TypeError, RuntimeError):  # the module takes other arguments
        return None
    if not isinstance(expected, Tensor):
        return None
    errors = [_distance(expected, result) for result in results]
    different = [int((expected != result).sum()) for result in results]
    matches = [i for i, error in enumerate(errors) if error <= _TOLERANCE[dtype]]
    return min(matches, key=lambda i: different[i], default=None)


def _distance(expected: Tensor, result: Tensor) -> float:
    """Maximum relative distance of the finite rows; infinite for another shape or dtype, or without finite rows."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return float("inf")
    finite = expected.isfinite().all(dim=-1)
    wide = expected[finite].double()
    relative = (result[finite].double() - wide).norm(dim=-1) / wide.norm(dim=-1).clamp(min=1e-30)
    return float(relative.nan_to_num(nan=float("inf")).max()) if bool(finite.any()) else float("inf")
