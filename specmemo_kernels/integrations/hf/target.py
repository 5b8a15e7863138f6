"""A transformers model as the target model of the speculative loop: its forward pass, and the hooks that it needs."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from specmemo_kernels import ops
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.step_attention import AttentionParams, StepAttention
from specmemo_kernels.forward.target import TargetOutput
from specmemo_kernels.integrations.hf.attention import (
    AttentionCall,
    Windows,
    attention_modules,
    install_view,
    remove_view,
)
from specmemo_kernels.integrations.hf.compressed import CompressedWeights, stored_weight
from specmemo_kernels.integrations.hf.features import FeatureTaps
from specmemo_kernels.integrations.hf.fuse import FusedLeaves
from specmemo_kernels.integrations.hf.library_buffers import LibraryBuffers
from specmemo_kernels.integrations.hf.mask import UnsupportedModel, pass_mask
from specmemo_kernels.integrations.hf.mixer_pass import MixerPass
from specmemo_kernels.integrations.hf.mixers import Mixers

Tensor = torch.Tensor


@dataclass(frozen=True)
class ModelFacts:
    """Facts from a model's probe (:func:`specmemo_kernels.integrations.hf.probe.probe`).

    Attributes:
        layers: the keys and values of each attention layer.
        num_qo_heads: query heads of each layer.
        hidden_size, dtype: of the lm_head's input. device: of the model's input and the hidden states.
        vocab_size: rows of the lm_head.
        plain_lm_head: the lm_head is an ``nn.Linear`` and the model keeps the order of its outputs, so that
            :func:`ops.lm_head_argmax` returns the model's token; else the model computes logits.
        exact_lm_head: the lm_head's output is the model's logits, so that single-row logits can be computed.
        windows: the sliding window of each layer's attention mask, ``None`` for full attention.
        cached_tokens: smallest size of a layer cache of generate that holds fewer tokens than the layer's mask sees;
            for longer texts the model's own tokens differ. ``None``: no such layer.
        table_positions: the positions that the model has embeddings of; ``None``: of any.
        input_tokens: the tokens that the model has embeddings of; ``None``: of all. A padded lm_head has more rows.
        leaves: the modules that operators compute.
        mixers: the layers with a state per sequence.
        attention: the layer index of each attention layer. last_attention: that of the last one in a pass.
        compressed: the modules with compressed weights.
        taps: the hidden states that the drafter reads.
        inference: passes run in inference mode; else without gradients.
    """

    layers: tuple[LayerKV, ...]
    num_qo_heads: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    plain_lm_head: bool
    exact_lm_head: bool
    windows: tuple[int | None, ...] = ()
    cached_tokens: int | None = None
    table_positions: int | None = None
    input_tokens: int | None = None
    leaves: FusedLeaves = field(default_factory=FusedLeaves)
    mixers: Mixers = field(default_factory=Mixers)
    attention: tuple[int, ...] = ()
    last_attention: int = -1
    compressed: CompressedWeights = field(default_factory=CompressedWeights)
    taps: FeatureTaps = field(default_factory=FeatureTaps)
    inference: bool = True

    @contextmanager
    def pass_mode(self) -> Iterator[None]:
        """The mode of the model's passes. Inference mode saves 5 % of a small model's step."""
        with torch.inference_mode(self.inference), torch.no_grad():
            yield


class HFTarget:
    """Runs ``model`` on packed nodes and captures its lm_head's input.

    Implements :class:`specmemo_kernels.forward.target.TargetModel`.
    """

    static = True

    def __init__(self, model: nn.Module, facts: ModelFacts, backend: str | None) -> None:
        self.model, self.facts, self.backend = model, facts, backend
        self.device = facts.device
        self.vocab_size = min(facts.vocab_size, facts.input_tokens or facts.vocab_size)
        self._windows = dict(zip(facts.attention, facts.windows, strict=True))
        self._places = {layer: place for place, layer in enumerate(facts.attention)}
        self.invariant, self.reads_hidden = facts.leaves.invariant, facts.plain_lm_head and facts.exact_lm_head
        self._buffers = LibraryBuffers(model, facts)
        self._spread = len({facts.device, *(layer.device for layer in facts.layers)}) > 1

    def forward(self, batch: TreeBatch, attention: StepAttention, keep: Tensor | None, logits: bool) -> TargetOutput:
        self._buffers.prepare(len(batch.tokens))
        by_model = not self.facts.plain_lm_head or (logits and not self.facts.exact_lm_head)
        # Passes within a prompt keep no row. The model's lm_head gets one: bitsandbytes' product of no rows ends the
        # process.
        no_rows = by_model and keep is not None and len(keep) == 0
        keep = keep.new_zeros(1) if keep is not None and no_rows else keep
        # A model on several devices would move an index tensor to the first device; the rows are on the last device.
        rows = keep.tolist() if keep is not None and self._spread else keep
        all_are_read = keep is None or self.facts.mixers.mixers or self.facts.taps.ids
        last = None if keep is None or all_are_read or self._spread else (self.facts.last_attention, keep)
        with self.facts.pass_mode(), tapped(cut=not by_model) as tap, self.facts.taps.captured() as states:
            tokens, leaves, mixers = batch.tokens.clamp(min=0), self.facts.leaves, self.facts.mixers
            call: AttentionCall = attention
            current = None
            if mixers.mixers:
                pool = attention.pool.states
                assert pool is not None, "the pool has the mixers' states"
                call, current = self._placed(attention), MixerPass.of_batch(pool, batch)
            positions = batch.positions
            if self.facts.table_positions is not None:  # nodes behind the end of a text are never accepted
                positions = positions.clamp(max=self.facts.table_positions - 1)
            with mixers.running(current):
                output = run_packed(self.model, tokens, positions, call, rows, self._windows, leaves, last=last)
            features = self._features(states)
        kept = slice(0, 0 if no_rows else None)
        own = output[0].to(self.device)[kept] if by_model else None
        return TargetOutput(tap.hidden.to(self.device)[kept], own, features)

    def _placed(self, attention: StepAttention) -> AttentionCall:
        """``attention`` for a model in which not every layer has keys and values."""

        def call(layer: int, q: Tensor, k: Tensor, v: Tensor, *, params: AttentionParams) -> Tensor:
            return attention(self._places[layer], q, k, v, params=params)

        return call

    def _features(self, states: dict[int, Tensor]) -> Tensor | None:
        """``[N, F]``: the states that the drafter reads, one after the other."""
        parts = [states[i][0].to(self.device) for i in self.facts.taps.ids]
        return torch.cat(parts, dim=1) if len(parts) > 1 else next(iter(parts), None)

    def argmax(self, output: TargetOutput) -> Tensor:
        if output.logits is not None:
            return output.logits.argmax(dim=-1)
        weight, bias = lm_head(self.model)
        hidden = output.hidden.to(weight.device)
        kernels = ops.kernels(self.backend, weight.device)
        return kernels.lm_head_argmax(hidden, weight, bias).to(self.device)

    def row_logits(self, output: TargetOutput, rows: list[int]) -> Tensor:
        if output.logits is not None:
            return output.logits[rows]
        weight, bias = lm_head(self.model)
        kernels = ops.kernels(self.backend, weight.device)
        hidden = output.hidden[rows].to(weight.device)
        return kernels.linear(hidden, weight, bias, None, self.invariant).to(self.device)


def lm_head_of(model: Any) -> nn.Module:
    """The model's lm_head.

    Raises:
        UnsupportedModel: the model has none.
    """
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        name = type(model).__name__
        raise UnsupportedModel(f"{name} has no lm_head, get_output_embeddings() is None; load a causal language model")
    return head


def lm_head(model: Any) -> tuple[Tensor, Tensor | None]:
    """Weight ``[V, hidden_size]`` and bias ``[V]`` (or ``None``) of a plain lm_head, detached; this rank's rows."""
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    return local_part(stored_weight(head)).detach(), None if bias is None else local_part(bias).detach()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor; other tensors as they are."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def run_packed(
    model: Any,
    tokens: Tensor,
    positions: Tensor,
    call: Any,
    keep: Tensor | list[int] | None,
    windows: Windows | None = None,
    leaves: FusedLeaves | None = None,
    last: tuple[int, Tensor] | None = None,
    products: bool = True,
) -> Tensor:
    """The logits ``[1, K, V]`` of a forward pass over packed nodes.

    Args:
        tokens, positions: ``[N]`` int64.
        call: replaces attention.
        keep: rows for the lm_head, ``[K]`` int64 or a list; ``None``: all.
        windows: sliding windows by layer; else the windows that layers pass to their attention function.
        leaves: modules that operators compute; without ``products`` not linear layers and MLPs.
        last: the last layer with attention, and ``keep``: the other rows aren't computed behind its attention.
    """
    with (leaves or FusedLeaves()).running(len(tokens), tokens.device, call, windows, last, products):
        output = model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=step_mask(tokens.device),
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            return_dict=True,
            **_without_router_logits(type(model).forward),
        )
    logits: Tensor = output.logits
    return logits


