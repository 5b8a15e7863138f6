"""Model sizes for predictions of memory and time, read from a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from specmemo_kernels.planning.model_config import DTYPE_BYTES, quantised_bits, read_sizes

#: Maximum of bytes read from a configuration; typical ones have up to 100 KB.
_LONGEST_CONFIG = 16 << 20


def ranks_share(queries: int, keys: int, ranks: int) -> bool:
    """Whether ``ranks`` ranks get equal numbers of query heads and KV heads.

    With more ranks than KV heads, several ranks hold the same KV head.
    """
    return ranks >= 1 and queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


@dataclass(frozen=True)
class MixerSizes:
    """Sizes of a model's recurrent and convolution layers.

    ``weights``, ``matrices``: of all of them. ``state_bytes``: their states of one sequence; ``largest_state``: of one
    of them. ``row_bytes``: kept input rows of one tree node.
    """

    weights: int
    matrices: int
    state_bytes: int
    largest_state: int
    row_bytes: int


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a transformers decoder.

    Attributes:
        num_kv_heads, head_dim, v_head_dim: of keys and values as attention receives them.
        attention_weights: matrix elements of one layer's attention.
        intermediate_size: width of a dense feed-forward layer. dense_layers: number of layers with one.
        gated: whether feed-forward layers have a gate matrix.
        num_experts, experts_per_token, expert_size, shared_size: of the other layers, mixtures of experts.
        ffn_tensors, expert_tensors: tensors of the intermediate width that a dense layer and an expert hold at once.
        norm_weights, bias_weights: vector elements of one layer.
        tied: whether the lm_head is the embedding.
        dtype: of activations, keys, values, and weights that aren't quantised.
        weight_bits: bits per quantised element, scales and zero points included; ``None``: as ``dtype``.
        quantised: ``"layers"``: the layers' matrices; ``"experts"``: only those of experts.
        max_context: the model's maximum of positions. mtp_layers: its layers for multi-token prediction.
        layers_without_keys: layers that have no keys and values. other_weights: matrix elements of all layers besides
            attention and feed-forward layers (of recurrent layers). recurrent: there are layers with a state per
            sequence. mixers: their sizes; ``None``: there are none, or their sizes aren't known yet
            (:mod:`specmemo_kernels.integrations.hf.hybrid_sizes`).
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
    mtp_layers: int = 0
    layers_without_keys: int = 0
    other_weights: int = 0
    recurrent: bool = False
    mixers: MixerSizes | None = None

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - self.layers_without_keys

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """All layers' keys and values: ``layers * kv heads * (head_dim + v_head_dim) * bytes``."""
        return self.attention_layers * self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype_bytes

    def kv_heads_of_rank(self, tp: int) -> int:
        """KV heads of one of ``tp`` ranks, at least one."""
        return max(1, self.num_kv_heads // tp)

    def layer_weights_of_rank(self, tp: int, whole: float | None = None) -> float:
        """Matrix elements of all layers on one of ``tp`` ranks, replicated KV heads included.

        ``whole``: elements on all ranks; ``None``: :attr:`layer_weights`.
        """
        rows = (self.kv_heads_of_rank(tp) - self.num_kv_heads / tp) * (self.head_dim + self.v_head_dim)
        return (self.layer_weights if whole is None else whole) / tp + self.attention_layers * self.hidden_size * rows

    @property
    def _ffn_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def dense_ffn_weights(self) -> int:
        """Feed-forward elements of one dense layer."""
        return self._ffn_matrices * self.hidden_size * self.intermediate_size

    @property
    def expert_weights(self) -> int:
        """Matrix elements of one expert."""
        return self._ffn_matrices * self.hidden_size * self.expert_size

    @property
    def moe_layers(self) -> int:
        return self.num_layers - self.dense_layers

    @property
    def shared_weights(self) -> int:
        """Elements of one mixture layer that every token uses: shared expert and router."""
        return self._ffn_matrices * self.hidden_size * self.shared_size + self.num_experts * self.hidden_size

    @property
    def layer_weights(self) -> int:
        """Matrix elements of all layers."""
        return int(self._layer_weights(self.num_experts))

    def _layer_weights(self, experts: float) -> float:
        """Matrix elements of all layers with ``experts`` experts per mixture."""
        dense = self.attention_layers * self.attention_weights + self.dense_layers * self.dense_ffn_weights
        return dense + self.other_weights + self.moe_layers * (experts * self.expert_weights + self.shared_weights)

    @property
    def layer_matrices(self) -> int:
        """Matrices that a token is multiplied with in all layers; four per attention."""
        experts = self.moe_layers * (self.experts_per_token + bool(self.shared_size))
        mixers = 0 if self.mixers is None else self.mixers.matrices
        return 4 * self.attention_layers + mixers + self._ffn_matrices * (self.dense_layers + experts)

    @property
    def vocab_weights(self) -> int:
        """Elements of one vocabulary matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        vectors = self.num_layers * (self.norm_weights + self.bias_weights) + self.hidden_size
        return self.layer_weights + self.vocab_weights * (1 if self.tied else 2) + vectors

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model; embeddings, lm_head and norms are never quantised."""
        return int(self._stored_bytes(self.parameters))

    @property
    def _quantised_weights(self) -> int:
        if self.weight_bits is None:
            return 0
        experts = self.moe_layers * self.num_experts * self.expert_weights
        return self.layer_weights if self.quantised == "layers" else experts

    @property
    def bytes_per_weight(self) -> float:
        """Mean over the layers' matrices."""
        return self._stored_bytes(self.layer_weights) / self.layer_weights

    def _stored_bytes(self, elements: int) -> float:
        """Bytes of ``elements``, all quantised ones among them."""
        quantised = self._quantised_weights
        return (elements - quantised) * self.dtype_bytes + quantised * (self.weight_bits or 0) / 8

    def read_weights(self, rows: int) -> float:
        """Matrix elements of the layers that a pass over ``rows`` rows reads.

        With ``k`` of ``E`` equally likely experts per token, a pass uses ``E * (1 - (1 - k/E)**rows)`` on average.
        """
        experts = 0.0
        if self.num_experts:
            experts = self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** rows)
        return self._layer_weights(experts)

    @property
    def active_weights(self) -> int:
        """Matrix elements of the layers that one token is multiplied with."""
        return int(self._layer_weights(self.experts_per_token))

    def with_weights(self, bits: float) -> ModelSpec:
        """A copy with the layers' matrices in ``bits`` bits, scales included."""
        return replace(self, weight_bits=bits, quantised="layers")

    def with_dtype(self, dtype: str) -> ModelSpec:
        """A copy in ``dtype``.

        Raises:
            ValueError: unknown dtype.
        """
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
        return replace(self, dtype=dtype)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Read a ``config.json``, a folder with one, or a hub id (by transformers).

        Raises:
            ValueError: not a configuration of a decoder; the message has source and field.
            OSError: no such file, folder or id.
        """
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            return cls.from_config(_read_json(file), name=str(source))
        if path.suffix == ".json" or path.is_dir():
            raise FileNotFoundError(f"there is no {file}; give a config.json, a folder with one, or a hub id")
        from transformers import AutoConfig

        return cls.from_config(AutoConfig.from_pretrained(source), name=str(source))

    @classmethod
    def from_config(cls, config: Any, name: str | None = None) -> Self:
        """From a transformers configuration, or the dict of a ``config.json``.

        Raises:
            ValueError: a missing field or an unknown quantisation; the message has its name.
        """
        if not isinstance(config, Mapping):
            config = config.to_dict()
        text: Mapping[str, Any] = config.get("text_config") or config
        if not isinstance(text, Mapping):
            raise ValueError(f"text_config of {name or 'the configuration'} is {text!r}, expected an object")
        source = name or str(text.get("model_type", "model"))
        try:
            quantisation = config.get("quantization_config") or text.get("quantization_config")
            bits, part = quantised_bits(quantisation) if quantisation else (None, "layers")
            return cls(**read_sizes(text, source), weight_bits=bits, quantised=part)
        except (ArithmeticError, AttributeError, KeyError, TypeError) as error:  # a field of another type
            raise ValueError(f"the configuration of {source} can't be read: {type(error).__name__}: {error}") from error


def _read_json(file: Path) -> Mapping[str, Any]:
    with file.open("rb") as stream:
        content = stream.read(_LONGEST_CONFIG)  # might be a file of weights
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"{file} holds a {type(config).__name__}, expected the JSON object of a config.json")
    return config
