"""The lm_head's choice among logits that aren't numbers: torch.argmax's rule in every backend.

NaN is the largest value, of equal values (all NaNs are equal, and -0.0 equals 0.0) the lowest token wins. The expected
tokens come from Python's sort of float64 logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreter import INTERPRETING
from selection import sample
from test_families import answers, batch, greedy
from tiny_models import OracleDrafter, tiny_model

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu
from specmemo_kernels.drafting.base import DraftInput
from specmemo_kernels.integrations.distributed.tensor_parallel import TensorParallel
from specmemo_kernels.ops.weight_codes import pack, unpack

Tensor = torch.Tensor
NAN, INF = float("nan"), float("inf")
NEGATIVE_NAN = torch.tensor([-1], dtype=torch.int32).view(torch.float32).item()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = ("mixed", "nan_weights", "nan_hidden", "inf_hidden", "all_minus_inf", "zeros", "late_nan")
#: One slice of the reference holds 8192 tokens; the other backends' parts are smaller.
SIZES = (1, 7, 300, 8300)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_case = pytest.mark.parametrize("case", CASES)


def problem(case: str, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """``hidden``, ``weight`` and ``bias`` of small integers with exact sums, changed by ``case``."""
    g = torch.Generator().manual_seed(vocab)
    hidden = torch.randint(-1, 2, (3, 70), generator=g).float()
    weight = torch.randint(-1, 2, (vocab, 70), generator=g).float()
    bias = torch.randint(-2, 3, (vocab,), generator=g).float()
    some = torch.randperm(vocab, generator=g)[: max(1, vocab // 50)]
    if case == "mixed":
        hidden.zero_()
        values = torch.tensor([NAN, NEGATIVE_NAN, INF, -INF, -0.0, 0.0, 1.0])
        bias = values[torch.randint(0, 7, (vocab,), generator=g)]
    elif case == "nan_weights":
        weight[some, 3] = NEGATIVE_NAN
        weight[some.flip(0)[: len(some) // 2], 69] = NAN
    elif case == "nan_hidden":
        hidden[1, 69] = NAN
    elif case == "inf_hidden":  # 0 * inf is NaN
        hidden[0, 0], hidden[1, 69] = INF, -INF
    elif case == "all_minus_inf":
        bias.fill_(-INF)
    elif case == "zeros":
        hidden.zero_()
        bias = torch.where(torch.arange(vocab) % 2 == 0, -0.0, 0.0)
    elif case == "late_nan":
        bias[vocab - 1], bias[vocab // 2] = NAN, INF
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype)


def ranked(logits: Tensor, k: int) -> list[list[int]]:
    """Each row's ``k`` best tokens."""

    def place(item: tuple[int, float]) -> tuple[bool, float, int]:
        token, value = item
        nan = math.isnan(value)
        return not nan, 0.0 if nan else -value, token

    return [[token for token, _ in sorted(enumerate(row), key=place)[:k]] for row in logits.tolist()]


def check(backend: str, case: str, vocab: int, dtype: torch.dtype, k: int = 9) -> None:
    hidden, weight, bias = problem(case, vocab, dtype)
    logits = hidden.double() @ weight.double().T + bias.double()
    k = min(vocab, k)
    wanted = ranked(logits, k)
    assert logits.argmax(1).tolist() == [row[0] for row in wanted], "the oracle is torch's rule"
    values, tokens = ops.lm_head_topk(hidden, weight, bias, k=k, backend=backend)
    assert tokens.tolist() == wanted
    torch.testing.assert_close(values.double(), logits.gather(1, tokens), rtol=0, atol=0, equal_nan=True)
    assert ops.lm_head_argmax(hidden, weight, bias, backend=backend).tolist() == [row[0] for row in wanted]


def check_codes(backend: str, case: str, dtype: torch.dtype) -> None:
    hidden, weight, bias = problem(case, 300, dtype)
    codes, scales = pack(weight.nan_to_num())
    if case == "nan_weights":
        scales[[250, 40], 1] = NAN
    exact = unpack(codes, scales, hidden.shape[1])
    logits = hidden.double() @ exact.double().T + bias.double()
    # Scales are eighths of integers, so float32 sums are exact; then the logits are rounded.
    wanted = ranked(logits.to(dtype).double(), 9)
    tokens = ops.lm_head_topk(hidden, codes, bias, k=9, scales=scales, backend=backend)[1]
    assert tokens.tolist() == wanted


