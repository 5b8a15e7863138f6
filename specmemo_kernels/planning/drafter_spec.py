"""Sizes of drafters that determine their memory and their time, without their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.ops.weight_codes import check_bits, packed_bytes
from specmemo_kernels.planning.model_spec import ModelSpec


@dataclass(frozen=True)
class Product:
    """``rows`` rows times ``matrices`` matrices of ``weights`` elements and ``nbytes`` bytes in total."""

    weights: float
    nbytes: float
    rows: int
    matrices: int


class DrafterSpec(Protocol):
    """A drafter's sizes. ``depth`` is the number of tokens that it drafts ahead."""

    @property
    def max_depth(self) -> int:
        """Maximum depth of a tree."""

    @property
    def own_lm_head(self) -> bool:
        """Whether it has a vocabulary matrix per depth, so that each depth is a message between ranks."""

    @property
    def head_bits(self) -> int | None:
        """4 for vocabulary matrices in codes."""

    def nbytes(self, spec: ModelSpec, depth: int, tp: int = 1) -> int:
        """Bytes of weights on one of ``tp`` ranks."""

    def products(self, spec: ModelSpec, sequences: int, depth: int, tp: int = 1) -> tuple[Product, ...]:
        """The products of one step."""

    def page_token_bytes(self, spec: ModelSpec, kv_dtype: str | None) -> int:
        """Bytes of a token in the drafter's layers' pages."""

    def row_bytes(self, spec: ModelSpec) -> int:
        """Peak bytes per row of a pass over accepted tokens."""

    def draft_bytes(self, spec: ModelSpec) -> int:
        """Peak bytes per sequence while drafting."""


@dataclass(frozen=True)
class FeatureDrafterSpec:
    """A drafter that reads the target's hidden states (:class:`specmemo_kernels.drafting.base.FeatureDrafter`).

    Attributes:
        kind: its name.
        max_depth: maximum depth of a tree. beam: nodes that it expands per depth.
        elements: of all weights. pair_elements: those that an accepted token multiplies. node_elements: those that a
            drafted node multiplies. block_elements: those that ``block_rows`` rows multiply once per step.
        vocab_elements: of the vocabulary matrix; 0: the target's.
        num_layers, num_kv_heads, head_dim: of its keys and values.
        feature_size: elements of a token's features. widest: most elements of a row's activations in a layer.
    """

    kind: str
    max_depth: int
    beam: int
    elements: int
    pair_elements: int
    node_elements: int
    vocab_elements: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    feature_size: int
    widest: int
    block_elements: int = 0
    block_rows: int = 0
    own_lm_head: bool = False
    head_bits: int | None = None

    def nbytes(self, spec: ModelSpec, depth: int, tp: int = 1) -> int:
        """See :class:`DrafterSpec`; every rank has all weights."""
        return self.elements * spec.dtype_bytes if depth else 0

    def products(self, spec: ModelSpec, sequences: int, depth: int, tp: int = 1) -> tuple[Product, ...]:
        """See :class:`DrafterSpec`: the accepted tokens, then a pass per depth from the second on."""
        size, vocabulary = spec.dtype_bytes, self.vocab_elements or spec.vocab_weights / tp
        nodes = sequences * self.beam
        products = [
            Product(self.pair_elements, self.pair_elements * size, sequences * (depth + 1), 7 * self.num_layers)
        ]
        if self.block_elements:
            products.append(
                Product(
                    self.block_elements, self.block_elements * size, sequences * self.block_rows, 7 * self.num_layers
                )
            )
            return *products, Product(vocabulary, vocabulary * size, sequences * depth, 1)
        products.append(Product(vocabulary, vocabulary * size, sequences, 1))
        for _ in range(depth - 1):
            products.append(Product(self.node_elements, self.node_elements * size, nodes, 7))
            products.append(Product(vocabulary, vocabulary * size, nodes, 1))
        return tuple(products)

    def page_token_bytes(self, spec: ModelSpec, kv_dtype: str | None) -> int:
        """See :class:`DrafterSpec`."""
        layer = LayerKV(
            self.num_kv_heads, self.head_dim, self.head_dim, getattr(torch, spec.dtype), torch.device("meta")
        )
        return self.num_layers * layer.page_bytes_per_token(kv_dtype)

    def row_bytes(self, spec: ModelSpec) -> int:
        """See :class:`DrafterSpec`."""
        return (self.feature_size + self.widest) * spec.dtype_bytes

    def draft_bytes(self, spec: ModelSpec) -> int:
        """See :class:`DrafterSpec`: logits in the model's dtype and in float32, and a layer's activations."""
        vocabulary = (self.vocab_elements or spec.vocab_weights) // spec.hidden_size
        rows = self.block_rows or self.beam
        history = self.max_depth * self.num_kv_heads * self.head_dim * 2
        return rows * (vocabulary * (spec.dtype_bytes + 4) + (self.widest + 2 * history) * spec.dtype_bytes)


@dataclass(frozen=True)
class HeadsSpec:
    """Sizes of Medusa heads: ``num_layers`` residual blocks each, and a vocabulary matrix if ``own_lm_head``.

    ``head_bits``: 4 for vocabulary matrices in 4-bit codes, ``None`` for the model's dtype.

    Raises:
        ValueError: other ``head_bits``, or ``head_bits`` without ``own_lm_head``.
    """

    num_heads: int = 5
    num_layers: int = 1
    own_lm_head: bool = True
    head_bits: int | None = None

    def __post_init__(self) -> None:
        check_bits(self.head_bits)
        if self.head_bits is not None and not self.own_lm_head:
            raise ValueError(
                f"head_bits is {self.head_bits}, but heads that share the model's lm_head have no matrix of their own"
            )

    @property
    def max_depth(self) -> int:
        """Maximum depth of a tree."""
        return self.num_heads

    def products(self, spec: ModelSpec, sequences: int, depth: int, tp: int = 1) -> tuple[Product, ...]:
        """See :class:`DrafterSpec`: the blocks, and each head's own matrix, or one product with the model's lm_head."""
        blocks = depth * self.num_layers * spec.hidden_size**2
        matrices, rows = (depth, sequences) if self.own_lm_head else (1, depth * sequences)
        vocabulary = matrices * spec.vocab_weights / tp
        return (
            Product(blocks, blocks * spec.dtype_bytes, sequences, depth * self.num_layers),
            Product(vocabulary, matrices * self.vocab_bytes(spec, tp), rows, matrices),
        )

    def page_token_bytes(self, spec: ModelSpec, kv_dtype: str | None) -> int:
        """Medusa heads have no keys and values."""
        return 0

    def row_bytes(self, spec: ModelSpec) -> int:
        """Medusa heads read the last hidden states only."""
        return 0

    def draft_bytes(self, spec: ModelSpec) -> int:
        """Less than a forward pass."""
        return 0

    def vocab_bytes(self, spec: ModelSpec, tp: int = 1) -> int:
        """One vocabulary matrix's share on one rank. Codes take 34 bytes per 64 elements of a row."""
        if self.head_bits is not None:
            return packed_bytes(-(-spec.vocab_size // tp), spec.hidden_size)
        return -(-spec.vocab_weights // tp) * spec.dtype_bytes

    def nbytes(self, spec: ModelSpec, heads: int, tp: int = 1) -> int:
        """Bytes of the first ``heads`` heads on one rank; the vocabulary is sharded, blocks are not."""
        block = spec.hidden_size * (spec.hidden_size + 1) * spec.dtype_bytes
        return heads * (self.num_layers * block + (self.vocab_bytes(spec, tp) if self.own_lm_head else 0))
