"""Hidden states of a model's layers, captured for drafters that read them, inside our forward passes only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from specmemo_kernels.drafting.base import POST_NORM
from specmemo_kernels.integrations.hf.mask import UnsupportedModel

Tensor = torch.Tensor


@dataclass(frozen=True)
class FeatureTaps:
    """The hidden states that a drafter reads.

    Attributes:
        ids: of each state, in order: i is the input of layer i, the number of layers is the last layer's output before
            the final norm, :data:`POST_NORM` the final norm's output.
        layers: the model's decoder layers. decoder: the module of all layers and the final norm.
    """

    ids: tuple[int, ...] = ()
    layers: tuple[nn.Module, ...] = field(default=(), repr=False)
    decoder: nn.Module | None = field(default=None, repr=False)

    def _attach(self) -> list[RemovableHandle]:
        """Install hooks, which do nothing outside of :meth:`captured`."""
        hooks: list[RemovableHandle] = []
        for i in set(self.ids):
            if i == POST_NORM:
                assert self.decoder is not None, "find_taps has found it"
                hooks.append(self.decoder.register_forward_hook(_Output(i)))
            elif i < len(self.layers):
                hooks.append(self.layers[i].register_forward_pre_hook(_Input(i), with_kwargs=True))
            else:
                hooks.append(self.layers[-1].register_forward_hook(_Output(i)))
        return hooks

    @contextmanager
    def captured(self) -> Iterator[dict[int, Tensor]]:
        """Capture states ``[B, N, size]`` by their index, in this context (thread, task) only.

        The hooks exist during the pass, so that copies and other passes of the model have none.
        """
        states: dict[int, Tensor] = {}
        hooks, token = self._attach(), _states.set(states)
        try:
            yield states
        finally:
            _states.reset(token)
            for hook in hooks:
                hook.remove()


_states: ContextVar[dict[int, Tensor] | None] = ContextVar("specmemo_features", default=None)


@dataclass(frozen=True)
class _Input:
    """Forward-pre-hook that captures a layer's input."""

    index: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (states := _states.get()) is not None:
            states[self.index] = args[0] if args else kwargs["hidden_states"]


@dataclass(frozen=True)
class _Output:
    """Forward hook that captures a layer's or the decoder's output."""

    index: int

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if (states := _states.get()) is not None:
            states[self.index] = output if isinstance(output, Tensor) else output[0]


def find_taps(model: Any, ids: Sequence[int]) -> FeatureTaps:
    """The taps of hidden states ``ids``.

    Raises:
        UnsupportedModel: the model's decoder layers aren't found, or it has fewer.
    """
    if not ids:
        return FeatureTaps()
    count, name = model.config.get_text_config().num_hidden_layers, type(model).__name__
    if max(ids) > count or min(ids) < POST_NORM:
        raise UnsupportedModel(
            f"the drafter reads hidden states {list(ids)} of {name}, which has 0 to {count}; use a drafter made for it"
        )
    stacks = (tuple(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    layers = next((stack for stack in stacks if all(_has_layer(m, i) for i, m in enumerate(stack))), None)
    if layers is None:
        raise UnsupportedModel(f"{name} has no list of {count} decoder layers, whose states the drafter reads")
    return FeatureTaps(tuple(ids), layers, model.get_decoder() if POST_NORM in ids else None)


def _has_layer(module: nn.Module, index: int) -> bool:
    return any(getattr(part, "layer_idx", None) == index for part in module.modules())
