"""How a transformers model's attention layers reach our operator, without touching their code.

Each attention module sees its config through :class:`ConfigView`, which names our attention function only while one
of our forward passes runs in the same context. Plain forwards, training and saving see the model's own config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from specmemo_kernels.integrations.hf.mask import PassMask, observed_mask, unsupported, window_of
from specmemo_kernels.integrations.hf.mask import UnsupportedModel as UnsupportedModel

ATTENTION_NAME = "specmemo"

#: Keyword arguments that have no effect on scores whatever their value. Masks and padding are expressed by the batch.
_NO_EFFECT = frozenset(
    {
        # Positions are already part of query and key; the batch has its own copy for the mask.
        "position_ids",
        "cache_position",
        "position_embeddings",
        # Requests about caches and outputs outside of the attention function.
        "use_cache",
        "output_hidden_states",
        "return_dict",
        "output_router_logits",
        "logits_to_keep",
        "num_items_in_batch",
        # Flash attention's choices of kernel and dtype.
        "deterministic",
        "target_dtype",
    }
)
#: Keyword arguments with the single value (beside ``None``) that has no effect.
_ONLY: dict[str, Any] = {"dropout": 0, "is_causal": True, "output_attentions": False}


class AttentionCall(Protocol):
    """What runs in place of a layer's attention (``StepAttention``, or the probe that looks at shapes)."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...


#: The window of each layer (``None``: all tokens).
Windows = Mapping[int, int | None]

_current: ContextVar[tuple[AttentionCall, Windows] | None] = ContextVar("specmemo_attention", default=None)


@contextmanager
def attention_call(call: AttentionCall, windows: Windows | None = None) -> Iterator[None]:
    """Route the attention layers of patched models to ``call`` in this context (thread, task) alone.

    Layers that ``windows`` leaves out have the window that they pass to their attention function.
    """
    token = _current.set((call, windows or {}))
    try:
        yield
    finally:
        _current.reset(token)


def specmemo_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers: ``query`` ``[1, heads, N, head_dim]``, the result ``[1, N, ...]``.

    Raises:
        UnsupportedModel: it got an argument that it doesn't use, or a mask other than the pass's own.
    """
    current = _current.get()
    if current is None:
        raise RuntimeError("the specmemo attention function was called outside of a specmemo step")
    call, windows = current
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    _check_arguments(module, kwargs, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
    if not isinstance(attention_mask, PassMask):
        given = "no attention mask" if attention_mask is None else "an attention mask of its own"
        raise unsupported(module, f"passes {given} to its attention function instead of the model's")
    window = windows.get(layer, sliding_window or None)
    if attention_mask.rule is not None:
        _check_shapes(module, query, key)
        window = window_of(module, attention_mask.rule, query.device)
    if sliding_window and sliding_window != window:
        raise unsupported(module, f"passes sliding_window={sliding_window} to its attention function, masks {window}")
    out = call(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, specmemo_attention)
AttentionMaskInterface.register(ATTENTION_NAME, observed_mask)


def _check_shapes(module: nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
    """Raise where keys come from elsewhere than the pass's own tokens."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        shapes = f"queries {list(query.shape)} and keys {list(key.shape)}"
        raise unsupported(module, f"attends with {shapes}; both must be of the same tokens of one row")


def _check_arguments(module: nn.Module, others: dict[str, Any], **numbers: float | None) -> None:
    """Raise for each argument of the attention function that would change scores and isn't used."""
    for name, value in others.items():
        if value is None or name in _NO_EFFECT:
            continue
        if name not in _ONLY:
            raise unsupported(module, f"passes {name!r} to its attention function, which can't be expressed")
        if isinstance(value, torch.Tensor) or value != _ONLY[name]:
            raise unsupported(module, f"passes {name}={value!r} to its attention function, not {_ONLY[name]!r}")
    for name, value in numbers.items():
        if value is not None and not isinstance(value, int | float):
            kind = type(value).__name__
            raise unsupported(module, f"passes a {kind} as {name} to its attention function, not a number")


class ConfigView:
    """A model config that names our attention function while one of our steps runs, and else is the original.

    Copies and pickles of it are the original config, so a copied or saved model is a plain one.
    """

    def __init__(self, config: Any) -> None:
        object.__setattr__(self, "_original", config)

    def __getattr__(self, name: str) -> Any:
        if name == "_attn_implementation" and _current.get() is not None:
            return ATTENTION_NAME
        return _viewed(getattr(object.__getattribute__(self, "_original"), name))

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        return _viewed(self._original.get_text_config(*args, **kwargs))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._original,)


def _viewed(value: Any) -> Any:
    """A part of a config as a view of its own while one of our steps runs."""
    return ConfigView(value) if isinstance(value, PreTrainedConfig) and _current.get() is not None else value


def _same(config: Any) -> Any:
    return config


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that look up their attention function: they hold a config and know their layer."""
    found = (m for m in model.modules() if "config" in vars(m) and hasattr(m, "layer_idx"))
    return [m for m in found if isinstance(m.layer_idx, int)]


def install_view(module: nn.Module) -> None:
    """Give an attention module its view; undone by :func:`remove_view`."""
    config = vars(module)["config"]
    if not isinstance(config, ConfigView):
        vars(module)["config"] = ConfigView(config)


def remove_view(module: nn.Module) -> None:
    """Put the original config back."""
    config = vars(module).get("config")
    if isinstance(config, ConfigView):
        vars(module)["config"] = config._original


@contextmanager
def views_everywhere(model: nn.Module) -> Iterator[None]:
    """Give all of a model's modules their view, so that its masks too are made for our attention function."""
    others = [m for m in model.modules() if isinstance(vars(m).get("config"), PreTrainedConfig)]
    for module in others:
        install_view(module)
    try:
        yield
    finally:
        for module in others:
            remove_view(module)
