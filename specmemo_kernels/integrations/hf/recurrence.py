"""Gated delta rules token by token, for a few tokens, with the state between two of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
#: Tokens up to which a recurrence takes less time than the chunks of 64 to which mixers pad them.
FEW_TOKENS = 16


@dataclass(frozen=True)
class Recurrence:
    """A module's ``forward`` in which each chunked rule is the recurrent rule of its module with the same name.

    transformers' gated delta rules have both, and use the chunked one for more than one token.
    """

    forward: Any
    rules: Mapping[str, Callable[..., tuple[Tensor, Tensor]]]
    signatures: Mapping[str, inspect.Signature]

    @classmethod
    def of(cls, module: nn.Module) -> Recurrence | None:
        """The module's, if it has such rules."""
        forward: Any = inspect.unwrap(type(module).forward)
        names = {name: name.replace("chunk", "recurrent") for name in forward.__code__.co_names if "chunk" in name}
        rules = {name: forward.__globals__[other] for name, other in names.items() if other in forward.__globals__}
        if not rules or any("_hf_hook" in vars(part) for part in module.modules()):
            return None
        return cls(forward, rules, {name: inspect.signature(rule) for name, rule in rules.items()})

    def function(self, cut: int = 0, states: list[Tensor] | None = None) -> Callable[..., Any]:
        """The ``forward``. With ``states``, each rule's state after the first ``cut`` tokens is appended to them."""
        rules = dict(self.rules)
        if states is not None:
            rules = {name: _divided(rule, self.signatures[name], cut, states) for name, rule in rules.items()}
        old = self.forward
        new = FunctionType(old.__code__, old.__globals__ | rules, old.__name__, old.__defaults__, old.__closure__)
        new.__kwdefaults__ = old.__kwdefaults__
        return new


def _divided(
    rule: Callable[..., tuple[Tensor, Tensor]], signature: inspect.Signature, cut: int, states: list[Tensor]
) -> Callable[..., Any]:
    """A rule in two calls: of the first ``cut`` tokens, whose state is appended to ``states``, and of the others.

    All its tensors are ``[B, L, ...]``, but ``initial_state``.
    """

    def divided(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        bound = signature.bind(*args, **kwargs)
        given = {name: x for name, x in bound.arguments.items() if isinstance(x, Tensor) and name != "initial_state"}

        def part(tokens: slice, **changes: Any) -> tuple[Tensor, Tensor]:
            bound.arguments.update({name: x[:, tokens] for name, x in given.items()} | changes)
            return rule(*bound.args, **bound.kwargs)

        first, state = part(slice(0, cut), output_final_state=True)
        states.append(state.clone())
        rest, last = part(slice(cut, None), initial_state=state)
        return torch.cat([first, rest], dim=1), last

    return divided
