"""What our forward passes need of a model's modules: a hook on its lm_head, config views in its attention layers.

Models may share modules: a draft model serves several targets, or is patched itself, or two models have one lm_head or
one decoder. So users are counted by module: the first one installs, the last one removes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from specmemo_kernels.integrations.hf.attention import attention_modules, install_view, remove_view
from specmemo_kernels.integrations.hf.probe import lm_head_of
from specmemo_kernels.integrations.hf.target import lm_head_hook

_lock = threading.Lock()
_hooked: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_viewing: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def attach(model: Any) -> Callable[[], None]:
    """Give a model what our forward passes need; the returned function takes it away again.

    Raises:
        UnsupportedModel: the model has no lm_head.
    """
    head, layers = lm_head_of(model), attention_modules(model)
    _change(head, layers, 1)
    attached = [True]

    def detach() -> None:
        if attached.pop() if attached else False:
            _change(head, layers, -1)

    return detach


def _change(head: nn.Module, layers: list[nn.Module], by: int) -> None:
    with _lock:
        _count(_hooked, head, by, _install_hook, _remove_hook)
        for layer in layers:
            _count(_viewing, layer, by, install_view, remove_view)


def _count(
    users: weakref.WeakKeyDictionary[nn.Module, int],
    module: nn.Module,
    by: int,
    install: Callable[[nn.Module], None],
    remove: Callable[[nn.Module], None],
) -> None:
    users[module] = users.get(module, 0) + by
    if not users[module]:
        del users[module]
        remove(module)
    elif by > 0:
        install(module)


def _install_hook(head: nn.Module) -> None:
    """Add the hook, unless it is there: copies of a draft model have it."""
    if lm_head_hook not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(lm_head_hook)


def _remove_hook(head: nn.Module) -> None:
    for key in [key for key, hook in head._forward_pre_hooks.items() if hook is lm_head_hook]:
        del head._forward_pre_hooks[key]
