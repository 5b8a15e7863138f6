"""The kinds of modules that operators compute: linear layers, gated MLPs, mixtures of experts, RMS norms.

A module's class alone doesn't tell what it computes. So each kind has candidates, and :func:`best_match` compares their
results on random input with the module's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specmemo_kernels.backends.layers import ACTIVATION_FUNCTIONS
from specmemo_kernels.integrations.hf.compressed import is_plain_linear
from specmemo_kernels.integrations.hf.experts import is_mixture, matrices, mixture, weight_names
from specmemo_kernels.integrations.hf.linears import Linears, exact_linear
from specmemo_kernels.ops import Kernels

Tensor = torch.Tensor
#: Computes a module's result, from all of its arguments, with a backend's operators.
Operator = Callable[..., Tensor]

#: Gate, up and down of Llama and of LFM2; Phi-3 and GLM have gate and up in one matrix.
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"))
#: A module without one of these attributes may call SiLU directly.
_ACTIVATIONS = ("act_fn", "activation_fn")
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
#: Magnitudes of the rows of the random input; a clamp, or an epsilon in another place, shows at one magnitude, also
#: behind small weights.
_MAGNITUDES = tuple(4.0**i for i in range(-3, 13))
#: Largest distance of a result from the module's own, relative to its norm: a few roundings.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}
#: The same, relative also to a row's magnitude: the few elements that a clamp leaves have the rounding error of
#: products of that magnitude. In 96 random experts of GPT-OSS it was up to 4e-8 times the magnitude.
_BEHIND_CLAMPS = 1e-7


@dataclass(frozen=True)
class LeafKind:
    """What may compute a module.

    Attributes:
        operator: the operator's name. calls: the candidates.
        inputs: size of the input's rows.
        products: arguments of ``ops.linear_workspace`` for each product: inputs, activations of a gated MLP, and
            whether the weight is transposed.
        experts: of a mixture, whose other arguments are each row's experts and their weights; 0 for other modules.
    """

    operator: str
    calls: Sequence[Operator]
    inputs: int
    products: tuple[tuple[int, int, bool], ...] = ()
    experts: int = 0


def leaf_kinds(module: nn.Module, invariant: bool) -> Iterator[LeafKind]:
    """The kinds that a module may be of. ``invariant``: products whose rows don't depend on each other."""
    for kind_of in (_linear, _gated_mlp, _mixture, _rms_norm):
        if (kind := kind_of(module, invariant)) is not None:
            yield kind


def _linear(module: nn.Module, invariant: bool) -> LeafKind | None:
    if is_plain_linear(module):
        return LeafKind(
            "linear",
            [lambda kernels, x: kernels.linear(x, *_matrix(module), None, invariant)],
            module.in_features,
            ((module.in_features, 0, False),),
        )
    if type(module) is Conv1D:  # GPT-2's linear layer, with a weight [inputs, outputs]

        def call(kernels: Kernels, x: Tensor) -> Tensor:
            weight, bias = _matrix(module)
            return kernels.linear(x, weight.T, bias, None, invariant)

        return LeafKind("linear", [call], module.nx, ((module.nx, 0, True),))
    return None


def _gated_mlp(module: nn.Module, invariant: bool) -> LeafKind | None:
    """Linear layers with the names of a :data:`_GATED` entry and a supported activation."""
    parts = _gated_parts(module)
    function = next((f for name in _ACTIVATIONS if (f := getattr(module, name, None)) is not None), nn.functional.silu)
    activation = next((name for name, known in ACTIVATION_FUNCTIONS.items() if _same_function(function, known)), None)
    if parts is None or activation is None:
        return None

    def call(kernels: Kernels, x: Tensor) -> Tensor:
        weights, biases = _gated_matrices(parts)
        return kernels.gated_mlp(x, *weights, *biases, activation, invariant)

    inputs, middle = parts[0].in_features, parts[-1].in_features
    return LeafKind("gated_mlp", [call], inputs, ((inputs, middle, False),))


def _gated_parts(module: nn.Module) -> list[nn.Linear] | None:
    """The linear layers of a gated MLP in the order of :data:`_GATED`; the last one is the projection down."""
    parts = {name: part for name, part in module.named_children() if any(True for _ in part.parameters())}
    names = next((names for names in _GATED if set(names) == set(parts)), None)
    layers = [part for name in names or () if is_plain_linear(part := parts[name])]
    alike = len(set(map(type, layers))) == 1
    return layers if names is not None and len(layers) == len(names) and alike else None


