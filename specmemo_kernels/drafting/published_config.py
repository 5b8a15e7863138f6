"""Sizes and options of published drafters, read from their ``config.json`` and keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specmemo_kernels.drafting.config_reader import LARGEST, ConfigReader
from specmemo_kernels.drafting.source_files import HeadsError
from specmemo_kernels.planning.model_config import MOST_LAYERS

#: Hugging Face's name of an activation -> :func:`specmemo_kernels.ops.gated_mlp`'s.
_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
#: Numbers that a kind of rotary embedding needs.
_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
#: Those of which the first must be below the second, with their defaults.
_ROPE_ORDERS: Mapping[str, tuple[tuple[str, str, tuple[float, float]], ...]] = {
    "yarn": (("beta_slow", "beta_fast", (1.0, 32.0)),),
    "llama3": (("low_freq_factor", "high_freq_factor", (1.0, 4.0)),),
}


@dataclass(frozen=True)
class LayerSpec:
    """A Llama-like decoder layer of a drafter.

    Attributes:
        hidden_act: the name in :func:`specmemo_kernels.ops.gated_mlp`.
        attention_bias: q_proj, k_proj and v_proj have biases; o_proj's is optional.
        qk_norm: has Qwen3's q_norm and k_norm.
        rope: transformers' ``rope_parameters``, with ``rope_type`` and ``rope_theta``.
    """

    hidden_size: int
    intermediate_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Mapping[str, Any]
    max_position_embeddings: int


@dataclass(frozen=True)
class Eagle3Config:
    """EAGLE-3.

    Attributes:
        vocab_size: of the target; ``draft_vocab_size``: rows of the lm_head.
        num_aux: number of the target's hidden states that ``fc`` reads.
        aux_layer_ids: their indices into transformers' ``hidden_states``; ``None``: 2, L // 2 and L - 3 of L layers.
        norm_before_fc: ``input_norm`` normalises all of them together; ``fc_norm``: ``fc_norm.{i}`` each of them.
        norm_output: the recursive feature is the normed hidden state.
        own_embedding: has ``embed_tokens``; else the target's.
        own_lm_head: has ``lm_head``; else the embedding.
    """

    layer: LayerSpec
    num_layers: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    aux_layer_ids: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    logit_scale: float
    own_embedding: bool
    own_lm_head: bool


@dataclass(frozen=True)
class EagleConfig:
    """EAGLE-1 and EAGLE-2, which have the same checkpoints. Layer 0 has no input_layernorm."""

    layer: LayerSpec
    num_layers: int
    vocab_size: int
    fc_bias: bool
    own_embedding: bool


@dataclass(frozen=True)
class CloverConfig:
    """Clover-2. ``num_heads`` is the number of tokens it drafts in a row."""

    layer: LayerSpec
    num_layers: int
    num_heads: int
    vocab_size: int


@dataclass(frozen=True)
class DFlashConfig:
    """DFlash. ``target_layer_ids`` are indices into transformers' ``hidden_states``."""

    layer: LayerSpec
    num_layers: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    vocab_size: int | None


DrafterConfig = Eagle3Config | EagleConfig | CloverConfig | DFlashConfig


def _rope(config: ConfigReader, max_position_embeddings: int) -> dict[str, Any]:
    """transformers 5's ``rope_parameters``, also of the older ``rope_theta`` and ``rope_scaling``."""
    name = "rope_parameters" if config.object("rope_parameters") else "rope_scaling"
    stored = config.object(name)
    stored = ConfigReader(config.where, (stored,)).object("full_attention") or stored  # nested by layer type
    inner = ConfigReader(f"{config.where}: {name}", (stored,))
    kind = inner.choice("type" if inner.value("rope_type") is None else "rope_type", "default", _ROPE_NUMBERS)
    partial = inner.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0), most=1.0)
    if partial != 1:
        raise inner.wrong("partial_rotary_factor", partial, "1; partly rotated heads aren't supported")
    rope = {key: value for key, value in stored.items() if value is not None and key != "type"}
    rope |= {"rope_type": kind, "rope_theta": inner.number("rope_theta", config.number("rope_theta", 10000.0))}
    rope.pop("partial_rotary_factor", None)
    length = "original_max_position_embeddings"
    if length in _ROPE_NUMBERS[kind]:
        rope[length] = inner.integer(length, config.integer(length, max_position_embeddings))
    for key in _ROPE_NUMBERS[kind]:
        ConfigReader(inner.where, (rope,)).number(key)
    for key, value in rope.items():
        listed = isinstance(value, list) and key == "mrope_section"
        if key != "rope_type" and not all(map(_is_number, value if listed else [value])):
            raise inner.wrong(key, value, "a list of numbers" if listed else "a number, true or false")
    if kind == "yarn" and rope["rope_theta"] <= 1:
        raise inner.wrong("rope_theta", rope["rope_theta"], "above 1")
    for low, high, defaults in _ROPE_ORDERS.get(kind, ()):
        values = [rope.get(key, default) for key, default in zip((low, high), defaults, strict=True)]
        if not 0 < values[0] < values[1]:
            raise inner.wrong(low, values[0], f"above 0 and below {high}, {values[1]}")
    return rope


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and abs(value) <= 1e30


