"""A device step reads nothing on the host and keeps its sizes; capture, and fallbacks when it fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from selection import sample
from test_families import _bushy_paths, batch, greedy
from test_late_steps import TREE, oracle, seeing_launches, whole
from tiny_models import _BASE, FAMILIES, VOCAB, random_heads, tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import specmemo_kernels as sk
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import candidate_columns
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.engine import step_graph
from specmemo_kernels.engine.device_step import DeviceStep, StepShape, StepState
from specmemo_kernels.engine.step_graph import CudaCapture, StepCache
from specmemo_kernels.forward.batch import tree_layout
from specmemo_kernels.integrations.hf.draft import attach
from specmemo_kernels.integrations.hf.target import HFTarget, ModelFacts, lm_head

pytestmark = pytest.mark.usefixtures("gpu_overlap")
#: Operators that read values on the host, or make as many elements as the values say.
ASKING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2",
    "unique_consecutive", "bincount", "repeat_interleave",
}  # fmt: skip


class Watch(TorchDispatchMode):
    """Fails on operators that block on a GPU; records the sizes of all storages that operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func).split(".")[1]
        assert name not in ASKING, f"{func} asks the host"
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        assert not any(x is not None and x.dtype == torch.bool for x in indices), f"{func} by a mask"
        result = func(*args, **(kwargs or {}))
        self.sizes += [(str(func), x.untyped_storage().nbytes()) for x in tree_leaves(result) if torch.is_tensor(x)]
        return result


