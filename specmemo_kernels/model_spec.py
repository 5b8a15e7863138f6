"""What memory and time of generation depend on of a model: read from a configuration, without its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a decoder of transformers.

    Attributes:
        hidden_size, num_layers, vocab_size, num_qo_heads, num_kv_heads, head_dim, v_head_dim: as their names say;
            ``num_kv_heads`` and the dimensions are those of keys and values as attention receives them.
        attention_weights: matrix elements of one layer's attention.
        intermediate_size: width of a dense feed-forward layer. dense_layers: how many layers have one.
        gated: feed-forward layers have two matrices into the middle (gate and up) instead of one.
        num_experts, experts_per_token, expert_size, shared_size: of the other layers, mixtures of experts.
        ffn_tensors, expert_tensors: how many tensors of the middle's width a dense layer and an expert hold at once.
        norm_weights, bias_weights: vector elements of one layer.
        tied: the lm_head is the embedding.
        dtype: of activations, keys and values, and of weights that aren't quantised.
        weight_bits: bits per quantised element, scales and zero points included; ``None``: as ``dtype``.
        quantised: ``"layers"``: the layers' matrices; ``"experts"``: those of experts alone.
        max_context: the longest sequence the model was made for.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    attention_weights: int
    intermediate_size: int
    dense_layers: int
    gated: bool
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    ffn_tensors: int
    expert_tensors: int
    norm_weights: int
    bias_weights: int
    tied: bool
    dtype: str
    weight_bits: float | None
    quantised: str
    max_context: int

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """All layers' keys and values: ``layers * kv heads * (head_dim + v_head_dim) * bytes``."""
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype_bytes

    @property
    def _ffn_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def dense_ffn_weights(self) -> int:
        """Of one dense layer: ``(2 or 3) * hidden * intermediate``."""
        return self._ffn_matrices * self.hidden_size * self.intermediate_size

    @property
    def expert_weights(self) -> int:
        """Of one expert."""
        return self._ffn_matrices * self.hidden_size * self.expert_size

    @property
    def moe_layers(self) -> int:
        return self.num_layers - self.dense_layers

    @property
    def shared_weights(self) -> int:
        """Of one mixture layer, what every token uses: the shared expert and the router."""
        return self._ffn_matrices * self.hidden_size * self.shared_size + self.num_experts * self.hidden_size

    @property
    def layer_weights(self) -> int:
        """Matrix elements of all layers."""
        mixture = self.num_experts * self.expert_weights + self.shared_weights
        return (
            self.num_layers * self.attention_weights
            + self.dense_layers * self.dense_ffn_weights
            + self.moe_layers * mixture
        )

    @property
    def layer_matrices(self) -> int:
        """Matrices that a token meets in all layers; attention's taken to be four."""
        experts = self.moe_layers * (self.experts_per_token + bool(self.shared_size))
        return 4 * self.num_layers + self._ffn_matrices * (self.dense_layers + experts)

    @property
    def vocab_weights(self) -> int:
        """Elements of one vocabulary matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All of the model."""
        vectors = self.num_layers * (self.norm_weights + self.bias_weights) + self.hidden_size
        return self.layer_weights + self.vocab_weights * (1 if self.tied else 2) + vectors

    @property
    def weight_bytes(self) -> int:
        """All of the model; what quantisation leaves out (embeddings, lm_head, norms) in ``dtype``."""
        few = self._quantised_weights
        return int((self.parameters - few) * self.dtype_bytes + few * (self.weight_bits or 0) / 8)

    @property
    def _quantised_weights(self) -> int:
        if self.weight_bits is None:
            return 0
        experts = self.moe_layers * self.num_experts * self.expert_weights
        return self.layer_weights if self.quantised == "layers" else experts

    @property
    def bytes_per_weight(self) -> float:
        """Mean over the layers' matrices."""
        few = self._quantised_weights
        plain = (self.layer_weights - few) * self.dtype_bytes
        return (plain + few * (self.weight_bits or 0) / 8) / self.layer_weights

    def read_weights(self, rows: int) -> float:
        """Matrix elements of the layers that a pass over ``rows`` rows reads.

        With ``k`` of ``E`` experts per token, ``E * (1 - (1 - k/E)**rows)`` experts are met on average if each is as
        likely as the next.
        """
        met = 0.0
        if self.num_experts:
            met = self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** rows)
        mixture = met * self.expert_weights + self.shared_weights
        dense = self.num_layers * self.attention_weights + self.dense_layers * self.dense_ffn_weights
        return dense + self.moe_layers * mixture

    @property
    def active_weights(self) -> int:
        """Matrix elements of the layers that one token multiplies with."""
        mixture = self.experts_per_token * self.expert_weights + self.shared_weights
        dense = self.num_layers * self.attention_weights + self.dense_layers * self.dense_ffn_weights
        return dense + self.moe_layers * mixture

    def with_weights(self, bits: float) -> ModelSpec:
        """The same model with its layers' matrices in ``bits`` bits (scales included)."""
        return replace(self, weight_bits=bits, quantised="layers")

    def with_dtype(self, dtype: str) -> ModelSpec:
        """The same model loaded in ``dtype``.

        Raises:
            ValueError: a dtype whose size isn't known.
        """
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
        return replace(self, dtype=dtype)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """From a ``config.json``, a folder with one, or a hub id (looked up by transformers).

        Raises:
            ValueError: not a configuration of a decoder; the message names source and field.
            OSError: no such file, folder or id.
        """
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            try:
                return cls.from_config(json.loads(file.read_text()), name=str(source))
            except json.JSONDecodeError as error:
                raise ValueError(f"{file} is not JSON: {error}") from error
        if path.suffix == ".json" or path.is_dir():
            raise FileNotFoundError(f"there is no {file}; give a config.json, a folder with one, or a hub id")
        from transformers import AutoConfig

        return cls.from_config(AutoConfig.from_pretrained(source), name=str(source))

    @classmethod
    def from_config(cls, config: Any, name: str | None = None) -> Self:
        """From a configuration of transformers, or the dict of a ``config.json``.

        Raises:
            ValueError: a field is missing, or a quantisation whose size isn't known; the message names it.
        """
        if not isinstance(config, Mapping):
            config = config.to_dict()
        text: Mapping[str, Any] = config.get("text_config") or config
        quantisation = config.get("quantization_config") or text.get("quantization_config")
        bits, what = quantised_bits(quantisation) if quantisation else (None, "layers")
        return cls(**_sizes(text, name or str(text.get("model_type", "model"))), weight_bits=bits, quantised=what)


