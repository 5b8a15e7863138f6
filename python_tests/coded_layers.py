"""Quantised linear layers as packages make them, in a few lines of torch each: codes that a product dequantises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

#: Inputs above this magnitude are multiplied with a dequantised matrix by :class:`ThresholdLinear`.
THRESHOLD = 20.0


class CodedLinear(nn.Module):
    """int8 codes and a scale per row, dequantised by torch operators. Refuses no rows (bitsandbytes' nf4)."""

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("codes", (weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            raise RuntimeError("a product of no rows")
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scales)


class ForeignLinear(CodedLinear):
    """Dequantises into memory of another library."""

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.codes.numpy() * self.scales.float().numpy()
        return nn.functional.linear(x, torch.from_numpy(np.ascontiguousarray(matrix)).to(x.dtype))


@torch.library.custom_op("specmemo_tests::threshold_product", mutates_args=())
def threshold_product(x: Tensor, codes: Tensor, scales: Tensor, threshold: float) -> Tensor:
    large = (x.abs() > threshold).flatten(0, -2).any(dim=0)
    # A few rows of codes at a time, without a matrix.
    result = torch.cat([(x * ~large) @ rows.to(x.dtype).t() for rows in codes.split(64)], dim=-1)
    if bool(large.any()):
        result = result + (x * large) @ codes.to(x.dtype).t()
    return result * scales.to(x.dtype).flatten()


class ThresholdLinear(CodedLinear):
    """Dequantises for large inputs only, inside of an operator."""

    def forward(self, x: Tensor) -> Tensor:
        return threshold_product(x, self.codes, self.scales, THRESHOLD)


class CodedWeight(Tensor):
    """A matrix of codes as a tensor subclass."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> CodedWeight:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> CodedWeight:
        return CodedWeight(parts["codes"], parts["scales"])

    def __repr__(self, **_: Any) -> str:
        return f"CodedWeight({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return CodedWeight(args[0].codes, args[0].scales)
        plain = [a.codes.to(a.dtype) * a.scales if isinstance(a, CodedWeight) else a for a in args]
        return func(*plain, **(kwargs or {}))


def subclass_linear(linear: nn.Linear) -> nn.Linear:
    """A linear layer whose weight is a tensor subclass (torchao)."""
    coded = CodedLinear(linear)
    linear.weight = nn.Parameter(CodedWeight(coded.codes, coded.scales), requires_grad=False)
    return linear


class AliasedLinear(CodedLinear):
    """Makes a view of a tensor subclass in each product, which torch refuses in inference mode (Quanto's int4)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.weight = nn.Parameter(CodedWeight(self.codes, self.scales), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.detach())


KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "codes": CodedLinear,
    "subclass": subclass_linear,
    "foreign": ForeignLinear,
    "threshold": ThresholdLinear,
    "aliased": AliasedLinear,
}


def quantise(model: PreTrainedModel, kind: str, lm_head: bool = False) -> PreTrainedModel:
    """Replace the linear layers of ``model``; its lm_head too with ``lm_head``."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (lm_head or name != "lm_head"):
                setattr(module, name, KINDS[kind](child))
    return model
