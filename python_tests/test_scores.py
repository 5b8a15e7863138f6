"""Log-probabilities of new tokens and of prompts: the plain model's, whatever tree, chunk or page they come from."""

from __future__ import annotations

import math

import pytest
import torch
from selection import sample
from test_generate_batch import CHAIN, PROMPTS, alone, texts
from test_patch_memory import with_workspace
from tiny_models import OracleDrafter, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.engine.scores import TokenScore

LONG = [3 + (7 * i) % 50 for i in range(90)]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=11)


def oracle(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """``[L - 1, V]`` float64: log-probabilities behind each token but the last."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(1)


def check(scores: list[TokenScore], tokens: list[int], expected: torch.Tensor, top: int) -> None:
    """``scores`` are those of ``tokens`` by the rows of ``expected``."""
    assert [score.token for score in scores] == tokens
    for score, row in zip(scores, expected, strict=True):
        assert math.isclose(score.logprob, float(row[score.token]), abs_tol=1e-4)
        values, best = row.topk(top)
        assert [token for token, _ in score.top] == best.tolist()
        torch.testing.assert_close(torch.tensor([v for _, v in score.top]).double(), values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("budget", sample([None, 320_000], [320_000]))
@pytest.mark.parametrize("reuse", sample([False, True], [True]))
def test_scores_of_prompts_and_answers(model: PreTrainedModel, budget: int | None, reuse: bool) -> None:
    """Greedy and sampled, long prompts in chunks, the same prompt twice, preempted sequences, unscored ones beside."""
    memory = None if budget is None else with_workspace(model, budget)
    prompts = [*PROMPTS, LONG, LONG, LONG[:40], LONG, LONG]
    requests = []
    for i, prompt in enumerate(prompts):
        sampling = sk.Sampling(0.9, seed=i, repetition_penalty=1.2) if i % 3 == 1 else None
        wanted = {} if i % 4 == 3 else {"logprobs": i % 4, "prompt_logprobs": i % 2 == 0}
        requests.append(sk.Request(prompt, 60, [], sampling, **wanted))
    drafter = OracleDrafter(texts(), 0.7)
    with sk.patch(model, drafter, tree=CHAIN, max_batch_size=6, memory_budget=memory, reuse_prefix=reuse) as handle:
        pieces: list[list[TokenScore]] = [[] for _ in requests]
        first = sk.generate_batch(model, requests, on_piece=lambda piece: pieces[piece.index].extend(piece.scores))
        again = sk.generate_batch(model, requests)
        assert budget is None or handle.stats.preemptions
        assert not reuse or handle.stats.reused_tokens
    assert [done.tokens for done in first] == [done.tokens for done in again]
    for done in (first, again):
        for i, (request, result) in enumerate(zip(requests, done, strict=True)):
            prompt = list(request.prompt)
            expected = oracle(model, prompt + result.tokens)
            if request.logprobs is None:
                assert not result.scores
                assert not result.prompt_scores
                continue
            check(result.scores, result.tokens, expected[len(prompt) - 1 :], request.logprobs)
            if request.prompt_logprobs:
                check(result.prompt_scores, prompt[1:], expected[: len(prompt) - 1], request.logprobs)
            else:
                assert not result.prompt_scores
            assert done is again or pieces[i] == result.scores


@pytest.mark.slow
def test_scores_change_no_token(model: PreTrainedModel) -> None:
    expected = [alone(model, prompt, 25) for prompt in PROMPTS]
    with sk.patch(model, OracleDrafter(texts(), 0.7), tree=CHAIN):
        requests = [sk.Request(prompt, 25, [], logprobs=2, prompt_logprobs=True) for prompt in PROMPTS]
        done = sk.generate_batch(model, requests)
    assert [each.tokens for each in done] == expected


@pytest.mark.parametrize(
    ("dtype", "cap", "vocabulary"),
    [(torch.bfloat16, 32.0, 1000), (torch.bfloat16, 30.0, 16), (torch.float16, 64.0, 300), (torch.float32, 30.0, 61)],
    ids=str,
)
def test_a_final_soft_cap(dtype: torch.dtype, cap: float, vocabulary: int) -> None:
    """Logits up to twice the cap, where a short dtype rounds small ones to what they were before the cap."""
    model = tiny_model("gemma2", seed=31, vocab_size=vocabulary, final_logit_softcapping=cap)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data * cap / 2)
    model.to(dtype)
    options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    prompt = torch.tensor([[5, 6, 4, 3, 6]])
    own = model.generate(prompt, **options).logits
    with sk.patch(model, "prompt-lookup"):
        found = model.generate(prompt, **options).logits
    assert max(float(row.max()) for row in own) > cap / 2
    torch.testing.assert_close(found, own, rtol=0, atol=16 * cap * torch.finfo(dtype).eps)


def test_cut_scores(model: PreTrainedModel) -> None:
    """There is a score per token, also where a step's last tokens are cut off by the length, an end or a stop."""
    expected = alone(model, PROMPTS[0], 30)
    with sk.patch(model, OracleDrafter(texts(), 1.0), tree=CHAIN), sk.Engine(model) as engine:
        cases = [{"max_new_tokens": n, "eos_token_ids": []} for n in (1, 2, 3, 8)]
        cases += [{"eos_token_ids": [expected[9]]}, {"stop": lambda tokens: len(tokens) == 3 + 7, "eos_token_ids": []}]
        for case in cases:
            done = engine.submit(sk.Request(PROMPTS[0], **case, logprobs=1)).result(60)
            assert done.tokens == expected[: len(done.tokens)]
            assert [score.token for score in done.scores] == done.tokens


def test_what_can_not_be_scored(model: PreTrainedModel) -> None:
    with sk.patch(model, OracleDrafter([], 0.0), tree=CHAIN):
        for options, message in (
            ({"logprobs": -1}, "logprobs of prompt 0 is -1"),
            ({"logprobs": 10**6}, "logprobs of prompt 0 is 1000000"),
            ({"logprobs": True}, "logprobs of prompt 0 is True"),
            ({"prompt_logprobs": True}, "prompt 0 has prompt_logprobs and no logprobs"),
            ({"logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs of prompt 0 is 1"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                sk.generate_batch(model, [sk.Request([5], 2, **options)])
    capped = tiny_model("gemma2", seed=1)
    with sk.patch(capped, OracleDrafter([], 0.0), tree=CHAIN):
        (done,) = sk.generate_batch(capped, [sk.Request(LONG, 9, [], logprobs=2)])
        check(done.scores, done.tokens, oracle(capped, LONG + done.tokens)[len(LONG) - 1 :], 2)
        with pytest.raises(ValueError, match="changes its lm_head's logits"):
            sk.generate_batch(capped, [sk.Request([5], 2, logprobs=1, prompt_logprobs=True)])


@pytest.mark.parametrize("tree", [1, 2])
def test_no_more_rows_than_planned(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tree: int) -> None:
    """A prompt's scores hold as many rows of logits as a step has nodes."""
    with sk.patch(model, OracleDrafter(texts(), 0.7), tree=tree, max_batch_size=1) as handle:
        row_logits, products = handle.target.row_logits, []
        monkeypatch.setattr(
            handle.target, "row_logits", lambda out, rows: products.append(rows) or row_logits(out, rows)
        )
        scored = sk.generate_batch(model, [sk.Request(LONG, 4, [], logprobs=1, prompt_logprobs=True)])[0]
    check(scored.prompt_scores, LONG[1:], oracle(model, LONG), 1)
    assert max(map(len, products)) == tree
