"""Results of the Triton attention kernels in Triton's interpreter on the CPU (see ``interpreter.py``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import (
    ATTENTION_CASES,
    QUANTISED_CASES,
    AttentionCase,
    attention_inputs,
    case_budget,
    mask_words,
    one_sequence,
)
from interpreter import INTERPRETING
from selection import sample

from specmemo_kernels.backends import reference

pytest.importorskip("triton")
Inputs = dict[str, Any]

# A program costs about 10 ms. Splits multiply them and the merge adds one per row and head, so the cases of more than
# 140 such (gqa8, tree64, wide_mask, causal_chunk, window_chunk) run with the launcher's own split sizes only.
BY_RULE = ATTENTION_CASES
IN_SPLITS = (
    *(case for case in ATTENTION_CASES if sum(case.nodes) * case.num_qo_heads <= 140),
    AttentionCase("short_chunk", (70, 0), (12, 9), window=30, tree=False),
)


#: In every run: some by the launcher's rule, some in splits.
SHORT = ("page_7", "v_narrower", "causal_chunk", "wide_mask", "all_extras")
SPLIT = ("ragged",)

CODES = tuple(
    case
    for case in QUANTISED_CASES
    if case.name.rpartition("-")[0] in ("page_edges", "ragged", "v_narrower", "head_dim_80", "page_7", "all_extras")
)


def by_name(cases: Iterable[AttentionCase], everyday: Collection[str]) -> list[Any]:
    """The cases; those with other names are slow."""
    return sample(cases, everyday, lambda case: case.name)


def problem(case: AttentionCase, dtype: torch.dtype) -> Inputs:
    """The arguments of ``tree_attention``, in order."""
    return dict(attention_inputs(case, dtype))


def small_configs(invariant: bool = False) -> Any:
    """Block sizes with small splits, so that short sequences have several splits."""
    from specmemo_kernels.backends.kernel_config import KernelConfig

    decode = KernelConfig(block_m=16, block_n=16, split_size=32, num_warps=4, num_stages=1, max_nodes=4)
    tree = KernelConfig(block_m=32, block_n=32, split_size=64, num_warps=4, num_stages=1, min_nodes=5)
    return (replace(tree, min_nodes=1),) if invariant else (decode, tree)


def run_attention(inputs: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from specmemo_kernels.backends import triton

    return triton.tree_attention(*inputs.values(), **options)


def check_attention(case: AttentionCase, dtype: torch.dtype, **options: Any) -> None:
    inputs = problem(case, dtype)
    budget = case_budget(case, dtype)
    out, lse = run_attention(inputs, **options)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert float((out.double() - budget.out).abs().max()) <= budget.out_error
    assert float((lse.double() - budget.lse).abs().max()) <= budget.lse_error


def chain_step(inputs: Inputs, step: int) -> Inputs:
    """Node ``step`` of a chain decoded alone, after the earlier nodes were committed."""
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


@pytest.fixture
def ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products summed in the order of k, because some BLAS versions round a row by its position in the matrix."""
    from triton.runtime.interpreter import InterpreterBuilder  # type: ignore[import-untyped,unused-ignore]

    def create_dot(_: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[None, k, :]
        return type(d)(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


class TestInterpreter:
    __test__ = INTERPRETING

    @pytest.mark.parametrize("case", by_name(BY_RULE, SHORT), ids=lambda case: case.name)
    def test_attention(self, case: AttentionCase) -> None:
        check_attention(case, torch.float32)

    @pytest.mark.slow
    @pytest.mark.parametrize("case", [case for case in BY_RULE if case.name in SHORT], ids=lambda case: case.name)
    def test_attention_float16(self, case: AttentionCase) -> None:
        check_attention(case, torch.float16)

    @pytest.mark.parametrize("case", by_name(IN_SPLITS, SPLIT), ids=lambda case: case.name)
    def test_attention_in_splits(self, case: AttentionCase) -> None:
        check_attention(case, torch.float32, configs=small_configs())

    @pytest.mark.slow
    def test_attention_bfloat16(self) -> None:
        check_attention(next(case for case in ATTENTION_CASES if case.name == "ragged"), torch.bfloat16)

    @pytest.mark.parametrize("dtype", sample((torch.float32, torch.float16), [torch.float32]), ids=str)
    @pytest.mark.parametrize("case", by_name(CODES, ("page_7-int8", "head_dim_80-fp8")), ids=lambda case: case.name)
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

    @pytest.mark.parametrize("splits", sample((False, True), [False]), ids=["by_rule", "in_splits"])
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

    @pytest.mark.parametrize("dtype", sample((torch.float32, torch.float16), [torch.float16]), ids=str)
    @pytest.mark.parametrize("length", sample((27, 128), [27]))
    @pytest.mark.usefixtures("ordered_dots")
    def test_invariant_chain_is_decoding(self, length: int, dtype: torch.dtype) -> None:
        nodes = 9
        inputs = chain_inputs(length, nodes, dtype)
        chain = run_attention(inputs, configs=small_configs(invariant=True))
        for step in range(nodes):
            one = run_attention(chain_step(inputs, step), configs=small_configs(invariant=True))
            for got, wanted in zip(chain, one, strict=True):
                assert torch.equal(got[step], wanted[0]), (step, length)

    @pytest.mark.slow
    @pytest.mark.usefixtures("ordered_dots")
    def test_invariant_by_argument(self) -> None:
        """The operator's argument, in a case where one node and nine nodes are split differently."""
        inputs = chain_inputs(700, 9, torch.float16)
        equal = []
        for invariant in (False, True):
            chain = run_attention(inputs | {"invariant": invariant})
            ones = [run_attention(chain_step(inputs, step) | {"invariant": invariant}) for step in (0, 4, 8)]
            equal.append([torch.equal(chain[1][step], one[1][0]) for step, one in zip((0, 4, 8), ones, strict=True)])
        assert not all(equal[0]), "the fast mode gives the same bits: nothing is tested"
        assert all(equal[1])

    def test_classes_that_are_launched(self) -> None:
        """One launch if all sequences are known to be alike, unless a graph is captured for other batches."""
        from specmemo_kernels.backends.kernel_config import attention_configs, launched_classes

        classes = attention_configs("sm_90", 128, 128, 4, torch.float16)
        assert [c.max_nodes for c in classes][:2] == [4, 64]
        assert launched_classes(classes, 8, 8, 1, 4000) == (classes[:1], 8)
        assert launched_classes(classes, 200, 8, 25, 4000) == (classes[1:2], 4)
        assert launched_classes(classes, 199, 8, 25, 4000) == (classes[:2], 8)
        assert launched_classes(classes, 200, 8, 25, 4000, replayed=True) == (classes[:2], 8)
        assert launched_classes(classes, 200, 8, 25, 4000, replayed=True, min_nodes=5) == (classes[1:2], 4)

    def test_workspace_is_bounded(self) -> None:
        """The declared workspace covers the states of every step's splits."""
        from specmemo_kernels import ops
        from specmemo_kernels.backends.kernel_config import attention_configs, launched_classes, split_state_bytes
        from specmemo_kernels.cache.kv_storage import LayerKV

        for heads, kv_heads, head_dim, v_dim in ((8, 2, 64, 64), (32, 1, 128, 128), (16, 16, 48, 32)):
            layer = LayerKV(kv_heads, head_dim, v_dim, torch.float16, torch.device("cpu"))
            split_size, row_bytes = ops.split_workspace("triton", layer, heads)
            classes = attention_configs("interpreter", head_dim, v_dim, heads // kv_heads, torch.float16)
            for rows, batch, nodes in ((256, 1, 256), (256, 2, 200), (40, 8, 5), (1, 1, 1), (70, 1, 70)):
                for slots in (nodes, 511, 512, 513, 5000, 32_768):
                    _, splits = launched_classes(classes, rows, batch, nodes, slots)
                    least = split_state_bytes(rows, heads, v_dim, splits)
                    assert least <= rows * row_bytes * -(-slots // split_size)

    def test_invariant_is_one_class(self) -> None:
        from specmemo_kernels.backends.kernel_config import attention_configs
        from specmemo_kernels.backends.kernel_target import TARGETS

        for target in TARGETS:
            assert len(attention_configs(target, 128, 128, 4, torch.float16, True)) == 1

    def test_refusals(self) -> None:
        inputs = problem(AttentionCase("small", (3,), (2,)), torch.float64)
        with pytest.raises(ValueError, match="float64"):
            run_attention(inputs)

    def test_nothing_to_do(self) -> None:
        out, lse = run_attention(problem(AttentionCase("none", (3, 4), (0, 0), tree=False), torch.float32))
        assert out.shape == (0, 4, 64)
        assert lse.shape == (0, 4)
