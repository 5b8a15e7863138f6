"""Sizes of drafters that determine their memory and their time, without their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specmemo_kernels.ops.weight_codes import CODE_BITS, check_bits, packed_bytes
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, Accuracy
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import Trees

#: Candidates per depth, as in published trees.
RANKS = 10
#: Share of right guesses of a drafter that prefers chains, whose accuracy is unknown.
CHAIN_ACCURACY = 0.5


@dataclass(frozen=True)
class Product:
    """``rows`` rows times ``matrices`` matrices of ``weights`` elements and ``nbytes`` bytes in total.

    ``coded``: in 4-bit codes.
    """

    weights: float
    nbytes: float
    rows: int
    matrices: int
    coded: bool = False


@dataclass(frozen=True)
class Drafts:
    """The drafts of a step: ``depth`` tokens ahead, in trees of ``nodes`` nodes, for each of ``sequences``.

    ``width``: candidates per depth that ranks exchange.
    """

    sequences: int
    depth: int
    nodes: int
    width: int = RANKS


@dataclass(frozen=True)
class DraftWork:
    """A drafter's work in a pass.

    Attributes:
        products: matrix products.
        attention: rows of each pass over its own layers that reads its pages.
        operators: launches, without those that :data:`specmemo_kernels.planning.cost.OPERATORS_AROUND` counts.
        gathered, reduced: with tensor parallelism, a rank's bytes in each all-gather and all-reduce.
    """

    products: tuple[Product, ...] = ()
    attention: tuple[int, ...] = ()
    operators: int = 0
    gathered: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()


class DrafterSpec(Protocol):
    """A drafter's sizes. ``depth``: tokens that it drafts ahead; ``nodes``: of a tree, root included."""

    @property
    def kind(self) -> str:
        """Its name."""

    @property
    def max_depth(self) -> int:
        """Maximum depth of a tree."""

    @property
    def head_bits(self) -> int | None:
        """4: its matrices are in 4-bit codes; ``None``: in the model's dtype."""

    @property
    def assumed_accuracy(self) -> Accuracy:
        """Its accuracy, ``[depth][k]`` cumulative, unless a file or a run has others."""

    @property
    def ranks(self) -> int:
        """Candidates per depth in its trees; 1: chains."""

    @property
    def hidden_size(self) -> int:
        """Width of its own layers' states; 0: the target's."""

    @property
    def attention_width(self) -> int:
        """Elements of all its layers' queries and results: a row has 2 operations per element and slot."""

    def in_codes(self) -> DrafterSpec | None:
        """The same drafter with its matrices in 4-bit codes; ``None``: they are already, or can't be."""

    def tree(self, paths: Sequence[Sequence[int]]) -> Trees:
        """The plan's tree, from the rank paths of the best static tree."""

    def nbytes(self, spec: ModelSpec, depth: int, tp: int = 1) -> int:
        """Bytes of weights on one of ``tp`` ranks."""

    def page_token_bytes(self, spec: ModelSpec, kv_dtype: str | None) -> int:
        """Bytes of a token in its layers' pages, on every rank."""

    def step_work(self, spec: ModelSpec, drafts: Drafts, tp: int = 1) -> DraftWork:
        """Work of a step: it reads the accepted tokens and drafts."""

    def prompt_work(self, spec: ModelSpec, rows: int, ends: int) -> DraftWork:
        """Work of a prompt chunk of ``rows`` rows, in which ``ends`` prompts end."""

    def row_bytes(self, spec: ModelSpec, target: int) -> int:
        """Peak bytes per row of a forward pass that takes ``target`` bytes, and of reading a prompt afterwards."""

    def sequence_bytes(self, spec: ModelSpec, depth: int, nodes: int) -> int:
        """Peak bytes per sequence of drafting, and of reading accepted tokens."""


