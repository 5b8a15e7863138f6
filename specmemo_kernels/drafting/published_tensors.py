"""Shapes of the tensors of published drafters, and checks of stored ones."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from specmemo_kernels.drafting.head_files import FLOATING, Entry, first_few
from specmemo_kernels.drafting.published_config import DFlashConfig, DrafterConfig, Eagle3Config, EagleConfig
from specmemo_kernels.drafting.source_files import CONFIG_NAME, HeadsError

_Shapes = dict[str, tuple[int, ...]]
_INTEGER = re.compile(r"[IU](8|16|32|64)|torch\.u?int(8|16|32|64)")


def check_tensors(where: str, names: Mapping[str, Entry], config: DrafterConfig) -> None:
    """Check keys, dtypes and shapes of stored tensors by internal key, and the values of ``d2t``.

    Raises:
        HeadsError: a missing or unknown key, a wrong dtype, shape or value.
    """
    shapes = tensor_shapes(config)
    optional = {"embed_tokens.weight", "lm_head.weight"}
    if isinstance(config, Eagle3Config) and config.draft_vocab_size == config.vocab_size:
        optional.add("d2t")
    missing = [key for key in shapes if key not in names and key not in optional and not key.endswith("o_proj.bias")]
    if missing:
        if any("midlayer." in entry.name for entry in names.values()):
            missing = [re.sub(r"^layers\.0\.", "midlayer.", key) for key in missing]
        raise HeadsError(f"{where}: missing keys {first_few(missing)}; its {CONFIG_NAME} needs them")
    if unknown := [entry.name for key, entry in names.items() if key not in shapes]:
        raise HeadsError(f"{where}: unknown keys {first_few(unknown)}; no option of its {CONFIG_NAME} needs them")
    for key, entry in names.items():
        pattern, needed = (_INTEGER, "integers") if key == "d2t" else (FLOATING, "floating-point numbers")
        if not pattern.fullmatch(entry.dtype):
            raise HeadsError(f"{location(entry)} is {entry.dtype}, it must be {needed}")
        if entry.value is not None and entry.value.layout is not torch.strided:
            raise HeadsError(f"{location(entry)} is {entry.value.layout}, it must be dense")
        if entry.shape != shapes[key]:
            raise HeadsError(
                f"{location(entry)} has shape {list(entry.shape)}, but {CONFIG_NAME} needs {list(shapes[key])}; "
                f"use the {CONFIG_NAME} of these weights"
            )
    if isinstance(config, Eagle3Config) and "d2t" in names:
        _check_d2t(names["d2t"], config.vocab_size)


def _check_d2t(entry: Entry, vocab_size: int) -> None:
    offsets = entry.read().to("cpu", torch.int64)
    tokens = offsets + torch.arange(len(offsets), device=offsets.device)
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise HeadsError(
            f"{location(entry)} has offset {int(offsets[row])} in row {row}: row + offset must be from 0 to "
            f"{vocab_size - 1}, the target's tokens"
        )
    if len(set(tokens.tolist())) < len(tokens):
        raise HeadsError(f"{location(entry)} maps two rows to one token; row + offset must be unique")


def location(entry: Entry) -> str:
    """File and key of a stored tensor, for messages."""
    return f"{entry.where}: {entry.name}"


def _layer_shapes(config: DrafterConfig, index: int) -> _Shapes:
    """Shapes of a decoder layer's tensors, by internal key."""
    spec = config.layer
    hidden, inner, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q, kv = spec.num_qo_heads * head, spec.num_kv_heads * head
    inputs = 2 * hidden if isinstance(config, Eagle3Config) and index == 0 else hidden
    matrices = {"q": (q, inputs), "k": (kv, inputs), "v": (kv, inputs), "o": (hidden, q)}
    shapes: _Shapes = {f"self_attn.{name}_proj.weight": shape for name, shape in matrices.items()}
    if spec.attention_bias:
        shapes |= {f"self_attn.{name}_proj.bias": shape[:1] for name, shape in matrices.items()}
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    matrices = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes |= {f"mlp.{name}_proj.weight": shape for name, shape in matrices.items()}
    if spec.mlp_bias:
        shapes |= {f"mlp.{name}_proj.bias": shape[:1] for name, shape in matrices.items()}
    norms = ["post_attention_layernorm"]
    if index or not isinstance(config, EagleConfig):
        norms.append("input_layernorm")
    if index == 0 and isinstance(config, Eagle3Config):
        norms.append("hidden_norm")
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}


def tensor_shapes(config: DrafterConfig) -> _Shapes:
    """The shape of every tensor that a drafter can have, by internal key."""
    shapes: _Shapes = {}
    for index in range(config.num_layers):
        shapes |= _layer_shapes(config, index)
    hidden = config.layer.hidden_size
    if isinstance(config, Eagle3Config):
        features = config.target_hidden_size
        shapes |= {"fc.weight": (hidden, config.num_aux * features), "norm.weight": (hidden,)}
        shapes |= {"lm_head.weight": (config.draft_vocab_size, hidden), "d2t": (config.draft_vocab_size,)}
        shapes |= {"embed_tokens.weight": (config.vocab_size, hidden)}
        if config.norm_before_fc:
            shapes["input_norm.weight"] = (config.num_aux * features,)
        if config.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (features,) for i in range(config.num_aux)}
    elif isinstance(config, EagleConfig):
        shapes |= {"fc.weight": (hidden, 2 * hidden), "embed_tokens.weight": (config.vocab_size, hidden)}
        if config.fc_bias:
            shapes["fc.bias"] = (hidden,)
    elif isinstance(config, DFlashConfig):
        shapes["fc.weight"] = (hidden, len(config.target_layer_ids) * hidden)
        shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    else:
        shapes["clover_embed_tokens.weight"] = (config.vocab_size, hidden)
        linears = {"clover_head_mlp": hidden, "clover_head_mlp2": 2 * hidden}
        for block in ("clover_head_mlp_rnn", "clover_head_mlp_rnn2"):
            linears |= {f"{block}.{name}": hidden for name in "qkv"}
            shapes[f"{block}.input_layernorm.weight"] = (hidden,)
        for name, width in linears.items():
            shapes |= {f"{name}.weight": (hidden, width), f"{name}.bias": (hidden,)}
        shapes |= {"clover_norm.weight": (hidden,), "clover_head_norm.weight": (hidden,)}
    return shapes
