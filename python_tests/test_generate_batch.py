"""generate_batch and sampling through transformers: every request gives the tokens that it gives alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
from selection import sample
from test_families import answers, batch, greedy
from test_patch_memory import with_workspace
from tiny_models import OracleDrafter, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk

CHAIN = sk.DraftTree.chain(4)
PROMPTS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [2, 0, 2], [11, 12], [30] * 20, [44, 3], [9, 9, 9, 1]]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=11)


def alone(model: PreTrainedModel, prompt: list[int], new: int, **options: object) -> list[int]:
    """New tokens of the unpatched model for one prompt."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False} | options
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, pad_token_id=0, **options)
    return output[0, len(prompt) :].tolist()


@cache
def texts() -> list[list[int]]:
    """The prompts and the tokens that the unpatched model writes."""
    model = tiny_model("llama", seed=11)
    return [prompt + alone(model, prompt, 60) for prompt in PROMPTS]


@pytest.fixture
def drafter() -> OracleDrafter:
    return OracleDrafter(texts(), 0.8)


def test_requests_with_their_own_parameters(model: PreTrainedModel, drafter: OracleDrafter) -> None:
    """Lengths, ends and stop functions per request; results in input order, pieces in the order of arrival."""
    free = [alone(model, prompt, 30) for prompt in PROMPTS]
    requests: list[sk.Request | list[int]] = [
        sk.Request(prompt, 5 + i, [free[i][9]] if i % 3 == 1 else []) for i, prompt in enumerate(PROMPTS[:6])
    ]
    requests += [sk.Request(PROMPTS[6], 30, [], stop=lambda tokens: len(tokens) == 13), PROMPTS[7]]
    expected = [
        alone(model, p, 5 + i, eos_token_id=[free[i][9]] if i % 3 == 1 else None) for i, p in enumerate(PROMPTS[:6])
    ]
    expected += [free[6][:11], alone(model, PROMPTS[7], 12)]
    with sk.patch(model, drafter, tree=CHAIN, max_batch_size=3):
        pieces: list[sk.Piece] = []
        done = sk.generate_batch(model, requests, max_new_tokens=12, eos_token_ids=[], on_piece=pieces.append)
    assert [c.tokens for c in done] == expected
    assert done[6].finish_reason == "stop"
    assert done[7].finish_reason == "length"
    for i, completion in enumerate(done):
        own = [piece for piece in pieces if piece.index == i]
        assert [token for piece in own for token in piece.tokens] == completion.tokens
        assert [piece.finished for piece in own] == [False] * (len(own) - 1) + [True]
        assert completion.tokens_per_step >= (completion.steps > 0)
    assert pieces[0].index == 0
    assert pieces[-1].index >= 3, "with three places the first requests can't end last"


def test_the_models_own_eos(model: PreTrainedModel, drafter: OracleDrafter) -> None:
    model.generation_config.eos_token_id = alone(model, PROMPTS[0], 30)[20]
    expected = alone(model, PROMPTS[0], 30)
    with sk.patch(model, drafter, tree=CHAIN):
        (done,) = sk.generate_batch(model, [torch.tensor(PROMPTS[0])], max_new_tokens=30)
    assert done.tokens == expected
    assert done.finish_reason == "eos"


@pytest.mark.parametrize("order", sample(["01234567", "76543210", "30716254"], ["30716254"]))
@pytest.mark.parametrize("places", sample((1, 3, 8), [3]))
def test_order_and_batch_size_change_nothing(
    model: PreTrainedModel, drafter: OracleDrafter, order: str, places: int
) -> None:
    prompts = [PROMPTS[int(i)] for i in order]
    expected = [alone(model, prompt, 25) for prompt in prompts]
    with sk.patch(model, drafter, tree=CHAIN, max_batch_size=places):
        done = sk.generate_batch(model, prompts, max_new_tokens=25)
    assert [c.tokens for c in done] == expected


@pytest.mark.slow
def test_abort_on_the_way(model: PreTrainedModel, drafter: OracleDrafter) -> None:
    expected = [alone(model, prompt, 40) for prompt in PROMPTS]
    with sk.patch(model, drafter, tree=CHAIN, max_batch_size=3) as handle:
        run = sk.stream_batch(model, PROMPTS, max_new_tokens=40)
        for piece in run:
            if piece.index == 1 and not piece.finished:
                run.abort(1)
                run.abort(7)
        done = run.completions()
        assert handle.pool.free_pages == handle.pool.num_pages
    for i, completion in enumerate(done):
        assert (completion.finish_reason == "aborted") == (i in (1, 7))
        assert completion.tokens == expected[i][: len(completion.tokens)]
        assert len(completion.tokens) == 40 or i in (1, 7)
    assert done[7].tokens == []


