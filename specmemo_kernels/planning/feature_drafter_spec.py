"""Sizes of drafters that read the target's hidden states: their memory and their work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.ops.weight_codes import CODE_BITS, check_bits
from specmemo_kernels.planning.drafter_spec import RANKS, Drafts, DraftWork, Product
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, RECURRENT_ACCURACY, Accuracy
from specmemo_kernels.tree.tree_budget import TreeBudget, beam_of, most_nodes

#: EAGLE-2's tree (``topK_genrate``): a beam of 10, expanded 7 times behind the root's children. Clover-2 has the beam,
#: MTP both.
DEPTH, BEAM = 8, 10
#: Launches of growing trees, counted by a dispatch mode: the roots' children, sorting and the tree mask; each further
#: depth; the attention of a layer's nodes to their drafted ancestors.
_OPERATORS, _OPERATORS_PER_DEPTH, _OPERATORS_PER_MERGE = 44, 12, 50
#: A candidate of a dynamic tree while the tree grows (score, token, parent), and while candidates are sorted.
_GROWING_BYTES, _SORTING_BYTES = 20, 60
#: Log-probabilities in float32 and tokens in int64.
_CHILD_BYTES = 4 + 8
#: Messages of ranks: a value and a token per candidate; rank 0's trees, with token, parent and depth of a node; the
#: message before that one.
_CANDIDATE_BYTES, _NODE_MESSAGE_BYTES, _MEETING_BYTES = 16, 3 * 8, 4 * 8


@dataclass(frozen=True)
class DrafterPart:
    """Weights that the same rows pass through.

    Attributes:
        weights: elements, in ``matrices`` matrices.
        operators: launches per pass, without those of growing trees.
        activations: most elements that a row holds, without its features and drafted ancestors' keys and values.
        inputs: what it holds of them in an attention.
        attends: its layers read the drafter's pages. embeds: it reads the target's embeddings of the rows' tokens.
    """

    weights: int = 0
    matrices: int = 0
    operators: int = 0
    activations: int = 0
    inputs: int = 0
    attends: bool = False
    embeds: bool = False


@dataclass(frozen=True)
class FeatureDrafterSpec:
    """A drafter that reads the target's hidden states (:class:`specmemo_kernels.drafting.base.FeatureDrafter`).

    Implements :class:`specmemo_kernels.planning.drafter_spec.DrafterSpec`.

    Attributes:
        kind: its name.
        max_depth: maximum depth of a tree. beam: most nodes that it expands per depth.
        elements: of all weights. indices: of tensors in int64.
        hidden_size, num_layers, num_qo_heads, num_kv_heads, head_dim: of its layers.
        features: hidden states that it reads of every token. held: how many of them the target's pass must keep.
        advance: what prompt rows and accepted tokens pass through. state: what one row per sequence does.
        draft: what drafted nodes pass through.
        vocab_rows: rows of its own vocabulary matrix; 0: it uses the target's.
        block_rows: rows per sequence of the only drafting pass; 0: a pass over the beam per depth, from the second on.
        matrix_elements: of ``elements``, those that can be 4-bit codes. packed_bytes: their bytes in 4-bit codes.
        head_bits: 4 if they are, ``None``: all weights have the model's dtype.

    Raises:
        ValueError: other ``head_bits``, or codes of a drafter that has none.
    """

    kind: str
    max_depth: int
    beam: int
    elements: int
    indices: int
    hidden_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    features: int
    held: int
    advance: DrafterPart
    state: DrafterPart
    draft: DrafterPart
    vocab_rows: int = 0
    block_rows: int = 0
    matrix_elements: int = 0
    packed_bytes: int = 0
    head_bits: int | None = None

    def __post_init__(self) -> None:
        check_bits(self.head_bits)
        if self.head_bits is not None and not self.packed_bytes:
            raise ValueError(f"head_bits is {self.head_bits}, but {self.kind} drafters are used as stored")

    def in_codes(self) -> FeatureDrafterSpec | None:
        """The same drafter with its matrices in 4-bit codes; ``None``: they are already, or can't be."""
        return replace(self, head_bits=CODE_BITS) if self.packed_bytes and self.head_bits is None else None

    @property
    def assumed_accuracy(self) -> Accuracy:
        """See :class:`specmemo_kernels.planning.drafter_spec.DrafterSpec`; one pass predicts all tokens of a block."""
        return DEFAULT_ACCURACY if self.block_rows else RECURRENT_ACCURACY

    @property
    def ranks(self) -> int:
        """Candidates per depth in its trees."""
        return min(RANKS, self.beam)

    @property
    def attention_width(self) -> int:
        """Elements of all layers' queries and results."""
        return 2 * self.num_layers * self.num_qo_heads * self.head_dim

    def tree(self, paths: Sequence[Sequence[int]]) -> TreeBudget:
        """The size of dynamic trees that contain as many nodes; they are at least as good as the static tree."""
        return self.budget(len(paths) + 1, max(map(len, paths), default=0))

    def budget(self, size: int, depth: int) -> TreeBudget:
        """Dynamic trees of at most ``size`` nodes and ``depth``."""
        depth = min(depth, size - 1)
        width = self._beam(size, depth)
        return TreeBudget(min(size, most_nodes(depth, width)), depth, width)

    def nbytes(self, spec: ModelSpec, depth: int, tp: int = 1) -> int:
        """Bytes of weights; every rank has all of them."""
        if not depth:
            return 0
        matrices = self.matrix_elements * spec.dtype_bytes if self.head_bits is None else self.packed_bytes
        return matrices + (self.elements - self.matrix_elements) * spec.dtype_bytes + 8 * self.indices

    def page_token_bytes(self, spec: ModelSpec, kv_dtype: str | None) -> int:
        """Bytes of a token in its layers' pages, on every rank."""
        dtype = getattr(torch, spec.dtype)
        layer = LayerKV(self.num_kv_heads, self.head_dim, self.head_dim, dtype, torch.device("meta"))
        return self.num_layers * layer.page_bytes_per_token(kv_dtype)

    def step_work(self, spec: ModelSpec, drafts: Drafts, tp: int = 1) -> DraftWork:
        """Work of a step: the accepted tokens (rejected ones count as well), then the drafting passes."""
        sequences, beam = drafts.sequences, self._beam(drafts.nodes, drafts.depth)
        passes = (sequences * self.block_rows,) if self.block_rows else (sequences * beam,) * (drafts.depth - 1)
        predicted = (sequences * drafts.depth,) if self.block_rows else (sequences, *passes)
        parts = [(self.advance, sequences * (drafts.depth + 1)), *((self.draft, rows) for rows in passes)]
        products = [self._product(spec, part, rows) for part, rows in (*parts, (self.state, sequences))]
        vocabulary = self.vocab_rows * self.hidden_size or spec.lm_head_weights / tp
        read = vocabulary * self._element_bytes(spec) if self.vocab_rows else spec.lm_head_bytes / tp
        coded = self.head_bits is not None and self.vocab_rows > 0
        products += [Product(vocabulary, read, rows, 1, coded) for rows in predicted]
        merges = self.num_layers * max(0, drafts.depth - 2) if self._has_ancestors else 0
        growing = _OPERATORS + _OPERATORS_PER_DEPTH * (drafts.depth - 1) + _OPERATORS_PER_MERGE * merges
        best = [
            size for rows in predicted if not self.vocab_rows for size in (_CANDIDATE_BYTES * rows * beam, 4 * rows)
        ]
        return DraftWork(
            products=tuple(products),
            attention=tuple(rows for part, rows in parts if part.attends),
            operators=growing + sum(part.operators for part, _ in parts),
            gathered=(*best, _MEETING_BYTES, _NODE_MESSAGE_BYTES * sequences * drafts.nodes),
            reduced=tuple(rows * spec.hidden_size * spec.dtype_bytes for part, rows in parts if part.embeds),
        )

    def prompt_work(self, spec: ModelSpec, rows: int, ends: int) -> DraftWork:
        """Work of a prompt chunk of ``rows`` rows, in which ``ends`` prompts end."""
        part = self.advance
        return DraftWork(
            products=(self._product(spec, part, rows), self._product(spec, self.state, ends)),
            attention=(rows,) if part.attends else (),
            operators=part.operators,
            reduced=(rows * spec.hidden_size * spec.dtype_bytes,) if part.embeds else (),
        )

    def row_bytes(self, spec: ModelSpec, target: int) -> int:
        """Peak bytes per row: held states beside the target's layers, then their concatenation, then its own layers."""
        hidden, size = spec.hidden_size, spec.dtype_bytes
        joined = (2 * self.features + 1) * hidden if self.features > 1 else 0
        own = self.features * hidden + self.advance.activations
        return max(target + self.held * hidden * size, joined * size, own * size)

    def sequence_bytes(self, spec: ModelSpec, depth: int, nodes: int) -> int:
        """Peak bytes per sequence: drafting, or all nodes' states beside the accepted path in its own layers."""
        features = self.features * spec.hidden_size
        read = nodes * (features + spec.hidden_size) + (depth + 1) * (features + self.advance.activations)
        return max(read * spec.dtype_bytes, self._draft_bytes(spec.dtype_bytes, depth, self._beam(nodes, depth)))

    def _draft_bytes(self, size: int, depth: int, beam: int) -> int:
        """Peak bytes per sequence while drafting, in a dtype of ``size`` bytes."""
        sorting = _SORTING_BYTES * (most_nodes(depth, beam) - 1)
        if self.block_rows:
            children = _CHILD_BYTES * depth * beam
            return max(self.block_rows * self.draft.activations * size, children + sorting)
        if depth < 2:
            return sorting
        growing = _GROWING_BYTES * (most_nodes(depth - 1, beam) - 1)
        return max(growing + beam * self._node_bytes(size, depth - 2), sorting)

    def _node_bytes(self, size: int, ancestors: int) -> int:
        """Peak bytes of a drafted node, in a layer's attention or behind it, with ``ancestors`` drafted ancestors.

        Attention copies the ancestors' keys and values, and merges two results in float32 at least.
        """
        if not self._has_ancestors:
            return self.draft.activations * size
        wide, queries, keys = max(4, size), self.num_qo_heads * self.head_dim, self.num_kv_heads * self.head_dim
        above, path = 2 * ancestors * keys * size, 2 * (ancestors + 1) * keys * size
        upcast = (2 * ancestors * keys + queries) * wide if wide > size else 0
        attending = self.draft.inputs * size + 2 * above + max(3 * queries * wide + upcast, path)
        return max(attending, self.draft.activations * size + path) + (self.num_layers - 1) * path

    @property
    def _has_ancestors(self) -> bool:
        """Whether drafted nodes attend to their drafted ancestors."""
        return self.draft.attends and not self.block_rows

    def _beam(self, nodes: int, depth: int) -> int:
        """Nodes per depth that are expanded in trees of ``nodes`` nodes: all of them where that costs nothing."""
        all_of_them = self.block_rows or depth == 1
        return max(1, min(self.beam, nodes - 1 if all_of_them else beam_of(nodes)))

    def _product(self, spec: ModelSpec, part: DrafterPart, rows: int) -> Product:
        nbytes = part.weights * self._element_bytes(spec)
        return Product(part.weights, nbytes, rows, part.matrices, self.head_bits is not None)

    def _element_bytes(self, spec: ModelSpec) -> float:
        """Bytes of a matrix's element."""
        return spec.dtype_bytes if self.head_bits is None else self.packed_bytes / self.matrix_elements
