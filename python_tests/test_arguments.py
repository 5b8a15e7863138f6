"""Arguments of a wrong type or size: an error that has name, value and limit, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from selection import sample
from test_families import batch, greedy
from test_patch import snapshot
from tiny_models import VOCAB, OracleDrafter, random_heads, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk

WRONG = (TypeError, ValueError)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=27)


INTEGERS = [1.5, 16.0, "16", True, None, 0, -3, torch.tensor(1.5), np.float64(8), [4], float("nan")]
OTHERS: dict[str, list[Any]] = {
    "tree": ["x", "[[0]]", 2.5, True, False, 0, -1, b"ab", [1, 2], [[0.5]], [["a"]], ["a"], [[True]], [[-1]], [[]],
             [[0], [0]], [[0, 0]], {"a": 1}, object(), float("nan")],
    "backend": [3, [], True, b"cpu", object()],
    "graph": ["yes", 1, 0, "False"],
    "reuse_prefix": ["no", 1, None],
    "kv_dtype": [[], torch.int8, 8, True, "int4", b"int8"],
    "head_bits": ["4", 4.0, True, 8, [], -4],
    "rank_timeout": ["x", "60", True, None, 0, -1, float("nan"), float("inf"), [60]],
    "memory_budget": [[], True, "much", -5, 0, float("nan"), float("inf"), {}, "1 PiB", b"2GiB"],
    "keep_free": [[], True, "much", -5, 0, float("nan"), object()],
}  # fmt: skip
CASES = [(name, value) for name in ("page_size", "prefill_chunk", "max_batch_size") for value in INTEGERS]
CASES.remove(("page_size", None))  # None: chosen
CASES += [(name, value) for name, values in OTHERS.items() for value in values]


def named(value: object) -> str:
    """A test's name without addresses, which differ between processes."""
    return type(value).__name__ if " at 0x" in repr(value) else str(value)


@pytest.mark.parametrize(("name", "value"), CASES, ids=named)
def test_arguments_of_patch(model: PreTrainedModel, name: str, value: object) -> None:
    before = snapshot(model)
    with pytest.raises(WRONG, match=name) as caught:
        sk.patch(model, "prompt-lookup", **{name: value})
    if not isinstance(value, list | dict):  # of these the part that is wrong is named
        assert repr(value)[:10] in str(caught.value)
    assert snapshot(model) == before


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8, torch.tensor])
def test_integers_of_other_libraries(model: PreTrainedModel, number: Callable[[int], Any]) -> None:
    expected = greedy(model, batch((9, 4)), 8)
    sizes = {"page_size": number(4), "prefill_chunk": number(32), "max_batch_size": number(2), "tree": number(5)}
    with sk.patch(model, random_heads(model), **sizes) as handle:
        plan = handle.plan
        assert torch.equal(greedy(model, batch((9, 4)), 8), expected)
        (done,) = sk.generate_batch(model, [np.array([5, 9])], max_new_tokens=number(3), eos_token_ids=[number(2)])
        assert len(done.tokens) <= 3
    assert (plan.page_size, plan.prefill_chunk, plan.max_sequences, plan.tree.size) == (4, 32, 2, 5)
    assert all(type(value) is int for value in (plan.page_size, plan.prefill_chunk, plan.max_sequences))
    paths = [[0], [number(1)], [0, number(0)]]
    assert sk.DraftTree.from_paths(paths) == sk.DraftTree.from_paths([[0], [1], [0, 0]])
    assert sk.DraftTree.from_paths(np.array([[0], [1]])) == sk.DraftTree.from_paths([[0], [1]])
    assert sk.Sampling(top_k=number(3), seed=number(7)).generator().initial_seed() == 7


@pytest.mark.parametrize("heads", [None, 3, [], 2.5, object(), sk.PromptLookupDrafter, sk.DraftModel(None)], ids=named)
def test_heads_that_are_none(model: PreTrainedModel, heads: Any) -> None:
    before = snapshot(model)
    with pytest.raises(WRONG, match=r"heads can be|needs generate and an lm_head"):
        sk.patch(model, heads)
    assert snapshot(model) == before


