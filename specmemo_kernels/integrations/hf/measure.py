"""Memory and time of a transformers model's passes, measured for plans."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from specmemo_kernels.engine.step_graph import Capture
from specmemo_kernels.forward.tree_paths import paths_to_leaves
from specmemo_kernels.integrations.hf.coded import measure_products
from specmemo_kernels.integrations.hf.library_buffers import multiply, packed_matrices
from specmemo_kernels.integrations.hf.mixer_pass import MixerPass, chunk_pass, tree_pass
from specmemo_kernels.integrations.hf.mixers import Mixer, PackedPass
from specmemo_kernels.integrations.hf.probe import like_attention
from specmemo_kernels.integrations.hf.recurrence import FEW_TOKENS
from specmemo_kernels.integrations.hf.target import ModelFacts, run_packed, tapped
from specmemo_kernels.planning.host_allocator import allocated_bytes, free_library_buffers
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.planning.pass_bytes import PassBytes, ProductBytes
from specmemo_kernels.tree.choice import PassSeconds
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor


#: Rows of the passes whose memory is measured: few, for speed; more than one, as models may treat one row differently.
_MEASURED_ROWS = (8, 16)
#: Rows of the pass behind which library buffers are measured: torch multiplies small matrices of fewer without MKL.
_LIBRARY_ROWS = 32
#: Minimum bytes of library buffers to count: allocations of Python objects vary by as much between calls.
_LEAST_COUNTED = 2 << 20
#: Rows of the passes whose time is measured. A single row is a matrix-vector product.
_TIMED_ROWS = (1, 2, 8, 32, 128)
#: A pass is repeated three times, if it takes less than the first of these times in total, and more often until it has
#: taken the second.
_TIMED_SECONDS, _LEAST_SECONDS = 0.3, 0.02


def measure_passes(model: Any, facts: ModelFacts, chunks: Sequence[int]) -> tuple[PassBytes, PassBytes]:
    """Measure the transient bytes of a forward pass, without the operators' workspace.

    With recurrent layers it is a prompt's pass. These layers pad their rows to whole parts, and compute few rows one by
    one, so the bytes of all ``chunks``, the sizes that the plan may choose, give the bound.

    Returns:
        The bytes up to the lm_head, and the additional bytes for rows of the lm_head, both by the number of rows. The
        latter are 0 with an exact lm_head: logits are then computed for a few rows at a time, if at all.
    """
    few_rows = facts.leaves.max_rows
    forward, logits = _measure_passes(model, facts, few_rows is None, chunks)
    if facts.leaves.names and few_rows is not None:
        few = tuple(_measure_passes(model, facts, True, [few_rows, *(rows for rows in chunks if rows < few_rows)]))
        forward, logits = (many.with_few(few_rows, fewer) for many, fewer in zip((forward, logits), few, strict=True))
    return forward, PassBytes() if facts.exact_lm_head else logits


def _measure_passes(model: Any, facts: ModelFacts, products: bool, chunks: Sequence[int]) -> Iterator[PassBytes]:
    """The same with the products of few rows or, without ``products``, of many (:meth:`FusedLeaves.running`)."""
    if facts.mixers.mixers:
        yield from _measure_chunks(model, facts, products, chunks)
        return
    few, many = (_trace(model, rows, facts, products) for rows in _MEASURED_ROWS)
    for a, b in zip(few, many, strict=True):
        yield PassBytes.fitted((_MEASURED_ROWS[0], a), (_MEASURED_ROWS[1], b))


def _measure_chunks(
    model: Any, facts: ModelFacts, products: bool, chunks: Sequence[int]
) -> tuple[PassBytes, PassBytes]:
    """:func:`_measure_passes` with recurrent layers, whose first chunk may differ from the others."""
    forward, logits = PassBytes(), PassBytes()
    sizes = sorted({2, *(max(3, rows) for rows in (min(FEW_TOKENS, max(chunks)), *chunks))})
    _trace(model, sizes[0], facts, products, chunk_pass(facts.mixers, sizes[0], True))  # makes what layers keep
    for first in (True, False):
        points = [
            [(rows, max(part)) for part in _trace(model, rows, facts, products, chunk_pass(facts.mixers, rows, first))]
            for rows in sizes
        ]
        forward = forward.elementwise_max(PassBytes.stepwise([of_forward for of_forward, _ in points]))
        logits = logits.elementwise_max(PassBytes.stepwise([of_logits for _, of_logits in points]))
    return forward, logits


def measure_mixers(facts: ModelFacts, tree: Trees) -> PassBytes:
    """Measure the transient bytes of verifying ``tree`` in a recurrent layer, by the number of sequences."""
    paths = widest = max(1, tree.size - 1)
    if isinstance(tree, DraftTree):
        paths, widest = len(paths_to_leaves(tree.parents)), max(Counter(tree.depths).values())
    bound = PassBytes()
    for mixer in {mixer.kind: mixer for mixer in facts.mixers.mixers}.values():
        rows, tokens = (widest, 1) if mixer.steps_alone else (paths, tree.max_depth + 1)
        with facts.pass_mode():
            peaks = [(count, mixer_peak(mixer, count * rows, tokens)) for count in (1, 2)]
        bound = bound.elementwise_max(PassBytes.between(*peaks))
    return bound


class _HeldByPasses:
    """Runs the mixers of a pass, and notes the most bytes held behind one of them."""

    def __init__(self, inner: MixerPass, tracker: MemoryTracker) -> None:
        self.inner, self.tracker, self.most = inner, tracker, 0

    def run(self, mixer: Mixer, hidden: Tensor, others: Mapping[str, Any]) -> Tensor:
        result = self.inner.run(mixer, hidden, others)
        self.most = max(self.most, self.tracker.live)
        return result


@torch.no_grad()
def measure_beside_mixers(model: Any, facts: ModelFacts, max_rows: int) -> PassBytes:
    """Measure what a pass holds while a recurrent layer runs, its input and output included, by the rows."""
    if not facts.mixers.mixers:
        return PassBytes()
    points = []
    for rows in (2, max(3, max_rows)):
        tokens, tracker = _same_tokens(facts, rows), MemoryTracker()
        inner = chunk_pass(facts.mixers, rows, True)
        assert inner is not None, "there are mixers"
        held = _HeldByPasses(inner, tracker)
        with tracker:
            _run(model, facts, tokens, held)
        points.append((rows, held.most))
    return PassBytes.between(*points)


def mixer_peak(mixer: Mixer, paths: int, tokens: int) -> int:
    """Peak bytes of a mixer's pass over copies of its state, without the state itself."""
    spec = mixer.spec
    arguments, twice = mixer.arguments_for(paths, tokens), mixer.arguments_for(paths, 2 * tokens)
    states = [torch.zeros(1, *shape, dtype=dtype, device=spec.device) for shape, dtype in spec.states]
    with MemoryTracker() as tracker:
        x = torch.zeros(paths, tokens, spec.hidden_size, dtype=spec.dtype, device=spec.device)
        above = torch.zeros(paths, dtype=torch.int64, device=spec.device)
        mixer.call(x, [state[above] for state in states], arguments)
        if mixer.divides(2 * tokens):  # the most accepted rows before a path
            mixer.divided(torch.cat([x, x], dim=1), [state[above] for state in states], twice, tokens)
    return int(tracker.peak)


