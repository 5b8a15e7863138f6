"""Every plan there is for a model, a device and a workload: its bytes and its predicted speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.cost import Speed, decode_pass, generation_speed, pass_seconds, prefill_seconds
from specmemo_kernels.planning.device import DeviceProfile
from specmemo_kernels.planning.footprint import (
    HeadsSpec,
    StepSize,
    equal_length_metadata,
    fixed_parts,
    page_parts,
    predicted_shape,
    weight_bytes,
)
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.tree.acceptance import (
    DEFAULT_ACCURACY,
    Accuracy,
    best_first_paths,
    expected_tokens_per_step,
    extrapolated,
)

#: What is tried. Ranks: as many candidates of a head as published trees use.
PAGE_SIZES = (16, 32, 64)
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048)
MAX_NODES = 64
RANKS = 10
#: A loaded model's tree may grow beyond the best one as far as that costs this share of the predicted speed:
#: predictions and texts differ, and each step verifies only what pays.
HEADROOM = 0.1
#: On a GPU torch's allocator rounds large blocks up to 2 MiB: four pools, the heads, the live blocks of a pass.
_SLACK_BLOCKS, _SLACK_BLOCK = 16, 2 << 20
#: Tokens per split of the GPU kernels, the smallest they choose.
_SPLIT_SIZE = 512


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is wanted for.

    Attributes:
        spec: the model, in a dtype that the device computes in (:func:`on_device`).
        heads, accuracy: heads that could be loaded, ``[head][k]`` cumulative accuracy of their best guesses.
        tp: ranks of tensor parallel; all bytes are those of one rank.
        max_nodes: the largest tree that is considered, root included.
        workspace_bytes: what the backend keeps for itself.
        kv_dtype: ``"int8"`` or ``"fp8"`` for pages of codes, which are never chosen unasked; ``None``: the model's.
    """

    spec: ModelSpec
    device: DeviceProfile
    workload: Workload
    heads: HeadsSpec = field(default_factory=HeadsSpec)
    accuracy: Accuracy = DEFAULT_ACCURACY
    tp: int = 1
    max_nodes: int = MAX_NODES
    workspace_bytes: int = 0
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.max_nodes < 1 or self.heads.num_heads < 0:
            raise ValueError(
                f"max_nodes is {self.max_nodes} and num_heads {self.heads.num_heads}, they must be at least 1 and 0"
            )


@dataclass(frozen=True)
class PlanCandidate:
    """One way to run a workload.

    Attributes:
        heads: how many heads are loaded; as deep as the tree, which has ``tree_size`` nodes with its root.
        sequences: decoded at once. chunk: prompt tokens per pass. page_size, num_pages: of the cache, for
            ``sequences`` that reach the workload's context.
        total_bytes: of all parts.
    """

    heads: int
    tree_size: int
    sequences: int
    chunk: int
    page_size: int
    num_pages: int
    total_bytes: int
    tokens_per_step: float
    speed: Speed


def on_device(spec: ModelSpec, device: DeviceProfile) -> ModelSpec:
    """The model in a dtype that the device computes in: float32, where a CPU's rate in 16 bits isn't known.

    Never on a GPU: its kernels take the model's dtype or refuse it (:mod:`specmemo_kernels.backends.kernel_config`).
    """
    if device.kernel_target is not None:
        return spec
    dtype = device.compute_dtype(spec.dtype)
    return spec if dtype == spec.dtype else replace(spec, dtype=dtype)


def tree_paths(problem: PlanRequest, heads: int, size: int) -> list[tuple[int, ...]]:
    """The best ``size - 1`` paths of the first ``heads`` heads, best first; ranks beyond the table extrapolated."""
    ranks = min(RANKS, problem.spec.vocab_size)
    table = [row[:ranks] for row in extrapolated(problem.accuracy[:heads], ranks)]
    return best_first_paths(table, size - 1) if heads else []


def parts_of(problem: PlanRequest, choice: PlanCandidate) -> dict[str, int]:
    """Bytes of every part of one choice, on one rank."""
    return _parts(problem, choice.heads, choice.tree_size, choice.sequences, choice.chunk, choice.page_size)[0]


