"""All that a check looks at in its arguments, as one value that can be remembered."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from typing import Any

import torch

Tensor = torch.Tensor


def _layout(value: Any) -> Hashable:
    """Raises TypeError for tensors that aren't plain (fake, traced or wrapped), whose sizes may be symbols."""
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple):
        return tuple([_layout(item) for item in value])
    if value is None or type(value) is int:
        return value
    raise TypeError(f"a {type(value).__name__} has no layout")


def layouts_in_python(*values: Any) -> Hashable:
    """As :func:`layouts`, where the C++ module isn't built."""
    try:
        return tuple([_layout(value) for value in values])
    except TypeError:
        return None


def _find() -> Callable[..., Hashable]:
    try:
        found: Callable[..., Hashable] = importlib.import_module("specmemo_kernels._cpu").layouts
    except ImportError:
        return layouts_in_python
    return found


#: Types, devices, sizes and strides of tensors, and other values as they are, equal when all of these are. ``None``
#: where something can't be told so: it must be looked at every time.
layouts = _find()
