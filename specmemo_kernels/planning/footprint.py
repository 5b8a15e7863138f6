"""The bytes of every part of generation: what was measured of a forward pass, and formulas for the rest.

Where a model is loaded, :class:`PassBytes` is measured on it; where there is only a configuration,
:func:`predicted_shape` derives it. Everything after that is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.ops.weight_codes import check_bits, packed_bytes
from specmemo_kernels.planning.model_spec import ModelSpec, ranks_share

#: A prefill row or tree node outside of the model: int64 tokens (as drafted, packed, clamped), positions, and a spare.
_ROW_BYTES = 5 * 8
#: The same once more where trees and chunks share a step: tokens, positions and the row's place among the kept ones;
#: its words of the tree mask come on top.
_JOINED_ROW_BYTES = 3 * 8
#: A token of a prompt or answer in generate's own tensors: int64 ids, mask and positions.
_TOKEN_BYTES = 3 * 8
#: A page's entry in the block table, and in the copy that a step works on.
_TABLE_BYTES = 2 * 4
#: Layouts of trees that are kept for the next step (``batch.tree_layout`` for the batch sizes seen last).
KEPT_LAYOUTS = 8
#: What graphs take beside a step's tensors: torch's allocator rounds up to blocks of 2 and 20 MiB, and cuBLAS gets
#: another workspace for the stream that captures, of 32 MiB on the GPUs where it is largest.
_GRAPH_BYTES = (2 + 20 + 32) << 20
#: Tensors of single elements, whose number depends on nothing.
_SMALL_BYTES = 4096
_SEQUENCE_BYTES = 128


@dataclass(frozen=True)
class PassBytes:
    """Transient bytes of a forward pass over some number of rows: at most ``fixed + rows * per_row``."""

    fixed: int = 0
    per_row: int = 0

    def at(self, rows: int) -> int:
        """The bound for ``rows`` rows, in bytes."""
        return self.fixed + rows * self.per_row

    def elementwise_max(self, other: PassBytes) -> PassBytes:
        """A bound for either of two passes."""
        return PassBytes(max(self.fixed, other.fixed), max(self.per_row, other.per_row))

    @classmethod
    def fitted(cls, few: tuple[int, Sequence[int]], many: tuple[int, Sequence[int]]) -> Self:
        """A bound from two passes, given as ``(rows, bytes held after each operator)``.

        Each moment of a pass holds ``a + b * rows`` bytes, so two passes with the same operators tell every moment's
        ``a`` and ``b``; the largest of both bound all moments at any number of rows. Peaks alone wouldn't do: the
        moment that is worst for many rows need not be the worst for few. Where the operators differ, all bytes count
        as if they grew with the rows, which is too much rather than too little.

        Raises:
            ValueError: no moments, or not more rows in ``many``.
        """
        (few_rows, few_bytes), (many_rows, many_bytes) = few, many
        if not 0 < few_rows < many_rows or not few_bytes or not many_bytes:
            raise ValueError(
                f"two passes over growing numbers of rows are needed, got {few_rows} rows with {len(few_bytes)} "
                f"operators and {many_rows} rows with {len(many_bytes)}"
            )
        if len(few_bytes) != len(many_bytes):
            peak = max(many_bytes)
            return cls(peak, -(-peak // many_rows))
        more = many_rows - few_rows
        slopes = [-((a - b) // more) for a, b in zip(few_bytes, many_bytes, strict=True)]
        constants = [-(-(a * many_rows - b * few_rows) // more) for a, b in zip(few_bytes, many_bytes, strict=True)]
        return cls(max(0, *constants), max(0, *slopes))


@dataclass(frozen=True)
class GenerationShape:
    """What generation memory depends on, of a model, its drafter and its backend.

    Attributes:
        kv_bytes_per_token: all layers' keys and values in pages, scales included.
        scratch_bytes_per_node: a node's keys and values while it waits for the verdict; ``None``: as in pages.
        head_bytes: what the drafter holds. coded_head_bytes: what it would with ``head_bits=4``; ``None``: the same.
        forward: a forward pass up to its lm_head, by its rows.
        logits: what the rows add whose logits the model makes, where steps can't do without; else nothing.
        state_bytes: of one sequence between passes (its last hidden state).
        split_size, split_row_bytes: attention that works on splits of ``split_size`` tokens holds this for each row
            and split; 0 for a backend without such a workspace.
        workspace_bytes: what the backend and libraries keep beside torch's allocator, whatever runs.
        drafter_kv_bytes_per_token: keys and values that the drafter keeps, in pages of its own.
        devices: how many devices hold layers; each gets a copy of a step's metadata.
        kept_steps: how many steps keep tensors of their own from one time to the next (``step_graph.MAX_STEPS``).
        graphs: whether they are captured in graphs, which hold all tensors of a step beside those of other passes.
    """

    kv_bytes_per_token: int
    head_bytes: int
    forward: PassBytes
    logits: PassBytes = PassBytes()
    state_bytes: int = 0
    split_size: int = 0
    split_row_bytes: int = 0
    workspace_bytes: int = 0
    drafter_kv_bytes_per_token: int = 0
    devices: int = 1
    scratch_bytes_per_node: int | None = None
    kept_steps: int = 0
    graphs: bool = False
    coded_head_bytes: int | None = None

    @property
    def node_bytes(self) -> int:
        """Scratch bytes of a node: pages may be quantised, scratch never is."""
        return self.kv_bytes_per_token if self.scratch_bytes_per_node is None else self.scratch_bytes_per_node


@dataclass(frozen=True)
class StepSize:
    """What runs at once: ``sequences`` trees of ``tree_size`` nodes, prompts in chunks of at most ``chunk`` rows."""

    tree_size: int
    sequences: int
    chunk: int
    page_size: int

    @property
    def nodes(self) -> int:
        """Nodes of a step."""
        return self.tree_size * self.sequences

    @property
    def rows(self) -> int:
        """The most rows of a forward pass."""
        return max(self.chunk, self.nodes)


def fixed_parts(shape: GenerationShape, load: StepSize) -> dict[str, int]:
    """Bytes by part, pages and what grows with them left out."""
    # A step's rows are trees and chunks of prompts side by side. Of a prompt the last row gets logits, of trees all.
    step = shape.forward.at(load.rows) + shape.logits.at(load.nodes)
    splits = -(-load.rows // shape.split_size) + 1 if shape.split_size else 0
    words = -(-load.tree_size // 64)
    layout = 8 * words + 4 + 8 + 8 + 8  # mask, parent, depth, row; the column of a drafter's choice
    rows = load.rows * (_ROW_BYTES + _JOINED_ROW_BYTES + 8 * words)
    metadata = rows + KEPT_LAYOUTS * load.nodes * layout + load.sequences * _SEQUENCE_BYTES + _SMALL_BYTES
    parts = {
        "heads": shape.head_bytes,
        "tree_scratch": load.nodes * shape.node_bytes,
        "activations": step + load.sequences * shape.state_bytes + load.rows * splits * shape.split_row_bytes,
        "metadata": metadata * shape.devices,
        "workspace": shape.workspace_bytes,
    }
    if shape.kept_steps:
        # What a step found is a row per sequence, no longer than its tree is large.
        found = load.sequences * (8 * (load.tree_size + 2) + 4)
        parts["graphs"] = shape.kept_steps * (load.nodes * layout + found)
        parts["graphs"] += load.sequences * (shape.state_bytes + _SEQUENCE_BYTES)
    if shape.graphs:
        splits = -(-load.nodes // shape.split_size) + 1 if shape.split_size else 0
        step = shape.forward.at(load.nodes) + shape.logits.at(load.nodes)
        parts["graphs"] += step + load.nodes * (splits * shape.split_row_bytes + _ROW_BYTES) + _GRAPH_BYTES
    return parts


def page_parts(shape: GenerationShape, load: StepSize) -> dict[str, int]:
    """Bytes by part that each page adds."""
    tokens = load.page_size
    split = -(-load.rows * tokens * shape.split_row_bytes // shape.split_size) if shape.split_size else 0
    # All prompts of a call may be padded to the longest, which may take all pages.
    ids = load.sequences * tokens * _TOKEN_BYTES
    parts = {
        "kv_pages": tokens * shape.kv_bytes_per_token,
        "drafter_pages": tokens * shape.drafter_kv_bytes_per_token,
        "activations": split,
        "metadata": (ids + load.sequences * _TABLE_BYTES) * shape.devices,
    }
    if shape.graphs:
        step = -(-load.nodes * tokens * shape.split_row_bytes // shape.split_size) if shape.split_size else 0
        parts["graphs"] = step + load.sequences * _TABLE_BYTES
    return parts


def equal_length_metadata(load: StepSize, pages: int) -> int:
    """Bytes of ids and block tables for ``pages`` pages of sequences of one length, where nothing is padded."""
    return pages * (load.page_size * _TOKEN_BYTES + load.sequences * _TABLE_BYTES)


@dataclass(frozen=True)
class HeadsSpec:
    """Medusa heads by their sizes: ``num_layers`` residual blocks each, and a vocabulary matrix if ``own_lm_head``.

    ``head_bits``: 4 for vocabulary matrices in 4-bit codes, ``None`` for the model's dtype.

    Raises:
        ValueError: other ``head_bits``, or without a matrix for them.
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

    def vocab_bytes(self, spec: ModelSpec, tp: int = 1) -> int:
        """One vocabulary matrix on one rank: its rows are divided. With codes 34 bytes per 64 elements of a row."""
        if self.head_bits is not None:
            return packed_bytes(-(-spec.vocab_size // tp), spec.hidden_size)
        return -(-spec.vocab_weights // tp) * spec.dtype_bytes

    def nbytes(self, spec: ModelSpec, heads: int, tp: int = 1) -> int:
        """The first ``heads`` heads on one rank; the vocabulary is divided, blocks are not."""
        block = spec.hidden_size * (spec.hidden_size + 1) * spec.dtype_bytes
        return heads * (self.num_layers * block + (self.vocab_bytes(spec, tp) if self.own_lm_head else 0))


def weight_bytes(spec: ModelSpec, tp: int = 1) -> int:
    """The model's own weights on one of ``tp`` ranks, by transformers' tensor parallel plan for Llama.

    Layers are divided (key/value heads are held whole, by several ranks where there are more of these), so are the rows
    of the embedding and the lm_head; vectors are on each. (Older versions leave the embedding whole, 5.17 does.)
    """
    vocabularies = 1 if spec.tied else 2
    vectors = spec.parameters - spec.layer_weights - vocabularies * spec.vocab_weights
    layers = spec.weight_bytes - (vectors + vocabularies * spec.vocab_weights) * spec.dtype_bytes
    rows = -(-spec.vocab_size // tp) * spec.hidden_size
    share = math.ceil(layers * (spec.layer_weights_of_rank(tp) / spec.layer_weights))
    return (vectors + vocabularies * rows) * spec.dtype_bytes + share


def page_token_bytes(spec: ModelSpec, kv_dtype: str | None = None, tp: int = 1) -> int:
    """All layers' bytes of a token in pages on one of ``tp`` ranks: elements, or codes and scales.

    Raises:
        ValueError: ``kv_dtype`` is none of ``None``, ``"int8"`` and ``"fp8"``.
    """
    heads, dtype = spec.kv_heads_of_rank(tp), getattr(torch, spec.dtype)
    layer = LayerKV(heads, spec.head_dim, spec.v_head_dim, dtype, torch.device("meta"))
    return spec.num_layers * layer.page_bytes_per_token(kv_dtype)


def pass_row_bytes(spec: ModelSpec, tp: int = 1) -> int:
    """Bytes that a row of a forward pass takes at the pass's worst moment, up to the lm_head.

    With H the hidden size, Q, K and V the widths of queries, keys and values, I of the feed-forward layer and s bytes
    per element, transformers' Llama holds at some time (what comes before a layer: embeddings, the layer's input)

    - in a norm, which computes in float32: ``3 H s + 2 * 4 H``: also what it normalises, twice in float32;
    - while rotating queries: ``3 H s + (Q + K + V + 3 Q) s``: q cos, the turned q and its product with sin;
    - while rotating keys: ``3 H s + (Q + K + V + Q + 3 K) s``: the rotated queries are there by then;
    - in the feed-forward layer: ``4 H s + 3 I s``: gate, up, their product (2 I without a gate, 4 I where gate and up
      are one matrix); in a mixture of experts of k per token ``4 H s + k (2 H + 4 I) s``, as grouped products hold it
      (9 I in gpt-oss);

    beside cos and sin, ``2 D s``. Other families differ in their norms and rotary embeddings by some per cent (up to an
    eighth: stablelm); a loaded model is measured instead. On one of ``tp`` ranks Q, K, V and I are divided.
    """
    size, hidden = spec.dtype_bytes, spec.hidden_size
    q = -(-spec.num_qo_heads * spec.head_dim // tp)
    k, v = (spec.kv_heads_of_rank(tp) * dim for dim in (spec.head_dim, spec.v_head_dim))
    moments = [3 * hidden * size + 8 * hidden, (3 * hidden + q + k + v + max(3 * q, q + 3 * k)) * size]
    if spec.dense_layers:
        moments.append((4 * hidden + spec.ffn_tensors * -(-spec.intermediate_size // tp)) * size)
    if spec.moe_layers:
        grouped = spec.experts_per_token * (2 * hidden + spec.expert_tensors * -(-spec.expert_size // tp))
        moments.append((4 * hidden + grouped + 3 * -(-spec.shared_size // tp)) * size)
    return max(moments) + 2 * spec.head_dim * size


def check_ranks(spec: ModelSpec, tp: int) -> None:
    """
    Raises:
        ValueError: ``tp`` ranks can't share the model's heads.
    """
    if not ranks_share(spec.num_qo_heads, spec.num_kv_heads, tp):
        raise ValueError(
            f"{spec.name} has {spec.num_qo_heads} query and {spec.num_kv_heads} key/value heads; tp is {tp}, it must "
            "divide the former, and divide the latter or be a multiple of them"
        )


def predicted_shape(
    spec: ModelSpec,
    heads: HeadsSpec,
    num_heads: int,
    *,
    tp: int = 1,
    split_size: int = 0,
    workspace_bytes: int = 0,
    kv_dtype: str | None = None,
) -> GenerationShape:
    """What patching would measure, from a configuration: one rank of ``tp``, the first ``num_heads`` heads loaded.

    Args:
        split_size: tokens per split of attention that keeps the states of its splits in memory (0: it doesn't);
            float32, ``v_head_dim`` and two numbers per query head.
        workspace_bytes: what the backend keeps for itself.
        kv_dtype: ``"int8"`` or ``"fp8"`` for pages of codes, ``None`` for the model's dtype.

    Raises:
        ValueError: ``tp`` ranks can't share the heads.
    """
    check_ranks(spec, tp)
    return GenerationShape(
        kv_bytes_per_token=page_token_bytes(spec, kv_dtype, tp),
        scratch_bytes_per_node=page_token_bytes(spec, None, tp),
        head_bytes=heads.nbytes(spec, num_heads, tp),
        forward=PassBytes(0, pass_row_bytes(spec, tp)),
        state_bytes=3 * spec.hidden_size * spec.dtype_bytes,
        split_size=split_size,
        split_row_bytes=4 * (spec.num_qo_heads // tp) * (spec.v_head_dim + 2) if split_size else 0,
        workspace_bytes=workspace_bytes,
    )