def _layer_spec(config: ConfigReader, keys: Collection[str], num_layers: int) -> LayerSpec:
    hidden_size, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    if config.value("head_dim") is None and hidden_size % heads:
        raise config.wrong("num_attention_heads", heads, f"a divisor of hidden_size, {hidden_size}, without head_dim")
    head_dim = config.integer("head_dim", hidden_size // heads)
    if head_dim % 2:
        raise config.wrong("head_dim", head_dim, "even")
    layer_types = config.value("layer_types")
    sliding = config.flag("use_sliding_window") if layer_types is None else layer_types
    if sliding and not (isinstance(sliding, list) and set(map(str, sliding[:num_layers])) == {"full_attention"}):
        name = "use_sliding_window" if layer_types is None else "layer_types"
        raise config.wrong(name, sliding, "full_attention in every layer; sliding windows aren't supported")
    length = config.integer("max_position_embeddings")
    # EAGLE-1's configs for Qwen2 have qkv_bias instead of attention_bias, Qwen2's own have neither.
    biased = config.flag("attention_bias") | config.flag("qkv_bias") | ("layers.0.self_attn.q_proj.bias" in keys)
    unbiased = [i for i in range(num_layers) if f"layers.{i}.self_attn.o_proj.bias" not in keys]
    if config.flag("attention_bias") and unbiased:
        raise HeadsError(f"{config.where}: attention_bias is true, but o_proj.bias of layer {unbiased[0]} is missing")
    return LayerSpec(
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6, most=1.0),
        hidden_act=_ACTIVATIONS[config.choice("hidden_act", "silu", _ACTIVATIONS)],
        attention_bias=biased,
        mlp_bias=config.flag("mlp_bias"),
        qk_norm="layers.0.self_attn.q_norm.weight" in keys,
        rope=_rope(config, length),
        max_position_embeddings=length,
    )


def _aux_layers(options: ConfigReader, offset: int) -> tuple[int, tuple[int, ...] | None]:
    """The number of EAGLE-3's auxiliary hidden states and their explicit indices, ``offset`` added."""
    if not options.flag("use_aux_hidden_state", True):
        raise options.wrong("use_aux_hidden_state", False, "true; EAGLE-3 without it isn't supported")
    name = "eagle_aux_hidden_state_layer_ids"
    ids = options.layer_ids(name, offset)
    expected = 3 if ids is None else len(ids)
    num_aux = options.integer("num_aux_hidden_states", expected, most=MOST_LAYERS)
    if num_aux != expected:
        raise options.wrong(name, options.value(name), f"a list of {num_aux} layers, as num_aux_hidden_states")
    return num_aux, ids


