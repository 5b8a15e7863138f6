"""Engine: requests of many threads, each with the tokens that it gives alone, whatever happens to the others."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples, sample
from test_generate_batch import CHAIN, PROMPTS, alone, texts
from test_patch_memory import with_workspace
from tiny_models import OracleDrafter, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.engine.decode import SpecDecoder
from specmemo_kernels.integrations.hf.generation_lock import Unpatched
from specmemo_kernels.integrations.hf.handle import SpecMemo

WAIT = 60.0


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=11)


@pytest.fixture
def handle(model: PreTrainedModel) -> Iterator[SpecMemo]:
    """Three rows, drafts that are right at 80 % of the places."""
    with sk.patch(model, OracleDrafter(texts(), 0.8), tree=CHAIN, max_batch_size=3) as handle:
        yield handle


def wanted(index: int, count: int) -> list[int]:
    prompt = PROMPTS[index]
    return texts()[index][len(prompt) : len(prompt) + count]


def request(index: int, count: int = 40, **options: object) -> sk.Request:
    return sk.Request(PROMPTS[index], count, [], **options)


class Gate:
    """Holds the engine's thread in a request's first piece until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, piece: sk.Piece) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT)


@pytest.mark.usefixtures("handle")
@pytest.mark.parametrize("aborted", [False, True])
def test_ended_requests_are_freed(model: PreTrainedModel, aborted: bool) -> None:
    """Without the garbage collector, which visits old objects so rarely that a server would keep a hundred requests."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with sk.Engine(model) as engine:
            generation = engine.submit(request(0, 200 if aborted else 20, stop=lambda tokens: False))
            next(generation)
            if aborted:
                generation.abort()
            assert generation.result(WAIT).tokens
            ended = weakref.ref(generation), weakref.ref(generation.sequence)
            del generation
            engine.submit(request(1, 20)).result(WAIT)  # the last step's sequences are kept until the next one's
            deadline = time.monotonic() + WAIT
            while any(each() is not None for each in ended):  # the engine's thread may not have dropped them yet
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        if enabled:
            gc.enable()


@pytest.mark.slow
def test_requests_of_many_threads(model: PreTrainedModel) -> None:
    sampled = [alone_sampled(model, i) for i in range(len(PROMPTS))]
    results: dict[tuple[int, bool], sk.Completion] = {}
    with sk.patch(model, OracleDrafter(texts(), 0.8), tree=CHAIN, max_batch_size=3), sk.Engine(model) as engine:

        def client(index: int) -> None:
            for sampling in (None, sk.Sampling(0.8, top_k=20, seed=index)):
                generation = engine.submit(request(index, 10 + 5 * index, sampling=sampling))
                pieces = list(generation)
                done = results[index, sampling is None] = generation.result(0)
                assert [token for piece in pieces for token in piece.tokens] == done.tokens
                assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
                assert next(generation, None) is None

        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    for i in range(len(PROMPTS)):
        assert results[i, True].tokens == wanted(i, 10 + 5 * i)
        assert results[i, False].tokens == sampled[i]
        assert results[i, True].finish_reason == "length"


def alone_sampled(model: PreTrainedModel, index: int) -> list[int]:
    """Transformers' own tokens by the seed that the request will have."""
    torch.manual_seed(index)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 1.0}
    return alone(model, PROMPTS[index], 10 + 5 * index, **options)


def test_others_join_on_the_way(model: PreTrainedModel, handle: SpecMemo) -> None:
    """A request that arrives during another's steps begins before that has ended, and new pages preempt nobody."""
    gate = Gate()
    with sk.Engine(model) as engine:
        first = engine.submit(request(0, 60), on_piece=gate)
        assert gate.reached.wait(WAIT)
        order: list[int] = []
        others = [engine.submit(request(i, 4), on_piece=lambda piece: order.append(piece.index)) for i in (1, 2)]
        assert engine.waiting == 2
        assert engine.running == 1
        gate.opened.set()
        assert [other.result(WAIT).tokens for other in others] == [wanted(i, 4) for i in (1, 2)]
        assert not first.done or handle.stats.steps < 60
        assert first.result(WAIT).tokens == wanted(0, 60)
    assert set(order) == {1, 2}
    assert handle.stats.preemptions == 0