def test_a_run_holds_the_model(model: PreTrainedModel, drafter: OracleDrafter) -> None:
    """Another generation waits in another thread, is refused in the same thread, and works after the run is closed."""
    expected = alone(model, PROMPTS[2], 10)
    with sk.patch(model, drafter, tree=CHAIN):
        run = sk.stream_batch(model, PROMPTS, max_new_tokens=30)
        next(run)
        with pytest.raises(RuntimeError, match="isn't over"):
            alone(model, PROMPTS[2], 10)
        with pytest.raises(RuntimeError, match="of 8 requests still run"):
            run.completions()
        results: list[list[int]] = []
        thread = threading.Thread(target=lambda: results.append(alone(model, PROMPTS[2], 10)))
        thread.start()
        run.close()
        thread.join()
        assert results == [expected]
        assert all(c.finish_reason == "aborted" for c in run.completions())
        assert alone(model, PROMPTS[2], 10) == expected


def test_stop_iteration_is_an_error(model: PreTrainedModel, drafter: OracleDrafter) -> None:
    """Of a stop function it would end the batch as if all requests were finished."""
    expected = alone(model, PROMPTS[0], 10)
    allowed = iter([False] * 3)
    with sk.patch(model, drafter, tree=CHAIN):
        used_up = sk.Request(PROMPTS[1], 10, [], stop=lambda _: next(allowed))
        with pytest.raises(RuntimeError, match="StopIteration") as raised:
            sk.generate_batch(model, [sk.Request(PROMPTS[0], 10, []), used_up])
        assert isinstance(raised.value.__cause__, StopIteration)
        [done] = sk.generate_batch(model, [sk.Request(PROMPTS[0], 10, [])])
        assert done.tokens == expected


def test_a_stop_function_that_asks_for_a_piece(model: PreTrainedModel, drafter: OracleDrafter) -> None:
    expected = alone(model, PROMPTS[0], 10)

    def stop(_: list[int]) -> bool:
        with pytest.raises(RuntimeError, match="return first"):
            next(run)
        return False

    with (
        sk.patch(model, drafter, tree=CHAIN),
        sk.stream_batch(model, [sk.Request(PROMPTS[0], 10, [], stop=stop)]) as run,
    ):
        assert [token for piece in run for token in piece.tokens] == expected


def test_what_can_not_be(model: PreTrainedModel, drafter: OracleDrafter) -> None:
    with pytest.raises(ValueError, match="isn't patched"):
        sk.generate_batch(model, PROMPTS)
    with sk.patch(
        model, drafter, tree=CHAIN, memory_budget=with_workspace(model, 330_000), max_batch_size=2, prefill_chunk=32
    ) as handle:
        for prompt in ([], [61], [-1], [[3]]):
            with pytest.raises(ValueError, match=r"prompt 1 must be one row of token ids from 0 to 60"):
                sk.generate_batch(model, [[3], prompt])
        with pytest.raises(ValueError, match="max_new_tokens of prompt 0 is 0"):
            sk.generate_batch(model, [[3]], max_new_tokens=0)
        with pytest.raises(sk.BudgetError, match=rf"the plan holds {handle.plan.max_tokens}"):
            sk.generate_batch(model, [[3], [4] * handle.plan.max_tokens])
        assert sk.generate_batch(model, []) == []
        assert len(sk.generate_batch(model, [[3]], max_new_tokens=4)[0].tokens) == 4


SAMPLED = [
    {},
    {"temperature": 0.6},
    {"top_k": 5, "top_p": 0.8},
    {"min_p": 0.05, "temperature": 1.5},
    {"repetition_penalty": 1.3, "typical_p": 0.9},
]


