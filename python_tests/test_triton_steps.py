"""The Triton kernels of pages, verification and lm_head, and whole steps, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import in_order, random_parents
from interpreter import INTERPRETING
from op_cases import CODE_CASES, LmHeadCase, hard_rows, lm_head_code_inputs
from selection import sample
from test_families import answers, batch, greedy
from tiny_models import OracleDrafter, tiny_model

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.backends import reference
from specmemo_kernels.backends.kernel_config import KernelConfig, attention_configs
from specmemo_kernels.ops.weight_codes import pack, unpack

pytest.importorskip("triton")


SMALL_CODE_CASES = sample([c for c in CODE_CASES if c.vocab < 1000], ["odd"], lambda case: case.name)
by_head = pytest.mark.parametrize("by_head", sample([True, False], [True]), ids=["by_head", "by_token"])


def paged_problem(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Four sequences over shuffled pages of 7 tokens, keys of 24 and values of 16, NaN in unused slots."""
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


class TestInterpreter:
    __test__ = INTERPRETING

    @by_head
    def test_append(self, by_head: bool) -> None:
        from specmemo_kernels.backends import triton

        pages_problem = paged_problem(torch.Generator().manual_seed(0))
        rows = torch.randn(12, 5, 40, generator=torch.Generator().manual_seed(1)).half()
        new = [rows[:, 1:4, :24], rows[:, 2:, 24:]]  # views: strides that no dense tensor has
        pages = [in_order(pages_problem[name][1], by_head) for name in ("k_pages", "v_pages")]
        rest = [pages_problem[name] for name in ("block_table", "seq_lens", "qo_indptr")]
        same_pages(triton.append_paged_kv, reference.append_paged_kv, [*new, *pages, *rest])

    @by_head
    def test_commit(self, by_head: bool) -> None:
        from specmemo_kernels.backends import triton

        problem = paged_problem(torch.Generator().manual_seed(0))
        arguments = [in_order(x, by_head) if name.endswith("pages") else x for name, x in problem.items()]
        same_pages(triton.commit_paged_kv, reference.commit_paged_kv, arguments)

    @by_head
    @pytest.mark.parametrize("kv_dtype", sample([torch.int8, torch.float8_e4m3fn], [torch.float8_e4m3fn]), ids=str)
    def test_append_of_codes(self, kv_dtype: torch.dtype, by_head: bool) -> None:
        """The reference's bits for rows of any size, ties, outliers, zeros, NaN and infinity."""
        from specmemo_kernels.backends import triton

        rows = hard_rows(torch.float32, 36)
        rows = torch.cat([rows, torch.tensor([float("nan"), float("inf")])[:, None] * torch.ones(2, 36)])
        new = rows[: len(rows) // 3 * 3].unflatten(0, (-1, 3))  # three heads
        pages = in_order(torch.zeros(8, 7, 3, 36, dtype=torch.uint8).view(kv_dtype), by_head)
        scales = in_order(torch.zeros(8, 7, 3), by_head, heads=-1)
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

    @by_head
    @pytest.mark.parametrize("kv_dtype", sample([torch.int8, torch.float8_e4m3fn], [torch.float8_e4m3fn]), ids=str)
    def test_commit_of_codes(self, kv_dtype: torch.dtype, by_head: bool) -> None:
        from specmemo_kernels.backends import triton

        inputs = paged_problem(torch.Generator().manual_seed(0))
        results = []
        for backend in (triton, reference):
            codes = [torch.full_like(inputs[n], 0x33, dtype=torch.uint8).view(kv_dtype) for n in ("k_pages", "v_pages")]
            pools = [in_order(pages, by_head) for pages in codes]
            empty = torch.full(inputs["k_pages"].shape[:-1], float("nan"))
            scales = [in_order(empty.clone(), by_head, heads=-1) for _ in range(2)]
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

    @pytest.mark.parametrize("bias", sample([False, True], [True]), ids=["plain", "bias"])
    @pytest.mark.parametrize(
        ("rows", "vocabulary", "hidden", "dtype"),
        [
            pytest.param(5, 1000, 80, torch.float32, marks=pytest.mark.slow),
            pytest.param(17, 200, 48, torch.float16, marks=pytest.mark.slow),
            pytest.param(5, 90, 48, torch.float32, marks=pytest.mark.slow),
            (1, 33, 48, torch.float16),
        ],
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

    @pytest.mark.parametrize(("vocabulary", "k"), [(1, 1), (300, 7)])
    def test_lm_head_log_probs(self, vocabulary: int, k: int) -> None:
        """Several blocks of the vocabulary, the last one not full, and some logits of minus infinity."""
        from specmemo_kernels.backends import triton

        g = torch.Generator().manual_seed(vocabulary)
        x, weight = torch.randn(5, 24, generator=g), torch.randn(vocabulary, 24, generator=g)
        bias = torch.where(torch.arange(vocabulary) % 3 == 1, -torch.inf, torch.randn(vocabulary, generator=g))
        mine, wanted = (backend.lm_head_log_probs(x, weight, bias, k) for backend in (triton, reference))
        assert torch.equal(mine[1], wanted[1])
        for i in (0, 2):
            torch.testing.assert_close(mine[i], wanted[i], rtol=1e-6, atol=3e-6)

    @pytest.mark.parametrize("dtype", sample((torch.float32, torch.bfloat16, torch.float16), [torch.float16]), ids=str)
    @pytest.mark.parametrize("case", SMALL_CODE_CASES, ids=lambda case: case.name)
    def test_lm_head_of_codes(self, case: LmHeadCase, dtype: torch.dtype) -> None:
        """Small integers; full and partial groups."""
        inputs = lm_head_code_inputs(case, dtype)
        mine, wanted = (
            ops.lm_head_topk(**inputs, k=case.k, backend=name)  # type: ignore[arg-type]
            for name in ("triton", "reference")
        )
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(mine, wanted, strict=True))

    def test_lm_head_of_codes_on_real_numbers(self) -> None:
        """No weight is rounded: float32 sums of the exact dequantised weights."""
        g = torch.Generator().manual_seed(5)
        hidden = torch.randn(3, 200, generator=g).half()
        codes, scales = pack(torch.randn(300, 200, generator=g) / 30)
        exact = hidden.double() @ unpack(codes, scales, 200).double().T
        values, tokens = ops.lm_head_topk(hidden, codes, k=9, scales=scales, backend="triton")
        off = (values.double() - exact.gather(1, tokens)).abs().max()
        assert float(off) <= torch.finfo(torch.float16).eps * float(exact.abs().max()) / 2 + 1e-5
        assert float((values.double() - exact.topk(9).values).abs().max()) <= float(off) + 1e-12

    def test_lm_head_rounds_before_comparing(self) -> None:
        """2048 and 2049 are the same number in float16: the lower token wins, not the larger sum."""
        from specmemo_kernels.backends import triton

        weight = torch.zeros(200, 16, dtype=torch.float16)
        weight[70, 0], weight[150, 0], weight[150, 1] = 2048, 2048, 1
        x = torch.zeros(2, 16, dtype=torch.float16)
        x[:, :2] = 1
        assert triton.lm_head_argmax(x, weight, None).tolist() == [70, 70]

    def test_no_rows_for_the_lm_head(self) -> None:
        from specmemo_kernels.backends import triton

        assert triton.lm_head_argmax(torch.empty(0, 8), torch.ones(5, 8), None).shape == (0,)

    @pytest.mark.parametrize("kv_dtype", sample([None, "int8"], ["int8"]))
    def test_patched_generation(self, kv_dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """The model's own tokens, with exactly the plan's block sizes."""
        from specmemo_kernels.backends.triton import attention

        taken = set()
        launched_classes = attention.launched_classes

        def recorded(classes: tuple[KernelConfig, ...], *sizes: int | None) -> object:
            taken.add(classes)
            return launched_classes(classes, *sizes)

        monkeypatch.setattr(attention, "launched_classes", recorded)
        model = tiny_model("llama", seed=40, num_hidden_layers=1)
        inputs = batch((6,))
        expected = greedy(model, inputs, 4)
        drafter = OracleDrafter(answers(inputs, expected), 1.0)
        with sk.patch(model, drafter, tree=[[0], [0, 0]], backend="triton", kv_dtype=kv_dtype) as handle:
            found = greedy(model, inputs, 4)
            assert kv_dtype or torch.equal(found, expected)
            assert handle.stats.steps
            assert taken == {handle.plan.kernels}
        layer, quantised = handle.facts.layers[0], kv_dtype is not None
        sizes = (layer.head_dim, layer.v_head_dim, handle.facts.num_qo_heads[0] // layer.num_kv_heads)
        assert taken == {attention_configs("interpreter", *sizes, torch.float32, quantised=quantised)}
