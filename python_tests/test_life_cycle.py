"""Unpatching, releasing, closing and aborting during a generation, in the same thread and in others."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from selection import sample
from test_families import batch, greedy
from test_patch import snapshot
from tiny_models import OracleDrafter, tiny_model
from toy_model import PROMPTS, decoder, empty, same_as_plain
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import specmemo_kernels as sk
from specmemo_kernels.drafting import DraftInput
from specmemo_kernels.engine.scheduler import Scheduler
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.tree.draft_tree import DraftTree

TEXTS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7]]
SOON = 20.0


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=11)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Waiting(OracleDrafter):
    """Blocks in each step until released."""

    def __init__(self) -> None:
        super().__init__([], 0.0, max_depth=3)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        self.inside.set()
        assert self.go_on.wait(SOON)
        return super().propose(inputs)


LEAVING = {"unpatch": sk.unpatch, "undo": lambda m: m.specmemo.undo(), "release": lambda m: m.specmemo.release()}


@pytest.mark.parametrize("leave", sample(LEAVING.values(), [LEAVING["unpatch"]]), ids=LEAVING)
def test_refused_while_this_threads_batch_is_open(model: PreTrainedModel, leave: Callable[[object], None]) -> None:
    """The batch continues afterwards; once it is exhausted or closed, the call works."""
    before, expected = snapshot(model), greedy(model, batch((9,)), 20)
    alone = [greedy(model, {"input_ids": torch.tensor([t])}, 15)[0, len(t) :].tolist() for t in TEXTS]
    for end in (list, lambda run: run.close()):
        sk.patch(model, "prompt-lookup")
        run = sk.stream_batch(model, TEXTS, max_new_tokens=15)
        next(run)
        with pytest.raises(RuntimeError, match=r"generation with the same model isn't over.*close"):
            leave(model)
        assert isinstance(model.specmemo, sk.SpecMemo)
        next(run)
        end(run)
        for completion, tokens in zip(run.completions(), alone, strict=True):
            assert completion.tokens == tokens[: len(completion.tokens)]
        assert torch.equal(greedy(model, batch((9,)), 20), expected)
        leave(model)
        assert torch.equal(greedy(model, batch((9,)), 20), expected)
        sk.unpatch(model)
        assert snapshot(model) == before


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
def test_refused_inside_of_generate(model: PreTrainedModel, leave: Callable[[object], None]) -> None:
    """A criterion that unpatches gets the error; generate raises it, and the model stays patched and usable."""

    class Leaving(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            leave(model)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    expected = greedy(model, batch((9,)), 10)
    with sk.patch(model, "prompt-lookup"):
        with pytest.raises(RuntimeError, match="isn't over"):
            greedy(model, batch((9,)), 10, stopping_criteria=StoppingCriteriaList([Leaving()]))
        assert torch.equal(greedy(model, batch((9,)), 10), expected)


@pytest.mark.parametrize("leave", sample(LEAVING.values(), [LEAVING["release"]]), ids=LEAVING)
def test_another_threads_generation_is_waited_for(model: PreTrainedModel, leave: Callable[[object], None]) -> None:
    before, expected = snapshot(model), greedy(model, batch((9,)), 10)
    drafter, results = Waiting(), []
    sk.patch(model, drafter, tree=DraftTree.chain(3))
    generating = threading.Thread(daemon=True, target=lambda: results.append(greedy(model, batch((9,)), 10)))
    leaving = threading.Thread(daemon=True, target=leave, args=(model,))
    generating.start()
    assert drafter.inside.wait(SOON)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive(), "it didn't wait"
    assert "specmemo" in vars(model)
    drafter.go_on.set()
    for thread in (generating, leaving):
        thread.join(SOON)
        assert not thread.is_alive()
    assert torch.equal(results[0], expected)
    assert torch.equal(greedy(model, batch((9,)), 10), expected)
    sk.unpatch(model)
    assert snapshot(model) == before


def test_calls_that_wait_for_an_unpatched_model_run_its_own_method(model: PreTrainedModel) -> None:
    """``generate`` calls queued behind a batch run the model's own method after unpatching; a queued batch raises."""
    expected, results, errors = greedy(model, batch((9,)), 10), [], []
    handle = sk.patch(model, "prompt-lookup")
    run = sk.stream_batch(model, TEXTS, max_new_tokens=15)
    next(run)

    def batching() -> None:
        try:
            sk.generate_batch(model, TEXTS, max_new_tokens=3)
        except RuntimeError as error:
            errors.append(str(error))

    waiting = [
        threading.Thread(daemon=True, target=lambda: results.append(greedy(model, batch((9,)), 10))) for _ in range(2)
    ]
    waiting.append(threading.Thread(daemon=True, target=batching))
    for thread in waiting:
        thread.start()
    time.sleep(0.3)  # they are likely to wait by now; the outcome is the same if not
    handle.__exit__(None, None, None)
    for thread in waiting:
        thread.join(SOON)
        assert not thread.is_alive()
    assert all(torch.equal(result, expected) for result in results)
    assert len(results) == 2
    assert not errors or "unpatched" in errors[0] or "isn't patched" in errors[0]
    assert all(completion.finish_reason == "aborted" for completion in run.completions())


def test_leaving_the_with_block_closes_its_batch(model: PreTrainedModel) -> None:
    """So that the block's own error is raised."""
    before = snapshot(model)
    runs: list[sk.BatchRun] = []

    def block() -> None:
        with sk.patch(model, "prompt-lookup"):
            runs.append(sk.stream_batch(model, TEXTS, max_new_tokens=15))
            next(runs[0])
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        block()
    assert snapshot(model) == before
    assert all(completion.finish_reason == "aborted" for completion in runs[0].completions())
    assert len(list(runs[0])) <= len(TEXTS), "what was there already"


