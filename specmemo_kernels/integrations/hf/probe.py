"""Facts about a transformers model from small forward passes: layers, lm_head, memory and time of a pass."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.forward.tree_paths import paths_to_leaves
from specmemo_kernels.integrations.hf.changes import foreign_code
from specmemo_kernels.integrations.hf.checks import check_equivalence, unsupported_errors
from specmemo_kernels.integrations.hf.find_mixers import checked, is_recurrent, trials
from specmemo_kernels.integrations.hf.fuse import FusedLeaves
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.mixers import Mixer, MixerPass, Mixers, chunk_pass, tree_pass
from specmemo_kernels.integrations.hf.target import ModelFacts, current_tap, lm_head_of, run_packed, tapped
from specmemo_kernels.planning.footprint import PassBytes
from specmemo_kernels.planning.host_allocator import allocated_bytes, free_library_buffers
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.tree.choice import PassSeconds
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor

#: Rows of the passes whose memory is measured: few, for speed; more than one, as models may treat one row differently.
_MEASURED_ROWS = (8, 16)
#: Minimum bytes of library buffers to count: allocations of Python objects vary by as much between calls.
_LEAST_COUNTED = 2 << 20
#: Dtypes of matrices that MKL packs.
_PACKED = (torch.float32, torch.float64)
#: Rows of the passes whose time is measured. A single row is a matrix-vector product.
_TIMED_ROWS = (1, 2, 8, 32, 128)
#: A pass is repeated, at most three times, until it has taken this long in total.
_TIMED_SECONDS = 0.3


@torch.no_grad()
def probe(model: Any) -> ModelFacts:
    """Run a forward pass of one token to record the layers and the lm_head, and three passes that compare results.

    The model must be attached (:func:`specmemo_kernels.integrations.hf.target.attach`). A ramp replaces the lm_head's
    output: if the model's logits rise as well, its later operations (scaling, soft caps) keep the order of tokens.

    Raises:
        UnsupportedModel: an attention layer wasn't called, or was called twice, or packed passes compute other hidden
            states than the model (:func:`check_equivalence`).
    """
    name = type(model).__name__
    if missing := {"position_ids", "logits_to_keep"} - set(inspect.signature(model.forward).parameters):
        raise UnsupportedModel(f"{name}.forward doesn't take {sorted(missing)}, which packed nodes need")
    device, head = model.get_input_embeddings().weight.device, lm_head_of(model)
    if device.type == "meta":
        raise UnsupportedModel(f"{name} has its weights on the meta device; load them first")
    mixers = find_mixers(model, device) if is_recurrent(model.config) else Mixers()
    layers, ramp, logits, hidden = _one_token_pass(model, head, device)
    expected = range(model.config.get_text_config().num_hidden_layers)
    with_keys = list(layers) if mixers.mixers else expected  # the other layers may have no keys
    if different := sorted(set(with_keys) ^ set(layers)):
        raise UnsupportedModel(
            f"{name}: attention layers {different} of {len(expected)} don't use the attention interface"
        )
    if not layers:
        raise UnsupportedModel(f"{name} has no attention layers, only states; nothing of it is kept in pages")
    if not len(ramp):
        raise UnsupportedModel(f"{name} computes logits without calling its lm_head ({type(head).__name__})")
    plain = type(head) is nn.Linear and _rows_are_plain(head.weight) and not foreign_code(model)
    exact = torch.equal(logits, ramp)
    # In shorter dtypes a soft cap makes ties of different logits: no operation may follow the lm_head.
    rises = bool((logits.diff() >= 0).all()) and hidden.dtype == torch.float32
    windows, cached_tokens = check_equivalence(model, device, len(ramp), mixers, cut=plain and exact)
    return ModelFacts(
        layers=tuple(layers[i][0] for i in with_keys),
        num_qo_heads=tuple(layers[i][1] for i in with_keys),
        hidden_size=hidden.shape[-1],
        vocab_size=len(ramp),
        dtype=hidden.dtype,
        device=device,
        plain_lm_head=plain and (exact or rises),
        exact_lm_head=plain and exact,
        windows=windows,
        cached_tokens=cached_tokens,
        mixers=mixers,
        attention=tuple(with_keys),
    )


def find_mixers(model: Any, device: torch.device) -> Mixers:
    """The layers with a state per sequence, from a pass of one token.

    Raises:
        UnsupportedModel: one of them can't be fed in pieces.
    """
    token = torch.zeros(1, dtype=torch.int64, device=device)
    with unsupported_errors(model):
        with tapped(cut=False), trials(model) as found:
            run_packed(model, token, token, _like_attention, None)
        return checked(found)


def _one_token_pass(
    model: Any, head: nn.Module, device: torch.device
) -> tuple[dict[int, tuple[LayerKV, int]], Tensor, Tensor, Tensor]:
    """Run one token through the model, with the lm_head's output replaced by a ramp.

    Returns:
        Each layer's keys and values with its query heads, the ramp, the logits, and the lm_head's input.
    """
    layers: dict[int, tuple[LayerKV, int]] = {}
    ramp = torch.empty(0)

    def record_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        if layer in layers:
            raise UnsupportedModel(f"attention layer {layer} runs twice in one forward pass")
        layers[layer] = LayerKV(k.shape[1], k.shape[2], v.shape[2], k.dtype, k.device), q.shape[1]
        return _values(q, k, v)  # a single token attends to itself only

    def replace_by_ramp(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        nonlocal ramp
        if current_tap() is not tap:  # a pass of another thread
            return None
        ramp = torch.linspace(-1, 1, output.shape[-1], device=output.device).to(output.dtype)
        return ramp.expand_as(output)

    token = torch.zeros(1, dtype=torch.int64, device=device)
    with unsupported_errors(model), tapped(cut=False) as tap, head.register_forward_hook(replace_by_ramp):
        logits = run_packed(model, token, token, record_layer, None)[0, 0]
    return layers, ramp, logits, tap.hidden


def _rows_are_plain(weight: Tensor) -> bool:
    """Whether a matrix is a plain tensor in memory, or is sharded by rows."""
    if hasattr(weight, "placements"):
        return all(placement.is_shard(0) or placement.is_replicate() for placement in weight.placements)
    return type(weight) in (nn.Parameter, Tensor) and not weight.is_meta


def measure_passes(model: Any, facts: ModelFacts, max_rows: int) -> tuple[PassBytes, PassBytes]:
    """Measure the transient bytes of a forward pass, without the operators' workspace.

    With recurrent layers it is a prompt's pass. These layers may pad their rows and loop over parts of them, so the
    bytes of two and of ``max_rows`` rows give the bound.

    Returns:
        The bytes up to the lm_head, and the additional bytes for rows of the lm_head, both by the number of rows. The
        latter are 0 with an exact lm_head: logits are then computed one row at a time, if at all.
    """
    forward, logits = _measure_passes(model, facts, None, max_rows)
    if facts.leaves.names:
        few = tuple(_measure_passes(model, facts, facts.leaves, facts.leaves.max_rows or max_rows))
        few_rows = sys.maxsize if facts.leaves.max_rows is None else facts.leaves.max_rows
        forward, logits = (
            replace(plain, few=fused, few_rows=few_rows) for plain, fused in zip((forward, logits), few, strict=True)
        )
    return forward, PassBytes() if facts.exact_lm_head else logits


def _measure_passes(model: Any, facts: ModelFacts, leaves: FusedLeaves | None, max_rows: int) -> Iterator[PassBytes]:
    if facts.mixers.mixers:
        yield from _measure_chunks(model, facts, leaves, max(3, max_rows))
        return
    few, many = (_trace(model, rows, facts, leaves) for rows in _MEASURED_ROWS)
    for a, b in zip(few, many, strict=True):
        yield PassBytes.fitted((_MEASURED_ROWS[0], a), (_MEASURED_ROWS[1], b))


def _measure_chunks(
    model: Any, facts: ModelFacts, leaves: FusedLeaves | None, max_rows: int
) -> tuple[PassBytes, PassBytes]:
    """:func:`_measure_passes` with recurrent layers, whose first chunk may differ from the others."""
    forward, logits = PassBytes(), PassBytes()
    for first in (True, False):
        few, many = (
            [(rows, max(part)) for part in _trace(model, rows, facts, leaves, chunk_pass(facts.mixers, rows, first))]
            for rows in (2, max_rows)
        )
        forward = forward.elementwise_max(PassBytes.between(few[0], many[0]))
        logits = logits.elementwise_max(PassBytes.between(few[1], many[1]))
    return forward, logits


@torch.inference_mode()
def measure_mixers(mixers: Mixers, tree: Trees) -> PassBytes:
    """Measure the transient bytes of verifying ``tree`` in a recurrent layer, by the number of sequences."""
    paths = widest = max(1, tree.size - 1)
    if isinstance(tree, DraftTree):
        paths, widest = len(paths_to_leaves(tree.parents)), max(Counter(tree.depths).values())
    bound = PassBytes()
    for mixer in {mixer.kind: mixer for mixer in mixers.mixers}.values():
        rows, tokens = (widest, 1) if mixer.steps_alone else (paths, tree.max_depth + 1)
        peaks = [(count, _mixer_peak(mixer, count * rows, tokens)) for count in (1, 2)]
        bound = bound.elementwise_max(PassBytes.between(*peaks))
    return bound


def _mixer_peak(mixer: Mixer, paths: int, tokens: int) -> int:
    """Peak bytes of a mixer's pass over copies of its state."""
    spec = mixer.spec
    arguments = mixer.arguments_for(paths, tokens)
    with MemoryTracker() as tracker:
        x = torch.zeros(paths, tokens, spec.hidden_size, dtype=spec.dtype, device=spec.device)
        states = [torch.zeros(paths, *shape, dtype=dtype, device=spec.device) for shape, dtype in spec.states]
        above = torch.arange(paths, device=spec.device)
        mixer.call(x, [state[above] for state in states], arguments)
    return int(tracker.peak)


