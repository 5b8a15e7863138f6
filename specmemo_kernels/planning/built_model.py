"""A decoder's weights as transformers builds them: on the meta device, shapes without memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from specmemo_kernels.planning.decoder_matrices import DecoderWeights, Matrix
from specmemo_kernels.planning.memory_tracker import MemoryTracker

#: Parts of names of parameters that passes over text don't read.
_TOWERS = re.compile(r"vision|visual|image|audio|multi_modal_projector")
#: Names of the feed-forward layers' activation in transformers' configurations.
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation", "afn")
_FEED_FORWARD = re.compile(r"mlp|feed_forward|ffn|moe|\.fc\d|intermediate|shared_expert|\d\.output\.|\.(up|down)_proj")


def build(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], DecoderWeights] | str:
    """The text configuration with transformers' defaults and common names, and its weights; or why there are none.

    A multimodal configuration is built whole if transformers has a causal language model for it, else its text part.
    """
    text = config.get("text_config") or config
    wholes = [config] if text is config else [config, text]
    known = [whole for whole in wholes if isinstance(whole.get("model_type"), str)]
    reason = "the configuration has no model_type"
    for whole in known:
        try:
            with _without_warnings():
                return _build(whole)
        except Exception as error:  # configurations and models raise errors of every type
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return reason


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Without transformers' warnings, which are about running the model."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _build(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], DecoderWeights]:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"transformers doesn't know model_type {kind!r}")
    stored = {key: value for key, value in config.items() if key != "quantization_config"}
    made = CONFIG_MAPPING[kind].from_dict(stored)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"), torch.no_grad():
        model = make(made)
    text = made.get_text_config()
    names = {"hidden_size", "num_hidden_layers", "num_attention_heads", *text.attribute_map}
    fields = text.to_dict() | {name: getattr(text, name) for name in names if hasattr(text, name)}
    return fields, built_weights(model, text.hidden_size)


def activation_tensors(fields: Mapping[str, Any]) -> int:
    """The most tensors that a text configuration's activation holds beside its input; 0: it is unknown.

    GELU by one operator holds one, ``gelu_new`` three.
    """
    from transformers.activations import ACT2FN

    name = next((fields[key] for key in _ACTIVATIONS if isinstance(fields.get(key), str)), None)
    if name not in ACT2FN:
        return 0
    with torch.device("meta"), torch.no_grad():
        x, activation = torch.zeros(1), ACT2FN[name]
        with MemoryTracker() as tracker:
            activation(x)
    return int(tracker.peak // x.nbytes)


def built_weights(model: Any, hidden: int) -> DecoderWeights:
    """The parameters of ``model`` by what a pass reads of them."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = [
        Matrix("model.embed_tokens", "embedding", embedding.shape[0], embedding.shape[1], linear=False),
        Matrix("lm_head", "lm_head", head.shape[0], head.shape[1]),
    ]
    vectors = held = 0
    chosen = _experts_per_token(model)
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        if parameter is embedding or parameter is head:
            continue
        if _TOWERS.search(name) or isinstance(owner, nn.Embedding):
            held += parameter.numel()
        elif parameter.dim() < 2 or name.endswith("bias"):
            vectors += parameter.numel()
        else:
            count = _experts(parameter, owner) if chosen else 0
            matrices += _expert(name, parameter, count, hidden) if count else [_matrix(name, parameter, owner)]
    return DecoderWeights(tuple(matrices), vectors, head is embedding, held, chosen)


def _matrix(name: str, parameter: nn.Parameter, owner: nn.Module) -> Matrix:
    linear = isinstance(owner, nn.Linear) or type(owner).__name__ == "Conv1D"
    part = "feed_forward" if _FEED_FORWARD.search(name) else "attention"
    rows = parameter.shape[0]
    return Matrix(name.removesuffix(".weight"), part, rows, parameter.numel() // rows, linear=linear)


def _experts(parameter: nn.Parameter, owner: nn.Module) -> int:
    """The number of experts whose matrices a parameter has; 0: it is another matrix."""
    if parameter.dim() == 3 and not type(owner).__module__.startswith("torch."):
        return int(parameter.shape[0])
    return int(getattr(owner, "moe_num_experts", 0))  # dbrx: rows of all experts in one matrix


def _expert(name: str, parameter: nn.Parameter, count: int, hidden: int) -> Iterator[Matrix]:
    """The experts' matrices under the names that a checkpoint has for expert 0."""
    owner, _, kind = name.removesuffix(".weight").rpartition(".")
    width = parameter.numel() // count // hidden
    if kind == "gate_up_proj":
        for half in ("gate_proj", "up_proj"):
            yield Matrix(f"{owner}.0.{half}", "experts", width // 2, hidden, count, linear=False)
    else:
        into_hidden = kind in ("down_proj", "output_linear", "w2")
        rows, columns = (hidden, width) if into_hidden else (width, hidden)
        yield Matrix(f"{owner}.0.{kind}", "experts", rows, columns, count, linear=False)


def _experts_per_token(model: nn.Module) -> int:
    """The largest number of experts that a router chooses; 0: there is no mixture."""
    chosen = (getattr(module, key, None) for module in model.modules() for key in ("top_k", "moe_top_k"))
    return max((k for k in chosen if isinstance(k, int)), default=0)