def eagle3_config(where: str, values: Mapping[str, Any], keys: Collection[str]) -> Eagle3Config:
    """The configuration of an EAGLE-3 drafter.

    Args:
        where: the file, for messages.
        keys: internal keys of the drafter's tensors.

    Raises:
        HeadsError: a missing or wrong value.
    """
    top = ConfigReader(where, (values,))
    options = ConfigReader(where, (values, top.object("eagle_config")))
    speculators, sizes = top.value("speculators_model_type") is not None, top
    if speculators:
        name = "transformer_layer_config"
        if not top.object(name):
            raise top.wrong(name, top.value(name), "an object with the sizes of the decoder layer")
        sizes = ConfigReader(f"{where}: {name}", (top.object(name),))
    num_layers = sizes.integer("num_hidden_layers", most=MOST_LAYERS)
    vocab_size = sizes.integer("vocab_size")
    num_aux, aux_layer_ids = _aux_layers(options, 0 if speculators else 1)
    layer = _layer_spec(sizes, keys, num_layers)
    config = Eagle3Config(
        layer=layer,
        num_layers=num_layers,
        target_hidden_size=options.integer("target_hidden_size", layer.hidden_size),
        vocab_size=vocab_size,
        draft_vocab_size=options.integer("draft_vocab_size", vocab_size, most=vocab_size),
        num_aux=num_aux,
        aux_layer_ids=aux_layer_ids,
        norm_before_residual=options.flag("norm_before_residual", speculators),
        norm_before_fc=options.flag("norm_before_fc"),
        fc_norm=options.flag("fc_norm") | options.flag("use_aux_norm"),
        norm_output=options.flag("norm_output"),
        logit_scale=options.number("logit_scale", 1.0),
        own_embedding="embed_tokens.weight" in keys,
        own_lm_head="lm_head.weight" in keys,
    )
    if config.fc_norm and config.norm_before_fc:
        raise options.wrong("norm_before_fc", True, "false with fc_norm")
    if not config.own_lm_head and not options.flag("tie_word_embeddings", sizes.flag("tie_word_embeddings")):
        raise HeadsError(f"{where}: lm_head.weight is missing, and tie_word_embeddings isn't true; one is needed")
    if not config.own_lm_head and config.draft_vocab_size != vocab_size:
        raise options.wrong("draft_vocab_size", config.draft_vocab_size, f"{vocab_size} without lm_head.weight")
    if not config.own_embedding and config.target_hidden_size != layer.hidden_size:
        raise HeadsError(
            f"{where}: embed_tokens.weight is missing, and the target's rows have target_hidden_size "
            f"{config.target_hidden_size}, not hidden_size {layer.hidden_size}; the drafter needs its own"
        )
    return config


def eagle_config(where: str, values: Mapping[str, Any], keys: Collection[str]) -> EagleConfig:
    """:func:`eagle3_config` for EAGLE-1 and EAGLE-2."""
    config = ConfigReader(where, (values,))
    num_layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    fc_bias = "fc.bias" in keys
    if config.flag("bias", fc_bias) and not fc_bias:
        raise HeadsError(f"{where}: fc.bias is missing, but bias is true in this file; one of them is wrong")
    return EagleConfig(
        layer=_layer_spec(config, keys, num_layers),
        num_layers=num_layers,
        vocab_size=config.integer("vocab_size"),
        fc_bias=fc_bias,
        own_embedding="embed_tokens.weight" in keys,
    )


def clover_config(where: str, values: Mapping[str, Any], keys: Collection[str]) -> CloverConfig:
    """:func:`eagle3_config` for Clover-2. ``num_hidden_layers`` is the target's, so it isn't read."""
    config = ConfigReader(where, (values,))
    clover = ConfigReader(f"{where}: clover", (config.object("clover"),))
    num_layers = clover.integer("num_layers", most=MOST_LAYERS)
    return CloverConfig(
        layer=_layer_spec(config, keys, num_layers),
        num_layers=num_layers,
        num_heads=clover.integer("num_heads", most=MOST_LAYERS),
        vocab_size=config.integer("vocab_size"),
    )


def dflash_config(where: str, values: Mapping[str, Any], keys: Collection[str]) -> DFlashConfig:
    """:func:`eagle3_config` for DFlash."""
    config = ConfigReader(where, (values,))
    nested = config.object("dflash_config")
    dflash = ConfigReader(f"{where}: dflash_config", (nested,))
    known = {"target_layer_ids", "mask_token_id", "block_size", "num_target_layers", "causal", "projector_type"}
    if unknown := nested.keys() - known:
        raise HeadsError(f"{dflash.where} has {', '.join(sorted(unknown))}; only {', '.join(sorted(known))} are known")
    if dflash.flag("causal"):
        raise dflash.wrong("causal", True, "false; causal blocks aren't supported")
    num_layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    vocab_size = None if config.value("vocab_size") is None else config.integer("vocab_size")
    target_layer_ids = dflash.layer_ids("target_layer_ids", 1)
    if target_layer_ids is None:
        raise dflash.wrong("target_layer_ids", None, "a list of the target's layers")
    return DFlashConfig(
        layer=replace(_layer_spec(config, keys, num_layers), qk_norm=True),
        num_layers=num_layers,
        block_size=ConfigReader(where, (values, nested)).integer("block_size", least=2, most=1024),
        target_layer_ids=target_layer_ids,
        mask_token_id=dflash.integer("mask_token_id", least=0, most=(vocab_size or LARGEST) - 1),
        vocab_size=vocab_size,
    )
