"""Recorded steps on a CPU write the model's own tokens; recording changes nothing and refuses what it can't repeat."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hidden_oracle import HiddenOracle
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import covering, examples, sample
from test_families import _bushy_paths, answers, batch, greedy
from test_late_steps import whole
from tiny_models import FAMILIES, OracleDrafter, random_heads, tiny_model

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.drafting.base import DraftInput
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.engine import host_capture, overlap, program, verify
from specmemo_kernels.engine.decode import SpecDecoder
from specmemo_kernels.engine.host_capture import HostCapture, record
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.tree.choice import TreeChooser

TREE = sk.DraftTree.from_paths(_bushy_paths(14))
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("device_state")


def capture(run: Callable[[], None]) -> Callable[[], None]:
    return HostCapture(CPU, limit=1 << 20)(run)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of replays, in a list of one element. Steps are recorded at their second run."""
    monkeypatch.setattr(HostCapture, "after", 1)
    count, original = [0], HostCapture.__call__

    def counting(self: HostCapture, run: Callable[[], None]) -> Callable[[], None]:
        replay = original(self, run)

        def counted() -> None:
            count[0] += 1
            replay()

        return counted

    monkeypatch.setattr(HostCapture, "__call__", counting)
    return count


SAMPLED = {
    "temperature": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "top_p": {"do_sample": True, "temperature": 0.9, "top_p": 0.8, "top_k": 9},
    "penalty": {"do_sample": False, "repetition_penalty": 1.4},
}


@pytest.mark.parametrize(
    ("family", "options", "tree"),
    sample(
        covering(
            ("llama", "qwen3", "mixtral", "gpt_oss", "gemma2"),
            tuple(SAMPLED),
            (1, 6),
            first=[("llama", "top_p", 6), ("gpt_oss", "penalty", 6), ("qwen3", "temperature", 1)],
        ),
        [("llama", "top_p", 6), ("gpt_oss", "penalty", 6), ("qwen3", "temperature", 1)],
    ),
)
def test_the_host_verifies_recorded_passes(family: str, options: str, tree: int, replays: list[int]) -> None:
    """The unpatched model's tokens; Gemma's capped logits aren't its lm_head's, so its steps stay eager."""
    model, inputs = tiny_model(family), batch((9,))
    written = []
    with sk.patch(model, random_heads(model), tree=tree, graph=True) as handle:
        for patched in (True, True, False):
            if not patched:
                sk.unpatch(model)
            torch.manual_seed(5)
            written.append(model.generate(**inputs, max_new_tokens=25, **SAMPLED[options]))
        assert handle.stats.graph_steps == 0 if family == "gemma2" else replays[0] > 8
    assert all(torch.equal(tokens, written[-1]) for tokens in written)


@pytest.mark.parametrize("drafter", ["heads", "lookup"])
def test_requests_of_all_kinds(drafter: str, replays: list[int]) -> None:
    """Greedy, sampled and scored requests that come and end at other times: tokens and scores of eager steps."""
    model, completions = tiny_model("llama"), []
    requests = [
        sk.Request(list(range(1, 4 + i)) * 3, 14 + 3 * i, [], sk.Sampling(seed=i) if i % 3 else None,
                   logprobs=2 if i % 2 else None)
        for i in range(7)
    ]  # fmt: skip
    for graph in (False, True):
        with sk.patch(
            model, random_heads(model) if drafter == "heads" else sk.PromptLookupDrafter(3), tree=5, graph=graph,
            max_batch_size=3,
        ) as handle:  # fmt: skip
            completions.append(sk.generate_batch(model, requests))
            whole(handle)
            if graph:
                assert handle.bytes_by_part["graphs"] <= handle.plan.parts["graphs"]
    for eager, recorded in zip(*completions, strict=True):
        assert recorded.tokens == eager.tokens
        assert recorded.scores == eager.scores
    assert replays[0] > 10


