"""The small operators of every backend against oracles in plain Python; pools are compared bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import AttentionCase, attention_inputs, one_sequence
from op_cases import (
    LM_HEAD_CASES,
    PAGED_CASES,
    VERIFY_CASES,
    LmHeadCase,
    PagedCase,
    VerifyCase,
    append_inputs,
    commit_inputs,
    lm_head_inputs,
    verify_inputs,
)

from specmemo_kernels import ops

Inputs = dict[str, Any]
BACKENDS = ("reference", "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_paged = pytest.mark.parametrize("case", PAGED_CASES, ids=lambda case: case.name)


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all bits are equal, NaN payloads included."""
    same = (x.contiguous().view(torch.uint8) for x in (got, wanted))
    return got.shape == wanted.shape and torch.equal(*same)


def slot_of(inputs: Inputs, sequence: int, position: int) -> tuple[int, int]:
    page_size = inputs["k_pages"].shape[-3]
    return int(inputs["block_table"][sequence, position // page_size]), position % page_size


def after_append(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected pools, written row by row."""
    k_pages, v_pages = inputs["k_pages"].clone(), inputs["v_pages"].clone()
    bounds = inputs["qo_indptr"].tolist()
    for sequence, length in enumerate(inputs["seq_lens"].tolist()):
        for i in range(bounds[sequence + 1] - bounds[sequence]):
            page, slot = slot_of(inputs, sequence, length + i)
            if page < 0:
                continue
            k_pages[page, slot] = inputs["k_new"][bounds[sequence] + i]
            v_pages[page, slot] = inputs["v_new"][bounds[sequence] + i]
    return k_pages, v_pages


def after_commit(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected pools, written slot by slot and layer by layer."""
    k_pages, v_pages = inputs["k_pages"].clone(), inputs["v_pages"].clone()
    for sequence, length in enumerate(inputs["seq_lens"].tolist()):
        for i in range(int(inputs["accept_length"][sequence]) + 1):
            page, slot = slot_of(inputs, sequence, length + i)
            if page < 0:
                continue
            row = int(inputs["qo_indptr"][sequence]) + int(inputs["accept_index"][sequence, i])
            for layer in range(k_pages.shape[0]):
                k_pages[layer, page, slot] = inputs["k_scratch"][layer, row]
                v_pages[layer, page, slot] = inputs["v_scratch"][layer, row]
    return k_pages, v_pages


@each_backend
@each_dtype
@each_paged
def test_append_writes_its_slots_only(backend: str, dtype: torch.dtype, case: PagedCase) -> None:
    """Rows that are views of ``[1, heads, N, dim]`` are written to shuffled pages; all other bits stay."""
    inputs = append_inputs(case, dtype)
    k_pages, v_pages = after_append(inputs)
    ops.append_paged_kv(**inputs, backend=backend)
    assert same_bits(inputs["k_pages"], k_pages)
    assert same_bits(inputs["v_pages"], v_pages)


@each_backend
def test_rows_behind_the_last_sequence_belong_to_none(backend: str) -> None:
    """A batch padded for a graph: NaN in rows behind ``qo_indptr[-1]`` reaches no result and no page."""
    inputs = append_inputs(PagedCase("padded", (5, 0, 30), (9, 0, 2), (0, 0, 0), head_dim=8), torch.float32)
    expected = after_append(inputs)
    pages = [torch.randn_like(inputs[name]) for name in ("k_pages", "v_pages")]
    queries, padding = torch.randn(11, 4, 8), torch.full((3, 2, 8), float("nan"))
    metadata = [inputs[name] for name in ("block_table", "seq_lens", "qo_indptr")]
    bounds: dict[str, Any] = {"scale": 0.3, "max_qo_len": 9, "min_qo_len": 2, "backend": backend}
    results = []
    for rows in (0, 3):
        k, v = (torch.cat([inputs[name], padding[:rows]]) for name in ("k_new", "v_new"))
        q = torch.cat([queries, padding[:rows].repeat(1, 2, 1)])
        results.append(ops.tree_attention(q, k, v, *pages, *metadata, **bounds))
    for exact, padded in zip(*results, strict=True):
        assert torch.equal(exact, padded[:11])
        assert not exact.isnan().any()
    ops.append_paged_kv(**inputs | {"k_new": k, "v_new": v}, backend=backend)
    assert same_bits(inputs["k_pages"], expected[0])
    assert same_bits(inputs["v_pages"], expected[1])


@each_backend
def test_append_of_slices(backend: str) -> None:
    """Keys and values are slices of one tensor, as after a fused projection."""
    inputs = append_inputs(PagedCase("fused", (5, 30), (9, 2), (0, 0), num_kv_heads=2, head_dim=8), torch.float32)
    fused = torch.full((11, 7, 8), float("nan"))
    fused[:, 1:3], fused[:, 4:6] = inputs["k_new"], inputs["v_new"]
    inputs |= {"k_new": fused[:, 1:3], "v_new": fused[:, 4:6]}
    k_pages, v_pages = after_append(inputs)
    ops.append_paged_kv(**inputs, backend=backend)
    assert same_bits(inputs["k_pages"], k_pages)
    assert same_bits(inputs["v_pages"], v_pages)


@each_backend
@each_dtype
@each_paged
def test_commit_writes_accepted_slots_only(backend: str, dtype: torch.dtype, case: PagedCase) -> None:
    """All layers. Scratch rows that weren't accepted are NaN, so that any wrong slot shows."""
    inputs = commit_inputs(case, dtype)
    k_pages, v_pages = after_commit(inputs)
    ops.commit_paged_kv(**inputs, backend=backend)
    assert same_bits(inputs["k_pages"], k_pages)
    assert same_bits(inputs["v_pages"], v_pages)


@each_backend
@pytest.mark.parametrize("nodes", [4, 5, 64, 500])
def test_commit_does_not_depend_on_the_tree_size(backend: str, nodes: int) -> None:
    """The same path in larger and larger trees gives the same pool."""
    inputs = commit_inputs(PagedCase("path", (14,), (4,), (3,)), torch.float32)
    k_pages, v_pages = after_commit(inputs)
    for name in ("k_scratch", "v_scratch"):
        inputs[name] = torch.cat([inputs[name][:, :4], torch.full((2, nodes, 2, 16), float("nan"))], dim=1)
    inputs["qo_indptr"] = torch.tensor([0, nodes], dtype=torch.int32)
    ops.commit_paged_kv(**inputs, backend=backend)
    assert same_bits(inputs["k_pages"], k_pages)
    assert same_bits(inputs["v_pages"], v_pages)


def walked(inputs: Inputs, max_depth: int) -> list[tuple[list[int], int, int]]:
    """Per sequence path, length and bonus: the deepest node that greedy decoding reaches, by a walk over all nodes."""
    bounds, result = inputs["qo_indptr"].tolist(), []
    for start, end in pairwise(bounds):
        draft, target, parents = (
            inputs[name][start:end].tolist() for name in ("draft_tokens", "target_tokens", "parents")
        )
        best: list[int] = []
        for node in range(end - start):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            right = all(
                draft[child] == target[parent]
                and child == min(c for c, p in enumerate(parents) if p == parent and draft[c] == draft[child])
                for parent, child in pairwise(path)
            )
            if right and len(best) < len(path) <= max_depth + 1:
                best = path
        result.append((best, len(best) - 1, target[best[-1]] if best else -1))
    return result


@each_backend
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", VERIFY_CASES, ids=lambda case: case.name)
def test_verify_finds_the_greedy_path(backend: str, case: VerifyCase, seed: int) -> None:
    """Trees with drafts of -1 and equal siblings, sequences without nodes, paths cut at ``max_depth``."""
    inputs = verify_inputs(case, seed)
    index, length, bonus = ops.verify_tree_greedy(**inputs, max_depth=case.max_depth, backend=backend)
    assert (index.dtype, length.dtype, bonus.dtype) == (torch.int32, torch.int32, torch.int64)
    expected = walked(inputs, case.max_depth)
    assert index.tolist() == [path + [-1] * (case.max_depth + 1 - len(path)) for path, _, _ in expected]
    assert length.tolist() == [accepted for _, accepted, _ in expected]
    assert bonus.tolist() == [token for _, _, token in expected]


@each_backend
def test_verify_takes_the_first_of_equal_siblings(backend: str) -> None:
    """Nodes 1 and 2 draft the same token; the path goes through 1, although only 2 has accepted children."""
    parents = torch.tensor([-1, 0, 0, 2], dtype=torch.int32)
    draft, target = torch.tensor([9, 5, 5, 6]), torch.tensor([5, 7, 6, 8])
    index, length, bonus = ops.verify_tree_greedy(
        draft, target, parents, torch.tensor([0, 4], dtype=torch.int32), max_depth=2, backend=backend
    )
    assert (index.tolist(), length.tolist(), bonus.tolist()) == ([[0, 1, -1]], [1], [7])


@each_backend
def test_verify_never_accepts_minus_one(backend: str) -> None:
    """Not even if the target's token is -1."""
    parents = torch.tensor([-1, 0, 1], dtype=torch.int32)
    tokens, indptr = torch.tensor([-1, -1, -1]), torch.tensor([0, 3], dtype=torch.int32)
    index, length, _ = ops.verify_tree_greedy(tokens, tokens, parents, indptr, max_depth=2, backend=backend)
    assert (index.tolist(), length.tolist()) == ([[0, -1, -1]], [0])


@each_backend
@each_dtype
@pytest.mark.parametrize("case", LM_HEAD_CASES, ids=lambda case: case.name)
def test_lm_head_is_exact_on_integers(backend: str, dtype: torch.dtype, case: LmHeadCase) -> None:
    """Sums are exact in every dtype, so order and ties (to the lower token) are determined; rows are strided."""
    inputs = lm_head_inputs(case, dtype)
    logits = inputs["hidden"].long() @ inputs["weight"].long().T + (inputs["bias"].long() if case.bias else 0)
    best = [sorted(range(case.vocab), key=lambda t, row=row: (-row[t], t))[: case.k] for row in logits.tolist()]
    tokens = ops.lm_head_argmax(**inputs, backend=backend)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [row[0] for row in best]
    values, indices = ops.lm_head_topk(**inputs, k=case.k, backend=backend)
    assert (values.dtype, indices.dtype, values.shape) == (dtype, torch.int64, (case.rows, case.k))
    assert indices.tolist() == best
    assert values.long().tolist() == [[row[t] for t in top] for row, top in zip(logits.tolist(), best, strict=True)]


@each_backend
@each_dtype
@pytest.mark.parametrize("case", LM_HEAD_CASES, ids=lambda case: case.name)
def test_lm_head_log_probs(backend: str, dtype: torch.dtype, case: LmHeadCase) -> None:
    """The logits are exact; the log-sum-exp is within float32's error of the float64 result, at any magnitude."""
    inputs = lm_head_inputs(case, dtype)
    logits = inputs["hidden"].double() @ inputs["weight"].double().T + (inputs["bias"].double() if case.bias else 0)
    log_p, tokens, lse = ops.lm_head_log_probs(**inputs, k=case.k, backend=backend)
    assert log_p.dtype == lse.dtype == torch.promote_types(dtype, torch.float32)
    values, best = ops.lm_head_topk(**inputs, k=case.k, backend=backend)
    assert torch.equal(tokens, best)
    assert torch.equal(log_p, (values.to(lse.dtype) - lse[:, None]).clamp(max=0))
    exact = logits.logsumexp(dim=1)
    error = 4 * torch.finfo(torch.float32).eps * (1 + logits.abs().amax() if logits.numel() else 0)
    torch.testing.assert_close(lse.double(), exact, rtol=0, atol=float(error))


@each_backend
def test_log_probs_of_extreme_logits(backend: str) -> None:
    """Large logits neither overflow nor vanish, logits of minus infinity don't count, a NaN makes its row NaN."""
    weight = torch.zeros(100, 16)
    weight[:3, 0] = torch.tensor([1.0, 1.0, 0.5])
    hidden = torch.zeros(3, 16)
    hidden[:, 0] = torch.tensor([3e4, -3e4, math.nan])
    bias = torch.where(torch.arange(100) < 60, 0.0, -math.inf)
    log_p, tokens, lse = ops.lm_head_log_probs(hidden, weight, bias, k=60, backend=backend)
    assert lse[:2].tolist() == pytest.approx([3e4 + math.log(2), math.log(57)], rel=1e-6)
    assert tokens[1].tolist() == [*range(3, 60), 2, 0, 1]
    assert log_p[0, :2].tolist() == pytest.approx([-math.log(2)] * 2, abs=4e-3)  # 3e4 has three decimals
    assert lse[2].isnan()


@each_backend
@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)], ids=str)
def test_lm_head_rounds_before_it_compares(backend: str, dtype: torch.dtype, large: float) -> None:
    """``large + 1`` is ``large`` in this dtype, so the lower token wins although its sum is smaller."""
    weight = torch.zeros(300, 40, dtype=dtype)
    weight[70, 3], weight[150, 3], weight[150, 17], weight[299, 3] = large, large, 1, large
    hidden = torch.ones(2, 40, dtype=dtype)
    assert ops.lm_head_argmax(hidden, weight, backend=backend).tolist() == [70, 70]
    values, indices = ops.lm_head_topk(hidden, weight, k=4, backend=backend)
    assert indices.tolist() == [[70, 150, 299, 0]] * 2
    assert values.tolist() == [[large, large, large, 0]] * 2


