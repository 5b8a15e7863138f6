"""Whether a model can be patched: its configuration, modules and dtype, and its results in packed passes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin

from specmemo_kernels import ops
from specmemo_kernels.engine.pressure import is_out_of_memory
from specmemo_kernels.forward.step_attention import AttentionParams
from specmemo_kernels.integrations.distributed.ranks import RankError
from specmemo_kernels.integrations.hf.attention import AttentionCall, attention_call, views_everywhere
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.mixer_pass import tree_pass
from specmemo_kernels.integrations.hf.mixers import Mixers
from specmemo_kernels.integrations.hf.target import ModelFacts, run_packed, tapped
from specmemo_kernels.planning.model_config import RECURRENT_KINDS

Tensor = torch.Tensor

#: Layer kinds with a causal mask, with or without a window, or with a state per sequence. Others (chunked, ...) aren't
#: supported.
_LAYER_TYPES = {"full_attention", "sliding_attention"} | RECURRENT_KINDS
#: Kinds of layers that mix no tokens.
_NO_MIXER = {"moe", "mlp", "dummy"}
#: Methods of generate that a speculative call doesn't run.
STEP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
#: The last part of the names of tables of positions.
_POSITIONS = re.compile(r"(pos|wpe)[^.]*$")
#: Packages of torch's quantised modules.
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
#: Positions of the packed nodes, shuffled: operations besides attention that mix tokens then change the result.
_ORDER = (3, 0, 6, 1, 7, 4, 2, 5)
#: Maximum relative distance of two hidden states by rounding, for float32 and for shorter dtypes.
_TOLERANCE, _SHORT_TOLERANCE = 0.03, 0.3


def check_config(config: Any) -> None:
    """Refuse settings that the attention operator can't express, before anything runs.

    Raises:
        UnsupportedModel: with the model's type and the setting.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = text.model_type
    if text.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoders can be patched")
    kinds = set(getattr(text, "layer_types", None) or ()) - _NO_MIXER
    if kinds - _LAYER_TYPES:
        raise UnsupportedModel(
            f"{name} has layers of type {sorted(kinds - _LAYER_TYPES)}; supported are {', '.join(sorted(_LAYER_TYPES))}"
        )
    for setting in ("attention_chunk_size", "alibi"):
        if getattr(text, setting, None):
            raise UnsupportedModel(f"{name} sets {setting}={getattr(text, setting)!r}, which isn't supported")


def rope_limit(config: Any) -> int | None:
    """The length beyond which the rotary embedding changes (dynamic, longrope); ``None``: no such length."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if not any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds):
        return None
    limits: list[int | None] = [getattr(text, "original_max_position_embeddings", None), text.max_position_embeddings]
    limits += [kind.get("original_max_position_embeddings") for kind in kinds]
    return min(limit for limit in limits if limit)


def table_positions(model: Any) -> int | None:
    """The positions of a model with a table of them, learned or computed; ``None``: it has none."""
    count = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    embeddings = ((name, m.weight) for name, m in model.named_modules() if isinstance(m, nn.Embedding))
    for name, table in (*embeddings, *model.named_buffers()):
        # OPT's has two rows more.
        if count and table.ndim == 2 and count <= table.shape[0] <= count + 2 and _POSITIONS.search(name):
            return int(count)
    return None


def without_wrapper(model: Any) -> Any:
    """The transformers model inside of a ``PeftModel``; other models as they are."""
    is_peft = any(cls.__name__ == "PeftModel" and cls.__module__.startswith("peft.") for cls in type(model).__mro__)
    return model.get_base_model() if is_peft else model


def check_generation(model: Any) -> None:
    """Refuse compiled models, and those whose ``generate`` does more than transformers' loop around ``forward``.

    Raises:
        UnsupportedModel: with what it does.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModel(
            "the active adapter learns a prompt, which PeftModel.generate adds and a speculative call doesn't; use an "
            "adapter of weights (LoRA, ...)"
        )
    inner = without_wrapper(model)
    for module in (inner, *inner.children()):
        if module._compiled_call_impl is not None or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            raise UnsupportedModel(f"{type(module).__name__} is compiled (torch.compile); patch first, then compile")
    if getattr(type(inner), "_sample", GenerationMixin._sample) is not GenerationMixin._sample:
        raise UnsupportedModel(f"{type(inner).__name__} has a _sample of its own, which patch would replace")
    for name in STEP_METHODS:
        owner = next((cls for cls in type(inner).__mro__ if name in vars(cls)), GenerationMixin)
        if owner.__module__.partition(".")[0] != "transformers":
            raise UnsupportedModel(
                f"{owner.__name__} has a {name} of its own ({owner.__module__}), which a speculative call doesn't run"
            )