def test_a_bounded_plan(model: PreTrainedModel) -> None:
    """More requests than the pages hold: they wait, or are preempted; what can never fit is refused."""
    budget = with_workspace(model, 400_000)
    with sk.patch(model, OracleDrafter(texts(), 0.8), tree=CHAIN, memory_budget=budget) as handle:
        longest = handle.max_length
        assert longest is not None
        with sk.Engine(model) as engine:
            generations = [engine.submit(request(i % 8, 60)) for i in range(20)]
            with pytest.raises(sk.BudgetError, match="the plan holds"):
                engine.submit(request(0, longest))
            for i, generation in enumerate(generations):
                assert generation.result(WAIT).tokens == wanted(i % 8, 60)
            parts = handle.bytes_by_part
        assert parts["kv_pages"] == handle.plan.parts["kv_pages"]
        assert handle.stats.preemptions > 0, "the plan holds everything, which tests nothing"


def test_aborts(model: PreTrainedModel, handle: SpecMemo) -> None:
    """Waiting, running, ended and unknown to the engine's thread yet: what was generated is kept, others go on."""
    gate = Gate()
    with sk.Engine(model) as engine:
        running = engine.submit(request(0, 60), on_piece=gate)
        assert gate.reached.wait(WAIT)
        others = [engine.submit(request(i, 30)) for i in (1, 2, 3, 4)]
        arrived, waiting = others[0], others[3]
        arrived.abort()
        arrived.abort()
        waiting.abort()
        running.abort()
        gate.opened.set()
        assert running.result(WAIT).finish_reason == "aborted"
        kept = running.result().tokens
        assert 0 < len(kept) < 60
        assert kept == wanted(0, len(kept))
        assert arrived.result(WAIT) == waiting.result(WAIT) == sk.Completion([], "aborted", 0, 0, 0)
        assert [piece.finished for piece in arrived] == [True]
        assert [other.result(WAIT).tokens for other in others[1:3]] == [wanted(i, 30) for i in (2, 3)]
        others[1].abort()  # no effect
        assert others[1].result().finish_reason == "length"
        pool = handle.pool
        assert pool is not None
        pool.check_integrity()
    assert pool.free_pages == pool.num_pages