@each_backend
@each_dtype
def test_lm_head_on_real_numbers(backend: str, dtype: torch.dtype) -> None:
    """Values are the float64 logits after float32 sums and one rounding; the order is that of the values."""
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(9, 200, generator=g).to(dtype), torch.randn(1003, 200, generator=g).to(dtype)
    bias = torch.randn(1003, generator=g).to(dtype)
    exact = hidden.double() @ weight.double().T + bias.double()
    sums = 200 * torch.finfo(torch.float32).eps * (hidden.double().abs() @ weight.double().abs().T).max()
    error = float(torch.finfo(dtype).eps * exact.abs().max() + sums)
    values, indices = ops.lm_head_topk(hidden, weight, bias, k=20, backend=backend)
    assert float((values.double() - exact.gather(1, indices)).abs().max()) <= error
    assert float((values.double() - exact.topk(20).values).abs().max()) <= error
    pairs = [list(zip((-values).tolist()[row], indices.tolist()[row], strict=True)) for row in range(9)]
    assert all(row == sorted(set(row)) for row in pairs)
    assert torch.equal(ops.lm_head_argmax(hidden, weight, bias, backend=backend), indices[:, 0])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_reference_lm_head_is_the_models_own(dtype: torch.dtype) -> None:
    """Vocabulary slices give the result of ``linear(...).argmax(-1)`` over all rows."""
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(5, 33, generator=g).to(dtype), torch.randn(20000, 33, generator=g).to(dtype)
    whole = torch.nn.functional.linear(hidden, weight)
    assert torch.equal(ops.lm_head_argmax(hidden, weight, backend="reference"), whole.argmax(-1))