@pytest.mark.parametrize("tokens", [0, -1, "x", 2.5, True, None])
def test_tokens_of_a_draft_model(model: PreTrainedModel, tokens: Any) -> None:
    small = tiny_model("llama", seed=28)
    before = snapshot(model), snapshot(small)
    with pytest.raises(WRONG, match=rf"draft model's tokens per step is '?{tokens}'?.*at least 1"):
        sk.patch(model, sk.DraftModel(small, tokens=tokens))
    assert (snapshot(model), snapshot(small)) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_depth", "x"), ("max_depth", -1), ("max_depth", 2.5), ("max_depth", None), ("nbytes", None), ("nbytes", -1),
     ("nbytes", "0"), ("nbytes", True)],
)  # fmt: skip
def test_properties_of_a_drafter(model: PreTrainedModel, name: str, value: Any) -> None:
    drafter = OracleDrafter([], 0.0, max_depth=3)
    setattr(drafter, name, value)
    before = snapshot(model)
    with pytest.raises(WRONG, match=rf"OracleDrafter.{name} is '?{value}'?.*at least 0"):
        sk.patch(model, drafter)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "answer",
    [None, torch.zeros(1, 3), torch.zeros(3).long(),
     *(pytest.param(answer, marks=pytest.mark.slow)
       for answer in ([[1, 2, 3]], ((1, 2, 3),), 3, "abc", np.zeros((1, 3), np.int64), torch.zeros(2, 3).long(),
                      torch.zeros(1, 3).int()))],
    ids=repr,
)  # fmt: skip
def test_answers_of_a_drafter(model: PreTrainedModel, answer: Any) -> None:
    """The step fails and names the expected tensor; a correct drafter then works."""
    expected, good = greedy(model, batch((9,)), 10), []

    class Wrong(OracleDrafter):
        def propose(self, inputs):  # type: ignore[no-untyped-def]
            return super().propose(inputs) if good else answer

    with sk.patch(model, Wrong([], 0.0, max_depth=3), tree=3):
        with pytest.raises(WRONG, match=r"Wrong\.propose.*\(1, 3\)"):
            greedy(model, batch((9,)), 10)
        with pytest.raises(WRONG, match=r"Wrong\.propose.*\(1, 3\)"):
            sk.generate_batch(model, [[5, 9]], max_new_tokens=10)
        good.append(True)
        assert torch.equal(greedy(model, batch((9,)), 10), expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", sample([None, "cpu"], [None]))
def test_float64_models(backend: str | None) -> None:
    """Refused with the remedies, and both work: the reference operators, or another dtype."""
    model = tiny_model("llama", seed=27).double()
    expected, before = greedy(model, batch((9,)), 10), snapshot(model)
    for heads in ("prompt-lookup", random_heads(model)):
        with pytest.raises(ValueError, match=r"float64.*model.to\(torch.float32\).*backend='reference'"):
            sk.patch(model, heads, backend=backend)
        assert snapshot(model) == before
        with sk.patch(model, heads, backend="reference"):
            assert torch.equal(greedy(model, batch((9,)), 10), expected)
    single = tiny_model("llama", seed=27)
    with pytest.raises(ValueError, match=r"the draft model computes in torch.float64"):
        sk.patch(single, model, backend=backend)
    with sk.patch(model.to(torch.float32), "prompt-lookup", backend=backend):
        assert greedy(model, batch((9,)), 10).shape == expected.shape


def test_triton_without_a_gpu(model: PreTrainedModel) -> None:
    pytest.importorskip("triton")
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"on cpu.*triton backend needs tensors on a GPU.*use backend='cpu'"):
        sk.patch(model, "prompt-lookup", backend="triton")
    assert snapshot(model) == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("heads", sample(["prompt-lookup", "medusa"], ["medusa"]))
