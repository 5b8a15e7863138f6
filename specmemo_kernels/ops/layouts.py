"""Calling again what was called before: arguments that are laid out alike need neither checks nor a choice of backend.

Between two layers' products a core's caches hold nothing of a call, and whatever it touches has to be fetched; so where
the C++ module is built, all of this is one function of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Any

import torch

Tensor = torch.Tensor


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


def call_in_python(
    listeners: Sequence[Callable[[], Any]],
    kernels: dict[Hashable, Callable[..., Any]],
    carefully: Callable[..., Any],
    *args: Any,
) -> Any:
    """As :func:`call`, where the C++ module isn't built."""
    kernel = None if any(listens() for listens in listeners) else kernels.get(layouts_in_python(*args))
    return carefully(*args) if kernel is None else kernel(*args[:-1])


def _compiled() -> ModuleType | None:
    try:
        return importlib.import_module("specmemo_kernels._cpu")
    except ImportError:
        return None


_cpu = _compiled()

#: Types, devices, sizes and strides of tensors, signs of numbers, and strings: a value that is equal when all of these
#: are. ``None`` where something can't be told so: it must be looked at every time.
layouts: Callable[..., Hashable] = _cpu.layouts if _cpu else layouts_in_python

#: ``call(listeners, kernels, carefully, *args)``: the kernel remembered for arguments like these, called without the
#: last of them (the backend); ``carefully(*args)`` where there is none or one of ``listeners`` answers yes.
call: Callable[..., Any] = _cpu.call if _cpu else call_in_python
