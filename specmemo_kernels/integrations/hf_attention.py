"""How a transformers model's attention layers reach our operator, without touching their code.

Each attention module sees its config through :class:`ConfigView`, which names our attention function only while one
of our forward passes runs in the same context. Plain forwards, training and saving see the model's own config.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

ATTENTION_NAME = "specmemo"

#: Arguments of attention functions that don't change what is computed here: positions are known from the batch,
#: there is no dropout outside training, and the mask is the tree's.
_HARMLESS = frozenset(
    """
    dropout is_causal position_ids cache_position past_key_values past_key_value use_cache output_attentions
    output_hidden_states return_dict position_embeddings deterministic target_dtype logits_to_keep num_items_in_batch
    seq_idx cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k output_router_logits
    """.split()  # noqa: SIM905 - a name per line says no more
)


class UnsupportedModel(ValueError):
    """The model's attention can't be expressed by the operator; the message names the model and the reason."""


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


_current: ContextVar[AttentionCall | None] = ContextVar("specmemo_attention", default=None)


@contextmanager
def attention_call(call: AttentionCall) -> Iterator[None]:
    """Route the attention layers of patched models to ``call`` in this context (thread, task) alone."""
    token = _current.set(call)
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
    """The function registered with transformers: ``query`` ``[1, heads, N, head_dim]``, the result ``[1, N, ...]``."""
    call = _current.get()
    if call is None:
        raise RuntimeError("the specmemo attention function was called outside of a specmemo step")
    for name, argument in kwargs.items():
        if argument is not None and name not in _HARMLESS:
            raise UnsupportedModel(
                f"{type(module).__name__} passes {name!r} to its attention, which can't be expressed"
            )
    out = call(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, specmemo_attention)


class ConfigView:
    """A model config that names our attention function while one of our steps runs, and else is the original.

    Copies and pickles of it are the original config, so a copied or saved model is a plain one.
    """

    def __init__(self, config: Any) -> None:
        object.__setattr__(self, "_original", config)

    def __getattr__(self, name: str) -> Any:
        if name == "_attn_implementation" and _current.get() is not None:
            return ATTENTION_NAME
        return getattr(object.__getattribute__(self, "_original"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._original,)


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
