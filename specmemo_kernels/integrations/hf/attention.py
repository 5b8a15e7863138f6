"""Routes a transformers model's attention layers to our operator, without changes of their code.

Each attention module reads its config through :class:`ConfigView`, which names our attention function only while our
forward pass runs in the same context. Plain forward passes, training and saving read the model's own config.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from specmemo_kernels.forward.step_attention import AttentionParams
from specmemo_kernels.integrations.hf.mask import PassMask, observed_mask, unsupported, window_of
from specmemo_kernels.ops import Kernels

ATTENTION_NAME = "specmemo"

#: Keyword arguments without effect on scores. The batch expresses masks and padding.
_NO_EFFECT = frozenset(
    {
        # Query and key contain the positions already; the batch has a copy for the mask.
        "position_ids",
        "cache_position",
        "position_embeddings",
        # Options of caches and outputs outside of the attention function.
        "use_cache",
        "output_hidden_states",
        "return_dict",
        "output_router_logits",
        "logits_to_keep",
        "num_items_in_batch",
        # Kernel and dtype options of flash attention.
        "deterministic",
        "target_dtype",
    }
)
#: Keyword arguments with the only value (besides ``None``) that has no effect.
_ONLY: dict[str, Any] = {"dropout": 0, "is_causal": True, "output_attentions": False}


class AttentionCall(Protocol):
    """The replacement of a layer's attention (``StepAttention``, or a probe)."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, params: AttentionParams
    ) -> torch.Tensor: ...


#: The sliding window of each layer (``None``: all tokens).
Windows = Mapping[int, int | None]


@dataclass(frozen=True)
class LeafOperators:
    """Operators that compute leaf modules in a pass (:mod:`specmemo_kernels.integrations.hf.fuse`).

    Attributes:
        kernels: a backend's functions.
        kept: ``[K]`` int64; of inputs ``[1, rows, inputs]`` only these rows are computed, the others' results are zero.
            ``None``: all rows.
    """

    kernels: Kernels
    kept: torch.Tensor | None = None
    rows: int = 0


@dataclass
class _Pass:
    """A pass in which attention is replaced.

    Attributes:
        call, windows, last: arguments of :func:`attention_call`.
        operators: compute leaf modules from here on; ``None``: the modules run their own ``forward``.
        shared: counts the calls of blocks that several layers share.
    """

    call: AttentionCall
    windows: Windows
    operators: LeafOperators | None
    last: tuple[int, LeafOperators] | None
    shared: Iterator[int]


_current: ContextVar[_Pass | None] = ContextVar("specmemo_pass", default=None)


@contextmanager
def attention_call(
    call: AttentionCall,
    windows: Windows | None = None,
    operators: LeafOperators | None = None,
    last: tuple[int, LeafOperators] | None = None,
) -> Iterator[None]:
    """Route the attention layers of patched models to ``call`` in this context (thread, task) only.

    Layers without an entry in ``windows`` use the window that they pass to their attention function.

    Args:
        operators: compute leaf modules; ``None``: the modules run their own ``forward``.
        last: the last layer with attention, and the operators behind its attention.
    """
    token = _current.set(_Pass(call, windows or {}, operators, last, count(1)))
    try:
        yield
    finally:
        _current.reset(token)


def leaf_operators() -> LeafOperators | None:
    """The operators that compute leaf modules in this context, or ``None``."""
    current = _current.get()
    return None if current is None else current.operators


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
    """The attention function for transformers: ``query`` ``[1, heads, N, head_dim]``, result ``[1, N, ...]``.

    Raises:
        UnsupportedModel: an unsupported argument, or a mask that isn't the pass's own.
    """
    current = _current.get()
    if current is None:
        raise RuntimeError(
            f"the attention function {ATTENTION_NAME!r} was called outside of a speculative step; don't set it as "
            "attn_implementation, call specmemo_kernels.patch(model, heads)"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if layer < 0:  # a block that several layers share (Zamba2): its calls are layers -1, -2, ...
        layer = -next(current.shared)
    _check_arguments(module, kwargs, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
    if not isinstance(attention_mask, PassMask):
        given = "no attention mask" if attention_mask is None else "an attention mask of its own"
        raise unsupported(module, f"passes {given} to its attention function instead of the model's")
    window = current.windows.get(layer, sliding_window or None)
    if attention_mask.rule is not None:
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            shapes = f"queries {list(query.shape)} and keys {list(key.shape)}"
            raise unsupported(module, f"attends with {shapes}; both must be of the same tokens of one row")
        window = window_of(module, attention_mask.rule, query.device)
    if sliding_window and sliding_window != window:
        raise unsupported(module, f"passes sliding_window={sliding_window} to its attention function, masks {window}")
    sinks = None if s_aux is None else s_aux.contiguous()
    params = AttentionParams(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, sinks)
    out = current.call(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), params=params)
    if current.last is not None and layer == current.last[0]:
        current.operators = current.last[1]
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, specmemo_attention)
AttentionMaskInterface.register(ATTENTION_NAME, observed_mask)


def _check_arguments(module: nn.Module, others: dict[str, Any], **numbers: float | None) -> None:
    """Raise if an argument that isn't implemented would change scores."""
    for name, value in others.items():
        if value is None or name in _NO_EFFECT:
            continue
        if name not in _ONLY:
            raise unsupported(module, f"passes {name!r} to its attention function, which isn't supported")
        if isinstance(value, torch.Tensor) or value != _ONLY[name]:
            raise unsupported(module, f"passes {name}={value!r} to its attention function, not {_ONLY[name]!r}")
    for name, value in numbers.items():
        if value is not None and not isinstance(value, int | float):
            kind = type(value).__name__
            raise unsupported(module, f"passes a {kind} as {name} to its attention function, not a number")


class ConfigView:
    """A view of a model config that names our attention function while our forward pass runs.

    Copies and pickles are the original config, so that a copied or saved model is a plain model.
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
        return operator.getitem, ([self._original], 0)  # loading doesn't need this package


def _viewed(value: Any) -> Any:
    """A part of a config, as a view while our forward pass runs."""
    return ConfigView(value) if isinstance(value, PreTrainedConfig) and _current.get() is not None else value


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that look up an attention function: they have a config and a layer index."""
    return [m for m in model.modules() if "config" in vars(m) and isinstance(getattr(m, "layer_idx", None), int)]


def install_view(module: nn.Module) -> None:
    """Replace a module's config by a view; undone by :func:`remove_view`."""
    config = vars(module)["config"]
    if not isinstance(config, ConfigView):
        vars(module)["config"] = ConfigView(config)


def remove_view(module: nn.Module) -> None:
    """Restore the original config."""
    config = vars(module).get("config")
    if isinstance(config, ConfigView):
        vars(module)["config"] = config._original


@contextmanager
def views_everywhere(model: nn.Module) -> Iterator[None]:
    """Install views in all of a model's modules, so that masks are made for our attention function too."""
    others = [m for m in model.modules() if isinstance(vars(m).get("config"), PreTrainedConfig)]
    for module in others:
        install_view(module)
    try:
        yield
    finally:
        for module in others:
            remove_view(module)
