"""The Triton kernels' results, computed by Triton's interpreter on the CPU.

The interpreter is chosen before triton is imported, so this file runs itself in a process of its own: there
``TestInterpreter`` is collected, in an ordinary test run ``test_in_the_interpreter`` is, and fails if any of the
former does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import (
    ATTENTION_CASES,
    QUANTISED_CASES,
    AttentionCase,
    attention_budget,
    attention_inputs,
    mask_words,
    one_sequence,
    random_parents,
)
from op_cases import hard_rows

from specmemo_kernels.backends import reference

pytest.importorskip("triton")
Inputs = dict[str, Any]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# A program costs about 10 ms. Splits multiply them and the merge adds one per row and head, so the cases of more than
# 140 such (gqa8, tree64, wide_mask, causal_chunk, window_chunk) run with the launcher's own split sizes only.
BY_RULE = ATTENTION_CASES
IN_SPLITS = (
    *(case for case in ATTENTION_CASES if sum(case.nodes) * case.num_qo_heads <= 140),
    AttentionCase("short_chunk", (70, 0), (12, 9), window=30, tree=False),
)


CODES = tuple(
    case
    for case in QUANTISED_CASES
    if case.name.rpartition("-")[0] in ("page_edges", "ragged", "v_narrower", "head_dim_80", "page_7", "all_extras")
)


def problem(case: AttentionCase, dtype: torch.dtype) -> Inputs:
    """The arguments of ``tree_attention``, in order."""
    return dict(attention_inputs(case, dtype))


def test_in_the_interpreter() -> None:
    """Every test of ``TestInterpreter`` passes."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, check=False, env=os.environ | environment, capture_output=True, text=True)
    print(run.stdout[-4000:])
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


test_in_the_interpreter.__test__ = not INTERPRETING  # type: ignore[attr-defined]


def small_configs(invariant: bool = False) -> Any:
    """Classes with small splits, so that short sequences have several of them."""
    from specmemo_kernels.kernel_config import KernelConfig

    decode = KernelConfig(page_size=16, block_m=16, block_n=16, split_size=32, num_warps=4, num_stages=1, max_nodes=4)
    tree = KernelConfig(page_size=16, block_m=32, block_n=32, split_size=64, num_warps=4, num_stages=1, min_nodes=5)
    return (replace(tree, min_nodes=1),) if invariant else (decode, tree)


