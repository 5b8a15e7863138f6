"""The attention mask of our forward passes, and the check that it is equivalent to the model's mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
#: Whether query ``q`` sees key ``k``: ``rule(batch, head, q, k)`` of int64 tensors, as transformers' mask functions.
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: All pairs of positions below ``_NEAR`` are checked; for queries near ``_FAR`` the distances around powers of two.
_NEAR, _FAR = 16, 2**20


class UnsupportedModel(ValueError):
    """The attention operator can't express the model's attention; the message has the model and the reason."""


class PassMask(Tensor):
    """Placeholder ``[1, 1, 1, 1]`` for the model's attention mask, the only mask that the attention function accepts.

    A moved or sliced placeholder stays a placeholder. Results of other functions are plain tensors, which are refused.

    Attributes:
        rule: the model's mask in the observing pass; ``None`` in steps, where the batch determines the mask.
    """

    rule: MaskRule | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func not in _KEEPS_MASK or not isinstance(result, Tensor):
            return result
        mask = result.as_subclass(cls)
        mask.rule = args[0].rule
        return mask


_KEEPS_MASK = frozenset(
    {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.clone, Tensor.detach, Tensor.contiguous, Tensor.expand}
    | {Tensor.__getitem__, Tensor.bool, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type}
)


def pass_mask(device: torch.device, rule: MaskRule | None = None) -> Tensor:
    """A mask for one forward pass. transformers doesn't change 4-D masks."""
    mask = torch.zeros(1, 1, 1, 1, device=device).as_subclass(PassMask)
    mask.rule = rule
    return mask


def observed_mask(*_: Any, mask_function: MaskRule, device: Any = None, **__: Any) -> Tensor:
    """The mask function of our attention, registered with transformers."""
    return pass_mask(torch.device("cpu" if device is None else device), mask_function)


def window_of(module: nn.Module, rule: MaskRule, device: torch.device) -> int | None:
    """The sliding window of a mask, the token itself included; ``None`` if the mask is causal without a window.

    Raises:
        UnsupportedModel: the mask isn't causal within a window, or it depends on more than positions.
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


def unsupported(module: nn.Module, reason: str) -> UnsupportedModel:
    """The error about one layer's attention."""
    return UnsupportedModel(f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')} {reason}")


def _sees(rule: MaskRule, q: Tensor, k: Tensor) -> Tensor:
    zero = torch.zeros_like(q)
    return rule(zero, zero, q, k).expand_as(q)


def _last_seen(rule: MaskRule, device: torch.device) -> int | None:
    """The window of a mask that is causal within a window, by bisection."""
    near, far = 0, _FAR - 1
    query = torch.tensor([_FAR - 1], device=device)  # in chunked masks, the end of a chunk
    if bool(_sees(rule, query, query - far)):
        return None
    while far - near > 1:
        middle = (near + far) // 2
        near, far = (middle, far) if bool(_sees(rule, query, query - middle)) else (near, middle)
    return far


def _pairs(window: int | None) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys, ``[M]`` int64 each, that distinguish causal masks, windows and chunks."""
    near = torch.cartesian_prod(*[torch.arange(_NEAR, device="cpu")] * 2)
    marks = [2**i for i in range(_FAR.bit_length() - 1)] + ([] if window is None else [window])
    distances = torch.tensor(sorted({m + d for m in marks for d in (-1, 0, 1)}), device="cpu")
    far = torch.cartesian_prod(torch.tensor([_FAR - 1, _FAR, _FAR + 12345], device="cpu"), distances)
    far = far[far[:, 1] <= far[:, 0]]
    return torch.cat([near[:, 0], far[:, 0]]), torch.cat([near[:, 1], far[:, 0] - far[:, 1]])
