"""Replaces ``forward`` of modules while our passes run; plain passes, copies and saved models have the modules' own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_PACKAGE = __name__.split(".")[0]


class OurForward:
    """A replaced ``forward``; copied or pickled with its module, it is the module's own."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module, self.function = module, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")  # found in its class, because the copy has no attributes yet


class ReplacedForwards:
    """Counts the passes that need the replacements; passes of several threads may overlap."""

    def __init__(self) -> None:
        self._passes, self._lock = 0, threading.Lock()
        self._installed: list[tuple[OurForward, Any]] = []  # with the attribute before

    @contextmanager
    def installed(self, replacements: Callable[[], Iterable[OurForward]]) -> Iterator[None]:
        """Replace in a block of code; the first of overlapping blocks decides what."""
        counted = False
        try:
            with self._lock:
                counted, self._passes = True, self._passes + 1
                if self._passes == 1:
                    for forward in replacements():
                        attributes = vars(forward.module)
                        self._installed.append((forward, attributes.get("forward")))
                        attributes["forward"] = forward
            yield
        finally:
            with self._lock:
                self._passes -= counted
                while self._installed and not self._passes:
                    forward, former = self._installed[-1]
                    attributes = vars(forward.module)
                    if attributes.get("forward") is not forward:
                        pass  # replaced meanwhile, or not yet
                    elif former is None:
                        del attributes["forward"]
                    else:
                        attributes["forward"] = former
                    self._installed.pop()  # last, so that the next pass ends what an interrupt has left


def class_forward(module: nn.Module) -> Any:
    """The ``forward`` of a module's class; a TorchScript module's class has none."""
    return getattr(type(module), "forward", None)


def is_plain(module: nn.Module) -> bool:
    """Whether a module has no replaced ``forward`` and no hooks except this package's."""
    attached = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    foreign = (hook for hooks in attached for hook in hooks.values() if hook.__module__.split(".")[0] != _PACKAGE)
    forward = getattr(vars(module).get("forward"), "__func__", vars(module).get("forward"))
    own = forward is None or forward is class_forward(module)  # a copy may have its own as an attribute
    return own and "_hf_hook" not in vars(module) and not any(True for _ in foreign)
