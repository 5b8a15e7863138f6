"""Products with one matrix per group of rows, and with transposed matrices, against float64; mixtures of experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import each_isa
from selection import examples, sample
from test_families import batch, greedy
from test_linear import DTYPES, check_linear, each_dtype, random
from tiny_models import tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu, cpu
from specmemo_kernels.integrations.hf.attention import LeafOperators, attention_call
from specmemo_kernels.integrations.hf.experts import mixture
from specmemo_kernels.integrations.hf.fuse import find_leaves
from specmemo_kernels.integrations.hf.leaf_kinds import leaf_kinds

Tensor = torch.Tensor
__all__ = ["each_isa"]  # the fixture isa
CPU = torch.device("cpu")
#: Rows, outputs and inputs: no whole tile or block of either order; several of each; more rows than one pass.
SIZES = [
    (1, 1, 1), (1, 5, 7), (2, 31, 33), (3, 33, 15), (5, 64, 130), (8, 257, 100), (9, 700, 50), (17, 20, 260),
    (40, 515, 33), (0, 5, 8), (6, 0, 8), (4, 10, 0),
]  # fmt: skip


def transposed(weight: Tensor) -> Tensor:
    """The same matrices, contiguous as ``[inputs, outputs]``."""
    return weight.mT.contiguous().mT


@each_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_transposed_matrices(isa: str, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, outputs, inputs = size
    x, weight = random(rows, inputs, dtype=dtype), transposed(random(outputs, inputs, dtype=dtype, seed=1))
    wide = torch.full((rows, inputs + 3), float("nan"), dtype=dtype)
    wide[:, :inputs] = x
    for bias in (None, random(outputs, dtype=dtype, seed=2)):
        result = ops.linear(x, weight, bias, invariant=True, backend="cpu")
        check_linear(x, weight, bias, result)
        for one in range(rows):
            assert torch.equal(ops.linear(x[one], weight, bias, invariant=True, backend="cpu"), result[one])
        assert torch.equal(ops.linear(wide[:, :inputs], weight, bias, invariant=True, backend="cpu"), result)


@each_dtype
def test_more_rows_than_pay(dtype: torch.dtype) -> None:
    """Torch's own product, where it is faster with a transposed matrix."""
    limit = ops.few_rows("cpu", dtype, transposed=True)
    x, weight = random(60, 30, dtype=dtype), transposed(random(50, 30, dtype=dtype, seed=1))
    result = ops.linear(x, weight, backend="cpu")
    own = nn.functional.linear(x, weight)
    assert torch.equal(result, own if limit else ops.linear(x, weight, invariant=True, backend="cpu"))
    assert torch.equal(
        ops.linear(x[:32], weight, backend="cpu"), ops.linear(x, weight, invariant=True, backend="cpu")[:32]
    )


def check_groups(x: Tensor, weight: Tensor, bias: Tensor | None, ends: list[int], result: Tensor) -> None:
    assert result.dtype == x.dtype
    assert result.shape == (len(x), weight.shape[1])
    begin = 0
    for group, end in enumerate(ends):
        own = slice(begin, max(begin, end))
        check_linear(x[own], weight[group], None if bias is None else bias[group], result[own])
        begin = own.stop
    assert bool((result[begin:] == 0).all())


