"""Calling again what was called before: arguments that are laid out alike need neither checks nor a choice of backend.

Between two layers' products a core's caches hold nothing of a call, and whatever it touches has to be fetched; so where
the C++ module is built, all of this is one function of it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

Tensor = torch.Tensor
Function = TypeVar("Function", bound=Callable[..., Any])


def _layout(value: Any) -> Hashable:
    """Raises TypeError for tensors that aren't plain (fake, traced or wrapped), whose sizes may be symbols."""
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, int | float):
        return value > 0, value < 0, value == 0
    if value is None or type(value) is str:
        return value
    raise TypeError(f"a {type(value).__name__} has no layout")


def layouts_in_python(*values: Any) -> Hashable:
    """As :func:`layouts`, where the C++ module isn't built."""
    try:
        return tuple([_layout(value) for value in values])
    except TypeError:
        return None


def _compiled() -> ModuleType | None:
    try:
        return importlib.import_module("specmemo_kernels.backends._cpu")
    except ImportError:
        return None


_cpu = _compiled()

#: Types, devices, sizes and strides of tensors, signs of numbers, and strings: a value that is equal when all of these
#: are. ``None`` where something can't be told so: it must be looked at every time.
layouts: Callable[..., Hashable] = _cpu.layouts if _cpu else layouts_in_python


def shortened(
    function: Function, listeners: Sequence[Callable[[], Any]], kernels: dict[Hashable, Callable[..., Any]]
) -> Function:
    """The same function, which calls what ``kernels`` holds for arguments that are laid out alike straight away.

    Everything else goes to ``function``: other arguments, and all calls while one of ``listeners`` answers yes.

    Args:
        function: its last parameter chooses the backend, which a kernel isn't given any more.
        kernels: by :func:`layouts` of all arguments in the order of the function's parameters.
    """
    if _cpu is None:
        return function
    parameters = inspect.signature(function).parameters.values()
    defaults = tuple(... if p.default is p.empty else p.default for p in parameters)
    positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
    names = tuple(p.name for p in parameters)
    result = _cpu.Shortened(function, names, defaults, positional, tuple(listeners), kernels)
    functools.update_wrapper(result, function)
    # By these two attributes, those of torch.jit.script_if_tracing, torch.compile finds the function that it can trace.
    setattr(result, "__script_if_tracing_wrapper", True)
    setattr(result, "__original_fn", function)
    return cast(Function, result)