def test_dynamic_quantisation(model: PreTrainedModel, heads: str) -> None:
    """A row's result depends on the rows beside it, so it is refused; as a draft model it only guesses."""
    quantised = torch.ao.quantization.quantize_dynamic(tiny_model("llama", seed=27), {torch.nn.Linear})
    before, expected = snapshot(quantised), greedy(model, batch((9,)), 10)
    with pytest.raises(sk.UnsupportedModel, match=r"q_proj is a Linear of torch.ao quantisation.*quantize_dynamic"):
        sk.patch(quantised, random_heads(model) if heads == "medusa" else heads)
    assert snapshot(quantised) == before
    with sk.patch(model, quantised):
        assert torch.equal(greedy(model, batch((9,)), 10), expected)


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (1, 0)])
def test_empty_batches_of_generate(model: PreTrainedModel, shape: tuple[int, int]) -> None:
    expected = greedy(model, batch((9,)), 10)
    ids = torch.zeros(shape, dtype=torch.int64)
    with sk.patch(model, "prompt-lookup"):
        for inputs in ({}, {"attention_mask": torch.ones_like(ids)}):
            with pytest.raises(ValueError, match=r"at least one row"):
                greedy(model, {"input_ids": ids} | inputs, 10)
        assert sk.generate_batch(model, []) == []
        assert torch.equal(greedy(model, batch((9,)), 10), expected)


REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": value}, f"prompt 1 must be one row of token ids from 0 to {VOCAB - 1}, got ")
    for value in (None, 3, "abc", b"ab", [], [True], [1.5], ["5"], [None], [[3]], [VOCAB], [-1], torch.tensor(3),
                  torch.tensor([1.0]), torch.tensor([[1, 2]]), torch.tensor([True]), np.array([[1]]), {"a": 1})
]  # fmt: skip
REQUESTS += [
    ({"max_new_tokens": value}, "max_new_tokens of prompt 1 is ") for value in (0, -1, 2.5, "3", True, None, [3])
]
REQUESTS += [
    ({"eos_token_ids": value}, "eos_token_ids of prompt 1 is ") for value in (5, "a", [1.5], [[1]], [None], True)
]
REQUESTS += [({"sampling": value}, "sampling of prompt 1 is ") for value in (0.5, "greedy", {}, True)]
REQUESTS += [({"stop": value}, "stop of prompt 1 is ") for value in (3, "end", True, [])]


@pytest.mark.parametrize(("fields", "message"), REQUESTS, ids=named)
def test_requests(patched: PreTrainedModel, fields: dict[str, Any], message: str) -> None:
    """No request of the batch is started."""
    with pytest.raises(WRONG) as caught:
        sk.generate_batch(patched, [[5], sk.Request(**{"prompt": [5, 9], "max_new_tokens": 3} | fields)])
    assert str(caught.value).startswith(message)
    assert len(sk.generate_batch(patched, [[5]], max_new_tokens=2)[0].tokens) == 2


@pytest.fixture(scope="module")
def patched():  # type: ignore[no-untyped-def]
    other = tiny_model("llama", seed=29)
    with sk.patch(other, "prompt-lookup"):
        yield other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": None}, "prompts is None"),
        ({"prompts": 3}, "prompts is 3"),
        ({"prompts": "abc"}, "prompts is 'abc'"),
        ({"max_new_tokens": 1.5}, "max_new_tokens of prompt 0 is 1.5"),
        ({"sampling": 0.7}, "sampling is 0.7"),
        ({"on_piece": 3}, "on_piece is 3"),
        ({"model": None}, "isn't patched"),
        ({"model": "org/model"}, "isn't patched"),
    ],
)
def test_arguments_of_a_batch(patched: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WRONG, match=message):
        sk.generate_batch(**{"model": patched, "prompts": [[5]], "max_new_tokens": 2} | arguments)
    sk.unpatch(arguments.get("model"))  # not patched: nothing happens