@pytest.mark.parametrize("options", sample(SAMPLED, (0, 4), SAMPLED.index), ids=str)
@pytest.mark.parametrize("share", sample([0.0, 0.7], [0.7]))
def test_sampling_draws_what_transformers_draws(
    model: PreTrainedModel, options: dict[str, float], share: float
) -> None:
    """One prompt, the same seed: token for token the unpatched model's sample, also in the next call."""
    inputs = batch((9,), seed=3)

    def two_samples() -> list[torch.Tensor]:
        torch.manual_seed(5)
        return [model.generate(**inputs, max_new_tokens=30, do_sample=True, **options) for _ in range(2)]

    expected = two_samples()
    assert not torch.equal(*expected)
    oracle = OracleDrafter(answers(inputs, expected[0]), share)
    with sk.patch(model, oracle, tree=CHAIN) as handle:
        result = two_samples()
        assert handle.stats.steps
        assert (handle.stats.tokens_per_step > 1.2) == (share > 0)
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_rows_sample_does_not_depend_on_its_batch(model: PreTrainedModel) -> None:
    inputs = batch((9, 4, 14), seed=3)

    def sample(rows: list[int], **options: object) -> torch.Tensor:
        torch.manual_seed(8)
        chosen = {name: tensor[rows] for name, tensor in inputs.items()}
        return model.generate(**chosen, max_new_tokens=20, do_sample=True, **options)

    with sk.patch(model, OracleDrafter([], 0.0), tree=CHAIN, max_batch_size=2):
        whole = sample([0, 1, 2])
        assert torch.equal(sample([0, 1])[1], whole[1])
        assert torch.equal(sample([2, 1, 0])[1], whole[1])
        assert torch.equal(sample([0])[0], whole[0])
        assert not torch.equal(sample([0, 0])[0], sample([0, 0])[1]), "rows share their random numbers"


def test_seeds_of_requests(model: PreTrainedModel, drafter: OracleDrafter) -> None:
    """A request's tokens depend on its seed only, also beside greedy requests and in any order."""
    sampling = sk.Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=3)
    expected = [alone(model, prompt, 15) for prompt in PROMPTS]
    with sk.patch(model, drafter, tree=CHAIN, max_batch_size=3):
        done = sk.generate_batch(model, PROMPTS, max_new_tokens=15, sampling=sampling)
        mixed: list[sk.Request] = []
        for i, prompt in enumerate(PROMPTS):
            mixed += [sk.Request(prompt, 15), sk.Request(prompt, 15, sampling=sampling.with_seed(3 + i))]
        again = sk.generate_batch(model, mixed[::-1])[::-1]
        lossy = sk.Sampling(typical=sk.TypicalAcceptance(0.02, 0.2), seed=1)
        typical = sk.generate_batch(model, PROMPTS, max_new_tokens=15, sampling=lossy)
    assert [c.tokens for c in again[1::2]] == [c.tokens for c in done]
    assert [c.tokens for c in again[::2]] == expected
    assert len({tuple(c.tokens) for c in done}) == len(done)
    assert all(len(c.tokens) == 15 for c in typical)


@pytest.mark.parametrize("temperature", sample([0, 0.8], [0]))
def test_changed_logits(model: PreTrainedModel, drafter: OracleDrafter, temperature: float) -> None:
    """Penalties and biases that see the step's own tokens; a temperature of 0 without them is greedy."""
    fields = {"repetition_penalty": 1.6, "min_p": 0.02}
    expected = []
    for i, prompt in enumerate(PROMPTS):
        torch.manual_seed(i)
        options = {"do_sample": temperature > 0, "top_k": 0, "sequence_bias": [[[3], 2.5]], **fields}
        options |= {"temperature": temperature} if temperature else {"min_p": None}
        expected.append(alone(model, prompt, 20, **options))
    with sk.patch(model, drafter, tree=CHAIN, max_batch_size=3) as handle:
        sampling = sk.Sampling(temperature, seed=0, logit_bias={3: 2.5}, **fields)
        done = sk.generate_batch(model, PROMPTS, max_new_tokens=20, sampling=sampling)
        handle.target.row_logits = None
        plain = sk.generate_batch(model, PROMPTS, max_new_tokens=20, sampling=sk.Sampling(0, top_k=3))
    assert [c.tokens for c in done] == expected
    assert expected != [alone(model, prompt, 20) for prompt in PROMPTS] == [c.tokens for c in plain]


def test_greedy_still_needs_no_logits(model: PreTrainedModel) -> None:
    """Without sampling a batch computes best tokens only."""
    inputs = batch((9, 14), seed=3)
    expected = greedy(model, inputs, 20)
    with sk.patch(model, OracleDrafter(answers(inputs, expected), 0.7), tree=CHAIN) as handle:
        handle.target.row_logits = None
        rows = [
            row[keep.bool()].tolist() for row, keep in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        done = sk.generate_batch(model, rows, max_new_tokens=20)
    assert [c.tokens for c in done] == expected[:, 14:].tolist()


@pytest.mark.slow
def test_a_script_may_end_inside_a_batch() -> None:
    """Python collects the run when module globals are already ``None``; no error is printed."""
    code = (
        "import specmemo_kernels as sk, tiny_models as t\n"
        "model = t.tiny_model('llama')\n"
        "sk.patch(model, t.random_heads(model))\n"
        "run = sk.stream_batch(model, [[5, 6, 7]], max_new_tokens=20)\n"
        "next(run)\n"
    )
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