def test_heads_draft_in_passes_that_the_host_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host drafts for eager steps only."""
    model, proposed, propose = tiny_model("llama"), [], MedusaDrafter.propose
    monkeypatch.setattr(MedusaDrafter, "propose", lambda self, x: proposed.append(x.tree.size) or propose(self, x))
    with sk.patch(model, random_heads(model), tree=6, graph=True) as handle:
        sk.generate_batch(model, [sk.Request([4, 5, 6], 40, [], sk.Sampling(seed=1))])
        stats = handle.stats
        assert stats.graph_steps > 10
        assert len(proposed) <= stats.steps - stats.graph_steps


@pytest.mark.parametrize("fails", ["capture", "memory of the capture", "memory of the verdict"])
def test_sampled_passes_that_fail(fails: str, monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """The tokens of eager steps."""
    model, written, calls = tiny_model("llama"), [], [0]
    requests = [sk.Request([4, 5, 6 + i], 40, [], sk.Sampling(seed=i) if i != 1 else None) for i in range(4)]
    owner, name = (verify, "verdict_of") if fails == "memory of the verdict" else (HostCapture, "__call__")
    original = getattr(owner, name)

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if fails == "capture":
            raise RuntimeError("no")
        if calls[0] in ((12, 60) if owner is verify else (1, 2)):
            raise torch.OutOfMemoryError("no memory")
        return original(*arguments)

    for graph in (False, None):
        with sk.patch(model, random_heads(model), tree=6, graph=graph, max_batch_size=3) as handle:
            if graph is None:
                monkeypatch.setattr(owner, name, failing)
            written.append([completion.tokens for completion in sk.generate_batch(model, requests)])
            whole(handle)
    assert written[0] == written[1]
    assert calls[0] > 0
    assert (replays[0] > 8) == (fails == "memory of the verdict")


def test_captured_drafters_have_no_time_of_their_own(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """Also not in eager steps: the tree's choice would count it twice."""
    model, told, stepped, eager = tiny_model("llama"), [], TreeChooser.stepped, 0

    def listening(self: TreeChooser, *arguments: Any) -> None:
        told.append(arguments[3])
        stepped(self, *arguments)

    monkeypatch.setattr(TreeChooser, "stepped", listening)
    for sampling in (None, sk.Sampling(seed=1)):
        with sk.patch(model, random_heads(model), graph=True) as handle:
            sk.generate_batch(model, [sk.Request([4, 5, 6], 30, [], sampling)])
            eager += handle.stats.steps - handle.stats.graph_steps
    assert eager > 0
    assert set(told) == {None}
    assert replays[0] > 0


