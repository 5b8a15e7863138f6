"""Facts about a transformers model from small forward passes: its layers and its lm_head."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.engine.pressure import is_out_of_memory
from specmemo_kernels.integrations.hf.changes import foreign_code
from specmemo_kernels.integrations.hf.checks import check_equivalence, table_positions, unsupported_errors
from specmemo_kernels.integrations.hf.coded import plain_weight
from specmemo_kernels.integrations.hf.find_mixers import checked, is_recurrent, trials
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.mixers import Mixers
from specmemo_kernels.integrations.hf.target import ModelFacts, current_tap, lm_head_of, run_packed, tapped

Tensor = torch.Tensor
#: Of the ramp that replaces an lm_head's output.
_LARGEST_LOGIT = 1000.0


@torch.no_grad()
def probe(model: Any) -> ModelFacts:
    """Run a forward pass of one token to record the layers and the lm_head, and three passes that compare results.

    The model must be attached (:func:`specmemo_kernels.integrations.hf.target.attach`). A ramp replaces the lm_head's
    output: if the model's logits rise as well, its later operations (scaling, soft caps) keep the order of tokens. The
    ramp has every magnitude up to 1000, where a soft cap or a clamp shows in each dtype.

    Raises:
        UnsupportedModel: an attention layer wasn't called, or was called twice, or under autocast, or packed passes
            compute other hidden states than the model (:func:`check_equivalence`).
    """
    name = type(model).__name__
    if missing := {"position_ids", "logits_to_keep"} - set(inspect.signature(model.forward).parameters):
        raise UnsupportedModel(f"{name}.forward doesn't take {sorted(missing)}, which packed nodes need")
    embedding, head = model.get_input_embeddings().weight, lm_head_of(model)
    device, input_tokens = embedding.device, embedding.shape[0]
    if device.type == "meta":
        raise UnsupportedModel(f"{name} has its weights on the meta device; load them first")
    mixers = find_mixers(model, device) if is_recurrent(model.config) else Mixers()
    token = torch.zeros(1, dtype=torch.int64, device=device)
    layers, ramp, logits, hidden = _recorded_pass(model, head, token)
    expected = range(model.config.get_text_config().num_hidden_layers)
    with_keys = list(layers) if mixers.mixers else expected  # the other layers may have no keys
    if different := sorted(set(with_keys) ^ set(layers)):
        raise UnsupportedModel(
            f"{name}: attention layers {different} of {len(expected)} don't use the attention interface"
        )
    if not layers:
        raise UnsupportedModel(f"{name} has no attention layer that uses the attention interface, only states")
    if not len(ramp):
        raise UnsupportedModel(f"{name} computes logits without calling its lm_head ({type(head).__name__})")
    plain = plain_weight(head) is not None and not foreign_code(model)
    exact = torch.equal(logits, ramp)
    # In shorter dtypes a soft cap makes ties of different logits: no operation may follow the lm_head.
    rises = bool((logits.diff() >= 0).all()) and hidden.dtype == torch.float32
    windows, cached_tokens = check_equivalence(model, device, min(len(ramp), input_tokens), mixers, cut=plain and exact)
    return ModelFacts(
        layers=tuple(layers[i][0] for i in with_keys),
        num_qo_heads=tuple(layers[i][1] for i in with_keys),
        hidden_size=hidden.shape[-1],
        vocab_size=len(ramp),
        dtype=hidden.dtype,
        device=device,
        plain_lm_head=plain and (exact or rises),
        exact_lm_head=plain and exact,
        windows=tuple(windows[i] for i in with_keys),
        cached_tokens=cached_tokens,
        table_positions=table_positions(model),
        input_tokens=input_tokens if input_tokens < len(ramp) else None,
        mixers=mixers,
        attention=tuple(with_keys),
        last_attention=list(layers)[-1],
        inference=_runs_in_inference_mode(model, token),
    )


def _runs_in_inference_mode(model: Any, token: Tensor) -> bool:
    """Whether a pass that runs without gradients also runs in inference mode. Some tensor subclasses don't: torch can't
    set the version of a tensor that they make.
    """
    try:
        with torch.inference_mode(), tapped(cut=False):
            run_packed(model, token, token, like_attention, None)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def find_mixers(model: Any, device: torch.device) -> Mixers:
    """The layers with a state per sequence, from a pass of one token.

    Raises:
        UnsupportedModel: one of them can't be fed in pieces.
    """
    token = torch.zeros(1, dtype=torch.int64, device=device)
    with unsupported_errors(model):
        with tapped(cut=False), trials(model) as found:
            run_packed(model, token, token, like_attention, None)
        return checked(found)


def _recorded_pass(
    model: Any, head: nn.Module, token: Tensor
) -> tuple[dict[int, tuple[LayerKV, int]], Tensor, Tensor, Tensor]:
    """Run one token through the model, with the lm_head's output replaced by a ramp.

    Returns:
        Each layer's keys and values with its query heads, the ramp, the logits, and the lm_head's input.
    """
    layers: dict[int, tuple[LayerKV, int]] = {}
    ramp = torch.empty(0, device="cpu")

    def record_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        _refuse_autocast(model, q.device)
        if layer in layers:
            raise UnsupportedModel(f"attention layer {layer} runs twice in one forward pass")
        layers[layer] = LayerKV(k.shape[1], k.shape[2], v.shape[2], k.dtype, k.device), q.shape[1]
        return single_values(q, k, v)  # a single token attends to itself only

    def replace_by_ramp(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        nonlocal ramp
        if current_tap() is not tap:  # a pass of another thread
            return None
        _refuse_autocast(model, output.device)
        steps = torch.linspace(-1, 1, output.shape[-1], device=output.device)
        ramp = (steps * math.asinh(_LARGEST_LOGIT)).sinh().to(output.dtype)
        return ramp.expand_as(output)

    with unsupported_errors(model), tapped(cut=False) as tap, head.register_forward_hook(replace_by_ramp):
        logits = run_packed(model, token, token, record_layer, None)[0, 0]
    return layers, ramp, logits, tap.hidden


def _refuse_autocast(model: Any, device: torch.device) -> None:
    """Raise if autocast is on, the caller's or one inside of ``forward``: our operators don't follow it."""
    if torch.is_autocast_enabled(device.type):
        raise UnsupportedModel(
            f"{type(model).__name__} runs under autocast for {device.type}; load it in the wanted dtype instead, and "
            "patch it without autocast"
        )


def like_attention(_: int, q: Tensor, k: Tensor, v: Tensor, **__: Any) -> Tensor:
    """Allocate the attention operator's tensors: the result, and the log-sum-exp while it runs."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    result = single_values(q, k, v)
    del lse
    return result


def single_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