def check_modules(model: Any) -> None:
    """Raise ``UnsupportedModel`` for modules that :func:`refused_module` names, and for an lm_head without hooks."""
    if reason := refused_module(dict(model.named_modules())):
        raise UnsupportedModel(reason)
    if isinstance(head := model.get_output_embeddings(), torch.jit.ScriptModule):
        raise UnsupportedModel(
            f"the lm_head is a {type(head).__name__} of TorchScript, which takes no hooks; patch the model with its "
            "lm_head as it was before torch.jit"
        )


def refused_module(modules: Mapping[str, nn.Module]) -> str:
    """Why one of a model's modules rules out speculative steps, or an empty string.

    Dynamic quantisation of ``torch.ao`` scales the rows of a call together, so tokens depend on drafts.
    """
    for name, module in modules.items():
        if type(module).__module__.startswith(_QUANTISED):
            return (
                f"{name} is a {type(module).__name__} of torch.ao quantisation, which scales all rows of a call "
                "together: its tokens would depend on the drafts beside them; patch the model as it was before "
                "quantize_dynamic, or quantise its weights alone (torchao's weight-only methods, bitsandbytes)"
            )
    return ""


def check_numbers(facts: ModelFacts, backend: str, name: str = "the model") -> None:
    """Raise ``ValueError`` if the backend doesn't support the model's devices or dtypes."""
    used = {(layer.device, layer.dtype) for layer in facts.layers}
    if facts.plain_lm_head:
        used.add((facts.device, facts.dtype))
    for device, dtype in sorted(used, key=str):
        if reason := ops.unsuited(backend, device, dtype):
            raise ValueError(f"{name} computes in {dtype} on {device}, but {reason}")


@contextmanager
def unsupported_errors(model: nn.Module) -> Iterator[None]:
    """Convert errors of a model's own code on packed nodes to :class:`UnsupportedModel`."""
    try:
        yield
    except (UnsupportedModel, RankError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise UnsupportedModel(f"{type(model).__name__} can't run a pass over packed nodes ({reason})") from error


@torch.no_grad()
def check_equivalence(
    model: Any, device: torch.device, vocab_size: int, mixers: Mixers, cut: bool
) -> tuple[dict[int, int | None], int | None]:
    """Compare the lm_head's input in the model's own pass over a short prompt and in a packed pass.

    Runs three or four passes over 8 tokens. The model must be attached.

    Args:
        device: device of the tokens. vocab_size: the tokens are below it.
        mixers: the layers with a state per sequence.
        cut: run the lm_head on no rows, if no operation follows it.

    Returns:
        The sliding window of each layer, by layer index, and ``cached_tokens`` of
        :class:`specmemo_kernels.integrations.hf.target.ModelFacts`.

    Raises:
        UnsupportedModel: its attention masks are not supported, or the hidden states differ.
    """
    tokens = _prompt(model.config, vocab_size).to(device)
    positions = torch.arange(len(tokens), device=device)
    inputs = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False, "return_dict": True}
    mask = torch.ones_like(tokens)[None]
    with unsupported_errors(model):
        prepared = model.prepare_inputs_for_generation(attention_mask=mask, is_first_iteration=True, **inputs)
        windows = _observe_masks(model, inputs, cut)
        cached_tokens = _cached_tokens(model, windows)
        with tapped(cut) as own_tap:
            model(attention_mask=mask, **inputs)
        own = prepared.get("position_ids")
        if own is None or not bool((own == positions).all()):
            _check_positions(model, inputs | {"attention_mask": mask, "position_ids": own}, own_tap.hidden, cut)
        order = torch.tensor(_ORDER, device=device)
        with tapped(cut) as tap, mixers.running(tree_pass(mixers, order.argsort())):
            run_packed(model, tokens[order], positions[order], _dense_attention(order), None, windows)
    expected, packed = own_tap.hidden, tap.hidden[order.argsort().to(tap.hidden.device)]
    short = any(p.dtype.itemsize < 4 for p in model.parameters()) or expected.dtype.itemsize < 4
    limit = _SHORT_TOLERANCE if short else _TOLERANCE
    distance = _distance(expected, packed)
    if distance > limit:
        raise UnsupportedModel(
            f"{type(model).__name__} computes other hidden states for packed nodes than for a prompt (relative "
            f"distance {distance:.2g}, at most {limit} by rounding); an operation besides attention mixes tokens"
        )
    return windows, cached_tokens