@pytest.mark.slow
def test_patching_and_generating_in_threads(model: PreTrainedModel, hasty: None) -> None:
    """One thread patches and unpatches, two generate: each call writes the model's own tokens."""
    expected, wrong, over = greedy(model, batch((9,)), 6), [], threading.Event()

    def generating() -> None:
        try:
            while not over.is_set():
                if not torch.equal(greedy(model, batch((9,)), 6), expected):
                    wrong.append("tokens")
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(daemon=True, target=generating) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        sk.patch(model, "prompt-lookup")
        time.sleep(0.02)
        sk.unpatch(model)
    over.set()
    for thread in threads:
        thread.join(SOON)
    assert not wrong


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_batch_that_another_thread_ends_in_a_step(model: PreTrainedModel, end: str) -> None:
    """The step is completed, the iterator ends, and the model is free."""
    expected, drafter, failures = greedy(model, batch((9,)), 10), Waiting(), []
    with sk.patch(model, drafter, tree=DraftTree.chain(3)):
        run = sk.stream_batch(model, TEXTS, max_new_tokens=60)

        def iterating() -> None:
            try:
                list(run)
            except BaseException as error:
                failures.append(error)

        def ending() -> None:
            if end == "close":
                run.close()
            else:
                for index in range(len(TEXTS)):
                    run.abort(index)

        iterator, ender = threading.Thread(daemon=True, target=iterating), threading.Thread(daemon=True, target=ending)
        iterator.start()
        assert drafter.inside.wait(SOON)
        ender.start()
        ender.join(0.2)
        assert ender.is_alive() == (end == "close"), "closing waits for the step, aborting doesn't"
        drafter.go_on.set()
        for thread in (iterator, ender):
            thread.join(SOON)
            assert not thread.is_alive()
        assert not failures
        assert [completion.finish_reason for completion in run.completions()] == ["aborted"] * 3
        assert max(len(completion.tokens) for completion in run.completions()) < 60
        assert torch.equal(greedy(model, batch((9,)), 10), expected)


def test_a_stop_function_may_close_its_batch(model: PreTrainedModel) -> None:
    """The batch ends with the step; another generation of this thread can start at once."""
    expected = greedy(model, batch((9,)), 10)
    with sk.patch(model, "prompt-lookup"):
        requests = [sk.Request(t, 30, stop=lambda tokens: bool(len(tokens) == 12 and run.close())) for t in TEXTS]
        run = sk.stream_batch(model, requests)
        pieces = list(run)
        assert torch.equal(greedy(model, batch((9,)), 10), expected)
    assert {piece.index for piece in pieces} == {0, 1, 2}
    assert all(completion.finish_reason == "aborted" for completion in run.completions())


def test_aborts_and_closes_from_many_threads(model: PreTrainedModel, hasty: None) -> None:
    """In any order: no exception, no lost page, and the tokens are the model's own."""
    alone = [greedy(model, {"input_ids": torch.tensor([t])}, 20)[0, len(t) :].tolist() for t in TEXTS]
    failures: list[str] = []

    def aborting(run: sk.BatchRun, index: int) -> None:
        for _ in range(20):
            run.abort(index)

    with sk.patch(model, "prompt-lookup") as handle:
        for repeat in range(24):
            run = sk.stream_batch(model, TEXTS, max_new_tokens=20)
            actions: list[Callable[[], object]] = [partial(list, run), run.close, run.close]
            actions += [partial(aborting, run, index) for index in range(3)]

            def act(action: Callable[[], object], delay: float) -> None:
                try:
                    time.sleep(delay)
                    action()
                except BaseException as error:
                    failures.append(repr(error))

            delays = [0, 0.002 * (repeat % 12), 0.002 * (repeat % 12), 0, 0.001, 0.01]
            threads = [
                threading.Thread(daemon=True, target=act, args=pair) for pair in zip(actions, delays, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SOON)
                assert not thread.is_alive()
            for completion, tokens in zip(run.completions(), alone, strict=True):
                assert completion.tokens == tokens[: len(completion.tokens)]
                assert completion.finish_reason == ("length" if len(completion.tokens) == 20 else "aborted")
            assert handle.pool.free_pages == handle.pool.num_pages
            handle.pool.check_integrity()
    assert not failures


def test_one_that_has_ended_stays_ended() -> None:
    """Aborted by another thread in the step in which it ends: its finish reason stays."""
    spec = decoder(DraftTree.chain(3), "right")
    scheduler, reached, aborted = Scheduler(spec, 2), threading.Event(), threading.Event()

    def aborting() -> None:
        assert reached.wait(SOON)
        scheduler.abort(state)
        aborted.set()

    def stop(tokens: list[int]) -> bool:
        if len(tokens) == len(PROMPTS[0]) + 6:
            reached.set()
            assert aborted.wait(SOON)
            return True
        return False

    state, other = SequenceState(PROMPTS[0], 30, stop=stop), SequenceState(PROMPTS[1], 9)
    thread = threading.Thread(daemon=True, target=aborting)
    thread.start()
    scheduler.submit(state)
    scheduler.submit(other)
    scheduler.run()
    thread.join(SOON)
    assert state.finished
    assert not state.aborted
    assert state.emitted == 6
    same_as_plain(other)
    empty(spec.pool)


def test_requests_that_are_not_there(model: PreTrainedModel) -> None:
    with sk.patch(model, "prompt-lookup"), sk.stream_batch(model, TEXTS, max_new_tokens=3) as run:
        for index in (3, -1):
            with pytest.raises(ValueError, match=f"index is {index}, it must be from 0 to 2"):
                run.abort(index)
        with pytest.raises(TypeError, match="index is 'first' of type str"):
            run.abort("first")  # type: ignore[arg-type]
