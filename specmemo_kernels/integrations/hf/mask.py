"""The attention mask of our forward passes, and whether it means the same as the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
#: Whether query ``q`` sees key ``k``: ``rule(batch, head, q, k)`` of int64 tensors, as transformers' mask functions.
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: Every pair of positions below this is checked, and from ``_FAR`` back all distances around powers of two.
_NEAR, _FAR = 16, 2**20


class UnsupportedModel(ValueError):
    """The model's attention can't be expressed by the operator; the message names the model and the reason."""


class PassMask(Tensor):
    """Stands for the model's attention mask ``[1, 1, 1, 1]``; the attention function takes no other.

    Moved or sliced it is still one. Anything computed from it is a plain tensor, which the attention function refuses.

    Attributes:
        rule: the mask that the model made, where it was observed; ``None`` where the batch alone decides.
    """

    rule: MaskRule | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func not in _KEEPS_MASK or not isinstance(result, Tensor):
            return result
        kept = result.as_subclass(cls)
        kept.rule = args[0].rule
        return kept


_KEEPS_MASK = frozenset(
    {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.clone, Tensor.detach, Tensor.contiguous, Tensor.expand}
    | {Tensor.__getitem__, Tensor.bool, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type}
)


def pass_mask(device: torch.device, rule: MaskRule | None = None) -> Tensor:
    """A mask for one forward pass. transformers hands 4-D masks through as they are."""
    mask = torch.zeros(1, 1, 1, 1, device=device).as_subclass(PassMask)
    mask.rule = rule
    return mask


def observed_mask(*_: Any, mask_function: MaskRule, device: Any = None, **__: Any) -> Tensor:
    """The function registered with transformers to make masks for our attention function."""
    return pass_mask(torch.device("cpu" if device is None else device), mask_function)


def window_of(module: nn.Module, rule: MaskRule, device: torch.device) -> int | None:
    """The number of positions that a mask lets a token see, itself included; ``None`` if all before it.

    Raises:
        UnsupportedModel: the mask isn't "causal, and within a window", or it depends on more than positions.
    """
    try:
        window = _last_seen(rule, device)
        q, k = (index.to(device) for index in _pairs(window))
        sees = _sees(rule, q, k)
    except (IndexError, RuntimeError, TypeError) as error:
        raise unsupported(module, "has an attention mask that depends on more than positions") from error
    expected = (k <= q) & (q - k < (window or 2 * _FAR))
    if wrong := (sees != expected).nonzero().flatten().tolist():
        verb = "sees" if sees[wrong[0]] else "doesn't see"
        raise unsupported(
            module,
            f"has an attention mask where position {int(q[wrong[0]])} {verb} position {int(k[wrong[0]])}; only causal "
            f"masks, with or without a sliding window, can be expressed",
        )
    return window


def unsupported(module: nn.Module, what: str) -> UnsupportedModel:
    """The error about one layer's attention."""
    return UnsupportedModel(f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')} {what}")


def _sees(rule: MaskRule, q: Tensor, k: Tensor) -> Tensor:
    zero = torch.zeros_like(q)
    return rule(zero, zero, q, k).expand_as(q)


def _last_seen(rule: MaskRule, device: torch.device) -> int | None:
    """The window of a mask that is causal within one, by bisection."""
    near, far = 0, _FAR - 1
    query = torch.tensor([_FAR - 1], device=device)  # the end of a chunk, of masks that aren't as expected
    if bool(_sees(rule, query, query - far)):
        return None
    while far - near > 1:
        middle = (near + far) // 2
        near, far = (middle, far) if bool(_sees(rule, query, query - middle)) else (near, middle)
    return far


def _pairs(window: int | None) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys, ``[M]`` int64 each, that tell causal masks, windows and chunks apart."""
    near = torch.cartesian_prod(torch.arange(_NEAR), torch.arange(_NEAR))
    marks = [2**i for i in range(_FAR.bit_length() - 1)] + ([] if window is None else [window])
    distances = torch.tensor(sorted({m + d for m in marks for d in (-1, 0, 1)}))
    far = torch.cartesian_prod(torch.tensor([_FAR - 1, _FAR, _FAR + 12345]), distances)
    far = far[far[:, 1] <= far[:, 0]]
    return torch.cat([near[:, 0], far[:, 0]]), torch.cat([near[:, 1], far[:, 0] - far[:, 1]])
