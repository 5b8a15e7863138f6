"""Bytes of each part of generation.

:class:`PassBytes` is measured on a loaded model, or derived from a configuration (:func:`predicted_shape`). The
formulas for the other parts are the same in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.forward.batch import CACHED_LAYOUTS
from specmemo_kernels.forward.target import LOGIT_ROWS
from specmemo_kernels.planning.drafter_spec import DrafterSpec
from specmemo_kernels.planning.model_spec import ModelSpec, ranks_share

#: Metadata of a row (prefill token or tree node): int64 tokens (drafted, packed, clamped), positions, and a spare.
_ROW_BYTES = 5 * 8
#: Copies in steps with trees and chunks: tokens, positions, row index. Words of the tree mask are added.
_JOINED_ROW_BYTES = 3 * 8
#: A token in the tensors of ``generate``: int64 ids, mask and positions.
_TOKEN_BYTES = 3 * 8
#: A block table entry, and its copy in a step.
_TABLE_BYTES = 2 * 4
#: Graphs: torch's allocator rounds up to blocks of 2 and 20 MiB, and cuBLAS allocates a workspace of up to 32 MiB for
#: the capturing stream.
_GRAPH_BYTES = (2 + 20 + 32) << 20
#: Objects of a recorded step per operator: while it is kept, and more while it is recorded. Measured with 24 layers
#: (Llama with heads and EAGLE-3, Qwen3-MoE): 480 to 1050 bytes and 1970 to 2900. The third is not counted:
#: a process's own objects vary by as much.
_KEPT_OPERATOR_BYTES, _RECORDING_OPERATOR_BYTES, _UNCOUNTED_BYTES = 550, 2200, 1 << 20
#: Bytes per token of the vocabulary to draw from one row of logits: copies in float32, sorted scores.
_DRAW_BYTES = 32
#: Hidden states that a sequence keeps: of its last step, of its prompt in prefill, and of the previous chunk.
KEPT_STATES = 3
#: All tensors of single elements.
_SMALL_BYTES = 4096
_SEQUENCE_BYTES = 128


@dataclass(frozen=True)
class PassBytes:
    """Bound on the transient bytes of a forward pass: ``fixed + rows * per_row``.

    Attributes:
        few, few_rows: another bound for at most ``few_rows`` rows.
    """

    fixed: int = 0
    per_row: int = 0
    few: PassBytes | None = None
    few_rows: int = 0

    def at(self, rows: int) -> int:
        """The bound for ``rows`` rows, in bytes."""
        if self.few is not None and rows <= self.few_rows:
            return self.few.at(rows)
        return self.fixed + rows * self.per_row

    def elementwise_max(self, other: PassBytes) -> PassBytes:
        """A bound for either of two passes."""
        bound = PassBytes(max(self.fixed, other.fixed), max(self.per_row, other.per_row))
        rows = max(self.few_rows, other.few_rows)
        if not rows:
            return bound
        return replace(bound, few=self._up_to(rows).elementwise_max(other._up_to(rows)), few_rows=rows)

    def _up_to(self, rows: int) -> PassBytes:
        return self.few if self.few is not None and self.few_rows == rows else self

    def with_few(self, rows: int, few: PassBytes) -> PassBytes:
        """The same bound but for at most ``rows`` rows, for which ``few`` is one."""
        if self.few is None or self.few_rows <= rows:
            return replace(self, few=few, few_rows=rows)
        return replace(self, few=self.few.with_few(rows, few))

    @classmethod
    def between(cls, few: tuple[int, int], many: tuple[int, int]) -> Self:
        """The line through two ``(rows, bytes)``: a bound between them where bytes grow ever faster."""
        slope = max(0, -((few[1] - many[1]) // (many[0] - few[0])))
        return cls(max(0, many[1] - slope * many[0]), slope)

    @classmethod
    def stepwise(cls, points: Sequence[tuple[int, int]]) -> PassBytes:
        """The bytes of the next larger of two or more ascending ``(rows, bytes)``: a bound where more rows never take
        less. Beyond them, the line through the first and the last.
        """
        few: PassBytes | None = None
        few_rows = 0
        for rows, held in points:
            few, few_rows = cls(held, 0, few, few_rows), rows
        return replace(cls.between(points[0], points[-1]), few=few, few_rows=few_rows)

    @classmethod
    def fitted(cls, few: tuple[int, Sequence[int]], many: tuple[int, Sequence[int]]) -> Self:
        """A bound from two passes, given as ``(rows, bytes held after each operator)``.

        After each operator a pass holds ``a + b * rows`` bytes. Two passes give ``a`` and ``b`` of each operator, and
        their maxima bound the pass at any number of rows. Peaks are not enough: the peak of few rows may be at another
        operator than the peak of many. If the passes have different operators, all bytes count per row (an upper
        bound).

        Raises:
            ValueError: a pass without operators, or not more rows in ``many``.
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
        rows = many_rows - few_rows
        slopes = [-((a - b) // rows) for a, b in zip(few_bytes, many_bytes, strict=True)]
        constants = [-(-(a * many_rows - b * few_rows) // rows) for a, b in zip(few_bytes, many_bytes, strict=True)]
        return cls(max(0, *constants), max(0, *slopes))


@dataclass(frozen=True)
class ProductBytes:
    """What a product of a quantised layer takes while it runs.

    Attributes:
        beyond: bytes that a pass's measured tensors don't include, by its rows.
        layer: class of the layer whose product takes the most. peak: all bytes of such a product, at most.
    """

    beyond: PassBytes = PassBytes()
    layer: str = ""
    peak: int = 0

    def elementwise_max(self, other: ProductBytes) -> ProductBytes:
        """A bound for either of two products."""
        largest = self if self.peak >= other.peak else other
        return replace(largest, beyond=self.beyond.elementwise_max(other.beyond))


@dataclass(frozen=True)
class GenerationShape:
    """Sizes of a model, its drafter and its backend that determine the memory of generation.

    Attributes:
        kv_bytes_per_token: all layers' keys and values in pages, scales included.
        scratch_bytes_per_node: a node's keys and values in scratch; ``None``: as in pages.
        head_bytes: the drafter's weights. coded_head_bytes: the same with ``head_bits=4``; ``None``: no difference.
        forward: a forward pass up to its lm_head, by its rows.
        logits: logits by their rows, where steps need them.
        draw: drawing tokens behind the pass, by the rows of logits (:func:`draw_bytes`).
        products: of quantised layers.
        draft: drafting by the number of sequences, for drafters with passes of their own.
        state_bytes: of the :data:`KEPT_STATES` hidden states of a sequence.
        mixer_state_bytes: states of a sequence in recurrent and convolution layers.
        mixers: verifying trees in such a layer, by the number of sequences. beside_mixers: what else a pass holds then,
            by its rows.
        split_size, split_row_bytes: tokens per attention split, and workspace bytes per row and split; 0 for a backend
            without this workspace.
        workspace_bytes: constant memory of the backend outside torch's allocator.
        libraries: buffers that libraries keep, by the rows of passes.
        drafter_kv_bytes_per_token: keys and values in the drafter's own pages.
        devices: number of devices with layers; each gets a copy of a step's metadata.
        kept_steps: number of steps whose tensors are cached (``step_graph.max_steps``, or fewer).
        step_operators, draft_operators: operators of the pass of a step that is recorded on a CPU, and of its drafting.
        graphs: whether cached steps are graphs, which own all tensors of a step.
    """

    kv_bytes_per_token: int
    head_bytes: int
    forward: PassBytes
    logits: PassBytes = PassBytes()
    draw: PassBytes = PassBytes()
    products: ProductBytes = ProductBytes()
    draft: PassBytes = PassBytes()
    state_bytes: int = 0
    split_size: int = 0
    split_row_bytes: int = 0
    workspace_bytes: int = 0
    libraries: PassBytes = PassBytes()
    drafter_kv_bytes_per_token: int = 0
    devices: int = 1
    scratch_bytes_per_node: int | None = None
    kept_steps: int = 0
    step_operators: int = 0
    draft_operators: int = 0
    graphs: bool = False
    coded_head_bytes: int | None = None
    mixer_state_bytes: int = 0
    mixers: PassBytes = PassBytes()
    beside_mixers: PassBytes = PassBytes()

    @property
    def node_bytes(self) -> int:
        """Scratch bytes of a node, never quantised."""
        return self.kv_bytes_per_token if self.scratch_bytes_per_node is None else self.scratch_bytes_per_node


@dataclass(frozen=True)
class StepSize:
    """Maximum of a step: ``sequences`` trees of ``tree_size`` nodes, and ``chunk`` prompt tokens."""

    tree_size: int
    sequences: int
    chunk: int
    page_size: int

    @property
    def nodes(self) -> int:
        return self.tree_size * self.sequences

    @property
    def rows(self) -> int:
        """Maximum of rows of a forward pass."""
        return max(self.chunk, self.nodes)


def draw_bytes(vocab_size: int, logit_bytes: int, ranks: int = 1) -> PassBytes:
    """Bytes to draw tokens: one row's copies, and logits per row, with tensor parallelism also all ranks' parts."""
    copies = 1 if ranks == 1 else 3
    return PassBytes(_DRAW_BYTES * vocab_size, copies * logit_bytes * vocab_size)


def pass_bytes(shape: GenerationShape, size: StepSize) -> int:
    """Bytes of the tensors of one pass, of the model or the drafter."""
    # Rows are tree nodes and prompt tokens. Logits: all nodes, and the last token of a prompt.
    forward = shape.forward.at(size.rows)
    if shape.mixer_state_bytes:
        # A pass that computes a prompt's chunk verifies no tree of that sequence.
        for rows, trees in ((size.rows, size.sequences - 1), (size.nodes, size.sequences)):
            if trees:
                forward = max(forward, shape.beside_mixers.at(rows) + shape.mixers.at(trees))
    logits = shape.logits.at(size.nodes)
    draw = shape.draw.at(min(LOGIT_ROWS, size.nodes))
    return max(forward + logits, logits + draw, shape.draft.at(size.sequences))


def fixed_parts(shape: GenerationShape, size: StepSize) -> dict[str, int]:
    """Bytes by part, without the shares that grow with the number of pages."""
    splits = -(-size.rows // shape.split_size) + 1 if shape.split_size else 0
    words = -(-size.tree_size // 64)
    layout = 8 * words + 4 + 8 + 8 + 8  # mask, parent, depth, row, column of the candidate
    rows = size.rows * (_ROW_BYTES + _JOINED_ROW_BYTES + 8 * words)
    metadata = rows + CACHED_LAYOUTS * size.nodes * layout + size.sequences * _SEQUENCE_BYTES + _SMALL_BYTES
    parts = {
        "heads": shape.head_bytes,
        "tree_scratch": size.nodes * shape.node_bytes,
        "activations": pass_bytes(shape, size)
        + size.sequences * shape.state_bytes
        + size.rows * splits * shape.split_row_bytes,
        "metadata": metadata * shape.devices,
        "workspace": shape.workspace_bytes + shape.libraries.at(size.rows),
    }
    if shape.products.layer:
        parts["products"] = shape.products.beyond.at(size.rows)
    if shape.mixer_state_bytes:
        parts["states"] = size.sequences * shape.mixer_state_bytes
    if shape.kept_steps:
        results = size.sequences * (8 * (2 * size.tree_size + 1) + 4)  # a row per sequence: tokens and nodes of a path
        parts["graphs"] = shape.kept_steps * (size.nodes * (layout + 8) + results)  # 8: a node's token
        parts["graphs"] += size.sequences * (shape.state_bytes + _SEQUENCE_BYTES)
        parts["graphs"] += size.nodes * (
            shape.state_bytes // KEPT_STATES
        )  # hidden states of a pass that the host verifies
        parts["graphs"] += recorded_bytes(shape)
    if shape.graphs:
        splits = -(-size.nodes // shape.split_size) + 1 if shape.split_size else 0
        step = max(shape.forward.at(size.nodes) + shape.logits.at(size.nodes), shape.draft.at(size.sequences))
        parts["graphs"] += step + size.nodes * (splits * shape.split_row_bytes + _ROW_BYTES) + _GRAPH_BYTES
    return parts


def recorded_bytes(shape: GenerationShape) -> int:
    """Bytes of the objects of recorded steps beyond those that aren't counted."""
    operator = shape.kept_steps * _KEPT_OPERATOR_BYTES + _RECORDING_OPERATOR_BYTES
    return max(0, (shape.step_operators + shape.draft_operators) * operator - _UNCOUNTED_BYTES)


def page_parts(shape: GenerationShape, size: StepSize) -> dict[str, int]:
    """Bytes per page, by part."""
    tokens = size.page_size
    split = -(-size.rows * tokens * shape.split_row_bytes // shape.split_size) if shape.split_size else 0
    # The longest prompt may take all pages; other prompts are padded to its length.
    ids = size.sequences * tokens * _TOKEN_BYTES
    parts = {
        "kv_pages": tokens * shape.kv_bytes_per_token,
        "drafter_pages": tokens * shape.drafter_kv_bytes_per_token,
        "activations": split,
        "metadata": (ids + size.sequences * _TABLE_BYTES) * shape.devices,
    }
    if shape.graphs:
        step = -(-size.nodes * tokens * shape.split_row_bytes // shape.split_size) if shape.split_size else 0
        parts["graphs"] = step + size.sequences * _TABLE_BYTES
    return parts


def equal_length_metadata(size: StepSize, pages: int) -> int:
    """Bytes of ids and block tables for ``pages`` pages of sequences of equal length, without padding."""
    return pages * (size.page_size * _TOKEN_BYTES + size.sequences * _TABLE_BYTES)


def weight_bytes(spec: ModelSpec, tp: int = 1) -> int:
    """The model's weights on one of ``tp`` ranks, by transformers' tensor parallel plan for Llama.

    Layers and the rows of embedding and lm_head are sharded; vectors are replicated, and so are KV heads where there
    are more ranks. (transformers up to 5.17 replicates the embedding.)
    """
    share = math.ceil(spec.layer_bytes() * (spec.layer_weights_of_rank(tp) / spec.layer_weights))
    return math.ceil(spec.vocab_bytes(tp)) + spec.replicated_bytes + share


def page_token_bytes(spec: ModelSpec, kv_dtype: str | None = None, tp: int = 1) -> int:
    """Bytes of a token in the pages of all layers, on one of ``tp`` ranks.

    Raises:
        ValueError: ``kv_dtype`` is not ``None``, ``"int8"`` or ``"fp8"``.
    """
    heads, dtype = spec.kv_heads_of_rank(tp), getattr(torch, spec.dtype)
    layer = LayerKV(heads, spec.head_dim, spec.v_head_dim, dtype, torch.device("meta"))
    return spec.attention_layers * layer.page_bytes_per_token(kv_dtype)


def pass_row_bytes(spec: ModelSpec, tp: int = 1) -> int:
    """Peak bytes per row of a forward pass, up to the lm_head.

    H is the hidden size, Q, K and V the widths of queries, keys and values, I of the feed-forward layer, D the head
    size, s the bytes per element. transformers' Llama has these maxima, all with the embeddings and the layer's input:

    - norm, in float32: ``3 H s + 2 * 4 H``;
    - rotating queries: ``3 H s + (Q + K + V + 3 Q) s`` (q cos, rotated q, its product with sin);
    - rotating keys: ``3 H s + (Q + K + V + Q + 3 K) s`` (rotated queries included);
    - feed-forward: ``4 H s + 3 I s`` (gate, up, their product; 2 I without a gate, 4 I with a fused gate and up);
    - mixture of experts, k per token: ``4 H s + k (2 H + 4 I) s`` (grouped products; 9 I in gpt-oss);

    plus cos and sin, ``2 D s``. Norms and rotary embeddings of other families differ by some per cent (stablelm: an
    eighth); a loaded model is measured instead. With ``tp`` ranks, Q, K, V and I are sharded.
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
    """Raise ``ValueError`` unless ``tp`` ranks can share the model's heads."""
    if not ranks_share(spec.num_qo_heads, spec.num_kv_heads, tp):
        raise ValueError(
            f"{spec.name} has {spec.num_qo_heads} query heads and {spec.num_kv_heads} KV heads; tp is {tp}, it must "
            f"divide {spec.num_qo_heads}, and divide {spec.num_kv_heads} or be a multiple of it"
        )


def predicted_shape(
    spec: ModelSpec,
    heads: DrafterSpec,
    depth: int,
    *,
    nodes: int = 1,
    tp: int = 1,
    workspace_bytes: int = 0,
    kv_dtype: str | None = None,
) -> GenerationShape:
    """The shape from a configuration, instead of measurements: one rank of ``tp``, drafting ``depth`` tokens ahead.

    Args:
        nodes: of a tree, root included.
        workspace_bytes: constant memory of the backend.
        kv_dtype: ``"int8"`` or ``"fp8"`` for pages of codes, ``None`` for the model's dtype.

    Raises:
        ValueError: ``tp`` ranks can't share the heads.
    """
    check_ranks(spec, tp)
    target_row, hidden_size = pass_row_bytes(spec, tp), spec.hidden_size
    if depth:
        hidden_size = max(hidden_size, heads.hidden_size)
    mixers, unpacked = spec.mixers, -(-spec.unpacked_matrix_bytes // tp)
    # A path to each leaf, at most one per two nodes in the best trees; a state before and behind it.
    states = 0 if mixers is None else 2 * max(1, nodes // 2) * mixers.largest_state
    return GenerationShape(
        kv_bytes_per_token=page_token_bytes(spec, kv_dtype, tp)
        + (heads.page_token_bytes(spec, kv_dtype) if depth else 0),
        scratch_bytes_per_node=page_token_bytes(spec, None, tp) + (0 if mixers is None else mixers.row_bytes),
        mixer_state_bytes=0 if mixers is None else mixers.state_bytes,
        mixers=PassBytes(0, states),
        beside_mixers=PassBytes(unpacked, 0 if mixers is None else 4 * spec.hidden_size * spec.dtype_bytes),
        head_bytes=heads.nbytes(spec, depth, tp),
        forward=PassBytes(unpacked, heads.row_bytes(spec, target_row) if depth else target_row),
        draw=draw_bytes(spec.vocab_size, spec.dtype_bytes, tp),
        draft=PassBytes(0, heads.sequence_bytes(spec, depth, nodes) if depth else 0),
        state_bytes=KEPT_STATES * hidden_size * spec.dtype_bytes,
        workspace_bytes=workspace_bytes,
    )