def test_what_is_refused(model: PreTrainedModel, handle: SpecMemo) -> None:
    gate = Gate()
    engine = sk.Engine(model, max_waiting=2)
    running = engine.submit(request(0), on_piece=gate)
    assert gate.reached.wait(WAIT)
    waiting = [engine.submit(request(i)) for i in (1, 2)]
    with pytest.raises(sk.QueueFull, match="2 requests wait, max_waiting is 2"):
        engine.submit(request(3))
    with pytest.raises(ValueError, match="prompt 4 must be one row of token ids"):
        engine.submit(sk.Request([], 4))
    with pytest.raises(TypeError, match="request"):
        engine.submit(PROMPTS[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_piece"):
        engine.submit(request(0), on_piece=3)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="request 1 still runs"):
        waiting[0].result(0.01)
    gate.opened.set()
    engine.close()
    assert [g.result(0).finish_reason for g in (running, *waiting)] == ["length"] * 3
    with pytest.raises(sk.EngineClosed, match="closed"):
        engine.submit(request(3))
    engine.close()
    with pytest.raises(ValueError, match="isn't patched"):
        sk.Engine(tiny_model("llama", seed=12))
    with pytest.raises(ValueError, match="max_waiting"):
        sk.Engine(model, max_waiting=0)


def test_close_aborts_what_takes_too_long(model: PreTrainedModel, handle: SpecMemo) -> None:
    gate = Gate()
    engine = sk.Engine(model)
    running, waiting = engine.submit(request(0, 100), on_piece=gate), engine.submit(request(1))
    assert gate.reached.wait(WAIT)
    closing = threading.Thread(target=engine.close, args=(0.0,))
    closing.start()
    gate.opened.set()
    closing.join(WAIT)
    assert running.result(0).finish_reason == waiting.result(0).finish_reason == "aborted"
    assert handle.pool is not None
    assert handle.pool.free_pages == handle.pool.num_pages


@pytest.mark.usefixtures("handle")
def test_requests_end_while_another_generation_holds_the_model(model: PreTrainedModel) -> None:
    """One is aborted, one is cut off by ``close`` in the thread of that generation."""
    with sk.stream_batch(model, PROMPTS[:1], max_new_tokens=20, eos_token_ids=[]) as run:
        with sk.Engine(model) as engine:
            aborted, cut = engine.submit(request(1)), engine.submit(request(2))
            aborted.abort()
            assert aborted.result(WAIT).finish_reason == "aborted"
            assert not cut.done
            engine.close(0.2)
            assert cut.result(0).finish_reason == "aborted"
        assert sum(len(piece.tokens) for piece in run) == 20
        assert list(run.completions()[0].tokens) == wanted(0, 20)


@pytest.mark.usefixtures("handle")
def test_requests_wait_for_another_generation(model: PreTrainedModel) -> None:
    with sk.Engine(model) as engine:
        with sk.stream_batch(model, PROMPTS[:1], max_new_tokens=20, eos_token_ids=[]) as run:
            first = engine.submit(request(1))
            with pytest.raises(TimeoutError):
                first.result(0.2)
            second = engine.submit(request(2))
            assert sum(len(piece.tokens) for piece in run) == 20
            assert list(run.completions()[0].tokens) == wanted(0, 20)
        assert first.result(WAIT).tokens == wanted(1, 40)
        assert second.result(WAIT).tokens == wanted(2, 40)


def test_errors_of_a_request_are_its_own(model: PreTrainedModel, handle: SpecMemo) -> None:
    def stop(tokens: list[int]) -> bool:
        if len(tokens) == len(PROMPTS[0]) + 9:
            raise KeyError("mine")
        return False

    def on_piece(piece: sk.Piece) -> None:
        raise OSError("gone")

    with sk.Engine(model) as engine:
        stopped = engine.submit(request(0, 40, stop=stop))
        gone, other = engine.submit(request(1, 40), on_piece=on_piece), engine.submit(request(2, 40))
        with pytest.raises(sk.GenerationFailed, match="request 0 ended with KeyError: 'mine'") as failed:
            stopped.result(WAIT)
        assert failed.value.tokens == wanted(0, 9)
        assert isinstance(failed.value.__cause__, KeyError)
        pieces: list[sk.Piece] = []
        with pytest.raises(sk.GenerationFailed, match="mine"):
            pieces.extend(stopped)
        assert [token for piece in pieces for token in piece.tokens] == wanted(0, 9)
        assert next(stopped, None) is None
        with pytest.raises(sk.GenerationFailed, match="OSError: gone"):
            gone.result(WAIT)
        assert other.result(WAIT).tokens == wanted(2, 40)


def test_failed_requests_hold_no_pages(model: PreTrainedModel, handle: SpecMemo) -> None:
    """Nor a step's tensors: tracebacks of their errors, and of the errors' causes, refer to the engine's calls."""

    def failing(_: object) -> bool:
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise OSError("gone") from error

    with sk.Engine(model) as engine:
        failed = [engine.submit(request(0, stop=failing)), engine.submit(request(1), on_piece=failing)]
        for generation in failed:
            with pytest.raises(sk.GenerationFailed, match="OSError: gone"):
                generation.result(WAIT)
        assert engine.submit(request(2, 20)).result(WAIT).tokens == wanted(2, 20)
    pool = weakref.ref(handle.pool)
    handle.release()
    gc.collect()
    assert pool() is None


class NoTruthValue:
    def __bool__(self) -> bool:
        raise ValueError("neither")


@pytest.mark.parametrize(
    "error", sample([SystemExit, KeyboardInterrupt, asyncio.CancelledError, NoTruthValue], [KeyboardInterrupt])
)
def test_errors_that_are_no_exceptions(model: PreTrainedModel, handle: SpecMemo, error: type) -> None:
    """They end their request, not the engine's thread."""

    def failing(_: object) -> object:
        if error is NoTruthValue:
            return NoTruthValue()
        raise error

    with sk.Engine(model) as engine:
        other = engine.submit(request(2, 40))
        failed = [engine.submit(request(0, 40, stop=failing))]
        if error is not NoTruthValue:
            failed.append(engine.submit(request(1, 40), on_piece=failing))
        for generation in failed:
            with pytest.raises(sk.GenerationFailed, match="ValueError: neither|" + error.__name__):
                generation.result(WAIT)
        assert other.result(WAIT).tokens == wanted(2, 40)
        assert engine.submit(request(3, 20)).result(WAIT).tokens == wanted(3, 20)


#: In none of the texts below; its embedding is NaN.
NAN_TOKEN = 50


@pytest.mark.parametrize(
    ("prompt", "sampling", "tokens"),
    [
        ([7, NAN_TOKEN], sk.Sampling(0.8), []),
        ([7, NAN_TOKEN], sk.Sampling(0.8, typical=sk.TypicalAcceptance()), []),
        ([7], sk.Sampling(0.8, logit_bias={NAN_TOKEN: 1000}), [NAN_TOKEN]),
    ],
    ids=["prompt", "typical", "later"],
)
def test_logits_that_are_nan(prompt: list[int], sampling: sk.Sampling, tokens: list[int]) -> None:
    """They end the sampled request that has them; others go on, and draw what they draw alone."""
    model = tiny_model("llama", seed=11)
    with torch.no_grad():
        model.model.embed_tokens.weight[NAN_TOKEN] = float("nan")
    with sk.patch(model, OracleDrafter(texts(), 0.8), tree=CHAIN) as handle:
        sampled = request(0, 30, sampling=sk.Sampling(0.8, seed=3))
        drawn = sk.generate_batch(model, [sampled])[0].tokens
        with sk.Engine(model) as engine:
            others = [engine.submit(sampled), engine.submit(request(2, 30))]
            seen: list[list[int]] = []
            failed = engine.submit(sk.Request(prompt, 30, [], sampling, lambda tokens: bool(seen.append(tokens))))
            with pytest.raises(sk.GenerationFailed, match=r"the logits of token 2 are NaN") as error:
                failed.result(WAIT)
            assert error.value.tokens == tokens
            assert seen == ([prompt + tokens] if tokens else [])
            assert [other.result(WAIT).tokens for other in others] == [drawn, wanted(2, 30)]
            assert engine.submit(sampled).result(WAIT).tokens == drawn
        assert handle.pool is not None
        handle.pool.check_integrity()
        with pytest.raises(RuntimeError, match="probability tensor"):  # as transformers
            model.generate(torch.tensor([[7, NAN_TOKEN]]), do_sample=True, max_new_tokens=3)


def test_a_callback_that_fails_at_the_end(
    model: PreTrainedModel, handle: SpecMemo, caplog: pytest.LogCaptureFixture
) -> None:
    """The result is known when the last piece is delivered, and stays."""
    results: list[sk.Completion] = []

    def on_piece(piece: sk.Piece) -> None:
        if piece.finished:
            results.append(generation.result(0))
            raise OSError("late")

    gate = Gate()
    with sk.Engine(model) as engine:
        first = engine.submit(request(0, 8), on_piece=gate)
        generation = engine.submit(request(1, 8), on_piece=on_piece)
        gate.opened.set()
        assert generation.result(WAIT).tokens == wanted(1, 8)
        assert first.result(WAIT).tokens == wanted(0, 8)
    assert results == [generation.result()]
    assert "request 1, which is complete" in caplog.text


def test_a_failed_step(model: PreTrainedModel, handle: SpecMemo, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the requests that run or wait, with their tokens; the next request is generated."""
    step, calls = SpecDecoder.step, 0

    def failing(decoder: SpecDecoder) -> object:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ArithmeticError("on purpose")
        return step(decoder)

    monkeypatch.setattr(SpecDecoder, "step", failing)
    pieces: list[sk.Piece] = []
    with sk.Engine(model) as engine:
        first = engine.submit(request(0, 60), on_piece=pieces.append)
        with pytest.raises(sk.GenerationFailed, match="ArithmeticError: on purpose") as failed:
            first.result(WAIT)
        assert failed.value.tokens == wanted(0, len(failed.value.tokens))
        assert [token for piece in pieces for token in piece.tokens] == failed.value.tokens
        assert pieces[-1].finished
        assert engine.submit(request(1, 40)).result(WAIT).tokens == wanted(1, 40)
    assert handle.pool is not None
    assert handle.pool.free_pages == handle.pool.num_pages


def test_the_model_is_free_between_requests(model: PreTrainedModel) -> None:
    """generate runs while the engine has no requests; after unpatching, requests fail and say why."""
    handle = sk.patch(model, OracleDrafter(texts(), 0.8), tree=CHAIN)
    with sk.Engine(model) as engine:
        assert engine.submit(request(0, 20)).result(WAIT).tokens == wanted(0, 20)
        assert alone(model, PROMPTS[1], 20) == wanted(1, 20)
        gate = Gate()
        late = engine.submit(request(2, 20), on_piece=gate)
        assert gate.reached.wait(WAIT)
        unpatching = threading.Thread(target=handle.undo)
        unpatching.start()
        gate.opened.set()
        unpatching.join(WAIT)
        assert late.result(WAIT).tokens == wanted(2, 20)
        with pytest.raises(sk.GenerationFailed, match="unpatched") as failed:
            engine.submit(request(3, 20)).result(WAIT)
        assert isinstance(failed.value.__cause__, Unpatched)


def test_a_model_in_training_mode(model: PreTrainedModel, handle: SpecMemo) -> None:
    with sk.Engine(model) as engine:
        model.train()
        with pytest.raises(ValueError, match="training mode"):
            engine.submit(request(0))
        model.eval()
        assert engine.submit(request(0)).result(WAIT).tokens == wanted(0, 40)


def test_callbacks_may_use_the_engine(model: PreTrainedModel, handle: SpecMemo) -> None:
    """A callback submits the next request, and the last one closes the engine."""
    engine, chain, ended = sk.Engine(model), [], threading.Event()

    def on_piece(piece: sk.Piece) -> None:
        if piece.finished and len(chain) < 3:
            chain.append(engine.submit(request(len(chain), 8), on_piece=on_piece))
        elif piece.finished:
            engine.close()
            ended.set()

    engine.submit(request(7, 8), on_piece=on_piece)
    assert ended.wait(WAIT)
    assert [g.result(WAIT).tokens for g in chain] == [wanted(i, 8) for i in range(3)]


class AbortAt:
    """Aborts a request at its n-th piece; ``None``: never."""

    def __init__(self, piece: int | None) -> None:
        self.left, self.generation = piece, None

    def __call__(self, _: sk.Piece) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left <= 0 and self.generation is not None:
                self.generation.abort()


@settings(max_examples=examples(24), deadline=None)
@given(st.data())
def test_any_order_of_events(data: st.DataObject) -> None:
    """Requests of any length arrive and are aborted at any step; what each has is the beginning of its own text."""
    model = tiny_model("llama", seed=11)
    places = st.integers(0, 7)
    plan = data.draw(st.lists(st.tuples(places, st.integers(1, 40), st.none() | st.integers(0, 12)), max_size=12))
    rows, budget = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([None, "600KiB"]))
    with (
        sk.patch(model, OracleDrafter(texts(), 0.6), tree=CHAIN, max_batch_size=rows, memory_budget=budget) as handle,
        sk.Engine(model) as engine,
    ):
        generations = []
        for index, count, abort_at in plan:
            on_piece = AbortAt(abort_at)
            on_piece.generation = engine.submit(request(index, count), on_piece=on_piece)
            generations.append(on_piece.generation)
            if abort_at == 0:
                on_piece.generation.abort()
        for (index, count, abort_at), generation in zip(plan, generations, strict=True):
            done = generation.result(WAIT)
            assert done.tokens == wanted(index, len(done.tokens))
            assert abort_at is not None or len(done.tokens) == count
            assert (done.finish_reason == "length") == (len(done.tokens) == count)
    if handle.pool is not None:
        handle.pool.check_integrity()