BATCH = AttentionCase("batch", (33, 5, 0, 100, 16), (3, 20, 9, 1, 0), window=60, sinks=True)


@each_dtype
def test_a_sequence_ignores_its_batch(dtype: torch.dtype) -> None:
    """Bit for bit on the cpu backend."""
    inputs = attention_inputs(BATCH, dtype)
    together = ops.tree_attention(**inputs, backend="cpu")
    bounds = inputs["qo_indptr"].tolist()
    for index in range(4):
        alone = ops.tree_attention(**one_sequence(inputs, index), backend="cpu")
        for got, wanted in zip(together, alone, strict=True):
            assert torch.equal(got[bounds[index] : bounds[index + 1]], wanted), index


@each_dtype
@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
def test_the_order_of_pages_changes_no_bit(dtype: torch.dtype, kv_dtype: str | None) -> None:
    """Neither of reads nor of appended rows."""
    case = replace(BATCH, kv_dtype=kv_dtype)
    results = []
    for by_head in (False, True):
        inputs = attention_inputs(replace(case, by_head=by_head), dtype)
        assert inputs["k_pages"].is_contiguous() is not by_head
        outputs = ops.tree_attention(**inputs, backend="cpu")
        table = torch.arange(inputs["k_pages"].shape[0], dtype=torch.int32)[None]
        places = (inputs["k_pages"], inputs["v_pages"], table, torch.tensor([3]).int(), torch.tensor([0, 33]).int())
        scales = {name: inputs[name] for name in ("k_scales", "v_scales")}
        ops.append_paged_kv(inputs["k_new"], inputs["v_new"], *places, **scales, backend="cpu")
        written = [inputs[name] for name in ("k_pages", "v_pages", *scales) if inputs[name] is not None]
        results.append([*outputs, *(tensor.contiguous().view(torch.uint8) for tensor in written)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@each_backend
def test_attention_of_views(backend: str) -> None:
    """Rows as transformers passes them, and without bounds: the bits of contiguous rows with bounds."""
    inputs = attention_inputs(BATCH, torch.float32)
    expected = ops.tree_attention(**inputs, backend=backend)
    views = {n: inputs[n].transpose(0, 1).contiguous().transpose(0, 1) for n in ("q", "k_new", "v_new")}
    assert not views["q"].is_contiguous()
    got = ops.tree_attention(**inputs | views | {"max_qo_len": None, "max_seq_len": None}, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@each_backend
def test_a_row_of_zeros_is_causal(backend: str) -> None:
    """A prefill chunk and a tree share a step; the chunk's rows see the same tokens as without a mask."""
    case = AttentionCase("mixed", (21, 30), (6, 40))
    inputs = attention_inputs(case, torch.float32)
    inputs["tree_mask"][6:] = 0
    mixed = ops.tree_attention(**inputs, backend=backend)
    chunk = ops.tree_attention(**one_sequence(inputs | {"tree_mask": None}, 1), backend=backend)
    for got, wanted in zip(mixed, chunk, strict=True):
        torch.testing.assert_close(got[6:], wanted, rtol=0, atol=1e-6)