def measure_quantised(model: Any, facts: ModelFacts, max_rows: int) -> ProductBytes:
    """Measure the products of quantised layers in passes of at most ``max_rows`` rows."""
    tokens = _same_tokens(facts, _MEASURED_ROWS[0])

    def run() -> None:
        with facts.pass_mode():
            _run(model, facts, tokens)

    return measure_products(model, run, facts.pass_mode, max_rows)


def measure_libraries(model: Any, facts: ModelFacts, max_rows: int) -> PassBytes:
    """Measure the library buffers (mostly packed matrices) on a CPU after passes over at most ``max_rows`` rows.

    MKL takes 4 MiB for its first product on an Intel CPU with AVX512. Passes whose linear layers are operators may not
    multiply by it at all.
    """
    if facts.device.type != "cpu":
        return PassBytes()
    few_rows = facts.leaves.max_rows
    bound = PassBytes(_library_bytes(model, facts, max_rows, few_rows is None))
    # Recurrent layers multiply more rows than a pass has: those of each path through a tree.
    if few_rows is None or facts.mixers.mixers:
        return bound
    return bound.with_few(few_rows, PassBytes(_library_bytes(model, facts, few_rows, True)))


def _library_bytes(model: Any, facts: ModelFacts, max_rows: int, products: bool) -> int:
    """The same with the products of few rows or of many.

    The maximum of two measurements. A pass over few rows, for speed, shows the buffers of all libraries. MKL's buffers
    grow with the rows, so each kind of matrix is also multiplied with ``max_rows`` rows: 3.9 MiB instead of 3.2 MiB
    with 256 rows and matrices of 512 x 1536.
    """
    tokens = _same_tokens(facts, _LIBRARY_ROWS)
    replaced = facts.leaves.modules if products else frozenset()
    with facts.pass_mode():
        for _ in range(2):  # the first pass also allocates buffers that stay
            of_pass = _kept_by_libraries(lambda: _run(model, facts, tokens, products=products))
        of_products = _kept_by_libraries(lambda: multiply(packed_matrices(model, facts, replaced), max_rows))
    kept_bytes = max(of_pass, of_products)
    return kept_bytes if kept_bytes >= _LEAST_COUNTED else 0


