"""Predicted bytes and seconds of every combination of this package's savings, from Medusa as published to all of them.

Built on the formulas of the package: without savings the bytes are those of
:func:`specmemo_kernels.planning.baselines.medusa_parts`, with all of them those of
:func:`specmemo_kernels.planning.search.parts_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from specmemo_kernels.planning.baselines import MedusaRun
from specmemo_kernels.planning.cost import Pass, generation_speed, medusa_speed, pass_seconds, prefill_seconds
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.footprint import (
    GenerationShape,
    StepSize,
    equal_length_metadata,
    fixed_parts,
    page_parts,
)
from specmemo_kernels.planning.predicted_shape import page_token_bytes, pass_row_bytes, predicted_shape
from specmemo_kernels.planning.search import PlanCandidate, PlanRequest, candidates, parts_of, tree_paths
from specmemo_kernels.tree.acceptance import expected_tokens_per_step, extrapolated
from specmemo_kernels.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class Savings:
    """The changes from Medusa as published to this package, in the order in which they are added.

    Attributes:
        pages: for the tokens of the workload, instead of a cache for the model's context.
        fused_attention: no ``[heads, L, L]`` scores.
        last_row: logits of the prompt's last row only; heads run on that row.
        streamed: no ``[nodes, V]`` logits and no copies of them along the paths; heads run on the accepted row.
        scratch: candidates' keys and values in a buffer of their own, so that pages receive accepted tokens only.
        chunks: the prompt in passes of the plan's size.
        pruned: the plan's number of nodes.
        fewer_heads: the plan's number of heads.
        coded_heads: heads in 4-bit codes.
        int8_pages: not lossless.
    """

    pages: bool = False
    fused_attention: bool = False
    last_row: bool = False
    streamed: bool = False
    scratch: bool = False
    chunks: bool = False
    pruned: bool = False
    fewer_heads: bool = False
    coded_heads: bool = False
    int8_pages: bool = False


NAMES = {
    "pages": "pages for tokens that exist",
    "fused_attention": "fused attention",
    "last_row": "prompt logits: last row",
    "streamed": "step logits streamed",
    "scratch": "candidates in scratch",
    "chunks": "chunked prefill",
    "pruned": "pruned tree",
    "fewer_heads": "fewer heads",
    "coded_heads": "heads in 4 bits",
    "int8_pages": "int8 pages (not lossless)",
}
NONE = Savings()
ALL = Savings(**dict.fromkeys(NAMES, True))
LOSSLESS = replace(ALL, int8_pages=False)


@dataclass(frozen=True)
class Prediction:
    """One combination.

    Attributes:
        parts: bytes without the model's weights.
        loaded_heads, nodes: of the combination's drafter and tree.
        rejected_bytes: keys and values of rejected candidates that a step writes into the cache.
    """

    parts: dict[str, int]
    loaded_heads: int
    nodes: int
    tokens_per_step: float
    prefill_seconds: float
    step_seconds: float
    tokens_per_second: float
    rejected_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


def chosen(request: PlanRequest) -> PlanCandidate:
    """The smallest plan that is at least as fast as Medusa as published, or else the fastest.

    Plans that split the batch are left out.
    """
    run, spec = MedusaRun(), request.spec
    tokens = expected_tokens_per_step(published_paths(request), request.accuracy)
    least = medusa_speed(spec, request.device, request.workload, run.heads, run.nodes, tokens, request.tp)
    choices = [c for c in candidates(request) if c.sequences == request.workload.batch]
    enough = [c for c in choices if c.speed.tokens_per_second >= least.tokens_per_second]
    if enough:
        return min(enough, key=lambda c: c.total_bytes)
    return max(choices, key=lambda c: (c.speed.tokens_per_second, -c.total_bytes))


def coded(request: PlanRequest) -> PlanRequest:
    """The request with heads in 4-bit codes."""
    return replace(request, heads=replace(MedusaRun().heads, head_bits=4))


def published_paths(request: PlanRequest) -> list[tuple[int, ...]]:
    """The best tree of Medusa's published size and depth."""
    run = MedusaRun()
    return tree_paths(request, min(run.depth, len(request.accuracy)), run.nodes)


