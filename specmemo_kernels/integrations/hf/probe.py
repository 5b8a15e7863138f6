"""What small forward passes tell about a transformers model: its layers, its lm_head, memory and time of a pass."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.integrations.hf.attention import UnsupportedModel
from specmemo_kernels.integrations.hf.changes import foreign_code
from specmemo_kernels.integrations.hf.equivalence import check_equivalence, unsupported_errors
from specmemo_kernels.integrations.hf.target import LmHeadTap, ModelFacts, current_tap, run_packed, tapped
from specmemo_kernels.planning.footprint import PassBytes
from specmemo_kernels.planning.host_allocator import allocated_bytes, free_library_buffers
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.tree.choice import PassSeconds

Tensor = torch.Tensor

#: Layer kinds whose mask is "causal, maybe with a window"; anything else (chunked, linear, ...) has other rules.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
#: Rows of the passes whose memory is measured: few, so that patching is quick; not one, which models may treat apart.
_MEASURED_ROWS = (8, 16)
#: Library buffers below this size aren't counted: Python's own objects vary by as much from call to call.
_LEAST_COUNTED = 2 << 20
#: Rows of the passes whose time is measured: a single one is another product (a vector) than several.
_TIMED_ROWS = (1, 2, 8, 32, 128)
#: A pass is timed once more while it has taken less than this together, three times at most.
_TIMED_SECONDS = 0.3


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
    for setting in ("attention_chunk_size", "alibi"):
        if getattr(text, setting, None):
            raise UnsupportedModel(f"{name} sets {setting}={getattr(text, setting)!r}, which can't be expressed")


@torch.no_grad()
def probe(model: Any) -> ModelFacts:
    """One forward pass of one token, with which the model shows its layers and its lm_head, and three that compare.

    The model must be attached (:mod:`specmemo_kernels.integrations.hf.attach`). The lm_head's output is replaced by a
    rising ramp: when the model's logits rise as well, whatever it does after the lm_head (scaling, soft caps) keeps
    the order of tokens.

    Raises:
        UnsupportedModel: an attention layer didn't come through, or came through twice, or packed passes compute
            something else than the model (:func:`check_equivalence`).
    """
    device, head = _lm_head_module(model)
    seen, token = _Layers(), torch.zeros(1, dtype=torch.int64, device=device)
    with unsupported_errors(model), tapped(cut=False) as tap, _Ramp(head, tap) as ramp:
        logits = run_packed(model, token, token, seen, None)[0, 0]
    expected = range(model.config.get_text_config().num_hidden_layers)
    if missing := sorted(set(expected) ^ set(seen.layers)):
        raise UnsupportedModel(
            f"{type(model).__name__}: attention layers {missing} of {len(expected)} don't use the attention interface"
        )
    if not len(ramp.values):
        raise UnsupportedModel(f"{type(model).__name__} makes its logits without its lm_head ({type(head).__name__})")
    plain = type(head) is nn.Linear and _rows_are_plain(head.weight) and not foreign_code(model)
    exact = torch.equal(logits, ramp.values)
    # Below float32 a soft cap makes ties of different logits, so there nothing may come after the lm_head.
    rises = bool((logits.diff() >= 0).all()) and tap.hidden.dtype == torch.float32
    masks = check_equivalence(model, device, len(ramp.values), cut=plain and exact)
    return ModelFacts(
        layers=tuple(seen.layers[i] for i in expected),
        num_qo_heads=tuple(seen.num_qo_heads[i] for i in expected),
        hidden_size=tap.hidden.shape[-1],
        vocab_size=len(ramp.values),
        dtype=tap.hidden.dtype,
        device=device,
        plain_lm_head=plain and (exact or rises),
        exact_lm_head=plain and exact,
        windows=masks.windows,
        cached_tokens=masks.cached_tokens,
    )


def _rows_are_plain(weight: Tensor) -> bool:
    """Whether a matrix is a plain tensor in memory, or, over several ranks, whole rows of one on each."""
    if hasattr(weight, "placements"):
        return all(place.is_shard(0) or place.is_replicate() for place in weight.placements)
    return type(weight) in (nn.Parameter, Tensor) and not weight.is_meta


def lm_head_of(model: Any) -> nn.Module:
    """The module that logits come out of.

    Raises:
        UnsupportedModel: there is none.
    """
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        name = type(model).__name__
        raise UnsupportedModel(f"{name} has no lm_head, get_output_embeddings() is None; load a causal language model")
    return head


def _lm_head_module(model: Any) -> tuple[torch.device, nn.Module]:
    """Where tokens go in, and the module that they come out of; refuses models in which one of them is missing."""
    name = type(model).__name__
    missing = {"position_ids", "logits_to_keep"} - set(inspect.signature(model.forward).parameters)
    if missing:
        raise UnsupportedModel(f"{name}.forward doesn't take {sorted(missing)}, which packed nodes need")
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        raise UnsupportedModel(f"{name} has its weights on the meta device; load them first")
    return device, lm_head_of(model)


class _Layers:
    """Stands in for attention in a one-token pass: notes shapes, returns the value (one token sees itself alone)."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerKV] = {}
        self.num_qo_heads: dict[int, int] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        if layer in self.layers:
            raise UnsupportedModel(f"attention layer {layer} runs twice in one forward pass")
        self.layers[layer] = LayerKV(k.shape[1], k.shape[2], v.shape[2], k.dtype, k.device)
        self.num_qo_heads[layer] = q.shape[1]
        return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


