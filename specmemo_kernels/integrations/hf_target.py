"""A transformers model as the target of the speculative loop, and what one probing forward pass tells about it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.batch import TreeBatch
from specmemo_kernels.decode import TargetOutput
from specmemo_kernels.integrations.hf_attention import UnsupportedModel, attention_call
from specmemo_kernels.paged_kv import LayerKV
from specmemo_kernels.step_attention import StepAttention

Tensor = torch.Tensor

#: Layer kinds whose mask is "causal, maybe with a window"; anything else (chunked, linear, ...) has other rules.
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class ModelFacts:
    """What a one-token forward pass showed.

    Attributes:
        layers: what each attention layer stores per token.
        num_qo_heads: the most query heads of a layer.
        hidden_size, dtype, device: of the lm_head's input.
        vocab_size: rows of the lm_head.
        plain_lm_head: the lm_head is an ``nn.Linear`` whose output order the model keeps, so that
            :func:`ops.lm_head_argmax` finds the model's own token; else logits are made by the model.
    """

    layers: tuple[LayerKV, ...]
    num_qo_heads: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    plain_lm_head: bool


class HFTarget:
    """Runs ``model`` on packed nodes and captures what goes into its lm_head.

    Implements :class:`specmemo_kernels.decode.TargetModel`.
    """

    def __init__(self, model: nn.Module, facts: ModelFacts, backend: str | None) -> None:
        self.model, self.facts, self.backend = model, facts, backend
        self.device, self.vocab_size = facts.device, facts.vocab_size

    def forward(self, batch: TreeBatch, attention: StepAttention, keep: Tensor | None, logits: bool) -> TargetOutput:
        want_logits = logits or not self.facts.plain_lm_head
        with tapped(cut=not want_logits) as tap:
            output = _run(self.model, batch.tokens.clamp(min=0), batch.positions, attention, keep)
        return TargetOutput(tap.hidden, output[0] if want_logits else None)

    def argmax(self, hidden: Tensor) -> Tensor:
        weight, bias = lm_head(self.model)
        return ops.lm_head_argmax(hidden, weight, bias, backend=self.backend)


def lm_head(model: Any) -> tuple[Tensor, Tensor | None]:
    """Weight ``[V, hidden_size]`` and bias ``[V]`` (or ``None``) of a model's lm_head, detached."""
    head = model.get_output_embeddings()
    return head.weight.detach(), None if getattr(head, "bias", None) is None else head.bias.detach()


def _run(model: Any, tokens: Tensor, positions: Tensor, call: Any, keep: Tensor | None) -> Tensor:
    """One forward pass over packed nodes; returns the logits ``[1, K, V]``."""
    # A 4-D mask is handed through as it is; ours is never read, it only keeps the model from making one.
    no_mask = torch.zeros(1, 1, 1, 1, device=tokens.device)
    with attention_call(call):
        output = model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=no_mask,
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            return_dict=True,
        )
    logits: Tensor = output.logits
    return logits


@dataclass
class LmHeadTap:
    """What a forward pass sent to its lm_head; with ``cut`` the lm_head itself gets no rows, so no logits are made."""

    cut: bool
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))


_tap: ContextVar[LmHeadTap | None] = ContextVar("specmemo_lm_head_tap", default=None)


def lm_head_hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward-pre-hook of a patched model's lm_head: does nothing but in a context that taps it."""
    tap = _tap.get()
    if tap is None:
        return None
    tap.hidden = args[0][0]
    return (args[0][:, :0], *args[1:]) if tap.cut else None


@contextmanager
def tapped(cut: bool) -> Iterator[LmHeadTap]:
    """Tap the lm_head of a patched model in this context (thread, task) alone."""
    tap = LmHeadTap(cut)
    token = _tap.set(tap)
    try:
        yield tap
    finally:
        _tap.reset(token)


class _Probe:
    """Stands in for attention in a one-token pass: notes shapes, returns the value (one token sees itself alone)."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerKV] = {}
        self.num_qo_heads = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None, **_: Any) -> Tensor:
        if layer in self.layers:
            raise UnsupportedModel(f"attention layer {layer} runs twice in one forward pass")
        self.layers[layer] = LayerKV(k.shape[1], k.shape[2], v.shape[2], k.dtype, k.device)
        self.num_qo_heads = max(self.num_qo_heads, q.shape[1])
        return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def check_config(config: Any) -> None:
    """Refuse by name what the operator can't express, before anything runs.

    Raises:
        UnsupportedModel: naming the model and the setting.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = text.model_type
    if text.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoders can be patched")
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - _LAYER_TYPES:
        raise UnsupportedModel(f"{name} has layers of type {sorted(kinds - _LAYER_TYPES)}, which can't be expressed")
    for setting in ("attention_chunk_size", "alibi", "use_bidirectional_attention"):
        if getattr(text, setting, None):
            raise UnsupportedModel(f"{name} sets {setting}={getattr(text, setting)!r}, which can't be expressed")


@torch.no_grad()
def probe(model: Any) -> ModelFacts:
    """One forward pass of one token, with which the model shows its layers and its lm_head.

    The model needs :func:`install_views` and :func:`lm_head_hook` in place. The lm_head's output is replaced by a rising ramp: when the model's logits rise as well, whatever it does
    after the lm_head (scaling, soft caps) keeps the order of tokens.

    Raises:
        UnsupportedModel: an attention layer didn't come through, or came through twice.
    """
    missing = {"position_ids", "logits_to_keep"} - set(inspect.signature(model.forward).parameters)
    if missing:
        raise UnsupportedModel(f"{type(model).__name__}.forward doesn't take {sorted(missing)}, which packed nodes need")
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModel(f"{type(model).__name__} has no lm_head")
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        raise UnsupportedModel(f"{type(model).__name__} has its weights on the meta device; load them first")
    seen, token = _Probe(), torch.zeros(1, dtype=torch.int64, device=device)
    with tapped(cut=False) as tap, _Ramp(head) as ramp:
        logits = _run(model, token, token, seen, None)[0, 0]
    expected = (model.config.get_text_config()).num_hidden_layers
    if sorted(seen.layers) != list(range(expected)):
        missing = sorted(set(range(expected)) ^ set(seen.layers))
        raise UnsupportedModel(
            f"{type(model).__name__}: attention layers {missing} of {expected} don't use the attention interface"
        )
    # Below float32 a soft cap makes ties of different logits, so there nothing may come after the lm_head.
    rises = bool((logits.diff() >= 0).all())
    same_order = torch.equal(logits, ramp.values) or (rises and tap.hidden.dtype == torch.float32)
    plain = type(head) is nn.Linear and type(head.weight) in (nn.Parameter, Tensor) and not head.weight.is_meta
    return ModelFacts(
        layers=tuple(seen.layers[i] for i in range(expected)),
        num_qo_heads=seen.num_qo_heads,
        hidden_size=tap.hidden.shape[-1],
        vocab_size=len(ramp.values),
        dtype=tap.hidden.dtype,
        device=device,
        plain_lm_head=plain and same_order,
    )


class _Ramp:
    """Replaces the lm_head's output by -1 ... 1 along the vocabulary."""

    def __init__(self, head: nn.Module) -> None:
        self._head, self.values = head, torch.empty(0)

    def __enter__(self) -> _Ramp:
        self._hook = self._head.register_forward_hook(self._replace)
        return self

    def _replace(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        self.values = torch.linspace(-1, 1, output.shape[-1], device=output.device).to(output.dtype)
        return self.values.expand_as(output)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
