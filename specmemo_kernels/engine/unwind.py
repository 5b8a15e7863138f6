"""Code under torch's modes, none of which an interrupt leaves behind.

Ctrl-C raises ``KeyboardInterrupt`` between any two bytecodes of the main thread: also in the Python code of a mode's
``__enter__`` and ``__exit__``, where ``with`` doesn't end what has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils import _python_dispatch

_Result = TypeVar("_Result")
#: What torch keeps beside the stack of dispatch modes, and the setter of its copy in C++.
_FLAGS = [
    name for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_") and isinstance(value, bool)
]
_COPIED = "_is_in_any_mode_without_ignore_compile_internals"
_copy: Callable[[bool], None] | None = getattr(
    _python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None
)


class _Modes(NamedTuple):
    """The modes of this thread."""

    dispatch_modes: int
    function_modes: int
    flags: list[Any]


def run_under(run: Callable[[], _Result], *modes: Any) -> _Result:
    """``run()`` with dispatch and function modes; an interrupt inside of torch's own ``with`` is raised as it is."""
    before = _Modes(
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        [getattr(_python_dispatch, name) for name in _FLAGS],
    )
    try:
        try:
            for mode in modes:
                mode.__enter__()
            return run()
        finally:  # not by `__exit__`, which fails if torch has popped the mode and was interrupted
            _pop_modes(before)
    finally:  # the interrupt may have come in the first
        _pop_modes(before)


def _pop_modes(before: _Modes) -> None:
    while torch._C._len_torch_dispatch_stack() > before.dispatch_modes:
        torch._C._pop_torch_dispatch_stack(None)
    while torch._C._len_torch_function_stack() > before.function_modes:
        torch._C._pop_torch_function_stack()
    for name, flag in zip(_FLAGS, before.flags, strict=True):
        setattr(_python_dispatch, name, flag)
        if name == _COPIED and _copy is not None:
            _copy(flag)
