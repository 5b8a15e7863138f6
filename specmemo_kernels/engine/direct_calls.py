"""Operators of torch through its built-in functions (``torch.add``), which take less time than ``torch.ops``.

An operator of ``torch.ops`` reads its arguments by a schema. Medians of 500 steps of models of 12 layers, 256 wide, on
two cores of an Intel Xeon: 0.88 (Phi), 0.91 (GPT-2) and 0.99 (Gemma 2) of the time with ``torch.ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specmemo_kernels.engine.program import Call, View
from specmemo_kernels.engine.unwind import run_under


def direct(calls: Sequence[Call]) -> list[Call]:
    """``calls`` with a built-in function in place of each operator that it dispatches to, with the same arguments."""
    return [call if (function := _function(call)) is None else replace(call, function=function) for call in calls]


class _Dispatched(Exception):
    """An operator and its arguments, instead of its execution."""


class _NothingRuns(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Dispatched(func, args, kwargs or {})


def _function(call: Call) -> Callable[..., Any] | None:
    """The function for a call's operator; ``None`` without one, and for tensors with functions of their own."""
    if not isinstance(call.function, torch._ops.OpOverload):
        return None
    args, kwargs = replace(call, function=lambda *args, **kwargs: (args, kwargs)).make(_empty)
    if has_torch_function(tree_leaves([args, kwargs])):
        return None
    for function in _candidates(call.function):
        try:
            with torch.inference_mode():
                run_under(partial(function, *args, **kwargs), _NothingRuns())
        except _Dispatched as seen:
            if _key(seen.args) == _key((call.function, args, kwargs)):
                return function
        except Exception:  # the function has another signature
            pass
    return None


def _empty(view: View) -> torch.Tensor:
    return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="meta")


def _candidates(operator: Any) -> Iterator[Callable[..., Any]]:
    """Built-in functions with an operator's name. A function in Python may dispatch to other operators after the first,
    with which it is compared."""
    for namespace in (torch, torch._C._nn, torch.Tensor):
        function = getattr(namespace, operator.overloadpacket.__name__, None)
        if isinstance(function, BuiltinFunctionType | MethodDescriptorType):
            yield function


def _key(value: Any) -> Any:
    """Equal for the same tensors, and for equal values of the same type."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, list | tuple):
        return [_key(each) for each in value]
    if isinstance(value, dict):
        return {name: _key(each) for name, each in value.items()}
    return type(value), value