class _StaticDrafter:
    """Of drafters that keep nothing per token and read at most the last hidden state."""

    ranks, hidden_size, attention_width = RANKS, 0, 0
    head_bits: int | None = None
    assumed_accuracy: Accuracy = DEFAULT_ACCURACY

    def in_codes(self) -> DrafterSpec | None:
        return None

    def tree(self, paths: Sequence[Sequence[int]]) -> Trees:
        return DraftTree.from_paths(paths)

    def page_token_bytes(self, spec: ModelSpec, kv_dtype: str | None) -> int:
        return 0

    def prompt_work(self, spec: ModelSpec, rows: int, ends: int) -> DraftWork:
        return DraftWork()

    def row_bytes(self, spec: ModelSpec, target: int) -> int:
        return target

    def sequence_bytes(self, spec: ModelSpec, depth: int, nodes: int) -> int:
        return 0  # less than a forward pass


@dataclass(frozen=True)
class HeadsSpec(_StaticDrafter):
    """Sizes of Medusa heads: ``num_layers`` residual blocks each, and a vocabulary matrix if ``own_lm_head``.

    ``head_bits``: 4 for matrices in 4-bit codes, ``None`` for the model's dtype.

    Raises:
        ValueError: other ``head_bits``.
    """

    num_heads: int = 5
    num_layers: int = 1
    own_lm_head: bool = True
    head_bits: int | None = None

    kind = "Medusa"

    def __post_init__(self) -> None:
        check_bits(self.head_bits)

    @property
    def max_depth(self) -> int:
        """Maximum depth of a tree."""
        return self.num_heads

    def in_codes(self) -> HeadsSpec | None:
        """See :class:`DrafterSpec`."""
        return replace(self, head_bits=CODE_BITS) if self.num_heads and self.head_bits is None else None

    def step_work(self, spec: ModelSpec, drafts: Drafts, tp: int = 1) -> DraftWork:
        """See :class:`DrafterSpec`: the blocks, and each head's own matrix, or one product with the model's lm_head.

        Ranks exchange a value and a token, 16 bytes, per candidate: one message per matrix.
        """
        sequences, depth = drafts.sequences, drafts.depth
        blocks, coded = depth * self.num_layers, self.head_bits is not None
        matrices, rows = (depth, sequences) if self.own_lm_head else (1, depth * sequences)
        vocabulary = matrices * spec.lm_head_weights / tp
        read = self.vocab_bytes(spec, tp) if self.own_lm_head else spec.lm_head_bytes / tp
        products = (
            Product(blocks * spec.hidden_size**2, blocks * self.block_bytes(spec), sequences, blocks, coded),
            Product(vocabulary, matrices * read, rows, matrices, coded and self.own_lm_head),
        )
        return DraftWork(products, gathered=(16 * rows * drafts.width,) * matrices)

    def block_bytes(self, spec: ModelSpec) -> int:
        """A residual block's matrix. Codes take 34 bytes per 64 elements of a row."""
        return self._matrix_bytes(spec.hidden_size, spec)

    def vocab_bytes(self, spec: ModelSpec, tp: int = 1) -> int:
        """An own vocabulary matrix: its share on one rank."""
        return self._matrix_bytes(-(-spec.vocab_size // tp), spec)

    def _matrix_bytes(self, rows: int, spec: ModelSpec) -> int:
        if self.head_bits is not None:
            return packed_bytes(rows, spec.hidden_size)
        return rows * spec.hidden_size * spec.dtype_bytes

    def nbytes(self, spec: ModelSpec, heads: int, tp: int = 1) -> int:
        """Bytes of the first ``heads`` heads on one rank; the vocabulary is sharded, blocks are not."""
        block = self.block_bytes(spec) + spec.hidden_size * spec.dtype_bytes
        return heads * (self.num_layers * block + (self.vocab_bytes(spec, tp) if self.own_lm_head else 0))


@dataclass(frozen=True)
class PromptLookupSpec(_StaticDrafter):
    """Prompt lookup: chains without weights; the host's time isn't counted."""

    max_depth: int = 10

    kind, ranks, assumed_accuracy = "prompt lookup", 1, ((CHAIN_ACCURACY,),)

    def nbytes(self, spec: ModelSpec, depth: int, tp: int = 1) -> int:
        """No weights."""
        return 0

    def step_work(self, spec: ModelSpec, drafts: Drafts, tp: int = 1) -> DraftWork:
        """No work on the device."""
        return DraftWork()