@each_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("by_input", [False, True])
def test_groups_of_rows(isa: str, size: tuple[int, int, int], by_input: bool, dtype: torch.dtype) -> None:
    rows, outputs, inputs = size
    ends = [0, rows // 3, rows // 3, rows - rows // 4]  # two groups without rows, and rows without a group
    x, weight = random(rows, inputs, dtype=dtype), random(4, outputs, inputs, dtype=dtype, seed=1)
    weight = transposed(weight) if by_input else weight
    for bias in (None, random(4, outputs, dtype=dtype, seed=2)):
        for backend in ("reference", "cpu"):
            result = ops.grouped_linear(x, weight, bias, torch.tensor(ends), backend=backend)
            check_groups(x, weight, bias, ends, result)


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), isa=st.sampled_from(_cpu.isas()), threads=st.integers(1, 3))
def test_any_groups(data: st.DataObject, dtype: torch.dtype, isa: str, threads: int) -> None:
    """A row's bits depend on its group's matrix alone: neither on its group's other rows nor on threads."""
    rows, outputs, inputs = (data.draw(st.integers(1, most)) for most in (40, 90, 200))
    groups = data.draw(st.integers(1, 6))
    ends = sorted(data.draw(st.integers(0, rows)) for _ in range(groups))
    x, weight = random(rows, inputs, dtype=dtype), random(groups, outputs, inputs, dtype=dtype, seed=1)
    weight = transposed(weight) if data.draw(st.booleans()) else weight
    before, threads_before = _cpu.isa(), torch.get_num_threads()
    try:
        _cpu.use_isa(isa)
        torch.set_num_threads(threads)
        result = ops.grouped_linear(x, weight, None, torch.tensor(ends), invariant=True, backend="cpu")
        check_groups(x, weight, None, ends, result)
        row = data.draw(st.integers(0, rows - 1))
        group = next((i for i, end in enumerate(ends) if row < end), None)
        torch.set_num_threads(1)
        if group is not None:
            alone = ops.linear(x[row], weight[group], invariant=True, backend="cpu")
            assert torch.equal(alone, result[row])
    finally:
        _cpu.use_isa(before)
        torch.set_num_threads(threads_before)