def _check_positions(model: Any, inputs: dict[str, Any], expected: Tensor, cut: bool) -> None:
    """Compare a pass over ``generate``'s own positions with one over 0, 1, 2 and so on, which packed nodes have.

    Positions that the model computes, if it gets ``None``, must be these; others may be shifted where only their
    differences matter, as in rotary embeddings.

    Raises:
        UnsupportedModel: the hidden states differ.
    """
    with tapped(cut) as tap:
        model(**{name: value for name, value in inputs.items() if value is not None})
    given = inputs["position_ids"] is not None
    limit = _SHORT_TOLERANCE if expected.dtype.itemsize < 4 else _TOLERANCE
    same = torch.equal(tap.hidden.nan_to_num(), expected.nan_to_num())
    if not same and not (given and _distance(expected, tap.hidden) < limit / 10):
        found = inputs["position_ids"].flatten().tolist() if given else "those that it computes"
        raise UnsupportedModel(
            f"{type(model).__name__}.generate has other positions than 0, 1, 2 and so on, which packed nodes have: "
            f"{found}, with other hidden states"
        )


def _prompt(config: Any, vocab_size: int) -> Tensor:
    """One token for each node of :data:`_ORDER`, without special tokens (padding, an image)."""
    special = _special_tokens(config.to_dict())
    plain = [token for i in range(1, 64) if (token := 7919 * i % vocab_size) not in special]
    return torch.tensor((plain or [0])[: len(_ORDER)] * len(_ORDER), device="cpu")[: len(_ORDER)]


def _special_tokens(settings: dict[str, Any]) -> set[int]:
    tokens: set[int] = set()
    for name, value in settings.items():
        if isinstance(value, dict):
            tokens |= _special_tokens(value)
        elif str(name).endswith(("token_id", "token_index")):
            tokens |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    return tokens


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; restores each module's mode at the end."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _observe_masks(model: Any, inputs: dict[str, Any], cut: bool) -> dict[int, int | None]:
    """The window of each layer, from a pass in which the model makes masks for our attention function."""
    windows: dict[int, int | None] = {}

    def record_window(layer: int, q: Tensor, k: Tensor, v: Tensor, *, params: AttentionParams) -> Tensor:
        windows[layer] = params.window
        return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)

    with views_everywhere(model), tapped(cut), attention_call(record_window):
        model(**inputs)
    return windows


def _cached_tokens(model: Any, windows: dict[int, int | None]) -> int | None:
    """The smallest cache size of generate's layers whose mask sees more tokens; ``None`` if there is none."""
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    sizes = {i: layer.sliding_window for i, layer in enumerate(cache.layers) if getattr(layer, "is_sliding", False)}
    # A cache of one token keeps all of them (transformers 5.24).
    differ = (size for i, size in sizes.items() if (window := windows.get(i)) is None or size < window or size == 1)
    return min(differ, default=None)


def _dense_attention(positions: Tensor) -> AttentionCall:
    """Attention over one sequence with rows at ``positions``, in float32: the operator's specification."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, params: AttentionParams) -> Tensor:
        scale, window, softcap, sinks = params
        repeats = q.shape[1] // k.shape[1]
        keys, values = (t.float().repeat_interleave(repeats, dim=1) for t in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q.float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows = positions.to(q.device)
        distances = rows[:, None] - rows[None, :]
        scores = scores.masked_fill((distances < 0) | (distances >= (window or len(rows))), float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, len(rows), 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(rows)]
        return torch.einsum("hnm,mhd->nhd", weights, values).to(v.dtype).contiguous()

    return attend


def _distance(expected: Tensor, packed: Tensor) -> float:
    """The median row's distance relative to its norm, over the finite rows of ``expected``."""
    expected, packed = expected.float(), packed.to(expected.device).float()
    rows = expected.isfinite().all(dim=-1)
    if not bool(rows.any()):
        return 0.0
    lengths = expected[rows].norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    relative = (expected[rows] - packed[rows]).norm(dim=-1) / lengths
    return float(relative.nan_to_num(nan=float("inf")).median())