def run_attention(inputs: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from specmemo_kernels.backends import triton

    return triton.tree_attention(*inputs.values(), **options)


def check_attention(case: AttentionCase, dtype: torch.dtype, **options: Any) -> None:
    inputs = problem(case, dtype)
    budget = attention_budget(inputs, dtype)
    out, lse = run_attention(inputs, **options)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert float((out.double() - budget.out).abs().max()) <= budget.out_error
    assert float((lse.double() - budget.lse).abs().max()) <= budget.lse_error


def chain_step(inputs: Inputs, step: int) -> Inputs:
    """Node ``step`` of a chain decoded alone, after the nodes before it were committed."""
    length, page_size = int(inputs["seq_lens"][0]), inputs["k_pages"].shape[1]
    result = dict(inputs) | {name: inputs[name].clone() for name in ("k_pages", "v_pages")}
    for node in range(step):
        page, slot = int(inputs["block_table"][0, (length + node) // page_size]), (length + node) % page_size
        for pages, new in (("k_pages", "k_new"), ("v_pages", "v_new")):
            result[pages][page, slot] = inputs[new][node]
    for name in ("q", "k_new", "v_new"):
        result[name] = inputs[name][step : step + 1]
    result["seq_lens"] = torch.tensor([length + step], dtype=torch.int32)
    result["qo_indptr"] = torch.tensor([0, 1], dtype=torch.int32)
    return result | {"tree_mask": None, "max_qo_len": 1, "max_seq_len": length + step}


def chain_inputs(length: int, nodes: int, dtype: torch.dtype) -> Inputs:
    """A chain of drafts after ``length`` tokens, with room in the pages for all of them."""
    case = AttentionCase("chain", (length + nodes,), (nodes,))
    inputs = problem(case, dtype)
    words = mask_words(torch.arange(-1, nodes - 1, dtype=torch.int32), 1)
    lengths = torch.tensor([length], dtype=torch.int32)
    return inputs | {"tree_mask": words, "seq_lens": lengths, "max_seq_len": length}


def paged_problem(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Four sequences over shuffled pages of 7 tokens, keys of 24 and values of 16, NaN wherever nothing is."""
    layers, pages, page_size, heads, nodes = 3, 20, 7, 3, 12
    table = torch.full((4, 5), 2**30, dtype=torch.int32)
    table[:, :4] = torch.randperm(pages, generator=generator).int()[:16].reshape(4, 4)
    accept = torch.tensor([[0, 2, 4, -1], [-1] * 4, [0, -1, -1, -1], [0, 1, 3, 5]], dtype=torch.int32)
    return {
        "k_scratch": torch.randn(layers, nodes + 3, heads, 24, generator=generator).half(),
        "v_scratch": torch.randn(layers, nodes + 3, heads, 16, generator=generator).half(),
        "k_pages": torch.full((layers, pages, page_size, heads, 24), float("nan"), dtype=torch.float16),
        "v_pages": torch.full((layers, pages, page_size, heads, 16), float("nan"), dtype=torch.float16),
        "block_table": table,
        "seq_lens": torch.tensor([6, 0, 13, 20], dtype=torch.int32),
        "qo_indptr": torch.tensor([0, 5, 5, 6, 12], dtype=torch.int32),
        "accept_index": accept,
        "accept_length": torch.tensor([2, -1, 0, 3], dtype=torch.int32),
    }


def same_pages(run: Callable[..., None], oracle: Callable[..., None], arguments: list[torch.Tensor]) -> None:
    """Both functions leave the same pages (arguments 2 and 3), bit for bit and NaN for NaN."""
    mine, wanted = ([x.clone() for x in arguments] for _ in range(2))
    run(*mine)
    oracle(*wanted)
    for got, expected in zip(mine, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(wanted[2].nan_to_num(), arguments[2].nan_to_num())


@pytest.fixture
def ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products summed in the order of k: some machines' BLAS rounds a row by its place in the matrix."""
    from triton.runtime.interpreter import InterpreterBuilder  # type: ignore[import-untyped,unused-ignore]

    def create_dot(_: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[None, k, :]
        return type(d)(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


class TestInterpreter:
    __test__ = INTERPRETING

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("case", BY_RULE, ids=lambda case: case.name)
    def test_attention(self, case: AttentionCase, dtype: torch.dtype) -> None:
        check_attention(case, dtype)

    @pytest.mark.parametrize("case", IN_SPLITS, ids=lambda case: case.name)
    def test_attention_in_splits(self, case: AttentionCase) -> None:
        check_attention(case, torch.float32, configs=small_configs())

    def test_attention_bfloat16(self) -> None:
        check_attention(next(case for case in ATTENTION_CASES if case.name == "ragged"), torch.bfloat16)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("case", CODES, ids=lambda case: case.name)
    def test_attention_over_codes(self, case: AttentionCase, dtype: torch.dtype) -> None:
        check_attention(case, dtype, configs=small_configs() if dtype == torch.float32 else None)

    def test_bounds_from_shapes(self) -> None:
        inputs = problem(next(case for case in ATTENTION_CASES if case.name == "page_edges"), torch.float32)
        bounded = run_attention(inputs)
        free = run_attention(inputs | {"max_qo_len": None, "max_seq_len": None})
        assert all(torch.equal(x, y) for x, y in zip(bounded, free, strict=True))

    def test_strided_rows_and_causal_rows(self) -> None:
        inputs = problem(AttentionCase("strided", (21, 0), (6, 4)), torch.float32)
        inputs["tree_mask"][6:] = 0
        expected = run_attention(inputs)
        wide = torch.full((10, 9, 64), float("nan"))
        wide[:, 0:4], wide[:, 4:6], wide[:, 6:8] = inputs["q"], inputs["k_new"], inputs["v_new"]
        views = {"q": wide[:, 0:4], "k_new": wide[:, 4:6], "v_new": wide[:, 6:8]}
        assert torch.equal(run_attention(inputs | views)[0], expected[0])
        exact = reference.tree_attention(*inputs.values())[0]
        torch.testing.assert_close(expected[0], exact, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("splits", [False, True], ids=["by_rule", "in_splits"])
    def test_a_sequence_ignores_its_batch(self, splits: bool) -> None:
        case = AttentionCase("batch", (33, 5, 0, 100), (3, 20, 9, 1), window=60, sinks=True)
        inputs = problem(case, torch.float32)
        options = {"configs": small_configs()} if splits else {}
        together = run_attention(inputs, **options)
        bounds = inputs["qo_indptr"].tolist()
        for index in range(4):
            alone = run_attention(one_sequence(inputs, index), **options)
            for got, wanted in zip(together, alone, strict=True):
                assert torch.equal(got[bounds[index] : bounds[index + 1]], wanted)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("length", [27, 60, 128])
    @pytest.mark.usefixtures("ordered_dots")
    def test_invariant_chain_is_decoding(self, length: int, dtype: torch.dtype) -> None:
        nodes = 9
        inputs = chain_inputs(length, nodes, dtype)
        chain = run_attention(inputs, configs=small_configs(invariant=True))
        for step in range(nodes):
            one = run_attention(chain_step(inputs, step), configs=small_configs(invariant=True))
            for got, wanted in zip(chain, one, strict=True):
                assert torch.equal(got[step], wanted[0]), (step, length)

    @pytest.mark.usefixtures("ordered_dots")
    def test_invariant_by_argument(self) -> None:
        """The operator's own switch, where the rule splits the keys of one node and of nine differently."""
        inputs = chain_inputs(700, 9, torch.float16)
        equal = []
        for invariant in (False, True):
            chain = run_attention(inputs | {"invariant": invariant})
            ones = [run_attention(chain_step(inputs, step) | {"invariant": invariant}) for step in (0, 4, 8)]
            equal.append([torch.equal(chain[1][step], one[1][0]) for step, one in zip((0, 4, 8), ones, strict=True)])
        assert not all(equal[0]), "the fast mode gives the same bits: nothing is tested"
        assert all(equal[1])

    def test_classes_that_are_launched(self) -> None:
        """One launch when all sequences are known to be alike, unless a graph is captured for later batches."""
        from specmemo_kernels.kernel_config import attention_configs, launched_classes

        classes = attention_configs("sm_90", 128, 128, 4, torch.float16, 16)
        assert [c.max_nodes for c in classes][:2] == [4, 64]
        assert launched_classes(classes, 8, 8, 1, 4000) == (classes[:1], 8)
        assert launched_classes(classes, 200, 8, 25, 4000) == (classes[1:2], 4)
        assert launched_classes(classes, 199, 8, 25, 4000) == (classes[:2], 8)
        assert launched_classes(classes, 200, 8, 25, 4000, replayed=True) == (classes[:2], 8)

    def test_workspace_is_bounded(self) -> None:
        """What a memory plan is told covers the states of every step's splits."""
        from specmemo_kernels.backends.triton import split_workspace
        from specmemo_kernels.kernel_config import attention_configs, launched_classes, split_state_bytes

        for heads, kv_heads, head_dim, v_dim in ((8, 2, 64, 64), (32, 1, 128, 128), (16, 16, 48, 32)):
            sizes = (heads, kv_heads, head_dim, v_dim, 16)
            split_size, row_bytes = split_workspace(torch.device("cpu"), torch.float16, *sizes)
            classes = attention_configs("interpreter", head_dim, v_dim, heads // kv_heads, torch.float16, 16)
            for rows, batch, nodes in ((256, 1, 256), (256, 2, 200), (40, 8, 5), (1, 1, 1), (70, 1, 70)):
                for slots in (nodes, 511, 512, 513, 5000, 32_768):
                    _, splits = launched_classes(classes, rows, batch, nodes, slots)
                    least = split_state_bytes(rows, heads, v_dim, splits)
                    assert least <= rows * row_bytes * -(-slots // split_size)

    def test_invariant_is_one_class(self) -> None:
        from specmemo_kernels.kernel_config import TARGETS, attention_configs

        for target in TARGETS:
            assert len(attention_configs(target, 128, 128, 4, torch.float16, 16, True)) == 1

    def test_append(self) -> None:
        from specmemo_kernels.backends import triton

        pages_problem = paged_problem(torch.Generator().manual_seed(0))
        rows = torch.randn(12, 5, 40, generator=torch.Generator().manual_seed(1)).half()
        new = [rows[:, 1:4, :24], rows[:, 2:, 24:]]  # views: strides that no dense tensor has
        pages = [pages_problem["k_pages"][1].contiguous(), pages_problem["v_pages"][1].contiguous()]
        rest = [pages_problem[name] for name in ("block_table", "seq_lens", "qo_indptr")]
        same_pages(triton.append_paged_kv, reference.append_paged_kv, [*new, *pages, *rest])

    def test_commit(self) -> None:
        from specmemo_kernels.backends import triton

        arguments = list(paged_problem(torch.Generator().manual_seed(0)).values())
        same_pages(triton.commit_paged_kv, reference.commit_paged_kv, arguments)

    @pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    def test_append_of_codes(self, kv_dtype: torch.dtype) -> None:
        """The reference's bits for rows of any size, ties, outliers, nothing, NaN and infinity."""
        from specmemo_kernels.backends import triton

        rows = hard_rows(torch.float32, 36)
        rows = torch.cat([rows, torch.tensor([float("nan"), float("inf")])[:, None] * torch.ones(2, 36)])
        new = rows[: len(rows) // 3 * 3].unflatten(0, (-1, 3))  # three heads
        pages = torch.zeros(8, 7, 3, 36, dtype=torch.uint8).view(kv_dtype)
        scales = torch.zeros(8, 7, 3)
        table = torch.arange(8, dtype=torch.int32).flip(0).reshape(1, 8)
        length, bounds = torch.tensor([3], dtype=torch.int32), torch.tensor([0, len(new)], dtype=torch.int32)
        results = []
        for backend in (triton, reference):
            own = [x.clone() for x in (pages, pages, scales, scales)]
            backend.append_paged_kv(new, new.flip(0), own[0], own[1], table, length, bounds, own[2], own[3])
            results.append([own[0].view(torch.uint8), own[1].view(torch.uint8), own[2], own[3]])
        for mine, wanted in zip(*results, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)
        assert bool((results[0][0] != 0).any())

    @pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    def test_commit_of_codes(self, kv_dtype: torch.dtype) -> None:
        from specmemo_kernels.backends import triton

        inputs = paged_problem(torch.Generator().manual_seed(0))
        results = []
        for backend in (triton, reference):
            pools = [torch.full_like(inputs[n], 0x33, dtype=torch.uint8).view(kv_dtype) for n in ("k_pages", "v_pages")]
            scales = [torch.full(inputs["k_pages"].shape[:-1], float("nan")) for _ in range(2)]
            rest = [x for name, x in inputs.items() if name not in ("k_scratch", "v_scratch", "k_pages", "v_pages")]
            backend.commit_paged_kv(inputs["k_scratch"], inputs["v_scratch"], *pools, *rest, *scales)
            results.append([pools[0].view(torch.uint8), pools[1].view(torch.uint8), *scales])
        for mine, wanted in zip(*results, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)
        assert int(results[0][2].isfinite().sum()) == 3 * 3 * 8, "three layers and heads, eight tokens"

    @pytest.mark.parametrize("max_depth", [0, 3, 20])
    def test_verify(self, max_depth: int) -> None:
        from specmemo_kernels.backends import triton

        g = torch.Generator().manual_seed(max_depth)
        nodes = [9, 0, 1, 70, 130]
        parents = torch.cat([random_parents(n, g) for n in nodes])
        indptr = torch.tensor([0, *torch.tensor(nodes).cumsum(0).tolist()], dtype=torch.int32)
        for _ in range(3):
            draft = torch.randint(-1, 3, (len(parents),), generator=g)
            target = torch.randint(0, 3, (len(parents),), generator=g)
            mine = triton.verify_tree_greedy(draft, target, parents, indptr, max_depth)
            wanted = reference.verify_tree_greedy(draft, target, parents, indptr, max_depth)
            assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(mine, wanted, strict=True))

    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    @pytest.mark.parametrize(
        ("rows", "vocabulary", "hidden", "dtype"),
        [(5, 1000, 80, torch.float32), (17, 777, 64, torch.float16), (1, 33, 48, torch.float16)],
    )
    def test_lm_head(self, rows: int, vocabulary: int, hidden: int, dtype: torch.dtype, bias: bool) -> None:
        """Small integers: exact logits, hundreds of ties."""
        from specmemo_kernels.backends import triton

        g = torch.Generator().manual_seed(rows)
        x = torch.randint(-3, 4, (rows, hidden), generator=g).to(dtype)
        weight = torch.randint(-2, 3, (vocabulary, hidden), generator=g).to(dtype)
        offset = torch.randint(-2, 3, (vocabulary,), generator=g).to(dtype) if bias else None
        assert torch.equal(triton.lm_head_argmax(x, weight, offset), reference.lm_head_argmax(x, weight, offset))
        for k in (1, 5, 33):
            mine, wanted = (backend.lm_head_topk(x, weight, offset, k) for backend in (triton, reference))
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(mine, wanted, strict=True))

    def test_lm_head_rounds_before_comparing(self) -> None:
        """2048 and 2049 are the same number in float16: the lower token wins, not the larger sum."""
        from specmemo_kernels.backends import triton

        weight = torch.zeros(200, 16, dtype=torch.float16)
        weight[70, 0], weight[150, 0], weight[150, 1] = 2048, 2048, 1
        x = torch.zeros(2, 16, dtype=torch.float16)
        x[:, :2] = 1
        assert triton.lm_head_argmax(x, weight, None).tolist() == [70, 70]

    def test_refusals(self) -> None:
        inputs = problem(AttentionCase("small", (3,), (2,)), torch.float64)
        with pytest.raises(ValueError, match="float64"):
            run_attention(inputs)

    def test_nothing_to_do(self) -> None:
        from specmemo_kernels.backends import triton

        out, lse = run_attention(problem(AttentionCase("none", (3, 4), (0, 0), tree=False), torch.float32))
        assert out.shape == (0, 4, 64)
        assert lse.shape == (0, 4)
        assert triton.lm_head_argmax(torch.empty(0, 8), torch.ones(5, 8), None).shape == (0,)
