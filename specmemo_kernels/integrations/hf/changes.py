"""One check before each call: is the model still the one that was patched, and does only its own code see logits?

A speculative step runs packed rows, and usually computes no logits at all. It is wrong where a foreign hook or a
replaced ``forward`` acts on what a plain step computes, and where parameters have another size, dtype or device than
the pages and heads were made for. :meth:`ModelGuard.reason` finds both; the caller then runs the model's own code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from specmemo_kernels.integrations.hf.target import local_part

#: Packages whose hooks and wrappers keep a module's results (device placement, tensor parallel, torch.compile, ours).
_FRAMEWORKS = frozenset(("torch", "transformers", "accelerate", "specmemo_kernels"))
_REMEDY = "call specmemo_kernels.unpatch(model), make the change, and patch again"

TensorFacts = tuple[torch.dtype, torch.Size, torch.device]


@dataclass(frozen=True)
class _Head:
    """The output embedding at the time of patching."""

    module: nn.Module
    cls: type
    weight: tuple[type, TensorFacts] | None

    @classmethod
    def of(cls, model: Any) -> _Head:
        module = model.get_output_embeddings()
        weight = getattr(module, "weight", None)
        found = (type(weight), _facts(weight)) if isinstance(weight, torch.Tensor) else None
        return cls(module, type(module), found)


class ModelGuard:
    """What patching relied on, compared with the model before each call.

    Args:
        model: patched, with everything in place that patching changes.
        name: how messages refer to it.
    """

    def __init__(self, model: Any, name: str = "the model") -> None:
        self.model, self.name = model, name
        self._head = _Head.of(model)
        self._forward = type(model).forward
        self._parameters = [(key, weakref.ref(p), _facts(p)) for key, p in model.named_parameters()]

    def reason(self) -> str:
        """Why speculative steps would not give the model's own tokens, with the remedy, or an empty string."""
        if change := self._change():
            return f"{change} since patching; to speculate again, {_REMEDY}"
        if attached := foreign_code(self.model):
            return f"{self.name} has {attached}; to speculate again, remove it"
        device = self.model.get_input_embeddings().weight.device.type
        if torch.is_autocast_enabled(device):
            return f"autocast is on for {device}; to speculate, load the model in the wanted dtype instead"
        return ""

    def _change(self) -> str:
        head = _Head.of(self.model)
        if head != self._head:
            return f"the lm_head of {self.name} has changed from {_described(self._head)} to {_described(head)}"
        if type(self.model).forward is not self._forward:
            return f"{type(self.model).__name__}.forward has been replaced"
        for key, reference, before in self._parameters:
            parameter = reference()  # None: replaced, as by an adapter or a training step, and checked by its layer
            if parameter is not None and (now := _facts(parameter)) != before:
                return f"{key} of {self.name} has changed from {_written(before)} to {_written(now)}"
        return ""


def foreign_code(model: Any) -> str:
    """The first hook or replaced ``forward`` that is neither the model's own nor a framework's, or an empty string.

    Hooks count on every module, as they see and may change packed rows. A replaced ``forward`` counts on the model and
    its lm_head alone: their logits are not computed in a speculative step. Elsewhere it runs inside the step.
    """
    head = model.get_output_embeddings()
    for kind, function in _global_hooks():
        if _is_foreign(function):
            return f"a global {kind} ({_origin(function)})"
    for module in model.modules():
        replaced = module is model or module is head
        for kind, function in _attached(module, replaced):
            if _is_foreign(function):
                where = next(key for key, each in model.named_modules() if each is module)
                return f"a {kind} on {where or type(model).__name__} ({_origin(function)})"
    return ""


def _global_hooks() -> Iterator[tuple[str, Any]]:
    for function in global_hooks._global_forward_hooks.values():
        yield "forward hook", function
    for function in global_hooks._global_forward_pre_hooks.values():
        yield "forward pre-hook", function


def _attached(module: nn.Module, replaced: bool) -> Iterator[tuple[str, Any]]:
    for function in module._forward_hooks.values():
        yield "forward hook", function
    for function in module._forward_pre_hooks.values():
        yield "forward pre-hook", function
    held = vars(module)
    if "_hf_hook" in held:  # accelerate's; several of them are one with a list
        for hook in getattr(held["_hf_hook"], "hooks", (held["_hf_hook"],)):
            yield "hook of accelerate", hook
    if replaced and "forward" in held:
        yield "replaced forward", held["forward"]


def _is_foreign(function: Any) -> bool:
    return _origin(function).partition(".")[0] not in _FRAMEWORKS


def _origin(function: Any) -> str:
    """The module that defines a callable; the names that ``functools.wraps`` copies are not used."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    module: Callable[[], str] | str = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return str(module)


def _facts(tensor: torch.Tensor) -> TensorFacts:
    local = local_part(tensor)
    return local.dtype, local.shape, local.device


def _written(facts: TensorFacts) -> str:
    dtype, shape, device = facts
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _described(head: _Head) -> str:
    weight = "no weight tensor" if head.weight is None else _written(head.weight[1])
    return f"{head.cls.__name__} ({weight})"
