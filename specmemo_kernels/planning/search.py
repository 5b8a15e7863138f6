"""Enumerates all plans for a model, a device and a workload, with their bytes and predicted speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from specmemo_kernels.backends.kernel_config import WIDE_PAGE_SHARE, preferred_page_size
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.cost import Speed, decode_pass, generation_speed, pass_seconds, prefill_seconds
from specmemo_kernels.planning.device import DeviceProfile
from specmemo_kernels.planning.drafter_spec import DrafterSpec, HeadsSpec
from specmemo_kernels.planning.footprint import (
    GenerationShape,
    StepSize,
    equal_length_metadata,
    fixed_parts,
    object_bytes,
    page_parts,
)
from specmemo_kernels.planning.memory_plan import format_bytes
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.predicted_shape import predicted_shape, weight_bytes
from specmemo_kernels.tree.acceptance import (
    DEFAULT_ACCURACY,
    Accuracy,
    best_first_paths,
    expected_tokens_per_step,
    extrapolated,
)

#: The search space.
PAGE_SIZES = (16, 32, 64)
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048)
MAX_NODES = 64
#: A loaded model's tree may be larger than the best one if that costs at most this share of the predicted speed:
#: predictions are inexact, texts differ, and each step chooses a part of the tree.
HEADROOM = 0.1
#: On a GPU torch's allocator rounds large blocks up to 2 MiB: four pools, the heads, the live tensors of a pass.
_SLACK_BLOCKS, _SLACK_BLOCK = 16, 2 << 20


@dataclass(frozen=True)
class PlanRequest:
    """Input of the search.

    Attributes:
        spec: the model, in a dtype that the device computes in (:func:`on_device`).
        heads, accuracy: the drafter, ``[depth][k]`` cumulative accuracy of its best guesses.
        assumed: a sentence about an accuracy that isn't known; else empty.
        tp: ranks of tensor parallelism; all bytes are those of one rank.
        max_nodes: the largest tree size, root included.
        workspace_bytes: constant memory of the backend.
        kv_dtype: ``"int8"`` or ``"fp8"`` for pages of codes; ``None``: the model's dtype.
        recorded: steps are recorded (:class:`~specmemo_kernels.planning.cost.Pass`).
    """

    spec: ModelSpec
    device: DeviceProfile
    workload: Workload
    heads: DrafterSpec = field(default_factory=HeadsSpec)
    accuracy: Accuracy = DEFAULT_ACCURACY
    tp: int = 1
    max_nodes: int = MAX_NODES
    workspace_bytes: int = 0
    kv_dtype: str | None = None
    assumed: str = ""
    recorded: bool = False

    def __post_init__(self) -> None:
        if self.max_nodes < 1 or self.heads.max_depth < 0:
            raise ValueError(
                f"max_nodes is {self.max_nodes}, it must be at least 1; the drafter's depth is {self.heads.max_depth}, "
                "it must be at least 0"
            )


@dataclass(frozen=True)
class PlanCandidate:
    """One plan of the search.

    Attributes:
        heads: loaded heads, and the depth of the tree. tree_size: nodes, root included.
        sequences: decoded at once. chunk: prompt tokens per pass.
        page_size, max_pages: the cache for ``sequences`` of the workload's context.
        total_bytes: of all parts.
    """

    heads: int
    tree_size: int
    sequences: int
    chunk: int
    page_size: int
    max_pages: int
    total_bytes: int
    tokens_per_step: float
    speed: Speed


def in_compute_dtype(spec: ModelSpec, device: DeviceProfile) -> ModelSpec:
    """The model in the dtype in which it computes on a device: float32 on a CPU without a known 16-bit rate.

    GPU kernels accept the model's dtype or raise (:mod:`specmemo_kernels.backends.kernel_config`).
    """
    return spec if device.kernel_target is not None else spec.with_dtype(device.compute_dtype(spec.dtype))


def on_device(spec: ModelSpec, device: DeviceProfile) -> ModelSpec:
    """The model as it computes on a device.

    In the device's compute dtype. Quantised weights as stored, or dequantised where the method's package does that when
    loading.
    """
    spec = in_compute_dtype(spec, device)
    used = replace(spec, quantised=spec.quantised.on(device.kernel_target, device.backend == "cpu"))
    if used.weight_bytes == spec.weight_bytes:
        return used
    stored, loaded = format_bytes(spec.weight_bytes), format_bytes(used.weight_bytes)
    note = (
        f"{spec.quantised.method} weights of {stored} become {loaded} in transformers, which dequantises all of them "
        f"once; for a runtime that keeps the codes: --weight-bits {8 * spec.bytes_per_weight:.3g}"
    )
    return replace(used, quantised=replace(used.quantised, notes=(*used.quantised.notes, note)))


def tree_paths(request: PlanRequest, heads: int, size: int) -> list[tuple[int, ...]]:
    """The best ``size - 1`` paths of the first ``heads`` heads, best first."""
    ranks = min(request.heads.ranks, request.spec.vocab_size)
    table = [row[:ranks] for row in extrapolated(request.accuracy[:heads], ranks)]
    return best_first_paths(table, size - 1) if heads else []


@dataclass(frozen=True)
class _Sizes:
    """What a tree determines: ``shape`` with ``heads`` heads and trees of ``nodes`` nodes, beside ``weights`` bytes."""

    shape: GenerationShape
    weights: int
    heads: int
    nodes: int

    @classmethod
    def of(cls, request: PlanRequest, heads: int, nodes: int) -> _Sizes:
        spec = request.spec
        shape = predicted_shape(
            spec, request.heads, heads, nodes=nodes, tp=request.tp, workspace_bytes=request.workspace_bytes,
            kv_dtype=request.kv_dtype, page_objects=request.device.backend == "cpu",
        )  # fmt: skip
        return cls(shape, weight_bytes(spec, request.tp), heads, nodes)


def parts_of(request: PlanRequest, choice: PlanCandidate) -> dict[str, int]:
    """Bytes by part of a candidate, on one rank."""
    sizes = _Sizes.of(request, choice.heads, choice.tree_size)
    return _parts(request, sizes, choice.sequences, choice.chunk, choice.page_size)[0]


def _parts(
    request: PlanRequest, sizes: _Sizes, sequences: int, chunk: int, page_size: int
) -> tuple[dict[str, int], int]:
    """Bytes by part, and the number of pages; the last tree may extend past the context."""
    shape = sizes.shape
    size = StepSize(sizes.nodes, sequences, min(chunk, sequences * request.workload.prompt), page_size)
    pages_each = -(-(request.workload.context + sizes.heads) // page_size)
    page = page_parts(shape, size)
    parts = {"weights": sizes.weights} | fixed_parts(shape, size)
    parts["kv_pages"] = sequences * pages_each * page["kv_pages"]
    # All sequences have the same length: a row attends to ``pages_each`` pages.
    parts["activations"] += pages_each * page["activations"]
    parts["metadata"] += equal_length_metadata(size, sequences * pages_each)
    parts["metadata"] += object_bytes(shape, page_size, sequences * pages_each)
    if request.device.kernel_target is not None:
        parts["slack"] = _SLACK_BLOCKS * _SLACK_BLOCK
    return parts, sequences * pages_each


def least_bytes(request: PlanRequest) -> int:
    """Minimum bytes for plain decoding of one sequence."""
    plain = _Sizes.of(request, 0, 1)
    return min(sum(_parts(request, plain, 1, CHUNKS[0], page)[0].values()) for page in PAGE_SIZES)


def batch_limits(batch: int) -> list[int]:
    """Batch limits, largest first: the smallest for each number of rounds."""
    return sorted({-(-batch // rounds) for rounds in range(1, batch + 1)}, reverse=True)


def shapes_of_trees(request: PlanRequest) -> Iterator[tuple[int, int, float]]:
    """``(heads, tree_size, tokens per step)`` of all trees that use their last head; plain decoding first."""
    yield 0, 1, 1.0
    for heads in range(1, min(request.heads.max_depth, len(request.accuracy)) + 1):
        paths = tree_paths(request, heads, request.max_nodes)
        for count in range(1, len(paths) + 1):
            if any(len(path) == heads for path in paths[:count]):
                table = extrapolated(request.accuracy[:heads], request.heads.ranks)
                yield heads, count + 1, expected_tokens_per_step(paths[:count], table)


def candidates(request: PlanRequest) -> list[PlanCandidate]:
    """All combinations of heads, tree, batch limit and chunk, each with the page size that needs least.

    Or with a larger one that the device's kernels prefer, where that is about as small.
    """
    preferred = PAGE_SIZES.index(preferred_page_size(request.device.kernel_target))
    work, plans = request.workload, []
    trees = [(_Sizes.of(request, heads, size), tokens) for heads, size, tokens in shapes_of_trees(request)]
    for sequences in batch_limits(work.batch):
        chunks = sorted({min(chunk, sequences * work.prompt) for chunk in CHUNKS})
        prefill = {
            (chunk, drafts): prefill_seconds(
                request.spec, request.device.of_operators, work, sequences, chunk, request.tp, request.kv_dtype,
                request.heads if drafts else None,
            )
            for chunk in chunks
            for drafts in (False, True)
        }  # fmt: skip
        for sizes, tokens in trees:
            heads, size = sizes.heads, sizes.nodes
            run = decode_pass(work, sequences, size, heads, request.recorded)
            step = pass_seconds(
                request.spec, request.device.of_operators, run, request.heads, request.tp, request.kv_dtype
            )
            of_rows: dict[int, tuple[int, int, int]] = {}  # bytes depend on a chunk only by the rows of a pass
            for chunk in chunks:
                rows = StepSize(size, sequences, chunk, PAGE_SIZES[0]).rows
                if rows not in of_rows:
                    of_rows[rows] = _best_pages(request, sizes, sequences, chunk, preferred)
                speed = generation_speed(work, prefill[chunk, heads > 0], step, tokens, sequences)
                plans.append(PlanCandidate(heads, size, sequences, chunk, *of_rows[rows], tokens, speed))
    return plans


def _best_pages(
    request: PlanRequest, sizes: _Sizes, sequences: int, chunk: int, preferred: int
) -> tuple[int, int, int]:
    """The page size of a candidate, the number of pages, and the bytes of all parts.

    Args:
        preferred: the place in :data:`PAGE_SIZES` that the device's kernels prefer.
    """
    options = [_parts(request, sizes, sequences, chunk, page) for page in PAGE_SIZES]
    totals = [sum(parts.values()) for parts, _ in options]
    best = totals.index(min(totals))
    if preferred > best and totals[preferred] <= (1 + WIDE_PAGE_SHARE) * totals[best]:
        best = preferred
    return PAGE_SIZES[best], options[best][1], totals[best]


def fastest(choices: Sequence[PlanCandidate], budget: float) -> PlanCandidate | None:
    """The fastest plan within ``budget`` bytes, then the smallest; ``None`` if nothing fits."""
    fitting = [c for c in choices if c.total_bytes <= budget]
    return max(fitting, key=lambda c: (c.speed.tokens_per_second, -c.total_bytes), default=None)


def frontier(choices: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """The Pareto frontier of bytes and speed, smallest first."""
    best: list[PlanCandidate] = []
    for choice in sorted(choices, key=lambda c: (c.total_bytes, -c.speed.tokens_per_second)):
        if not best or choice.speed.tokens_per_second > best[-1].speed.tokens_per_second:
            best.append(choice)
    return best


def best_tree(request: PlanRequest, with_heads: bool) -> tuple[PlanCandidate, PlanCandidate, PlanCandidate]:
    """For a loaded model: the fastest tree with drafts, the largest nearly as fast (:data:`HEADROOM`), plain decoding.

    Bytes are left at 0; memory is divided afterwards. ``with_heads``: count the time of ``request.heads``, else no
    drafting time.
    """

    def timed(heads: int, size: int, tokens: float) -> PlanCandidate:
        run = decode_pass(request.workload, 1, size, heads if with_heads else 0, request.recorded)
        step = pass_seconds(request.spec, request.device.of_operators, run, request.heads, request.tp, request.kv_dtype)
        return PlanCandidate(heads, size, 1, 0, 0, 0, 0, tokens, Speed(step, tokens / step))

    plain, *trees = (timed(*tree) for tree in shapes_of_trees(request))
    best = max(trees, key=lambda c: (c.speed.tokens_per_second, -c.tree_size), default=plain)
    least = (1 - HEADROOM) * best.speed.tokens_per_second
    nearly = [c for c in trees if c.heads == best.heads and c.speed.tokens_per_second >= least]
    return best, max(nearly, key=lambda c: c.tree_size, default=best), plain