def _sizes(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a :class:`ModelSpec` but its quantisation."""

    def need(*keys: str) -> int:
        found = next((text[key] for key in keys if text.get(key) is not None), None)
        if not isinstance(found, int) or found < 1:
            raise ValueError(f"the configuration of {name} has {keys[0]}={found!r}, a size of at least 1 is needed")
        return found

    def get(*keys: str) -> int:
        return int(next((text[key] for key in keys if text.get(key) is not None), 0))

    hidden, layers, heads = need("hidden_size", "n_embd"), need("num_hidden_layers", "n_layer"), need(
        "num_attention_heads", "n_head"
    )  # fmt: skip
    experts = get("num_local_experts", "num_experts", "n_routed_experts")
    width = get("intermediate_size", "n_inner") or 4 * hidden
    expert_size = (get("moe_intermediate_size") or width) if experts else 0
    shared = get("shared_expert_intermediate_size") or get("n_shared_experts") * expert_size
    dense = (
        layers if not experts else min(layers, get("first_k_dense_replace") + len(text.get("mlp_only_layers") or ()))
    )
    attention = _attention(text, hidden, heads)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"the configuration of {name} has dtype={dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
    return attention | {
        "name": name, "hidden_size": hidden, "num_layers": layers, "vocab_size": need("vocab_size"),
        "num_qo_heads": heads, "intermediate_size": width, "dense_layers": dense,
        "gated": text.get("model_type") not in _UNGATED, "num_experts": experts,
        "experts_per_token": get("num_experts_per_tok") if experts else 0, "expert_size": expert_size,
        "shared_size": shared if experts else 0,
        "ffn_tensors": _ffn_tensors(str(text.get("model_type"))),
        "expert_tensors": 9 if text.get("model_type") == "gpt_oss" else 4,
        "norm_weights": hidden * (4 if text.get("model_type") in _FOUR_NORMS else 2),
        "tied": bool(text.get("tie_word_embeddings", text.get("model_type") in _TIED)), "dtype": dtype,
        "max_context": get("max_position_embeddings", "n_positions") or 1 << 20,
    }  # fmt: skip


#: Families that differ from Llama in ways that a config.json doesn't spell out.
_UNGATED = {"gpt2", "gpt_neox", "phi", "opt", "starcoder2", "nemotron"}
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}
_FUSED = {"phi3", "glm", "glm4"}
_TIED = {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "cohere", "cohere2"}


def _ffn_tensors(family: str) -> int:
    """Gate, up and their product; both halves of a fused matrix, the gate's activation and the product; or two.

    gpt-oss's experts hold nine: the fused pair, both clamped, three to make the gate of one, the other plus one, the
    product; other experts hold four as fused layers do.
    """
    return 2 if family in _UNGATED else 4 if family in _FUSED else 3


def _attention(text: Mapping[str, Any], hidden: int, heads: int) -> dict[str, int]:
    """Heads, dimensions and matrix elements of one layer's attention, from grouped queries to a latent (DeepSeek)."""
    if text.get("kv_lora_rank"):
        rope, plain = int(text["qk_rope_head_dim"]), int(text["qk_nope_head_dim"])
        latent, value, dim = int(text["kv_lora_rank"]), int(text["v_head_dim"]), rope + plain
        query = int(text.get("q_lora_rank") or 0)
        into_queries = query * (hidden + heads * dim) if query else hidden * heads * dim
        weights = into_queries + hidden * (latent + rope) + latent * heads * (plain + value) + heads * value * hidden
        sizes = {"num_kv_heads": heads, "head_dim": dim, "v_head_dim": value}
        return sizes | {"attention_weights": weights, "bias_weights": 0}
    kv_heads = int(text.get("num_key_value_heads") or heads)
    dim = int(text.get("head_dim") or hidden // heads)
    biased = bool(text.get("attention_bias") or text.get("use_qkv_bias") or text.get("model_type") == "qwen2")
    return {
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "v_head_dim": dim,
        "attention_weights": hidden * dim * (2 * heads + 2 * kv_heads),
        "bias_weights": dim * (heads + 2 * kv_heads) if biased else 0,
    }


def quantised_bits(config: Mapping[str, Any]) -> tuple[float, str]:
    """Bits per weight of a ``quantization_config``, its scales and zero points included, and what is quantised.

    gptq and awq: a 16-bit scale and a zero point per group. bitsandbytes: a float32 scale per 64 weights in 4 bits
    (with double quantisation 8 bits, and a float32 per 256 of them), one per row in 8 bits. fp8: a float32 scale per
    block of 128 x 128. mxfp4: an 8-bit scale per 32 weights, experts alone (gpt-oss).

    Raises:
        ValueError: another method; the message names it and those that are known.
    """
    method = str(config.get("quant_method", "")).lower()
    if method in ("gptq", "awq"):
        bits, group = int(config.get("bits", 4)), int(config.get("group_size", config.get("q_group_size", 128)))
        return bits + (16 + bits) / group if group > 0 else float(bits), "layers"
    if method == "bitsandbytes" or "load_in_4bit" in config or "load_in_8bit" in config:
        if config.get("load_in_8bit"):
            return 8.0, "layers"
        double = config.get("bnb_4bit_use_double_quant")
        return 4 + (8 / 64 + 32 / (64 * 256) if double else 32 / 64), "layers"
    if method in ("fp8", "fbgemm_fp8"):
        return 8 + 32 / 128**2, "layers"
    if method == "mxfp4":
        return 4 + 8 / 32, "experts"
    known = "gptq, awq, bitsandbytes, fp8, fbgemm_fp8, mxfp4"
    raise ValueError(f"quantization_config has quant_method={method!r}; sizes are known for {known}")
