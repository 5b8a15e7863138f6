"""Model sizes for predictions of memory and time, read from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from specmemo_kernels.planning.built_model import activation_tensors, build
from specmemo_kernels.planning.decoder_matrices import DecoderWeights, llama_weights
from specmemo_kernels.planning.gguf_file import read_gguf
from specmemo_kernels.planning.gguf_header import is_gguf
from specmemo_kernels.planning.known_models import known_model
from specmemo_kernels.planning.model_config import DTYPE_BYTES, check_counts, check_experts, read_json, read_sizes
from specmemo_kernels.planning.pass_bytes import PassBytes
from specmemo_kernels.planning.quantised_weights import UNQUANTISED, QuantisedWeights


def ranks_share(queries: int, keys: int, ranks: int) -> bool:
    """Whether ``ranks`` ranks get equal numbers of query heads and KV heads.

    With more ranks than KV heads, several ranks hold the same KV head.
    """
    return ranks >= 1 and queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


@dataclass(frozen=True)
class MixerSizes:
    """Sizes of a model's recurrent and convolution layers.

    ``weights``, ``matrices``: of all of them; ``inputs``: the most input features of a matrix. ``state_bytes``: their
    states of one sequence. ``row_bytes``: kept input rows of one tree node. ``chunk``: transient bytes of one of them
    in a prompt's pass, by its rows; ``path``: for a path through a tree, by its tokens; both 0 for a loaded model, of
    which they are measured.
    """

    weights: int
    matrices: int
    inputs: int
    state_bytes: int
    row_bytes: int
    chunk: PassBytes = PassBytes()
    path: PassBytes = PassBytes()


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a transformers decoder.

    Attributes:
        num_kv_heads, head_dim, v_head_dim: of keys and values as attention receives them.
        intermediate_size: width of a dense feed-forward layer. dense_layers: number of layers with one.
        gated: whether feed-forward layers have a gate matrix.
        num_experts, experts_per_token, expert_size, shared_size: of the other layers, mixtures of experts.
        ffn_tensors, expert_tensors: tensors of the intermediate width that a dense layer and an expert hold at once.
            Two; three with a gate (gate, up, product); four with a fused matrix; or what the activation's code holds.
            Experts have four as well; gpt-oss's nine: the fused pair, both clamped, three for the gate, up plus one,
            and the product.
        attention_weights, feed_forward_weights, experts_weights: matrix elements of all layers, recurrent layers with
            attention, shared experts and routers with feed-forward layers.
        embedding_weights, lm_head_weights: elements. tied: whether the lm_head is the embedding.
        vector_weights, held_weights: as in :class:`DecoderWeights`.
        dtype: of activations, keys, values, and weights that aren't quantised.
        max_context: the model's maximum of positions. mtp_layers: its layers for multi-token prediction.
        quantised: which matrices are stored as codes.
        layers_without_keys: layers that have no keys and values. other_weights: matrix elements of recurrent layers
            that aren't counted as attention, in models of other code than transformers'. recurrent: there are layers
            with a state per sequence. mixers: their sizes; ``None``: there are none, or their sizes aren't known yet
            (:mod:`specmemo_kernels.integrations.hf.hybrid_sizes`).
        notes: sentences for the plan.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    intermediate_size: int
    dense_layers: int
    gated: bool
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    ffn_tensors: int
    expert_tensors: int
    attention_weights: int
    feed_forward_weights: int
    experts_weights: int
    embedding_weights: int
    lm_head_weights: int
    vector_weights: int
    held_weights: int
    tied: bool
    dtype: str
    max_context: int
    mtp_layers: int = 0
    quantised: QuantisedWeights = UNQUANTISED
    layers_without_keys: int = 0
    other_weights: int = 0
    recurrent: bool = False
    mixers: MixerSizes | None = None
    notes: tuple[str, ...] = ()

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - self.layers_without_keys

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

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
    def moe_layers(self) -> int:
        return self.num_layers - self.dense_layers

    @property
    def layer_weights(self) -> int:
        """Matrix elements of all layers."""
        return self._unconditional_weights + self.experts_weights

    @property
    def _unconditional_weights(self) -> int:
        """Matrix elements that every token is multiplied with."""
        return self.attention_weights + self.feed_forward_weights + self.other_weights

    def _layer_weights(self, experts: float) -> float:
        """Matrix elements of all layers with ``experts`` experts per mixture."""
        return self._unconditional_weights + self._of_experts(experts)

    def _of_experts(self, experts: float) -> float:
        """Matrix elements of ``experts`` experts per mixture."""
        return self.experts_weights * experts / self.num_experts if self.num_experts else 0.0

    @property
    def layer_matrices(self) -> int:
        """Matrices that a token is multiplied with in all layers; four per attention."""
        experts = self.moe_layers * (self.experts_per_token + bool(self.shared_size))
        mixers = 0 if self.mixers is None else self.mixers.matrices
        return 4 * self.attention_layers + mixers + self._ffn_matrices * (self.dense_layers + experts)

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        vocabulary = self.embedding_weights + (0 if self.tied else self.lm_head_weights)
        return self.layer_weights + vocabulary + self.vector_weights + self.held_weights

    @property
    def replicated_bytes(self) -> int:
        """Bytes of all parameters but the matrices of layers and vocabulary; never quantised."""
        return (self.vector_weights + self.held_weights) * self.dtype_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model."""
        return int(self.vocab_bytes() + self.replicated_bytes + self.layer_bytes())

    def vocab_bytes(self, tp: int = 1) -> float:
        """Bytes of the embedding and the lm_head on one of ``tp`` ranks, which have equal shares of the rows.

        A tied lm_head that is stored otherwise than the embedding takes its own bytes.
        """
        weights = self.quantised
        nbytes = self.embedding_weights * weights.embedding.per_element(self.dtype_bytes)
        if not self.tied or weights.lm_head != weights.embedding:
            nbytes += self.lm_head_bytes
        return -(-self.vocab_size // tp) * nbytes / self.vocab_size

    @property
    def lm_head_bytes(self) -> float:
        """Bytes of the lm_head's matrix, read in each product with it."""
        return self.lm_head_weights * self.quantised.lm_head.per_element(self.dtype_bytes)

    @property
    def bytes_per_weight(self) -> float:
        """Mean over the layers' matrices."""
        return self.layer_bytes() / self.layer_weights

    def layer_bytes(self, experts: float | None = None) -> float:
        """Bytes of all layers' matrices, with ``experts`` experts per mixture (``None``: all)."""
        size, weights = self.dtype_bytes, self.quantised
        expert = self._of_experts(self.num_experts if experts is None else experts)
        parts = (
            (self.attention_weights + self.other_weights, weights.attention),
            (self.feed_forward_weights, weights.feed_forward),
            (expert, weights.experts),
        )
        return sum(elements * part.per_element(size) for elements, part in parts)

    @property
    def unpacked_matrix_bytes(self) -> int:
        """Bytes that dequantising the largest matrix takes in each pass, 0 if kernels read the codes."""
        return int(self.quantised.largest * self.dtype_bytes * self.quantised.unpacking.copies)

    def unpacked_bytes(self, rows: int, lm_head: bool = True) -> float:
        """Bytes that a pass over ``rows`` rows dequantises, perhaps with the lm_head; 0 if it reads the codes."""
        if not self.quantised.largest:
            return 0.0
        coded = replace(self, quantised=self.quantised.only_coded())
        whole = coded.read_bytes(rows) + (coded.lm_head_bytes if lm_head else 0.0)
        return whole * self.quantised.unpacking.copies

    def read_weights(self, rows: int) -> float:
        """Matrix elements of the layers that a pass over ``rows`` rows reads.

        With ``k`` of ``E`` equally likely experts per token, a pass uses ``E * (1 - (1 - k/E)**rows)`` on average.
        """
        return self._layer_weights(self._read_experts(rows))

    def read_bytes(self, rows: int) -> float:
        """Bytes of :meth:`read_weights`, as stored."""
        return self.layer_bytes(self._read_experts(rows))

    def _read_experts(self, rows: int) -> float:
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** rows)

    @property
    def active_weights(self) -> int:
        """Matrix elements of the layers that one token is multiplied with."""
        return int(self._layer_weights(self.experts_per_token))

    def with_weights(self, bits: float) -> Self:
        """A copy with the layers' matrices in ``bits`` bits, scales included, which kernels read as they are."""
        return replace(self, quantised=QuantisedWeights.uniform(bits))

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
    def load(cls, source: str | Path, weight_bits: float | None = None) -> Self:
        """Read a known model's name, a ``config.json``, a folder with one, a ``.gguf`` file, or a hub id.

        A path has precedence over a known name, a known name over the hub's file (by transformers).

        Args:
            weight_bits: bits of the layers' weights, instead of the source's quantisation.

        Raises:
            ValueError: not a configuration of a decoder; the message has source and field.
            OSError: no such file, folder or id.
        """
        path = Path(source)
        if path.suffix == ".gguf" or (path.is_file() and is_gguf(path)):
            spec = cls(**read_gguf(path))
            return spec if weight_bits is None else spec.with_weights(weight_bits)
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            return cls.from_config(read_json(file), str(source), weight_bits)
        if path.suffix == ".json" or path.is_dir():
            raise FileNotFoundError(f"there is no {file}; give a config.json, a folder with one, or a hub id")
        if (config := known_model(str(source))) is not None:
            return cls.from_config(config, str(source), weight_bits)
        from transformers import AutoConfig

        return cls.from_config(AutoConfig.from_pretrained(source), str(source), weight_bits)

    @classmethod
    def from_config(cls, config: Any, name: str | None = None, weight_bits: float | None = None) -> Self:
        """From a transformers configuration, or the dict of a ``config.json``.

        Args:
            weight_bits: bits of the layers' weights, instead of the configuration's quantisation.

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
            sizes, weights = _sizes(config, text, source)
            quantisation = config.get("quantization_config") or text.get("quantization_config")
            if weight_bits is not None:
                sizes["quantised"] = QuantisedWeights.uniform(weight_bits)
            elif quantisation:
                size = DTYPE_BYTES[sizes["dtype"]]
                sizes["quantised"] = QuantisedWeights.read(quantisation, weights.matrices, size)
            return cls(**sizes)
        except (ArithmeticError, AttributeError, KeyError, TypeError) as error:  # a field of another type
            raise ValueError(f"the configuration of {source} can't be read: {type(error).__name__}: {error}") from error


def _sizes(config: Mapping[str, Any], text: Mapping[str, Any], name: str) -> tuple[dict[str, Any], DecoderWeights]:
    """The fields of a ``ModelSpec`` but the quantisation, and the weights: transformers', or those of a Llama.

    Raises:
        ValueError: as :func:`read_sizes`.
    """
    check_counts(config, name)
    built = build(config)
    if not isinstance(built, str):
        fields, weights = built
        sizes = read_sizes(fields, name)
        widths = weights.widths(sizes)
        widths["ffn_tensors"] = max(widths["ffn_tensors"], 1 + activation_tensors(fields))
        return sizes | widths | weights.sizes(), weights
    sizes = read_sizes(text, name)
    check_experts(text, name, sizes)
    weights = llama_weights(text, sizes)
    note = f"weights are counted as those of a Llama-like decoder, since transformers can't build {name} ({built})"
    return sizes | weights.sizes() | {"notes": (note,)}, weights