def _kept_by_libraries(call: Callable[[], object]) -> int:
    """Bytes allocated during ``call`` and not freed."""
    free_library_buffers()
    before = allocated_bytes()
    call()
    return allocated_bytes() - before


@torch.no_grad()
def _trace(
    model: Any, rows: int, facts: ModelFacts, products: bool, current: MixerPass | None = None
) -> tuple[list[int], list[int]]:
    """Bytes held after each operator of a pass over ``rows`` rows: up to the lm_head, and additional bytes after it."""
    before: list[int] = []
    tokens, tracker = _same_tokens(facts, rows), MemoryTracker(trace=True)
    thread = threading.get_ident()

    def record(*_: Any) -> None:
        if threading.get_ident() == thread:
            before.extend(tracker.trace)

    with model.get_output_embeddings().register_forward_pre_hook(record), tracker:
        _run(model, facts, tokens, current, products)
    return before, [max(0, held - before[-1]) for held in tracker.trace[len(before) :]]


@torch.no_grad()
def count_results(model: Any, facts: ModelFacts) -> int:
    """Number of tensors that the operators of a pass allocate."""
    tokens = _same_tokens(facts, _MEASURED_ROWS[0])
    with MemoryTracker() as tracker:
        _run(model, facts, tokens)
    return int(tracker.count)


def time_passes(
    model: Any,
    facts: ModelFacts,
    max_rows: int,
    agreed: Callable[[float], float] = float,
    capture: Capture | None = None,
) -> PassSeconds:
    """Seconds of forward passes up to the lm_head by their rows, at most ``max_rows``, without attention.

    Args:
        agreed: returns the seconds that all ranks use, so that they run equally many passes.
        capture: records the passes, as the steps that they predict. Python code and launches take as long for one row
            as for eight, so that eager passes make larger trees seem cheap: of a small model, and on a GPU of any.
    """
    points = []
    for rows in sorted({min(rows, max_rows) for rows in _TIMED_ROWS}):
        tokens = _same_tokens(facts, rows)
        current = tree_pass(facts.mixers, torch.arange(rows, device=facts.device))
        run = partial(_run, model, facts, tokens, current)
        points.append((rows, least_seconds(run, facts, agreed, capture)))
    return PassSeconds(tuple(points))


def least_seconds(
    run: Callable[[], Tensor], facts: ModelFacts, agreed: Callable[[float], float], capture: Capture | None
) -> float:
    """Seconds of the fastest of a few runs; ``agreed`` and ``capture`` as for :func:`time_passes`.

    On a GPU one untimed run comes first, because it may compile kernels.
    """
    with facts.pass_mode():
        call = run if capture is None else _recorded(run, capture)

    def timed() -> float:
        started = time.perf_counter()
        with facts.pass_mode():
            call()
        if facts.device.type == "cuda":
            torch.cuda.synchronize(facts.device)
        return time.perf_counter() - started

    if facts.device.type == "cuda":
        timed()
    times: list[float] = []
    while sum(times) < (_TIMED_SECONDS if len(times) < 4 else _LEAST_SECONDS):
        times.append(agreed(timed()))
    return min(times)


def _recorded(run: Callable[[], Tensor], capture: Capture) -> Callable[[], object]:
    """A replay of ``run``; ``run`` if it can't be recorded, or on a CPU is so slow that its Python code doesn't matter.

    On a GPU the first run doesn't tell how slow it is: it may compile kernels.
    """
    started = time.perf_counter()
    kept = torch.empty_like(run())
    if kept.device.type == "cpu" and time.perf_counter() - started > _TIMED_SECONDS:
        return run

    def keep() -> None:
        kept.copy_(run())

    try:
        return capture(keep)
    except Exception:  # whatever the model's code raises while it is recorded
        return run


def _same_tokens(facts: ModelFacts, rows: int) -> Tensor:
    """Copies of one token: a mixture of experts routes all rows to the same experts, its worst case."""
    return torch.zeros(rows, dtype=torch.int64, device=facts.device)


def _run(
    model: Any,
    facts: ModelFacts,
    tokens: Tensor,
    current: PackedPass | None = None,
    products: bool = True,
) -> Tensor:
    """Run a pass over tokens at one position, which captures the states that a drafter reads; the hidden states."""
    with tapped(cut=facts.exact_lm_head) as tap, facts.taps.captured(), facts.mixers.running(current):
        run_packed(model, tokens, tokens, like_attention, None, leaves=facts.leaves, products=products)
    return tap.hidden
