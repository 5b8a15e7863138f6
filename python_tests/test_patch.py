"""The contract of ``patch``: generate behaves as documented, and unpatching restores the model."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import family_model
from selection import sample
from test_families import answers, batch, greedy
from tiny_models import OracleDrafter, random_heads, tiny_model
from torch.utils.hooks import RemovableHandle
from transformers import LlamaForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer, LogitsProcessor, LogitsProcessorList

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENT


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=11)


def oracle(model: PreTrainedModel, inputs: dict[str, torch.Tensor], share: float = 0.8) -> OracleDrafter:
    return OracleDrafter(answers(inputs, greedy(model, inputs, 40)), share)


def snapshot(model: PreTrainedModel) -> tuple[object, ...]:
    """Everything that patching may change."""
    hooks = [(n, len(m._forward_pre_hooks), len(m._forward_hooks)) for n, m in model.named_modules()]
    configs = [(n, id(vars(m).get("config"))) for n, m in model.named_modules()]
    return type(model), sorted(vars(model)), hooks, configs, list(model.state_dict())


def test_unpatch_restores_everything(model: PreTrainedModel) -> None:
    before = snapshot(model)
    inputs = batch((8,))
    drafter = oracle(model, inputs)
    sk.patch(model, drafter)
    assert model.specmemo.drafter is drafter
    assert type(model).__name__ == "LlamaForCausalLM"
    assert list(model.state_dict()) == before[4]
    greedy(model, inputs, 5)
    sk.unpatch(model)
    assert snapshot(model) == before
    sk.unpatch(model)  # a second time is a no-op
    assert snapshot(model) == before


def test_restored_after_an_exception(model: PreTrainedModel) -> None:
    """An error inside the with block, or inside generate, leaves no trace and no page behind."""
    before, inputs = snapshot(model), batch((8, 5))
    expected = greedy(model, inputs, 20)

    class Broken(OracleDrafter):
        calls = 0

        def propose(self, inputs):  # type: ignore[no-untyped-def]
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("drafter broke")
            return super().propose(inputs)

    with sk.patch(model, Broken([], 0.0)) as handle:
        with pytest.raises(RuntimeError, match="drafter broke"):
            greedy(model, inputs, 20)
        pool = handle.pool
        pool.check_integrity()
        assert pool.free_pages == pool.num_pages
        assert torch.equal(greedy(model, inputs, 20), expected), "a failed call spoiled the next one"
    assert snapshot(model) == before


def test_patching_twice_says_so(model: PreTrainedModel) -> None:
    with sk.patch(model, OracleDrafter([], 0.0)), pytest.raises(ValueError, match=r"patched already.*unpatch"):
        sk.patch(model, OracleDrafter([], 0.0))


@pytest.mark.slow
def test_two_models_do_not_see_each_other(model: PreTrainedModel) -> None:
    other = tiny_model("qwen3", seed=12)
    inputs = batch((9,))
    expected, expected_other = greedy(model, inputs, 15), greedy(other, inputs, 15)
    with sk.patch(model, oracle(model, inputs)) as first:
        assert torch.equal(greedy(other, inputs, 15), expected_other)
        with sk.patch(other, oracle(other, inputs)) as second:
            assert torch.equal(greedy(model, inputs, 15), expected)
            steps = first.stats.steps
            assert torch.equal(greedy(other, inputs, 15), expected_other)
            assert first.stats.steps == steps
            assert second.stats.steps > 0
        assert torch.equal(greedy(model, inputs, 15), expected)


def test_plain_forward_is_untouched(model: PreTrainedModel) -> None:
    """Forward, padding masks and backward of a patched model are the model's own."""
    inputs = batch((12, 7))
    expected = model(**inputs).logits
    with sk.patch(model, OracleDrafter([], 0.0)):
        logits = model(**inputs).logits
        assert torch.equal(logits, expected)
        logits.sum().backward()
        assert model.lm_head.weight.grad is not None