@cache
def _without_router_logits(forward: Callable[..., Any]) -> dict[str, bool]:
    """The argument that leaves out a mixture's balancing loss, which reads the attention mask."""
    name = "output_router_logits"
    return {name: False} if name in inspect.signature(forward).parameters else {}


@cache
def step_mask(device: torch.device) -> Tensor:
    """The mask of passes over packed nodes; its content isn't read."""
    with torch.inference_mode(False):
        return pass_mask(device)


@dataclass
class LmHeadTap:
    """The input of a forward pass's lm_head; with ``cut`` the lm_head itself gets no rows and computes no logits."""

    cut: bool
    hidden: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))


_tap: ContextVar[LmHeadTap | None] = ContextVar("specmemo_lm_head_tap", default=None)


def lm_head_hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward-pre-hook of a patched model's lm_head; without effect outside of :func:`tapped`."""
    tap = _tap.get()
    if tap is None:
        return None
    tap.hidden = args[0][0]
    return (args[0][:, :0], *args[1:]) if tap.cut else None


def current_tap() -> LmHeadTap | None:
    """The tap of this context, or ``None``."""
    return _tap.get()


@contextmanager
def tapped(cut: bool) -> Iterator[LmHeadTap]:
    """Capture the input of a patched model's lm_head in this context (thread, task) only."""
    tap = LmHeadTap(cut)
    token = _tap.set(tap)
    try:
        yield tap
    finally:
        _tap.reset(token)


