"""Bytes of each part of generation.

A :class:`GenerationShape` is measured on a loaded model, or predicted from a configuration
(:mod:`specmemo_kernels.planning.predicted_shape`). The formulas are the same in both cases.
"""

from __future__ import annotations

from dataclasses import dataclass

from specmemo_kernels.cache.prefix_index import LABEL_BYTES
from specmemo_kernels.forward.batch import CACHED_LAYOUTS
from specmemo_kernels.forward.target import LOGIT_ROWS
from specmemo_kernels.planning.pass_bytes import PassBytes, ProductBytes

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
#: Objects of a page that is kept for prefix reuse (``PrefixIndex``), without its labels. Measured with pages of 1 to
#: 64 tokens: 314 bytes and 7.8 per token, more where dicts have just grown. The second is not counted.
_PAGE_OBJECT_BYTES, _UNCOUNTED_LABELS = 500, 1 << 20
#: Bytes per token of the vocabulary to draw from one row of logits: copies in float32, sorted scores.
_DRAW_BYTES = 32
#: Hidden states that a sequence keeps: of its last step, of its prompt in prefill, and of the previous chunk.
KEPT_STATES = 3
#: All tensors of single elements.
_SMALL_BYTES = 4096
_SEQUENCE_BYTES = 128


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
        page_objects: whether the objects of pages are in the memory that is divided, as on a CPU.
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
    page_objects: bool = False
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


def object_bytes(shape: GenerationShape, page_size: int, pages: int) -> int:
    """Bytes of the objects of so many pages, beyond those that aren't counted."""
    return max(0, pages * _page_objects(page_size) - _UNCOUNTED_LABELS) if shape.page_objects else 0


def _page_objects(page_size: int) -> int:
    return _PAGE_OBJECT_BYTES + page_size * LABEL_BYTES


def pages_within(shape: GenerationShape, page_size: int, room: int, page_bytes: int) -> int:
    """The number of pages of ``page_bytes`` that ``room`` bytes hold, with :func:`object_bytes`."""
    pages = room // page_bytes
    if object_bytes(shape, page_size, pages):
        pages = (room + _UNCOUNTED_LABELS) // (page_bytes + _page_objects(page_size))
    return pages


def equal_length_metadata(size: StepSize, pages: int) -> int:
    """Bytes of ids and block tables for ``pages`` pages of sequences of equal length, without padding."""
    return pages * (size.page_size * _TOKEN_BYTES + size.sequences * _TABLE_BYTES)