@torch.inference_mode()
def measure_libraries(model: Any, facts: ModelFacts, max_rows: int) -> int:
    """Bytes of library buffers (mostly packed matrices) on a CPU after forward passes over at most ``max_rows`` rows.

    The maximum of two measurements. A pass over few rows, for speed, shows the buffers of all libraries. MKL's buffers
    grow with the rows, so each kind of matrix is also multiplied with ``max_rows`` rows: 3.9 MiB instead of 3.2 MiB
    with 256 rows and matrices of 512 x 1536.
    """
    if facts.device.type != "cpu":
        return 0
    tokens = _same_tokens(facts, _MEASURED_ROWS[-1])
    for _ in range(2):  # the first pass also allocates buffers that stay
        of_pass = _kept_by_libraries(lambda: _run(model, facts, tokens))
    of_products = _kept_by_libraries(lambda: _multiply(_packed_matrices(model, facts), max_rows))
    kept_bytes = max(of_pass, of_products)
    return kept_bytes if kept_bytes >= _LEAST_COUNTED else 0


def _kept_by_libraries(call: Callable[[], object]) -> int:
    """Bytes allocated during ``call`` and not freed."""
    free_library_buffers()
    before = allocated_bytes()
    call()
    return allocated_bytes() - before


def _packed_matrices(model: Any, facts: ModelFacts) -> list[Tensor]:
    """One matrix of each shape and dtype that MKL multiplies in a forward pass."""
    embedding, lm_head = (
        getattr(module, "weight", None) for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    skipped = {id(embedding), id(lm_head)} if facts.exact_lm_head else {id(embedding)} - {id(lm_head)}
    found = {
        (parameter.dtype, parameter.shape): parameter
        for parameter in model.parameters()
        if parameter.dim() == 2 and parameter.dtype in _PACKED and id(parameter) not in skipped
    }
    return [matrix for matrix in found.values() if type(matrix) is nn.Parameter and not matrix.is_meta]


def _multiply(matrices: list[Tensor], rows: int) -> None:
    for matrix in matrices:
        nn.functional.linear(matrix.new_zeros(rows, matrix.shape[1]), matrix)


@torch.no_grad()
def _trace(
    model: Any, rows: int, facts: ModelFacts, leaves: FusedLeaves | None, current: MixerPass | None = None
) -> tuple[list[int], list[int]]:
    """Bytes held after each operator of a pass over ``rows`` rows: up to the lm_head, and additional bytes after it."""
    before: list[int] = []
    tokens, tracker = _same_tokens(facts, rows), MemoryTracker(trace=True)
    thread = threading.get_ident()

    def record(*_: Any) -> None:
        if threading.get_ident() == thread:
            before.extend(tracker.trace)

    with model.get_output_embeddings().register_forward_pre_hook(record), tracker:
        _run(model, facts, tokens, leaves, current)
    return before, [max(0, held - before[-1]) for held in tracker.trace[len(before) :]]


@torch.inference_mode()
def time_passes(model: Any, facts: ModelFacts, max_rows: int, agreed: Callable[[float], float] = float) -> PassSeconds:
    """Seconds of forward passes up to the lm_head by their rows, at most ``max_rows``, without attention.

    ``agreed`` returns the seconds that all ranks use, so that they run equally many passes.
    """
    points = []
    for rows in sorted({min(rows, max_rows) for rows in _TIMED_ROWS}):
        tokens = _same_tokens(facts, rows)
        current = tree_pass(facts.mixers, torch.arange(rows, device=facts.device))
        times: list[float] = []
        while len(times) < 4 and sum(times) < _TIMED_SECONDS:
            started = time.perf_counter()
            _run(model, facts, tokens, facts.leaves, current)
            if facts.device.type == "cuda":
                torch.cuda.synchronize(facts.device)
            times.append(agreed(time.perf_counter() - started))
        points.append((rows, min(times)))
    return PassSeconds(tuple(points))


def _same_tokens(facts: ModelFacts, rows: int) -> Tensor:
    """Copies of one token: a mixture of experts routes all rows to the same experts, its worst case."""
    return torch.zeros(rows, dtype=torch.int64, device=facts.device)


def _run(
    model: Any,
    facts: ModelFacts,
    tokens: Tensor,
    leaves: FusedLeaves | None = None,
    current: MixerPass | None = None,
) -> None:
    """Run a pass over tokens at one position, which captures the states that a drafter reads."""
    with tapped(cut=facts.exact_lm_head), facts.taps.captured(), facts.mixers.running(current):
        run_packed(model, tokens, tokens, _like_attention, None, leaves=leaves)


def _like_attention(_: int, q: Tensor, k: Tensor, v: Tensor, **__: Any) -> Tensor:
    """Allocate the attention operator's tensors: the result, and the log-sum-exp while it runs."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    result = _values(q, k, v)
    del lse
    return result


def _values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