def test_parts_of_one_size_share_a_recording(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """Trees of the same size and depth, but of other widths."""
    model = tiny_model("llama")
    parts = [sk.DraftTree.from_paths(paths) for paths in ([[0], [1], [0, 0]], [[0], [2], [0, 0]])]
    monkeypatch.setattr(SpecDecoder, "next_tree", lambda self: parts[len(self.sequences[0].tokens) % 2])
    with sk.patch(model, random_heads(model), tree=TREE, graph=True, max_batch_size=1) as handle:
        sk.generate_batch(model, [sk.Request([4, 5, 6], 40, [], sk.Sampling(seed=1))])
        kept = handle._pools.steps
        assert kept is not None
        assert len([shape for shape in kept._steps if shape.nodes == 4]) == 1
    assert replays[0] > 8


def test_scratch_that_grows_between_sampled_calls(replays: list[int]) -> None:
    """The hidden states of the nodes get room with it."""
    model = tiny_model("llama")
    requests = [sk.Request([4, 5, 6 + i], 12, [], sk.Sampling(seed=i)) for i in range(2)]
    with sk.patch(model, random_heads(model), tree=4, graph=False, max_batch_size=2):
        expected = [completion.tokens for completion in sk.generate_batch(model, requests)]
    with sk.patch(model, random_heads(model), tree=4, graph=True, max_batch_size=2) as handle:
        handle._pools.get([40, 40], admitting=True)
        pool = handle.pool
        assert pool is not None
        pool.resize_scratch(4)
        sk.generate_batch(model, requests[:1])
        assert handle.pool is pool
        pool.resize_scratch(8)
        assert [completion.tokens for completion in sk.generate_batch(model, requests)] == expected
        assert handle.pool is pool
    assert replays[0] > 4


def test_unread_results_are_not_computed() -> None:
    """Nor what only they read; writes are."""
    x, out = torch.randn(3), torch.zeros(3)

    def run() -> None:
        x.sin().cos()
        y = x * 2
        y.add_(1)
        out.copy_(y)

    calls, _ = record(run)
    assert [call.function.name() for call in calls] == ["aten::mul.Tensor", "aten::add_.Tensor", "aten::copy_"]


@torch.inference_mode()
def test_results_that_never_change_are_constants() -> None:
    x, out = torch.zeros(4, 4), torch.zeros(3, 4)

    def run() -> None:
        row = torch.arange(4)
        changed = torch.zeros(4).add_(x[0])
        long, random = torch.arange(2000)[:4], torch.rand(4) * 0
        out.copy_(torch.stack([row * 2 + x[0], changed, long + random + x[0]]))

    calls, _ = record(run)
    kept = [call.function._schema.name for call in calls]
    assert [name for name in kept if name in ("aten::arange", "aten::zeros", "aten::rand")] == [
        "aten::zeros", "aten::arange", "aten::rand"
    ]  # fmt: skip
    replay = capture(run)
    for value in (3.0, 5.0):
        x.fill_(value)
        replay()
        row = torch.arange(4)
        assert torch.equal(out, torch.stack([row * 2 + value, torch.full((4,), value), row + value]))


@torch.inference_mode()
def test_composite_operators_are_recorded_as_their_parts() -> None:
    q, keys, out = torch.randn(3, 2, 1, 8), torch.randn(3, 5, 2, 8), torch.zeros(3, 2, 1, 5)

    def run() -> None:
        out.copy_(torch.einsum("nhgd,nahd->nhga", q, keys).softmax(-1))

    calls, _ = record(run)
    names = {call.function._schema.name for call in calls}
    assert {"aten::bmm", "aten::_softmax"} <= names
    assert not {"aten::einsum", "aten::softmax"} & names
    capture(run)()
    assert torch.equal(out, torch.einsum("nhgd,nahd->nhga", q, keys).softmax(-1))


def test_the_state_is_copied_when_it_has_changed(device_state: list[int], replays: list[int]) -> None:
    """At the start, and where a row has ended or another pass was made between."""
    model, inputs = tiny_model("llama"), batch((40, 1, 17))
    expected = greedy(model, inputs, 40)
    with sk.patch(model, random_heads(model), tree=4, graph=True) as handle:
        assert torch.equal(greedy(model, inputs, 40), expected)
        assert device_state[0] == handle.stats.graph_steps > 20
        assert 1 <= device_state[1] <= 3
        requests = [
            sk.Request(list(range(1, 9 + i)), 12, [], sk.Sampling(seed=i) if i % 3 == 0 else None) for i in range(6)
        ]
        before = device_state[1]
        sk.generate_batch(model, requests)
        assert device_state[1] > before
    assert replays[0] > 10


@pytest.mark.parametrize("reads", [False, True])
def test_passes_are_timed_as_recorded(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the choice of trees; the replays compute what the model does. A model that reads values is timed eagerly."""
    model, replayed = tiny_model("llama"), [0]
    if reads:
        norm = model.model.norm.forward
        monkeypatch.setattr(model.model.norm, "forward", lambda x: norm(x) * float(bool((x == x).all())))
    original = HostCapture.__call__

    def call(self: HostCapture, run: Callable[[], None]) -> Callable[[], None]:
        replay = original(self, run)
        (kept,) = (cell.cell_contents for cell in run.__closure__ or () if isinstance(cell.cell_contents, torch.Tensor))
        run()
        expected = kept.clone()
        kept.fill_(float("nan"))

        def checked() -> None:
            replay()
            assert torch.equal(kept, expected)
            replayed[0] += 1

        return checked

    monkeypatch.setattr(HostCapture, "__call__", call)
    with sk.patch(model, random_heads(model), graph=None) as handle:
        assert handle.chooser is not None
        assert all(seconds > 0 for _, seconds in handle.chooser.seconds.points)
        assert (replayed[0] == 0) if reads else (replayed[0] >= 4 * len(handle.chooser.seconds.points))
    before = replayed[0]
    with sk.patch(model, random_heads(model), graph=False) as handle:
        assert handle.chooser is not None
        assert replayed[0] == before


def test_a_recording_that_fails_stops_no_patching(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HostCapture, run: Callable[[], None]) -> Callable[[], None]:
        raise TypeError("not recorded")

    monkeypatch.setattr(HostCapture, "__call__", fail)
    model = tiny_model("llama")
    with sk.patch(model, random_heads(model)) as handle:
        assert handle.chooser is not None
        assert all(seconds > 0 for _, seconds in handle.chooser.seconds.points)


FIRST = [("llama", True), ("gemma2", True), ("mixtral", False)]


@pytest.mark.parametrize(
    ("family", "fuse"), sample(covering(FAMILIES, (True, False), first=FIRST), [("llama", True), ("mixtral", False)])
)
def test_families(family: str, fuse: bool, replays: list[int]) -> None:
    """Token for token, in batches whose sequences end one after the other."""
    model = tiny_model(family)
    inputs = batch((40, 1, 17))
    expected = greedy(model, inputs, 40)
    eos = int(expected[0, -12])
    ended = greedy(model, inputs, 40, eos_token_id=eos, pad_token_id=0)
    with sk.patch(model, random_heads(model), tree=TREE, page_size=4, graph=True, fuse=fuse) as handle:
        assert torch.equal(greedy(model, inputs, 40), expected)
        assert torch.equal(greedy(model, inputs, 40, eos_token_id=eos, pad_token_id=0), ended)
        assert torch.equal(greedy(model, inputs, 40), expected)
        assert replays[0] > 40
        whole(handle)


def test_a_model_that_reads_values(replays: list[int]) -> None:
    """A loop over the experts that got tokens: steps stay eager, and the reason is given."""
    model: Any = tiny_model("mixtral")
    model.set_experts_implementation("eager")
    inputs = batch((9, 4))
    expected = greedy(model, inputs, 30)
    with sk.patch(model, random_heads(model), tree=6, graph=True, fuse=False) as handle:
        with pytest.raises(RuntimeError, match=r"can't be captured .*one_hot.* depends on a tensor's values"):
            greedy(model, inputs, 30)
        whole(handle)
        handle._pools.graphs = replace(handle.graphs, must=False)  # as without graph=True
        handle.release()
        assert torch.equal(greedy(model, inputs, 30), expected)
        assert any("one_hot" in reason for reason in handle.stats.eager_reasons)
    assert replays[0] == 0


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("dtype", sample([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_the_same_bits_as_eager_steps(kv_dtype: str | None, dtype: torch.dtype, replays: list[int]) -> None:
    model = tiny_model("llama").to(dtype)
    inputs = batch((40, 9))
    written = []
    for graph in (False, True):
        with sk.patch(model, random_heads(model).to(dtype), tree=9, graph=graph, kv_dtype=kv_dtype):
            written.append(greedy(model, inputs, 60))
    assert torch.equal(*written)
    assert replays[0] > 40


def test_a_step_is_recorded_when_it_has_come_often(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCapture, "after", 5)
    model = tiny_model("llama")
    inputs = batch((9,))
    expected = greedy(model, inputs, 30)
    with sk.patch(model, random_heads(model), tree=6, graph=True) as handle:
        assert torch.equal(greedy(model, inputs, 30), expected)
        shapes = len(handle._pools.steps._steps) if handle._pools.steps is not None else 0
        assert handle.stats.graph_steps - 5 * shapes <= replays[0] < handle.stats.graph_steps - 4
        handle.stats.reset()
        replays[0] = 0
        assert torch.equal(greedy(model, inputs, 30), expected)
        assert replays[0] > 20


def test_accepted_paths(replays: list[int]) -> None:
    """With mostly right guesses."""
    model = tiny_model("qwen3")
    inputs = batch((30, 9))
    expected = greedy(model, inputs, 60)

    with sk.patch(model, HiddenOracle(model, answers(inputs, expected), 0.8), tree=TREE, graph=True) as handle:
        assert torch.equal(greedy(model, inputs, 60), expected)
        assert handle.stats.tokens_per_step > 1.5
    assert replays[0] > 10


class Hesitant(OracleDrafter):
    """Guesses mostly right, up to a depth of its own in every step, sometimes nothing."""

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        draft = super().propose(inputs)
        deepest = int(torch.randint(-1, inputs.tree.max_depth + 1, (), generator=self.generator))
        return draft.where(torch.tensor(inputs.tree.depths) <= deepest, -1)


@pytest.mark.parametrize("family", sample(["llama", "gemma2", "qwen3_moe"], ["llama"]))
@pytest.mark.parametrize("kind", sample(["prompt-lookup", "draft model", "hesitant"], ["hesitant"]))
def test_drafters_on_the_host(kind: str, family: str, replays: list[int]) -> None:
    """Their trees are filled before the recorded step; depths without guesses are left out of it."""
    model, inputs = tiny_model(family), batch((40, 1, 17))
    expected = greedy(model, inputs, 60)
    known = answers(inputs, expected)
    makers: dict[str, Callable[[], Any]] = {
        "prompt-lookup": lambda: "prompt-lookup",
        "draft model": lambda: sk.DraftModel(tiny_model(family, num_hidden_layers=1), tokens=3),
        "hesitant": lambda: Hesitant(known, 0.8),
    }
    chain = sk.DraftTree.chain(3 if kind == "draft model" else 6)
    for tree in (TREE, chain) if kind == "hesitant" else (chain,):
        replays[0] = 0
        with sk.patch(model, makers[kind](), tree=tree, page_size=4, graph=True) as handle:
            assert torch.equal(greedy(model, inputs, 60), expected)
            assert torch.equal(greedy(model, inputs, 60), expected)
            assert 10 < replays[0] <= handle.stats.graph_steps
            if kind == "hesitant":
                assert handle.stats.tokens_per_step > 1.5
            whole(handle)


def test_an_overlapped_step_never_precedes_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU too, where other steps are launched before the last one is read."""
    monkeypatch.setitem(overlap.IN_FLIGHT, "cpu", 2)
    model, inputs = tiny_model("llama"), batch((9, 12))
    expected = greedy(model, inputs, 30)
    with sk.patch(model, OracleDrafter(answers(inputs, expected), 0.8), tree=TREE, graph=True) as handle:
        assert torch.equal(greedy(model, inputs, 30), expected)
        assert handle.stats.tokens_per_step > 1.5
        assert handle.stats.graph_steps == handle.stats.steps


def test_weights_that_change(replays: list[int]) -> None:
    """Written in place they are read; replaced ones end the recording."""
    model: Any = tiny_model("llama")
    inputs = batch((9,))
    with sk.patch(model, random_heads(model), tree=6, graph=True):
        before = greedy(model, inputs, 30)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(-1)
        written = greedy(model, inputs, 30)
        model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(-model.model.layers[1].mlp.down_proj.weight)
        replaced = greedy(model, inputs, 30)
        assert replays[0] > 10
    assert not torch.equal(before, written)
    assert torch.equal(replaced, greedy(model, inputs, 30))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)
    assert torch.equal(written, greedy(model, inputs, 30))


@pytest.mark.parametrize("lines", [1, 2, 64])
def test_replays_need_no_more_memory(lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a program's parts have few lines."""
    monkeypatch.setattr(host_capture, "dispatcher_active", lambda: False)
    monkeypatch.setattr(program, "_PART_LINES", lines)
    x, weight, out = torch.randn(64, 512), torch.randn(512, 512), torch.zeros(64, 512)

    def run() -> None:
        y = x
        for _ in range(8):
            y = (y @ weight).relu() * 0.1
        out.copy_(y)

    replay = capture(run)
    peaks = []
    for function in (run, replay):
        with MemoryTracker() as tracker:
            function()
        peaks.append(tracker.peak)
    assert 0 < peaks[1] <= peaks[0]


def test_recording_writes_nothing() -> None:
    x, out, rows = torch.randn(4, 6), torch.zeros(4, 6), torch.zeros(8, 6)

    def run() -> None:
        rows[2:6] = x + 1
        rows[0].add_(1)
        out.copy_(rows[2:6] * 2)
        out.mul_(out)

    replay = capture(run)
    assert not out.any()
    assert not rows.any()
    replay()
    assert torch.equal(out, ((x + 1) * 2) ** 2)
    assert torch.equal(rows[2:6], x + 1)
    x.zero_()
    replay()
    assert torch.equal(out, torch.full_like(out, 4))
    assert torch.equal(rows[0], torch.full((6,), 2.0))


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(), "bool": lambda x: bool((x > 0).all()), "tolist": lambda x: (x + 1).tolist(),
    "numpy": lambda x: (x + 1).numpy(), "array": lambda x: memoryview((x + 1).numpy()), "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 0], "unique": lambda x: x.unique(), "pointer": lambda x: x.data_ptr(),
    "repeats": lambda x: torch.repeat_interleave(torch.arange(4), x.long()),
}  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_values_that_are_read(read: str) -> None:
    x, out = torch.arange(4.0), torch.zeros(4)

    def run() -> None:
        READS[read](x * 2)
        out.copy_(x)

    with pytest.raises(RuntimeError, match="values"):
        capture(run)
    assert not out.any()


def test_only_a_cpu_is_recorded() -> None:
    with pytest.raises(ValueError, match="steps on cuda:0 can't be recorded"):
        HostCapture(torch.device("cuda", 0), limit=0)


def test_other_functions_that_cant_be_recorded() -> None:
    x = torch.arange(4.0)
    with pytest.raises(RuntimeError, match=r"float32 memory"):
        capture(lambda: print((x + 1).view(torch.int32) + 1))
    with pytest.raises(RuntimeError, match="has other results"):
        capture(lambda: torch.sort(x, out=(x, torch.empty(4, dtype=torch.long))) and None)


def _change(y: torch.Tensor, choice: int, weight: torch.Tensor) -> torch.Tensor:
    """One of several operators and views, of ``[4, 4]`` or ``[2, 8]``."""
    if choice == 0:
        return y.t()
    if choice == 1:
        return y.reshape(2, 8) if y.shape[0] == 4 else y.reshape(4, 4)
    if choice == 2:
        return y.relu_()
    if choice == 3:
        y.view(-1)[:3].add_(1.5)
        return y
    if choice == 4:
        return torch.cat([y[1:], y[:1]])
    if choice == 5:
        return y.contiguous()
    if choice == 6:
        return torch.stack([y, -y]).amax(0)
    if choice == 7:
        first, second = y.chunk(2)
        return torch.cat([second, first * 0.5])
    if choice == 8 and y.shape == (4, 4):
        return ops.linear(y, weight, backend="cpu")
    return y.topk(y.shape[1], dim=1)[0]


@settings(max_examples=examples(100), deadline=None)
@given(choices=st.lists(st.integers(0, 9), min_size=1, max_size=12), seed=st.integers(0, 1000), lines=st.integers(1, 9))
def test_random_functions(choices: list[int], seed: int, lines: int) -> None:
    """The results of replays on new input are those of the function, with few and many lines per part of a program."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.empty(4, 4), torch.randn(4, 4, generator=generator)
    outs = torch.zeros(2, 16)
    order = random.Random(seed).sample(range(len(choices)), len(choices))

    def run(out: torch.Tensor) -> None:
        y = x * 1
        kept = y
        for i, choice in enumerate(choices):
            if y.dim() == 2 and y.shape[0] in (2, 4):
                y = _change(y if y.is_contiguous() or choice not in (3,) else y.contiguous(), choice, weight)
            if i == order[0]:
                kept = y
        out.copy_(torch.cat([y.reshape(-1)[:8], kept.reshape(-1)[:8]]))

    x.normal_(generator=generator)
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(program, "_PART_LINES", lines)
        replay = capture(lambda: run(outs[0]))
    for _ in range(2):
        x.normal_(generator=generator)
        replay()
        run(outs[1])
        assert torch.equal(outs[0], outs[1])