def test_copies_and_pickles_are_plain(model: PreTrainedModel, tmp_path: Path) -> None:
    inputs = batch((6,))
    expected = greedy(model, inputs, 8)
    with sk.patch(model, OracleDrafter([], 0.0)):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert "specmemo" not in vars(twin)
            assert type(twin) is LlamaForCausalLM
            assert not twin.lm_head._forward_pre_hooks
            assert torch.equal(greedy(twin, inputs, 8), expected)
        model.save_pretrained(tmp_path)
        assert "specmemo" not in (tmp_path / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(greedy(again, inputs, 8), expected)


def test_copies_of_a_nested_lm_head() -> None:
    """And of the lm_head alone."""
    model = family_model("bert")
    head = model.get_output_embeddings()
    with sk.patch(model, "prompt-lookup"):
        data = pickle.dumps(model)
        assert b"specmemo_kernels" not in data
        copies = [copy.deepcopy(model), pickle.loads(data)]
        twins = [copy.deepcopy(head), *(twin.get_output_embeddings() for twin in copies)]
        assert head._forward_pre_hooks
        assert not any(twin._forward_pre_hooks for twin in twins)
    assert not head._forward_pre_hooks
    assert not vars(head._forward_pre_hooks)


def test_hooks_of_the_users_on_the_lm_head(model: PreTrainedModel) -> None:
    """Copies have them, and their handles remove them, patched or not."""
    called: list[str] = []

    def hooked(name: str) -> RemovableHandle:
        return model.lm_head.register_forward_pre_hook(lambda *_: called.append(name))

    first = hooked("first")
    with sk.patch(model, OracleDrafter([], 0.0)):
        second = hooked("second")
        called.clear()
        copy.deepcopy(model)(**batch((4,)))
        assert called == ["first", "second"]
        first.remove()
        assert len(copy.deepcopy(model.lm_head)._forward_pre_hooks) == 1
    second.remove()
    assert not model.lm_head._forward_pre_hooks


def test_threads_share_a_model(model: PreTrainedModel) -> None:
    prompts = [batch((5 + i,), seed=i) for i in range(4)]
    expected = [greedy(model, p, 20) for p in prompts]
    results: list[torch.Tensor | None] = [None] * 4
    with sk.patch(model, OracleDrafter([], 0.0)):

        def work(i: int) -> None:
            results[i] = greedy(model, prompts[i], 20)
            assert model(**prompts[i]).logits.isfinite().all()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result, wanted in zip(results, expected, strict=True):
        assert result is not None
        assert torch.equal(result, wanted)


class Collecting(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("lengths", [(7,), pytest.param((7, 12, 3), marks=pytest.mark.slow)])
def test_streamer_gets_what_it_always_got(model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    inputs = batch(lengths)
    full = greedy(model, inputs, 30)
    eos = int(full[0, -10])
    plain, patched = Collecting(), Collecting()
    greedy(model, inputs, 30, eos_token_id=eos, pad_token_id=0, streamer=plain)
    with sk.patch(model, oracle(model, inputs), tree=sk.DraftTree.chain(4)):
        greedy(model, inputs, 30, eos_token_id=eos, pad_token_id=0, streamer=patched)
    assert patched.pieces == plain.pieces
    assert patched.ended == plain.ended == 1


class Until(StoppingCriteria):
    """Stops a row once its tokens sum to a multiple of ``n``; records its inputs."""

    def __init__(self, n: int) -> None:
        self.n, self.shown = n, 0

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.shown += 1
        return input_ids.sum(dim=1) % self.n == 0


@pytest.mark.parametrize("n", sample([3, 7, 23], [3]))
def test_stopping_criteria(model: PreTrainedModel, n: int) -> None:
    for lengths, extra in (((9,), {}), ((9, 14), {"eos_token_id": 1, "pad_token_id": 0})):
        inputs = batch(lengths)
        drafter = oracle(model, inputs)
        plain, patched = Until(n), Until(n)
        expected = greedy(model, inputs, 30, stopping_criteria=StoppingCriteriaList([plain]), **extra)
        with sk.patch(model, drafter, tree=sk.DraftTree.chain(4)) as handle:
            with nullcontext() if len(lengths) == 1 else pytest.warns(UserWarning, match=r"Until.*all rows"):
                result = greedy(model, inputs, 30, stopping_criteria=StoppingCriteriaList([patched]), **extra)
            assert bool(handle.stats.steps) == (len(lengths) == 1)
        assert torch.equal(result, expected)
        if len(lengths) == 1:
            assert patched.shown == plain.shown, "criteria see every emitted token once"


@pytest.mark.parametrize(
    "options",
    sample(
        [
            {"repetition_penalty": 1.7},
            {"no_repeat_ngram_size": 2},
            {"min_new_tokens": 12, "eos_token_id": list(range(3, 40)), "pad_token_id": 0},
            {"suppress_tokens": list(range(10, 50))},
            {"forced_eos_token_id": 2, "eos_token_id": 2, "pad_token_id": 0},
            {"bad_words_ids": [[5], [7, 9]]},
            {"max_length": 40},
            {"eos_token_id": [3, 4, 5, 6], "pad_token_id": 0},
        ],
        ["repetition_penalty", "min_new_tokens", "suppress_tokens", "max_length"],
        lambda options: next(iter(options)),
    ),
    ids=lambda o: next(iter(o)),
)
@pytest.mark.parametrize("lengths", [pytest.param((10,), marks=pytest.mark.slow), (10, 17)])
def test_generation_options(model: PreTrainedModel, lengths: tuple[int, ...], options: dict[str, object]) -> None:
    """Processors and limits act as in the model's own generate."""
    inputs = batch(lengths, seed=3)
    limit = {} if "max_length" in options else {"max_new_tokens": 25}
    expected = model.generate(**inputs, do_sample=False, **limit, **options)
    drafter = OracleDrafter(answers(inputs, expected), 0.8)
    with sk.patch(model, drafter, tree=sk.DraftTree.chain(4)) as handle:
        assert torch.equal(model.generate(**inputs, do_sample=False, **limit, **options), expected)
        assert handle.stats.steps, "ran without speculation"


class Recorder(LogitsProcessor):
    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(input_ids[0].tolist())
        scores[:, 13] += 2.5  # in place, as some processors do
        return scores


def test_own_processor_sees_each_token_once(model: PreTrainedModel) -> None:
    inputs = batch((9,))
    plain, patched = Recorder(), Recorder()
    expected = greedy(model, inputs, 20, logits_processor=LogitsProcessorList([plain]))
    with sk.patch(model, OracleDrafter(answers(inputs, expected), 0.9), tree=sk.DraftTree.chain(4)):
        assert torch.equal(greedy(model, inputs, 20, logits_processor=LogitsProcessorList([patched])), expected)
    assert patched.calls == plain.calls


def test_return_dict_with_scores(model: PreTrainedModel) -> None:
    inputs = batch((9,))
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    expected = greedy(model, inputs, 15, **wanted)
    with sk.patch(model, oracle(model, inputs), tree=sk.DraftTree.chain(3)) as handle:
        result = greedy(model, inputs, 15, **wanted)
        assert handle.stats.steps
    assert torch.equal(result.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(result.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
    assert not any(x.is_inference() for x in (result.sequences, *result.scores, *result.logits)), "no use for training"


def test_logits_of_a_processor_that_writes_in_place(model: PreTrainedModel) -> None:
    """transformers keeps the tensor that it gives to processors."""
    inputs = batch((9,))
    wanted: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}

    def run() -> Any:
        return greedy(model, inputs, 8, **wanted, logits_processor=LogitsProcessorList([Recorder()]))

    expected = run()
    with sk.patch(model, "prompt-lookup") as handle:
        result = run()
        assert handle.stats.steps
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_max_time_of_more_rows_than_run_at_once(model: PreTrainedModel) -> None:
    """Rows behind others would begin when the time is up."""
    inputs = batch((9, 9, 9))
    with sk.patch(model, "prompt-lookup", max_batch_size=2) as handle:
        with pytest.warns(UserWarning, match="max_time is one clock for all 3 rows, and the plan runs 2 at once"):
            greedy(model, inputs, 8, max_time=60.0, eos_token_id=1)
        assert handle.stats.steps == 0
        greedy(model, {name: rows[:2] for name, rows in inputs.items()}, 8, max_time=60.0, eos_token_id=1)
        assert handle.stats.steps


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_input_ids_of_another_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The model's own error, behind a warning with the reason."""
    ids = torch.full((1, 5), 7, dtype=dtype)
    with pytest.raises(RuntimeError) as expected:
        greedy(model, {"input_ids": ids}, 3)
    with (
        sk.patch(model, "prompt-lookup"),
        pytest.warns(UserWarning, match=f"input_ids has the dtype {dtype}, not torch.int64"),
        pytest.raises(RuntimeError) as found,
    ):
        greedy(model, {"input_ids": ids}, 3)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    sample(
        [
            ({"use_cache": False}, "use_cache=False"),
            ({"return_dict_in_generate": True, "output_attentions": True}, "attention weights"),
            ({"return_dict_in_generate": True, "output_hidden_states": True}, "every layer"),
            ({"cache_implementation": "static"}, "cache_implementation='static'"),
            ({"position_ids": torch.arange(3, 12)[None]}, "position_ids"),
        ],
        ["use_cache=False", "position_ids"],
        lambda case: case[1],
    ),
    ids=lambda o: next(iter(o)) if isinstance(o, dict) else "",
)
def test_unsupported_runs_the_models_own(model: PreTrainedModel, options: dict[str, object], reason: str) -> None:
    """One warning with the reason, the model's own result, and no second warning."""
    inputs = batch((9,))

    def run() -> torch.Tensor:
        torch.manual_seed(0)
        result = model.generate(**inputs, max_new_tokens=6, **{"do_sample": False, **options})
        return result if torch.is_tensor(result) else result.sequences

    expected = run()
    with sk.patch(model, OracleDrafter([], 0.0)) as handle:
        with pytest.warns(UserWarning, match=f"{reason}.*own generate"):
            assert torch.equal(run(), expected)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="specmemo")
            assert torch.equal(run(), expected)
        assert handle.stats.steps == 0


def test_beams_and_other_modes_are_the_models_own(model: PreTrainedModel) -> None:
    inputs = batch((9,))
    modes: list[dict[str, object]] = [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}]
    expected = [greedy(model, inputs, 10, **mode) for mode in modes]
    with sk.patch(model, OracleDrafter([], 0.0)) as handle:
        for mode, wanted in zip(modes, expected, strict=True):
            assert torch.equal(greedy(model, inputs, 10, **mode), wanted)
        assert handle.stats.steps == 0


def test_reused_cache_runs_the_models_own(model: PreTrainedModel) -> None:
    inputs = batch((9,))
    first = greedy(model, inputs, 5, return_dict_in_generate=True)
    cache, ids = copy.deepcopy(first[CACHE_ARGUMENT]), torch.cat([first.sequences, torch.tensor([[4, 5]])], 1)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, **{CACHE_ARGUMENT: first[CACHE_ARGUMENT]})
    with (
        sk.patch(model, OracleDrafter([], 0.0)),
        pytest.warns(UserWarning, match=f"{CACHE_ARGUMENT} can't be continued"),
    ):
        result = model.generate(ids, max_new_tokens=5, do_sample=False, **{CACHE_ARGUMENT: cache})
    assert torch.equal(result, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_inference_mode_and_after(family: str) -> None:
    """A call under inference_mode records steps that are right, there and outside of it."""
    model, inputs = tiny_model(family), batch((20,))
    expected = greedy(model, inputs, 40)
    with sk.patch(model, "prompt-lookup", tree=4) as handle:
        with torch.inference_mode():
            assert torch.equal(greedy(model, inputs, 40), expected)
        assert torch.equal(greedy(model, inputs, 40), expected)
        assert handle.stats.graph_steps


@pytest.mark.parametrize("drafter", ["heads", "prompt-lookup", "model"])
def test_another_default_device(model: PreTrainedModel, drafter: str) -> None:
    """Tensors of the host and of the model's device are made there."""
    inputs = batch((9, 4))
    expected = greedy(model, inputs, 12)
    heads: Any = {"heads": random_heads(model), "model": tiny_model("llama", seed=3)}.get(drafter, drafter)
    with torch.device("meta"):
        handle = sk.patch(model, heads)
        found = greedy(model, inputs, 12)
        sampled = model.generate(**inputs, max_new_tokens=5, do_sample=True, repetition_penalty=1.5)
        requests = [sk.Request([5, 6, 7], 9, [], logprobs=2), sk.Request([8] * 30, 9, [], sk.Sampling(0.5))]
        answers = sk.generate_batch(model, requests)
    handle.undo()
    assert torch.equal(found, expected)
    assert sampled.device.type == "cpu"
    assert answers[0].tokens == greedy(model, {"input_ids": torch.tensor([[5, 6, 7]])}, 9)[0, 3:].tolist()


def test_padding_on_the_left_or_in_between(model: PreTrainedModel) -> None:
    """The attention mask decides which tokens count: each row gives the tokens of its real tokens alone."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 61, (4, 14), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, :5], mask[2, 4:8], mask[3, :13] = 0, 0, 0, 0
    ids[0, 2] = ids[1, 7] = 0  # a real token may be the padding token
    inputs = {"input_ids": ids, "attention_mask": mask}
    plain = greedy(model, inputs, 15, pad_token_id=0)
    with sk.patch(model, OracleDrafter([], 0.0), tree=4, max_batch_size=3) as handle:
        output = greedy(model, inputs, 15, pad_token_id=0)
        assert handle.stats.steps
    assert torch.equal(output, plain)
    for row in range(4):
        alone = ids[row][mask[row].bool()][None]
        expected = greedy(model, {"input_ids": alone, "attention_mask": torch.ones_like(alone)}, 15)
        assert torch.equal(output[row, 14:], expected[0, alone.shape[1] :])


def test_rows_that_are_preempted(model: PreTrainedModel) -> None:
    """A budget whose pages hold the prompts but not all rows at their full length."""
    inputs = batch((6, 9, 4, 11), seed=2)
    expected = greedy(model, inputs, 60)
    drafter = OracleDrafter(answers(inputs, expected), 0.6)
    options = {"tree": 4, "page_size": 4, "max_batch_size": 4, "prefill_chunk": 32, "backend": "reference"}
    with sk.patch(model, drafter, **options) as handle:
        fixed = sum(size for part, size in handle.plan.parts.items() if part != "kv_pages")
    with sk.patch(model, drafter, memory_budget=fixed + 60_000, **options) as handle:
        assert handle.plan.max_sequences == 4
        assert handle.plan.max_tokens < 4 * 70
        assert torch.equal(greedy(model, inputs, 60), expected)
        assert handle.stats.preemptions > 0