@contextmanager
def watched() -> Iterator[list[tuple[DeviceStep, list[tuple[str, int]]]]]:
    """Every step that runs in this context, with its sizes."""
    seen: list[tuple[DeviceStep, list[tuple[str, int]]]] = []
    run = DeviceStep.run

    def watching(self: DeviceStep) -> None:
        with Watch() as watch:
            run(self)
        seen.append((self, watch.sizes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceStep, "run", watching)
        yield seen


def test_the_watch_sees() -> None:
    x = torch.arange(4)
    for ask in (x.sum().item, x.nonzero, lambda: x[x > 1], lambda: bool(x.any()), x.unique):
        with pytest.raises(AssertionError, match=r"asks the host|by a mask"), Watch():
            ask()
    with Watch() as watch:
        x[torch.tensor([0, 1])] + 1
    assert watch.sizes[-1] == ("aten.add.Tensor", 16)


@pytest.mark.parametrize("kv_dtype", sample([None, "int8"], ["int8"]))
@pytest.mark.parametrize("family", sample(["llama", "gemma2", "deepseek_v3"], ["gemma2"]))
def test_nothing_is_asked_and_sizes_stay(family: str, kv_dtype: str | None) -> None:
    """Steps of one shape allocate tensors of the same sizes in the same order, whatever is accepted; none reads a
    value.
    """
    model = tiny_model(family)
    inputs = batch((30, 9))
    expected = greedy(model, inputs, 30)
    heads = random_heads(model)
    with sk.patch(model, heads, tree=9, page_size=4, kv_dtype=kv_dtype, graph=True) as handle, watched() as seen:
        output = greedy(model, inputs, 30)
        assert kv_dtype is not None or torch.equal(output, expected)
        assert handle.stats.graph_steps == len(seen) > 10
        assert handle.stats.accepted_at_depth, "nothing was accepted: all steps were the same"
    first: dict[StepShape, list[tuple[str, int]]] = {}
    for step, sizes in seen:
        assert first.setdefault(step.shape, sizes) == sizes
    assert {shape.sequences for shape in first} <= {1, 2}
    assert len(first) <= 2


class Recording:
    """A stand-in for CUDA graphs: a capture runs nothing, each replay runs the step."""

    after = 1
    pads = False

    def __init__(self) -> None:
        self.nbytes, self.captured, self.replayed = 0, 0, 0

    def trim(self) -> None: ...

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        self.nbytes += 1000

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


def captures(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> None:
    """All steps are captured by ``make``'s graphs."""
    init: Callable[..., None] = StepCache.__init__

    def with_capture(self: StepCache, *args: Any) -> None:
        init(self, *args[:6], make)

    monkeypatch.setattr(StepCache, "__init__", with_capture)


def test_each_shape_runs_once_and_is_captured_then(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=11)
    inputs, made = batch((9, 14, 5)), []
    expected = greedy(model, inputs, 40, eos_token_id=[3, 4, 5, 6], pad_token_id=0)
    captures(monkeypatch, lambda: made.append(Recording()) or made[-1])  # type: ignore[func-returns-value]
    with sk.patch(model, oracle(model, inputs), tree=TREE, graph=True) as handle, seeing_launches() as launches:
        assert torch.equal(greedy(model, inputs, 40, eos_token_id=[3, 4, 5, 6], pad_token_id=0), expected)
        shapes = [shape for shape, _ in launches]
        (capture,) = made
        assert capture.captured == sum(shapes.count(shape) > 1 for shape in set(shapes)) > 1
        assert capture.replayed == len(shapes) - len(set(shapes))
        assert handle.bytes_by_part["graphs"] > 1000 * capture.captured
        replays = capture.replayed
        greedy(model, inputs, 40, eos_token_id=[3, 4, 5, 6], pad_token_id=0)
        assert capture.captured == len({shape for shape, _ in launches}), "the next call finds the graphs"
        assert capture.replayed > replays
        whole(handle)
        handle.release()
        assert handle.bytes_by_part["graphs"] == 0


def test_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is recorded, no token is lost; with ``graph=True`` it is an error and the model stays usable."""

    class Failing(Recording):
        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            finally:
                raise RuntimeError("capture ended")

    model = tiny_model("llama", seed=11)
    inputs = batch((9, 14))
    expected = greedy(model, inputs, 40)
    captures(monkeypatch, Failing)
    with sk.patch(model, oracle(model, inputs), tree=TREE, graph=True) as handle:
        handle._pools.graphs = replace(handle.graphs, must=False)  # as on a GPU by default
        assert torch.equal(greedy(model, inputs, 40), expected)
        (reason,) = handle.stats.eager_reasons
        assert reason == ("a step can't be captured (RuntimeError: operation not permitted when stream is capturing)")
        assert handle.stats.eager_reasons[reason] == handle.stats.steps - 1
        whole(handle)
        handle.release()
        handle._pools.graphs = replace(handle.graphs, must=True)
        with pytest.raises(RuntimeError, match="can't be captured"):
            greedy(model, inputs, 40)
        whole(handle)


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        pytest.param(RuntimeError("CUDA error: out of memory"), marks=pytest.mark.slow),
    ],
)
def test_memory_that_runs_out_while_capturing(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like any failed allocation: the engine degrades, no token is lost, and later steps are captured again."""

    class Short(Recording):
        failures = 0

        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            if Short.failures:
                return super().__call__(run)
            Short.failures += 1
            try:
                raise failure
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    model, made = tiny_model("llama", seed=11), []
    inputs = batch((9, 14))
    expected = greedy(model, inputs, 120)
    captures(monkeypatch, lambda: made.append(Short()) or made[-1])  # type: ignore[func-returns-value]
    with sk.patch(model, oracle(model, inputs), tree=TREE, graph=True) as handle:
        handle.memory_pressure.poll_every = 1
        assert torch.equal(greedy(model, inputs, 120), expected)
        assert handle.stats.retries == handle.stats.shrinks == Short.failures == 1
        assert handle.stats.grows == 1
        assert "memory is low" in handle.stats.eager_reasons
        assert not any("captured" in reason for reason in handle.stats.eager_reasons)
        assert made[-1].replayed > 5, "steps are captured once there is memory again"
        whole(handle)


def test_few_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last used ones; others are created and captured again on demand."""
    model = tiny_model("llama", seed=11)
    inputs = batch((9, 14, 5, 3))
    options: dict[str, Any] = {"eos_token_id": [3, 4, 5, 6], "pad_token_id": 0}
    expected = greedy(model, inputs, 40, **options)
    monkeypatch.setattr(step_graph, "MAX_STEPS", 2)
    with sk.patch(model, oracle(model, inputs), tree=TREE, graph=True) as handle, seeing_launches() as launches:
        assert torch.equal(greedy(model, inputs, 40, **options), expected)
        kept = handle._pools.steps
        assert kept is not None
        assert len({shape for shape, _ in launches}) > 2
        assert list(kept._steps) == list(dict.fromkeys(shape for shape, _ in launches[::-1]))[1::-1]


def test_the_step_traces_without_values() -> None:
    """With fake tensors everything but the kernels runs, as a capture needs it, and nothing can be read."""
    layouts, tree = (tree_layout, candidate_columns), sk.DraftTree.from_paths(_bushy_paths(14))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            config = CONFIG_MAPPING["llama"](**(_BASE | FAMILIES["llama"]))
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
            undo = attach(model.eval())
            layers = (LayerKV(2, 8, 8, torch.float32, torch.device("cpu")),) * 2
            facts = ModelFacts(layers, (4, 4), 32, VOCAB, torch.float32, layers[0].device, True, True)
            pool = PagedKVPool(layers, num_pages=8, page_size=16, max_sequences=3, max_nodes=3 * tree.size)
            state = StepState(3, torch.empty(32, dtype=torch.float32))
            shape = StepShape(2, tree.size, tree.max_depth, tree.width, 128)
            drafter = MedusaDrafter(sk.MedusaHeads(32, VOCAB, 4), lm_head(model), "triton")
            step = DeviceStep(shape, tree, state, HFTarget(model, facts, "triton"), drafter, pool, "triton")
            with Watch() as watch:
                step.run()
            with pytest.raises(DataDependentOutputException):
                step.emitted.tolist()
            undo()
    finally:
        for layout in layouts:  # they remember fake tensors
            layout.cache_clear()
    names = [name for name, _ in watch.sizes]
    assert names.count("specmemo.tree_attention.default") == 2 * len(layers)


def test_a_failed_capture_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ending a capture fails, torch's context stays on its side stream; the previous stream is restored."""
    streams = ["usual"]

    class Capturing:
        def __init__(self, graph: object, pool: object, stream: str, capture_error_mode: str) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            streams.append(self.stream)

        def __exit__(self, *args: object) -> None:
            raise RuntimeError("capture ended")

    inspect.signature(torch.cuda.graph).bind(None, pool=None, stream=None, capture_error_mode="thread_local")
    stand_ins: dict[str, Any] = {
        "graph": Capturing, "CUDAGraph": object, "graph_pool_handle": tuple, "memory_reserved": lambda _: 0,
        "device": lambda _: nullcontext(), "current_stream": lambda _: streams[-1], "set_stream": streams.append,
        "Stream": lambda _: "side",
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with pytest.raises(RuntimeError, match="capture ended"):
        CudaCapture(torch.device("cuda", 0))(lambda: None)
    assert streams == ["usual", "side", "usual"]