class _Ramp:
    """Replaces the lm_head's output by -1 ... 1 along the vocabulary in passes with this ``tap``, not in others."""

    def __init__(self, head: nn.Module, tap: LmHeadTap) -> None:
        self._head, self._tap, self.values = head, tap, torch.empty(0)

    def __enter__(self) -> _Ramp:
        self._hook = self._head.register_forward_hook(self._replace)
        return self

    def _replace(self, _: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        if current_tap() is not self._tap:
            return None
        self.values = torch.linspace(-1, 1, output.shape[-1], device=output.device).to(output.dtype)
        return self.values.expand_as(output)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def measure_passes(model: Any, facts: ModelFacts) -> tuple[PassBytes, PassBytes]:
    """The bytes that a forward pass makes and drops, the operators' own workspace apart.

    Args:
        model: as for :func:`probe`, which made ``facts``.

    Returns:
        What a pass holds at most up to its lm_head, by its rows, and what the rows that the lm_head gets add to that.
        The latter is nothing with an exact lm_head: logits are then made of one row at a time, if at all.
    """
    few, many = (_trace(model, rows, facts) for rows in _MEASURED_ROWS)
    forward, logits = (
        PassBytes.fitted((_MEASURED_ROWS[0], a), (_MEASURED_ROWS[1], b)) for a, b in zip(few, many, strict=True)
    )
    return forward, PassBytes() if facts.exact_lm_head else logits


@torch.inference_mode()
def measure_libraries(model: Any, facts: ModelFacts) -> int:
    """Bytes that libraries keep on a CPU after a forward pass, beside tensors: packed matrices above all.

    They hardly depend on the number of rows, and not on the length of texts.
    """
    if facts.device.type != "cpu":
        return 0
    tokens = torch.zeros(_MEASURED_ROWS[-1], dtype=torch.int64)
    kept = []
    for _ in range(2):  # what only the first pass sets up isn't kept for passes
        free_library_buffers()
        before = allocated_bytes()
        with tapped(cut=facts.exact_lm_head):
            run_packed(model, tokens, tokens, _like_attention, None)
        kept.append(allocated_bytes() - before)
    return kept[-1] if kept[-1] >= _LEAST_COUNTED else 0


@torch.no_grad()
def _trace(model: Any, rows: int, facts: ModelFacts) -> tuple[list[int], list[int]]:
    """Bytes held after each operator of a pass over ``rows`` rows: up to the lm_head, and on top of that from there on.

    All rows are the same token at the same place: a mixture of experts sends them all to the same experts, which is
    the most that one expert can get.
    """
    tokens = torch.zeros(rows, dtype=torch.int64, device=facts.device)
    before: list[int] = []
    tracker = MemoryTracker(trace=True)
    with tapped(cut=facts.exact_lm_head) as tap:

        def note(*_: Any) -> None:
            if current_tap() is tap:  # not a pass of another thread
                before.extend(tracker.trace)

        hook = model.get_output_embeddings().register_forward_pre_hook(note)
        try:
            with tracker:
                run_packed(model, tokens, tokens, _like_attention, None)
        finally:
            hook.remove()
    return before, [max(0, held - before[-1]) for held in tracker.trace[len(before) :]]


@torch.inference_mode()
def time_passes(model: Any, facts: ModelFacts, most_rows: int, agreed: Callable[[float], float] = float) -> PassSeconds:
    """Seconds of forward passes up to the lm_head by their rows, ``most_rows`` at most; attention itself left out.

    ``agreed`` turns this rank's seconds into those that all ranks go by, so that they run as many passes.
    """
    points = []
    for rows in sorted({min(rows, most_rows) for rows in _TIMED_ROWS}):
        tokens = torch.zeros(rows, dtype=torch.int64, device=facts.device)
        taken: list[float] = []
        while len(taken) < 4 and sum(taken) < _TIMED_SECONDS:
            started = time.perf_counter()
            with tapped(cut=facts.exact_lm_head):
                run_packed(model, tokens, tokens, _like_attention, None)
            if facts.device.type == "cuda":
                torch.cuda.synchronize(facts.device)
            taken.append(agreed(time.perf_counter() - started))
        points.append((rows, min(taken)))
    return PassSeconds(tuple(points))


def _like_attention(_: int, q: Tensor, k: Tensor, v: Tensor, **__: Any) -> Tensor:
    """Makes what the attention operator makes: its result, and its logarithms while it runs."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    result = v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    del lse
    return result
