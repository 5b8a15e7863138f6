"""Whether a model is still the one whose keys and values were kept."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specmemo_kernels.integrations.hf.target import local_part

Tensor = torch.Tensor

#: What every module has.
_COMMON = frozenset(vars(nn.Module()))
#: Elements of each parameter that are compared.
_SAMPLES = 4


class ModelSignature:
    """What of a model decides its keys and values, looked at cheaply.

    - Each parameter and buffer: which tensor, where, in what dtype, its version (torch counts changes in place), and
      of its elements four (changes through ``.data``, as of merged adapters and of some optimizers, aren't counted).
    - Each module: all that it holds beside tensors and modules: an adapter's switches are there.

    Not seen are changes through ``.data`` that miss these elements, and whatever a replaced function looks up
    elsewhere. Hooks don't count: models with foreign hooks don't speculate
    (:mod:`specmemo_kernels.integrations.hf.changes`).
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._facts = [_tensor_facts(tensor) for tensor in tensors], [_module_facts(m) for m in model.modules()]
        self._samples = _samples(tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelSignature):
            return NotImplemented
        return (
            self._facts == other._facts
            and self._samples.keys() == other._samples.keys()
            and all(torch.equal(mine, other._samples[kind]) for kind, mine in self._samples.items())
        )

    __hash__ = None  # type: ignore[assignment]  # it holds tensors


def _tensor_facts(tensor: Tensor) -> tuple[Hashable, ...]:
    local = local_part(tensor)
    version = 0 if local.is_inference() else local._version
    return id(tensor), local.data_ptr() if _is_plain(local) else 0, local.dtype, local.shape, version


def _samples(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """Elements from all over each tensor, their bits as they are, by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in map(local_part, tensors):
            count = tensor.numel()
            if count and _is_plain(tensor) and tensor.is_contiguous():
                some = tensor.as_strided((min(count, _SAMPLES),), (max(1, count // _SAMPLES),))
                found.setdefault((tensor.device, tensor.dtype), []).append(some)
        return {kind: torch.cat(parts).view(torch.uint8) for kind, parts in found.items()}


def _is_plain(tensor: Tensor) -> bool:
    """Whether its elements lie in memory of its own (not on the meta device, not in a quantised tensor's parts)."""
    return not tensor.is_meta and not is_traceable_wrapper_subclass(tensor)


def _module_facts(module: nn.Module) -> tuple[Hashable, ...]:
    held = vars(module)
    return id(module), tuple((name, _plain(value)) for name, value in held.items() if name not in _COMMON)


def _plain(value: Any) -> Hashable:
    """A value that changes where ``value`` does: of containers their content, of other objects which one it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return tuple((str(key), _plain(each)) for key, each in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(_plain(each) for each in value)
    return id(value)
