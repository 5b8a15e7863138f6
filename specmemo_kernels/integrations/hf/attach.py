"""The lm_head hook and the config views of a model that runs our forward passes.

Models may share modules: a draft model serves several targets or is itself patched; two models have one lm_head or one
decoder. Users are counted per module: the first user installs, the last user removes.
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
_hook_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_view_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def attach(model: Any) -> Callable[[], None]:
    """Install the hook and the views; the returned function removes them, once.

    Raises:
        UnsupportedModel: the model has no lm_head.
    """
    head, layers = lm_head_of(model), attention_modules(model)
    _count_users(head, layers, 1)
    attached = [True]

    def detach() -> None:
        if attached:
            attached.clear()
            _count_users(head, layers, -1)

    return detach


def _count_users(head: nn.Module, layers: list[nn.Module], change: int) -> None:
    with _lock:
        for users, modules, install, remove in (
            (_hook_users, [head], _install_hook, _remove_hook),
            (_view_users, layers, install_view, remove_view),
        ):
            for module in modules:
                users[module] = users.get(module, 0) + change
                if not users[module]:
                    del users[module]
                    remove(module)
                elif change > 0:
                    install(module)


def _install_hook(head: nn.Module) -> None:
    if lm_head_hook not in head._forward_pre_hooks.values():  # copies of a draft model have the hook already
        head.register_forward_pre_hook(lm_head_hook)


def _remove_hook(head: nn.Module) -> None:
    for key in [key for key, hook in head._forward_pre_hooks.items() if hook is lm_head_hook]:
        del head._forward_pre_hooks[key]