def _parts(
    problem: PlanRequest, heads: int, tree_size: int, sequences: int, chunk: int, page_size: int
) -> tuple[dict[str, int], int]:
    """The parts, and the pages in them: what ``sequences`` need whose last tree ends behind the context."""
    spec, gpu = problem.spec, problem.device.kernel_target is not None
    shape = predicted_shape(
        spec, problem.heads, heads, tp=problem.tp, split_size=_SPLIT_SIZE if gpu else 0,
        workspace_bytes=problem.workspace_bytes, kv_dtype=problem.kv_dtype,
    )  # fmt: skip
    load = StepSize(tree_size, sequences, min(chunk, sequences * problem.workload.prompt), page_size)
    each = -(-(problem.workload.context + heads) // page_size)
    fixed, page = fixed_parts(shape, load), page_parts(shape, load)
    parts = {"weights": weight_bytes(spec, problem.tp)} | fixed
    parts["kv_pages"] = sequences * each * page["kv_pages"]
    # Sequences of one length: no row attends to more than its own pages.
    parts["activations"] += each * page["activations"]
    parts["metadata"] += equal_length_metadata(load, sequences * each)
    if gpu:
        parts["slack"] = _SLACK_BLOCKS * _SLACK_BLOCK
    return parts, sequences * each


def least_bytes(problem: PlanRequest) -> int:
    """What one sequence of plain decoding needs at least."""
    return min(sum(_parts(problem, 0, 1, 1, CHUNKS[0], page)[0].values()) for page in PAGE_SIZES)


def batch_limits(batch: int) -> list[int]:
    """Sequences at once that make different numbers of rounds, largest first: fewer would only idle."""
    return sorted({-(-batch // rounds) for rounds in range(1, batch + 1)}, reverse=True)


def shapes_of_trees(problem: PlanRequest) -> Iterator[tuple[int, int, float]]:
    """``(heads, tree_size, tokens per step)`` of every tree worth asking about; plain decoding first.

    Trees that don't use their last head are left out: with one head less they are the same.
    """
    yield 0, 1, 1.0
    most = min(problem.heads.num_heads, len(problem.accuracy))
    for heads in range(1, most + 1):
        paths = tree_paths(problem, heads, problem.max_nodes)
        for count in range(1, len(paths) + 1):
            if any(len(path) == heads for path in paths[:count]):
                table = extrapolated(problem.accuracy[:heads], RANKS)
                yield heads, count + 1, expected_tokens_per_step(paths[:count], table)


def candidates(problem: PlanRequest) -> list[PlanCandidate]:
    """All choices: heads x tree x batch limit x chunk, each with the page size that needs least."""
    work, found = problem.workload, []
    trees = list(shapes_of_trees(problem))
    for sequences in batch_limits(work.batch):
        chunks = sorted({min(chunk, sequences * work.prompt) for chunk in CHUNKS})
        prefill = {
            chunk: prefill_seconds(problem.spec, problem.device, work, sequences, chunk, problem.tp, problem.kv_dtype)
            for chunk in chunks
        }
        for heads, size, tokens in trees:
            run = decode_pass(work, sequences, size, heads)
            step = pass_seconds(problem.spec, problem.device, run, problem.heads, problem.tp, problem.kv_dtype)
            for chunk in chunks:
                options = [_parts(problem, heads, size, sequences, chunk, page) for page in PAGE_SIZES]
                totals = [sum(parts.values()) for parts, _ in options]
                best = totals.index(min(totals))
                speed = generation_speed(work, prefill[chunk], step, tokens, sequences)
                page, pages = PAGE_SIZES[best], options[best][1]
                found.append(PlanCandidate(heads, size, sequences, chunk, page, pages, totals[best], tokens, speed))
    return found


def fastest(choices: Sequence[PlanCandidate], budget: float) -> PlanCandidate | None:
    """The fastest choice within ``budget`` bytes, the smallest of equally fast ones; ``None`` where nothing fits."""
    fitting = [c for c in choices if c.total_bytes <= budget]
    return max(fitting, key=lambda c: (c.speed.tokens_per_second, -c.total_bytes), default=None)


def frontier(choices: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """The choices that nothing of the same size or smaller outruns, smallest first."""
    kept: list[PlanCandidate] = []
    for choice in sorted(choices, key=lambda c: (c.total_bytes, -c.speed.tokens_per_second)):
        if not kept or choice.speed.tokens_per_second > kept[-1].speed.tokens_per_second:
            kept.append(choice)
    return kept


def best_tree(problem: PlanRequest, with_heads: bool) -> tuple[PlanCandidate, PlanCandidate, PlanCandidate]:
    """The tree of at least one draft with the most tokens per second of decoding, the largest one with the same heads
    that is nearly as fast (:data:`HEADROOM`), and plain decoding beside them.

    For a model that is loaded already: memory is divided afterwards, so bytes are left at 0. ``with_heads``: drafting
    costs what Medusa heads cost; else it is taken to be free.
    """

    def timed(heads: int, size: int, tokens: float) -> PlanCandidate:
        run = decode_pass(problem.workload, 1, size, heads if with_heads else 0)
        step = pass_seconds(problem.spec, problem.device, run, problem.heads, problem.tp, problem.kv_dtype)
        return PlanCandidate(heads, size, 1, 0, 0, 0, 0, tokens, Speed(step, tokens / step))

    plain, *trees = (timed(*tree) for tree in shapes_of_trees(problem))
    best = max(trees, key=lambda c: (c.speed.tokens_per_second, -c.tree_size), default=plain)
    least = (1 - HEADROOM) * best.speed.tokens_per_second
    nearly = [c for c in trees if c.heads == best.heads and c.speed.tokens_per_second >= least]
    return best, max(nearly, key=lambda c: c.tree_size, default=best), plain