#: Users per module. Models may share modules: a draft model serves several targets or is itself patched; two models
#: have one lm_head or one decoder. The first user installs the hook or view, the last user removes it.
_hook_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_view_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_users_lock = threading.Lock()


def attach(model: Any) -> Callable[[], None]:
    """Install the lm_head's hook and the config views; the returned function removes them, once.

    Raises:
        UnsupportedModel: the model has no lm_head.
    """
    head = lm_head_of(model)
    detach_views = attach_views(model)
    _count_users(_hook_users, [head], 1, _install_hook, _remove_hook)
    attached = [True]

    def detach() -> None:
        if attached:
            attached.clear()
            _count_users(_hook_users, [head], -1, _install_hook, _remove_hook)
            detach_views()

    return detach


def attach_views(model: nn.Module) -> Callable[[], None]:
    """Install the config views of a model's or a layer's attention; the returned function removes them."""
    layers = attention_modules(model)
    _count_users(_view_users, layers, 1, install_view, remove_view)
    return partial(_count_users, _view_users, layers, -1, install_view, remove_view)


def _count_users(
    users: weakref.WeakKeyDictionary[nn.Module, int],
    modules: list[nn.Module],
    change: int,
    install: Callable[[nn.Module], None],
    remove: Callable[[nn.Module], None],
) -> None:
    with _users_lock:
        for module in modules:
            users[module] = users.get(module, 0) + change
            if not users[module]:
                del users[module]
                remove(module)
            elif change > 0:
                install(module)


def _install_hook(head: nn.Module) -> None:
    hooks = head._forward_pre_hooks  # this dict stays: handles of the user's hooks refer to it
    if lm_head_hook not in hooks.values():
        head.register_forward_pre_hook(lm_head_hook)
        vars(hooks)["__reduce_ex__"] = partial(_reduce_others, hooks)


def _remove_hook(head: nn.Module) -> None:
    hooks = head._forward_pre_hooks
    vars(hooks).pop("__reduce_ex__", None)
    for key in [key for key, hook in hooks.items() if hook is lm_head_hook]:
        del hooks[key]


def _reduce_others(hooks: Mapping[int, Any], protocol: Any) -> Any:
    """Copy and pickle the hooks of an lm_head without ours."""
    return OrderedDict((key, hook) for key, hook in hooks.items() if hook is not lm_head_hook).__reduce_ex__(protocol)
