"""Steps with room for more sequences than run: few shapes serve all batches, and vacant rows write nothing."""

from __future__ import annotations

from typing import Any

import pytest
from test_device_step import Recording
from test_families import answers, batch, greedy
from test_feature_drafter_engine import patched, seer, target, write
from test_late_steps import TREE, oracle, seeing_launches, whole
from tiny_models import tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.cache.paged_kv import NO_PAGE
from specmemo_kernels.engine import overlap
from specmemo_kernels.engine.device_step import DeviceStep, StepShape
from specmemo_kernels.engine.step_graph import padded_sequences
from specmemo_kernels.integrations.hf import pool
from specmemo_kernels.tree.acceptance import RunningAcceptance
from specmemo_kernels.tree.choice import PassSeconds, TreeChooser

LENGTHS = (9, 14, 5, 30, 1, 7, 12)
NEW = 40


class Padding(Recording):
    """A stand-in for CUDA graphs whose steps are padded."""

    pads = True


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Padding]:
    """Steps on a CPU overlap and are captured as on a GPU; the captures made. Vacant rows never have tokens."""
    made: list[Padding] = []
    run = DeviceStep.run

    def checked(self: DeviceStep) -> None:
        run(self)
        if self._vacant is not None:
            assert not self._seq_lens[self._vacant].any()
            assert (self._table()[self._vacant] == NO_PAGE).all()

    monkeypatch.setattr(DeviceStep, "run", checked)

    def make(*_: Any) -> Padding:
        made.append(Padding())
        return made[-1]

    monkeypatch.setitem(overlap.IN_FLIGHT, "cpu", 2)
    monkeypatch.setitem(pool.CAPTURES, "cpu", make)
    return made


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=11)


def padded_shapes(launches: list[tuple[StepShape, Any]], most: int) -> set[StepShape]:
    """The launched shapes, of which all have a power of two, or ``most``, sequences."""
    shapes = {shape for shape, _ in launches}
    assert {shape.sequences for shape in shapes} <= {1, 2, 4, 8, 16, most}
    assert len({shape.depth for shape in shapes if shape.nodes > 1}) <= 1
    assert any(shape.sequences not in (1, most) for shape in shapes), "no step was padded"
    return shapes


@pytest.mark.parametrize("new_at_once", [len(LENGTHS), 5])
@pytest.mark.parametrize(("drafter", "tree"), [("heads", TREE), ("heads", 1), ("host", 6)])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_batches(
    model: PreTrainedModel, captures: list[Padding], drafter: str, tree: Any, new_at_once: int, kv_dtype: str | None
) -> None:
    """Sequences that end one after the other, and others that take their places, write the model's own tokens."""
    inputs = batch(LENGTHS)
    prompts = answers(inputs, inputs["input_ids"])
    requests = [sk.Request(prompt, 4 + 5 * i, []) for i, prompt in enumerate(prompts)]
    whole_rows = answers(inputs, greedy(model, inputs, NEW))
    expected = [
        row[len(p) : len(p) + r.max_new_tokens] for row, p, r in zip(whole_rows, prompts, requests, strict=True)
    ]
    heads: Any = oracle(model, inputs) if drafter == "heads" else "prompt-lookup"
    options: dict[str, Any] = {"tree": tree, "graph": True, "max_batch_size": new_at_once, "page_size": 4}
    with sk.patch(model, heads, kv_dtype=kv_dtype, **options) as handle, seeing_launches() as launches:
        for _ in range(2):
            done = sk.generate_batch(model, requests)
            if kv_dtype is None:
                assert [completion.tokens for completion in done] == expected
        shapes = padded_shapes(launches, new_at_once)
        assert len(shapes) <= 8
        assert handle.stats.graph_steps == len(launches) > 20
        assert sum(capture.captured for capture in captures) <= len(shapes)
        whole(handle)
    if kv_dtype is not None:
        with sk.patch(model, heads, kv_dtype=kv_dtype, **options | {"graph": False}):
            eager = sk.generate_batch(model, requests)
        assert [completion.tokens for completion in done] == [completion.tokens for completion in eager]


def test_steps_that_the_host_verifies(model: PreTrainedModel, captures: list[Padding]) -> None:
    """Sampled tokens are those of eager steps with the same seeds."""
    inputs = batch(LENGTHS)
    prompts = answers(inputs, inputs["input_ids"])
    sampling = sk.Sampling(temperature=0.8)
    requests = [sk.Request(p, 6 + 4 * i, [], sampling.with_seed(i)) for i, p in enumerate(prompts)]
    results = []
    for graph in (False, True):
        with sk.patch(model, oracle(model, inputs), tree=TREE, graph=graph, max_batch_size=7) as handle:
            with seeing_launches() as launches:
                results.append([done.tokens for done in sk.generate_batch(model, requests)])
            if graph:
                assert handle.stats.graph_steps == len(launches) > 5
                assert not any(shape.verified for shape in padded_shapes(launches, 7))
            whole(handle)
    assert results[0] == results[1]


def test_drafters_that_read_features_get_no_vacant_rows(captures: list[Padding], tmp_path: Any) -> None:
    files = write("eagle3", tmp_path, target())
    requests = [sk.Request([3 + i, 9, 5], 8 + 8 * i, []) for i in range(6)]
    with patched(target(), files, seer(0.8), graph=True, max_batch_size=6), seeing_launches() as launches:
        sk.generate_batch(target(), requests)
    assert {shape.sequences for shape, _ in launches} >= {3, 5}, "padded steps have 4 and 6"


@pytest.mark.parametrize("most", [1, 3, 8, 10])
def test_sizes_of_padded_steps(most: int) -> None:
    for count in range(1, most + 1):
        size = padded_sequences(count, most)
        assert count <= size <= most
        assert size == most or size & (size - 1) == 0
        assert size < 2 * count


def test_the_chooser_counts_vacant_rows() -> None:
    """Five sequences get the tree of eight, whose pass they take."""
    accuracy, seconds = [[0.7, 0.8]] * 4, PassSeconds(((1, 1.0), (64, 1.0), (65, 9.0), (128, 9.0)))
    choosers = [
        TreeChooser(TREE, RunningAcceptance(TREE, accuracy), seconds, padded=padded)
        for padded in (int, lambda count: padded_sequences(count, 8))
    ]
    exact, padded = choosers
    assert exact.tree_for(5).size * 5 <= 64 < exact.tree_for(5).size * 8
    assert padded.tree_for(5) is padded.tree_for(8)
    assert padded.tree_for(8).size * 8 <= 64
    for _ in range(20):
        padded.stepped(padded.tree_for(5), [[0]] * 5, 2.0)
    assert set(padded._step_overhead) == {(False, 8 * padded.tree_for(5).size, 0)}