X, W, ENDS = torch.ones(3, 8), torch.ones(2, 4, 8), torch.tensor([1, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.grouped_linear(X[0], W, None, ENDS), r"x has shape \(8,\), expected \[\*, \*\]"),
        (lambda: ops.grouped_linear(X, W[0], None, ENDS), r"weight has shape \(4, 8\)"),
        (lambda: ops.grouped_linear(X, W[:, :, ::2], None, ENDS), r"weight has shape \(2, 4, 4\)"),
        (lambda: ops.grouped_linear(X, W.half(), None, ENDS), "weight has dtype torch.float16, expected torch.float32"),
        (lambda: ops.grouped_linear(X, torch.ones(8, 4, 2).permute(2, 1, 0), None, ENDS), "weight must be contiguous"),
        (lambda: ops.grouped_linear(X, W, torch.ones(4), ENDS), r"bias has shape \(4,\), expected \[2, 4\]"),
        (lambda: ops.grouped_linear(X, W, None, ENDS.int()), "ends has dtype torch.int32, expected torch.int64"),
        (lambda: ops.grouped_linear(X, W, None, ENDS[:1]), r"ends has shape \(1,\), expected \[2\]"),
        (lambda: ops.grouped_linear(X, W, None, ENDS, invariant=True, backend="reference"), "only backend='cpu'"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


#: Families by their experts: gate and up one after the other or in turns, without a gate, with biases, transposed.
MIXTURES = ["mixtral", "gpt_oss", "qwen3_moe", "olmoe", "deepseek_v3", "nemotron_h", "glm4_moe", "ernie4_5_moe"]


def experts_of(family: str) -> nn.Module:
    changes = {"layers_block_type": ["attention", "moe"]} if family == "nemotron_h" else {}
    model = tiny_model(family, **changes)
    return next(module for module in model.modules() if hasattr(module, "is_transposed"))


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("rows", [0, 1, 23])
def test_a_mixture_is_transformers_own(family: str, rows: int) -> None:
    """In float64, against the loop over experts of the model's own code."""
    module: Any = experts_of(family).double()
    module.config = copy.copy(module.config)
    module.config._experts_implementation = "eager"
    (kind,) = [kind for kind in leaf_kinds(module, False) if kind.operator == "grouped_linear"]
    x = torch.randn(rows, kind.inputs, generator=torch.Generator().manual_seed(1)).double()
    scores, chosen = torch.rand(rows, kind.experts, generator=torch.Generator().manual_seed(2)).double().topk(2)
    with torch.no_grad():
        own = type(module).forward(module, x, chosen, scores)
        result = mixture(module, ops.kernels("reference", CPU), x, chosen, scores, False)
    torch.testing.assert_close(result, own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", sample(["mixtral", "gpt_oss", "qwen3_moe", "olmoe"], ["mixtral", "gpt_oss"]))
def test_a_patched_model_uses_it(family: str) -> None:
    model, inputs = tiny_model(family), batch((17, 40))
    expected = greedy(model, inputs, 72)  # steps are recorded once eight had the same size
    with sk.patch(model, "prompt-lookup") as handle:
        names = [name for name, operator in handle.fused.items() if operator == "grouped_linear"]
        assert [type(model.get_submodule(name)).__name__.endswith("Experts") for name in names] == [True] * len(names)
        assert names
        assert torch.equal(greedy(model, inputs, 72), expected)
        assert handle.stats.graph_steps > 0  # which experts a step reads doesn't keep it from being recorded


def test_other_experts_are_left_alone() -> None:
    """Of another rank's shard, without matrices, and of a class that computes something else."""
    module: Any = experts_of("mixtral")
    module._is_expert_parallel = True
    assert not list(leaf_kinds(module, False))
    module._is_expert_parallel = False
    module.down_proj, down = None, module.down_proj
    assert not list(leaf_kinds(module, False))
    module.down_proj = down

    class Negative(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Tensor:
            return -super().forward(*args)

    module.__class__ = Negative
    assert find_leaves(nn.Sequential(module), torch.float32, "cpu", False).names == {}


@pytest.mark.parametrize("kept", [[], [9], [7, 3]], ids=str)
def test_only_kept_rows_are_multiplied(kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last attention: the other rows' results are zeros."""
    module = experts_of("mixtral")
    (leaf,) = find_leaves(nn.Sequential(module), torch.float32, "cpu", False).leaves
    x, counts = random(10, 32, dtype=torch.float32), []
    scores, chosen = torch.rand(10, 4).topk(2)
    expected = leaf.call(ops.kernels("cpu", CPU), x, chosen, scores)
    multiply = cpu.grouped_linear
    monkeypatch.setattr(cpu, "grouped_linear", lambda x, *others: counts.append(len(x)) or multiply(x, *others))
    rows = torch.tensor(kept, dtype=torch.int64)
    operators = LeafOperators(ops.kernels("cpu", CPU), rows, 10)
    with attention_call(lambda *_, **__: x, operators=operators):
        result = leaf.forward(x, chosen, scores)
    assert counts == [2 * len(kept)] * 2
    assert torch.equal(result[rows], expected[rows])
    assert result.count_nonzero() == result[rows].count_nonzero()


@each_dtype
def test_conv1d(dtype: torch.dtype) -> None:
    """GPT-2's linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(50, 30)).to(dtype)
    found = find_leaves(model, dtype, "cpu", False)
    assert found.names == {"0": "linear"}
    x = random(1, 9, 30, dtype=dtype)
    check_linear(x, model[0].weight.T, model[0].bias, found.leaves[0].call(ops.kernels("cpu", CPU), x))
    assert found.workspace == ops.linear_workspace("cpu", dtype, 30, transposed=True) > 0


def test_memory_that_is_kept_is_what_linear_workspace_says() -> None:
    """In a process whose threads have no buffers yet."""
    import subprocess
    import sys

    code = """
import torch
from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu
torch.set_num_threads(2)
for rows in (1, 9, 100):
    x, w = torch.ones(rows, 300), torch.ones(2, 300, 700).mT
    ops.grouped_linear(x, w, None, torch.tensor([rows // 3, rows]), backend="cpu")
limit = ops.linear_workspace("cpu", torch.float32, 300, transposed=True) + 4 * 4096  # buffers are rounded up to pages
for _ in range(5000):  # every thread counts the sums of two panels, and a busy machine may start one too late
    if _cpu.arena_bytes() > limit / 2:
        break
    ops.linear(torch.ones(128, 64), torch.ones(500, 64), backend="cpu")
assert limit / 2 < _cpu.arena_bytes() <= limit, (_cpu.arena_bytes(), limit)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