@pytest.mark.parametrize(
    "fields",
    [{"temperature": value} for value in (-1e-9, float("nan"), float("inf"), "x", True, None, [1], torch.tensor(1.0))]
    + [{"top_p": value} for value in (0, 1.1, -0.5, float("nan"), "x", True, None)]
    + [{"top_k": value} for value in (-1, 1.5, "x", True, None, float("nan"))]
    + [{"seed": value} for value in (1.5, "x", True, None, 2**64, -(2**63) - 1)]
    + [{"typical": value} for value in (3, True, "x", 0.3)]
    + [{"min_p": value} for value in (-0.1, 1.1, float("nan"), "x", True, None)]
    + [{"repetition_penalty": value} for value in (0, -1, float("inf"), "x", True, None)]
    + [{name: v} for name in ("presence_penalty", "frequency_penalty") for v in (float("nan"), "x", True, None)]
    + [{"logit_bias": value} for value in (3, "x", True, None, [1])],
    ids=str,
)
def test_sampling(fields: dict[str, Any]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(WRONG, match=f"^{name} is ") as caught:
        sk.Sampling(**fields)
    assert str(value) in str(caught.value)


def test_logit_bias(patched: PreTrainedModel) -> None:
    for bias, message in (
        ({-1: 1.0}, "a token of logit_bias is -1"),
        ({"3": 1.0}, "a token of logit_bias is '3'"),
        ({3: float("inf")}, "logit_bias of token 3 is inf"),
        ({3: None}, "logit_bias of token 3 is None"),
    ):
        with pytest.raises(WRONG, match=message):
            sk.Sampling(logit_bias=bias)  # type: ignore[arg-type]
    request = sk.Request([5], 2, sampling=sk.Sampling(logit_bias={10**6: 1.0}))
    with pytest.raises(WRONG, match="logit_bias of prompt 0 has the token 1000000, the last one is"):
        sk.generate_batch(patched, [request])


@pytest.mark.parametrize("seed", [0, -(2**63), 2**64 - 1])
def test_every_seed_that_is_accepted_draws(seed: int) -> None:
    sk.Sampling(seed=seed).generator()


@pytest.mark.parametrize("value", [0, 1.5, "x", True, None, float("nan")])
def test_typical_acceptance(value: Any) -> None:
    for name in ("epsilon", "alpha"):
        with pytest.raises(WRONG, match=f"{name} is .*above 0 and at most 1"):
            sk.TypicalAcceptance(**{name: value})


@pytest.mark.parametrize(
    "paths", [3, None, "ab", [3], [None], ["ab"], [[1.0]], [["a"]], [[None]], [[True]], [[0], [[0]]], [[]], [[-1]]]
)
def test_trees_of_nonsense(paths: Any) -> None:
    with pytest.raises(WRONG, match=r"tree is|path \d of the tree is|rank below 0"):
        sk.DraftTree.from_paths(paths)


def test_other_classes() -> None:
    for arguments in ((1.5,), ("x",), (True,), (3, 0), (3, 2, 3), (3, 2, 1.5)):
        with pytest.raises(WRONG, match=r"prompt lookup: \w+ is "):
            sk.PromptLookupDrafter(*arguments)
    for arguments in ((0, 5, 2), (4, 5.0, 2), (4, 5, "2"), (4, 5, 2, 0), (4, True, 2)):
        with pytest.raises(WRONG, match=r"MedusaHeads: \w+ is "):
            sk.MedusaHeads(*arguments)
    for depth in (-1, 1.5, "x", True):
        with pytest.raises(WRONG, match="depth is "):
            sk.DraftTree.chain(depth)
    with pytest.raises(WRONG, match="parents is"):
        sk.DraftTree((-1, 0.0), (0, 0))
    assert hash(sk.DraftTree([-1, 0], [0, 0])) == hash(sk.DraftTree.chain(1))