@dataclass(frozen=True)
class _Setting:
    """What a combination runs: the drafter's sizes, the tree and the rows of a prefill pass.

    ``slack``: the planner's allowance for rounding by a GPU's allocator, which Medusa's sum doesn't have.
    """

    request: PlanRequest
    loaded: int
    paths: Sequence[tuple[int, ...]]
    leaves: int
    depth: int
    chunk: int
    page_size: int
    slack: int

    @property
    def nodes(self) -> int:
        return len(self.paths) + 1

    @property
    def rows(self) -> int:
        """Rows of a prefill pass, all sequences together."""
        return min(self.chunk, self.request.workload.batch * self.request.workload.prompt)

    @property
    def size(self) -> StepSize:
        return StepSize(self.nodes, self.request.workload.batch, self.rows, self.page_size)

    @property
    def vocab_row(self) -> int:
        return self.request.spec.vocab_size * self.request.spec.dtype_bytes

    @property
    def logits_per_row(self) -> int:
        """Medusa's: the model's once and each head's twice (list and stack)."""
        return self.vocab_row * (1 + 2 * self.loaded)

    @property
    def gathered(self) -> int:
        """Logits along every path of one sequence's tree."""
        return self.leaves * (self.depth + 1) * self.vocab_row * (1 + self.loaded)

    @property
    def step_logits(self) -> int:
        return self.request.workload.batch * (self.nodes * self.logits_per_row + self.gathered)

    def scores(self, rows: int, slots: float) -> float:
        """Bytes of one layer's attention matrices: in float32 once, in the model's dtype twice."""
        spec = self.request.spec
        return rows * (spec.num_qo_heads // self.request.tp) * slots * (4 + 2 * spec.dtype_bytes)


def _setting(on: Savings, request: PlanRequest, plan: PlanCandidate) -> _Setting:
    run = MedusaRun()
    loaded = plan.heads if on.fewer_heads else run.heads.num_heads
    deepest = plan.heads if on.fewer_heads else min(run.depth, len(request.accuracy))
    paths = tree_paths(request, deepest, plan.tree_size if on.pruned else run.nodes)
    leaves, depth = run.leaves, run.depth
    if on.pruned or on.fewer_heads:
        tree = DraftTree.from_paths(paths)
        leaves, depth = len(set(range(tree.size)) - set(tree.parents)), tree.max_depth
    slack = parts_of(request, plan).get("slack", 0)
    heads = replace(run.heads, head_bits=4 if on.coded_heads else None)
    request = replace(request, heads=heads, kv_dtype="int8" if on.int8_pages else None)
    work = request.workload
    chunk = plan.chunk if on.chunks else work.batch * work.prompt
    return _Setting(request, loaded, paths, leaves, depth, chunk, plan.page_size, slack)


def predict(on: Savings, request: PlanRequest, plan: PlanCandidate) -> Prediction:
    """The bytes and the speed of one combination.

    Args:
        request: for Medusa heads; its ``head_bits`` and ``kv_dtype`` are replaced by the combination's.
        plan: the nodes, heads, chunk and page size that the savings lead to, for the whole batch at once.

    Raises:
        ValueError: another drafter, a plan without heads or for a part of the batch, or recurrent layers.
    """
    if not isinstance(request.heads, HeadsSpec) or request.spec.mixers is not None or not plan.heads:
        raise ValueError(f"the ablation is of Medusa heads on a model of attention layers, got {request.heads}, {plan}")
    if plan.sequences != request.workload.batch:
        raise ValueError(f"the plan decodes {plan.sequences} of {request.workload.batch} sequences at once, not all")
    setting = _setting(on, request, plan)
    accuracy = extrapolated(request.accuracy, request.heads.ranks)
    tokens = expected_tokens_per_step(setting.paths, accuracy)
    prefill, step = _prefill_seconds(on, setting), _step_seconds(on, setting)
    work = request.workload
    speed = generation_speed(work, prefill, step, tokens, work.batch)
    rejected = 0.0
    if not on.scratch:
        kv_dtype = setting.request.kv_dtype
        rejected = work.batch * (setting.nodes - tokens) * page_token_bytes(request.spec, kv_dtype, request.tp)
    return Prediction(
        _parts(on, setting), setting.loaded, setting.nodes, tokens, prefill, step, speed.tokens_per_second,
        round(rejected),
    )  # fmt: skip


def _parts(on: Savings, setting: _Setting) -> dict[str, int]:
    request, size = setting.request, setting.size
    spec, work, heads, tp = request.spec, request.workload, request.heads, request.tp
    shape = predicted_shape(
        spec, heads, setting.loaded, nodes=setting.nodes, tp=tp, workspace_bytes=request.workspace_bytes,
        kv_dtype=request.kv_dtype,
    )  # fmt: skip
    ours = fixed_parts(shape, size)
    parts = {"heads": ours["heads"], **_most(_moments(on, setting, shape))}
    if on.streamed:
        parts["activations"] += work.batch * shape.state_bytes
    if on.scratch:
        parts["tree_scratch"] = ours["tree_scratch"]
    if on.fused_attention:
        parts["workspace"] = ours["workspace"]
    if on.pages:
        behind = setting.loaded if on.scratch else setting.nodes
        pages = work.batch * -(-(work.context + behind) // size.page_size)
        parts["kv_pages"] = pages * page_parts(shape, size)["kv_pages"]
        parts["metadata"] = ours["metadata"] + equal_length_metadata(size, pages)
        parts["slack"] = setting.slack
    else:
        slots = max(spec.max_context, work.context)
        parts["kv_cache"] = work.batch * slots * page_token_bytes(spec, request.kv_dtype, tp)
    return parts


def _moments(on: Savings, setting: _Setting, shape: GenerationShape) -> Iterator[dict[str, int]]:
    """Bytes at the moments that may be the peak, as :func:`medusa_parts` has them, where they aren't saved."""
    request, rows = setting.request, setting.rows
    batch, row = request.workload.batch, pass_row_bytes(request.spec, request.tp)
    state = request.spec.hidden_size * request.spec.dtype_bytes
    nodes = batch * setting.nodes
    if not on.fused_attention:
        scores = round(setting.scores(rows, request.workload.prompt))
        yield {"attention_scores": scores, "activations": 7 * rows * state}
    if not on.last_row:
        yield {"logits": rows * setting.logits_per_row, "activations": 3 * rows * state}
    elif not on.streamed:
        yield {"logits": batch * setting.logits_per_row, "activations": 3 * rows * state}
    if not on.streamed:
        yield {"logits": setting.step_logits, "activations": nodes * row}
    yield {"activations": max(rows, nodes if on.streamed else 0) * row}


def _most(moments: Iterator[dict[str, int]]) -> dict[str, int]:
    return max(moments, key=lambda parts: sum(parts.values()))


def _step_seconds(on: Savings, setting: _Setting) -> float:
    """A step, with Medusa's heads on all nodes unless logits are streamed.

    Recorded with the savings that leave the host nothing to do between two steps.
    """
    work, recorded = setting.request.workload, setting.request.recorded and on.pages and on.streamed and on.scratch
    rows, slots = work.batch * setting.nodes, work.prompt + work.new_tokens / 2
    run = Pass(rows, work.batch, slots, rows, setting.loaded, work.batch if on.streamed else rows, recorded=recorded)
    logits = 0 if on.streamed else setting.step_logits
    return _seconds(on, setting, run, logits, rows, slots + setting.nodes)


def _prefill_seconds(on: Savings, setting: _Setting) -> float:
    """All passes over the prompts, with logits and heads of all rows unless only the last ones are used."""
    request, work = setting.request, setting.request.workload
    if on.last_row and on.chunks and on.fused_attention:
        return prefill_seconds(
            request.spec, request.device.of_operators, work, work.batch, setting.chunk, request.tp, request.kv_dtype,
            request.heads,
        )  # fmt: skip
    full, rest = divmod(work.batch * work.prompt, setting.rows)
    seconds = 0.0
    for count, rows in ((full, setting.rows), (bool(rest), rest)):
        if not count:
            continue
        sequences = min(work.batch, rows)
        slots = work.prompt / 2 if on.chunks else 0
        if on.last_row:
            run = Pass(rows, sequences, slots, sequences, prompts=True)
        else:
            run = Pass(rows, sequences, slots, rows, setting.loaded, rows)
        logits = 0 if on.last_row else rows * setting.logits_per_row
        seconds += count * _seconds(on, setting, run, logits, rows, slots + rows / sequences)
    return seconds


def _seconds(on: Savings, setting: _Setting, run: Pass, logits: int, rows: int, slots: float) -> float:
    """A pass, and one write and one read of each materialised logit and attention score at the device's read rate."""
    request = setting.request
    device = request.device.of_operators
    tensors = logits + (0.0 if on.fused_attention else request.spec.attention_layers * setting.scores(rows, slots))
    moved = 2 * tensors / device.read_rate

    def timed(launch_seconds: float) -> float:
        profile = replace(device, launch_seconds=launch_seconds)
        return pass_seconds(request.spec, profile, run, request.heads, request.tp, request.kv_dtype)

    if not device.overlaps:
        return timed(device.launch_seconds) + moved
    return max(timed(device.launch_seconds), timed(1e-30) + moved)  # the host launches while the device computes


def cumulative() -> list[tuple[str, Savings]]:
    """Medusa as published, then one more saving each."""
    rows, on = [("Medusa as published", NONE)], NONE
    for name, title in NAMES.items():
        on = replace(on, **{name: True})
        rows.append((f"+ {title}", on))
    return rows


def left_out() -> list[tuple[str, Savings]]:
    """All lossless savings, then without one each."""
    rows = [("all lossless savings", LOSSLESS)]
    return rows + [
        (f"without {NAMES[f.name]}", replace(LOSSLESS, **{f.name: False}))
        for f in fields(Savings)
        if f.name != "int8_pages"
    ]