def _gated_matrices(parts: list[nn.Linear]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Weights and biases of gate, up and down."""
    *inner, down = map(_matrix, parts)
    if len(inner) == 1:  # gate and up in one matrix, one after the other
        weight, bias = inner[0]
        inner = list(zip(weight.chunk(2), (None, None) if bias is None else bias.chunk(2), strict=True))
    weights, biases = zip(*inner, down, strict=True)
    return weights, biases


def _mixture(module: nn.Module, invariant: bool) -> LeafKind | None:
    if not is_mixture(module):
        return None

    def call(kernels: Kernels, x: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
        return mixture(module, kernels, x, experts, scores, invariant)

    weights = [getattr(module, name) for name in weight_names(module)]
    inputs = [weight.shape[1 if module.is_transposed else 2] for weight in weights]
    products = tuple(
        (size, 0, not weight.is_contiguous()) for size, weight in zip(inputs, matrices(module), strict=True)
    )
    return LeafKind("grouped_linear", [call], inputs[0], products, len(weights[0]))


def _rms_norm(module: nn.Module, _: bool) -> LeafKind | None:
    """The known variants of a class named ``...RMSNorm`` with a weight and an epsilon."""
    attributes = vars(module)
    eps = next((name for name in _EPSILONS if isinstance(attributes.get(name), float)), None)
    if not type(module).__name__.endswith("RMSNorm") or eps is None or set(module._parameters) != {"weight"}:
        return None

    def call_with(offset: float, round_first: bool) -> Operator:
        return lambda kernels, x: kernels.rms_norm(
            x, module._parameters["weight"], attributes[eps], offset, round_first
        )

    calls = [call_with(offset, round_first) for offset in (0.0, 1.0) for round_first in (True, False)]
    return LeafKind("rms_norm", calls, next(module.parameters()).shape[-1])


def _matrix(module: Any) -> tuple[Tensor, Tensor | None]:
    return module._parameters["weight"], module._parameters["bias"]


def _same_function(function: Any, known: Callable[[Tensor], Tensor]) -> bool:
    """Whether two activations give the same bits."""
    x = torch.linspace(-12, 12, 1001, device="cpu")
    try:
        return torch.equal(function(x), known(x))
    except Exception:  # not an activation of one tensor
        return False


def best_match(module: nn.Module, kind: LeafKind, kernels: Kernels, dtype: torch.dtype) -> int | None:
    """The index of the candidate whose results agree within rounding errors, with the fewest different elements."""
    generator, device = torch.Generator().manual_seed(0), next(module.parameters()).device
    sizes = [size for size in _MAGNITUDES if size < torch.finfo(dtype).max / 8]  # no row overflows
    magnitudes = torch.tensor(sizes, device="cpu")
    rows = torch.randn(1, len(magnitudes), kind.inputs, generator=generator, device="cpu")
    arguments = [(rows * magnitudes[:, None]).to(device, dtype)]
    if kind.experts:
        ranked = torch.rand(len(magnitudes), kind.experts, generator=generator, device="cpu")
        chosen = ranked.topk(min(2, kind.experts))[1]
        scores = torch.rand(chosen.shape, generator=generator, device="cpu")
        arguments = [arguments[0][0], chosen.to(device), scores.to(device, dtype)]
    try:
        with Linears(exact_linear):
            expected = type(module).forward(module, *arguments)
        results = [call(kernels, *arguments) for call in kind.calls]
    except (TypeError, RuntimeError):  # the module takes other arguments
        return None
    if not isinstance(expected, Tensor):
        return None
    if kind.operator != "linear" and not expected.any():  # weights of zero hide what a module computes
        return None
    limits = (_BEHIND_CLAMPS * magnitudes.double()).clamp(min=_TOLERANCE[dtype]).to(device)
    errors = [_distances(expected, result) for result in results]
    different = [int((expected != result).sum()) for result in results]
    matches = [i for i, error in enumerate(errors) if bool((error <= limits).all())]
    return min(matches, key=lambda i: different[i], default=None)


def _distances(expected: Tensor, result: Tensor) -> Tensor:
    """Relative distance of each row; 0 where ``expected`` isn't finite, infinite if it is nowhere or shapes differ."""
    finite = expected.isfinite().all(dim=-1)
    if result.shape != expected.shape or result.dtype != expected.dtype or not bool(finite.any()):
        return torch.full((), float("inf"), dtype=torch.float64, device=expected.device)
    wide = expected.double()
    relative = (result.double() - wide).norm(dim=-1) / wide.norm(dim=-1).clamp(min=1e-30)
    return torch.where(finite, relative.nan_to_num(nan=float("inf")), 0.0)