@pytest.fixture(params=["reference", *(f"cpu {isa}" for isa in _cpu.isas())])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend of a CPU, with each instruction set."""
    name, _, isa = request.param.partition(" ")
    before = _cpu.isa()
    if isa:
        _cpu.use_isa(isa)
    yield name
    _cpu.use_isa(before)


@pytest.mark.parametrize("dtype", sample(DTYPES, [torch.bfloat16]), ids=str)
@each_case
def test_the_best_tokens(backend: str, case: str, dtype: torch.dtype) -> None:
    for vocab in SIZES:
        check(backend, case, vocab, dtype)


@each_dtype
@each_case
def test_the_best_tokens_by_codes(backend: str, case: str, dtype: torch.dtype) -> None:
    check_codes(backend, case, dtype)


@pytest.mark.parametrize("counts", [(4, 3), (2, 2, 1, 0), (1, 6), (7, 0)])
@pytest.mark.parametrize("values", [[-INF] * 7, [-INF, 1, NAN, -INF, NAN, INF, 0], [0, -0.0, NAN, 0, 0, 0, 0]])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_best_tokens_of_ranks(values: list[float], counts: tuple[int, ...], k: int) -> None:
    """Merged from all ranks' candidates; a rank may have fewer tokens than ``k``."""
    hidden, weight = torch.ones(2, 1), torch.tensor(values[: sum(counts)])[:, None]
    sent: list[Tensor] = []
    found: list[Any] = []
    for gathering in (False, True):
        for rank in range(len(counts)):
            team = object.__new__(TensorParallel)
            first = sum(counts[:rank])
            team.rank, team.size, team._counts = rank, len(counts), list(counts)
            team.rows = first, first + counts[rank]
            team._gather = lambda mine, all_of=gathering: (  # type: ignore[method-assign]
                torch.stack(sent) if all_of else sent.append(mine) or mine.expand(len(counts), *mine.shape)
            )
            result = team.topk(hidden, weight[slice(*team.rows)], k=k, backend="reference")
            if gathering:
                found.append(result)
    wanted = ranked((hidden @ weight.T).double(), k)
    for best, tokens in found:
        assert tokens.tolist() == wanted
        torch.testing.assert_close(best, (hidden @ weight.T).gather(1, tokens), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_vocabulary_of_no_tokens(name: str) -> None:
    """An error, as in torch.argmax."""
    with pytest.raises(ValueError, match="weight has 0 rows"):
        ops.lm_head_argmax(torch.ones(2, 4), torch.ones(0, 4), backend=name)


def check_generation(backend: str, where: str) -> None:
    """A patched model writes the unpatched one's tokens, with some or all logits NaN."""
    model: Any = tiny_model("llama", seed=40, num_hidden_layers=1)
    with torch.no_grad():
        if where == "token":
            model.lm_head.weight[17, 0] = NAN
        elif where == "all":
            model.model.norm.weight[3] = NAN
        else:  # a token of the prompt: all that follows it is NaN
            model.model.embed_tokens.weight[int(batch((6,))["input_ids"][0, 2])] = NAN
    inputs = batch((6,))
    expected = greedy(model, inputs, 6)
    assert expected[0, 6:].tolist() == [17 if where == "token" else 0] * 6
    drafter = OracleDrafter(answers(inputs, expected), 1.0)
    with sk.patch(model, drafter, tree=[[0], [1], [0, 0]], backend=backend):
        assert torch.equal(greedy(model, inputs, 6), expected)


@pytest.mark.parametrize("where", ["token", "all", "prompt"])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_generation(name: str, where: str) -> None:
    check_generation(name, where)


class BadSiblings(OracleDrafter):
    """Right guesses, beside each a token whose embedding is NaN."""

    def propose(self, inputs: DraftInput) -> Tensor:
        tokens = super().propose(inputs)
        tokens[:, [node for node, path in enumerate(inputs.tree.paths, 1) if path[-1] == 1]] = BAD
        return tokens


BAD = 44


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_candidates_and_prompts_with_nan(name: str) -> None:
    """A rejected candidate, and a later token of another prompt with the same beginning, change no token."""
    model: Any = tiny_model("llama", seed=40, num_hidden_layers=2)
    model.model.embed_tokens.weight.data[BAD] = NAN
    inputs = batch((40,))
    inputs["input_ids"][inputs["input_ids"] == BAD] = 45
    expected = greedy(model, inputs, 12)
    assert BAD not in expected[0]
    prompt = inputs["input_ids"][0].tolist()
    with sk.patch(
        model, BadSiblings(answers(inputs, expected), 1.0), tree=[[0], [1], [0, 0], [0, 1]], backend=name
    ) as h:
        assert torch.equal(greedy(model, inputs, 12), expected)
        assert h.stats.tokens_per_step > 2
        h.release()
        sk.generate_batch(model, [[*prompt[:-1], BAD, 7, 8]], max_new_tokens=4, eos_token_ids=[])
        h.stats.reset()
        assert torch.equal(greedy(model, inputs, 12), expected)
        assert h.stats.reused_tokens >= 32


class TestInterpreter:
    __test__ = INTERPRETING

    @pytest.mark.parametrize("case", sample(CASES, ["mixed"]))
    def test_the_best_tokens(self, case: str) -> None:
        for vocab in (1, 7, 300):
            check("triton", case, vocab, torch.float32)

    @pytest.mark.parametrize("dtype", sample((torch.bfloat16, torch.float16), [torch.bfloat16]), ids=str)
    def test_the_best_tokens_in_16_bits(self, dtype: torch.dtype) -> None:
        for case in ("mixed", "nan_weights"):
            check("triton", case, 100, dtype)

    @pytest.mark.parametrize("case", sample(CASES, ("mixed", "nan_weights")))
    def test_the_best_tokens_by_codes(self, case: str) -> None:
        check_codes("triton", case, torch.bfloat16)

    @pytest.mark.parametrize("case", sample(("mixed", "all_minus_inf"), ["all_minus_inf"]))
    def test_blocks_of_blocks(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """More keys than one reduction: the merge has two levels."""
        from specmemo_kernels.backends.triton import lm_head

        monkeypatch.setattr(lm_head, "LM_HEAD_REDUCE_CONFIG", replace(lm_head.LM_HEAD_REDUCE_CONFIG, block_n=32))
        check("triton", case, 300, torch.float32)

    @pytest.mark.slow
    @pytest.mark.parametrize("where", ["token", "all", "prompt"])
    def test_generation(self, where: str) -> None:
        check_generation("triton", where)

    def test_drafts_below_zero(self) -> None:
        """No draft below 0 is accepted, whatever the target's tokens: the rule of the other backends."""
        bounds = torch.tensor([0, 3], dtype=torch.int32)
        parents = torch.tensor([-1, 0, 1], dtype=torch.int32)
        draft, target = torch.tensor([1, -2, -2]), torch.tensor([-2, -2, 4])
        for name in ("triton", "cpu", "reference"):
            length = ops.verify_tree_greedy(draft, target, parents, bounds, max_depth=2, backend=name)[1]
            assert length.tolist() == [0], name
