"""Quantised pages: the error bound, every backend's bits, pools, plans and patched models."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import AttentionCase, attention_inputs
from op_cases import PAGED_CASES, PagedCase, append_inputs, commit_inputs, hard_rows
from selection import covering, sample
from test_families import answers, batch, greedy
from test_ops import same_bits, slot_of
from test_patch_memory import peak_of, wide_model, with_workspace
from tiny_models import FAMILIES, OracleDrafter, tiny_model

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.backends import reference
from specmemo_kernels.cache.kv_storage import KV_DTYPES, LayerKV
from specmemo_kernels.cache.paged_kv import PagedKVPool

Inputs = dict[str, Any]
each_kv = pytest.mark.parametrize("kv_dtype", KV_DTYPES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
LARGEST = {"int8": 127, "fp8": 448}


def through_pages(rows: torch.Tensor, kv_dtype: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales that ``append_paged_kv`` writes for ``[N, dim]`` rows."""
    pages = torch.zeros(1, len(rows), 1, rows.shape[1], dtype=KV_DTYPES[kv_dtype])
    scales = torch.full((1, len(rows), 1), float("nan"))
    both = (rows[:, None], rows[:, None], pages, pages.clone())
    table, zero = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    bounds = torch.tensor([0, len(rows)], dtype=torch.int32)
    ops.append_paged_kv(*both, table, zero, bounds, k_scales=scales, v_scales=scales.clone(), backend=backend)
    return pages[0, :, 0], scales[0, :, 0]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@each_dtype
@each_kv
def test_what_codes_lose(kv_dtype: str, dtype: torch.dtype, backend: str) -> None:
    """At most half a scale in int8; in fp8 a sixteenth of the element, or half of the smallest code's step.

    Plus float32 roundings; rows below 127 (448) times the smallest normal number become zeros.
    """
    rows = hard_rows(dtype)
    codes, scales = through_pages(rows, kv_dtype, backend)
    exact, held = rows.double(), codes.double() * scales.double()[:, None]
    assert torch.equal(scales == 0, rows.double().abs().amax(1) < LARGEST[kv_dtype] * 2.0**-126)
    step = scales.double()[:, None].expand_as(exact)
    bound = step / 2 if kv_dtype == "int8" else torch.maximum(exact.abs() / 16, step * 2.0**-10)
    slack = 4 * torch.finfo(torch.float32).eps * exact.abs() + LARGEST[kv_dtype] * 2.0**-126 * (step == 0)
    assert bool(((held - exact).abs() <= bound + slack).all())
    largest = codes.double().abs().amax(1)
    assert bool((largest[scales > 0] == LARGEST[kv_dtype]).all()), "the codes' range isn't used"
    assert torch.equal(held.abs().amax(1) == 0, scales == 0)


@each_dtype
@each_kv
def test_cpu_writes_the_references_bits(kv_dtype: str, dtype: torch.dtype) -> None:
    rows = hard_rows(dtype)
    for mine, wanted in zip(
        through_pages(rows, kv_dtype, "cpu"), reference.quantize(rows, KV_DTYPES[kv_dtype]), strict=True
    ):
        assert same_bits(mine, wanted)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@each_kv
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_seen(kv_dtype: str, bad: float, backend: str) -> None:
    """One NaN or infinity makes its token's head NaN; other tokens are unaffected."""
    rows = torch.ones(3, 20)
    rows[1, 7] = bad
    codes, scales = through_pages(rows, kv_dtype, backend)
    held = codes.float() * scales[:, None]
    assert held[1].isnan().all()
    assert held[[0, 2]].isfinite().all()


@each_kv
def test_codes_survive_a_second_trip(kv_dtype: str) -> None:
    """Dequantised elements are quantised to the same codes, in any backend: no drift."""
    codes, scales = through_pages(torch.randn(50, 40, generator=torch.Generator().manual_seed(1)), kv_dtype, "cpu")
    held = codes.float() * scales[:, None]
    again, same = through_pages(held, kv_dtype, "cpu")
    assert torch.equal(again.float(), codes.float())
    torch.testing.assert_close(same, scales, rtol=1e-6, atol=0)


def by_slot(inputs: Inputs, layer: int | None, row: int, sequence: int, position: int) -> None:
    """Write one row to its slot, with the reference's codes."""
    page, slot = slot_of(inputs, sequence, position)
    if page < 0:
        return
    for side in ("k", "v"):
        pages, scales = inputs[f"{side}_pages"], inputs[f"{side}_scales"]
        if layer is None:
            source = inputs[f"{side}_new"][row]
        else:
            source, pages, scales = inputs[f"{side}_scratch"][layer, row], pages[layer], scales[layer]
        codes, scale = reference.quantize(source, pages.dtype)
        pages.view(torch.uint8)[page, slot], scales[page, slot] = codes.view(torch.uint8), scale


def copied(inputs: Inputs) -> Inputs:
    return {name: x.clone() if torch.is_tensor(x) else x for name, x in inputs.items()}


POOLS = ("k_pages", "v_pages", "k_scales", "v_scales")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@each_dtype
@each_kv
@pytest.mark.parametrize("case", PAGED_CASES, ids=lambda case: case.name)
def test_append_writes_its_slots_only(case: PagedCase, kv_dtype: str, dtype: torch.dtype, backend: str) -> None:
    """Codes and scales of its rows, all heads; all other bits of four pools stay."""
    inputs = append_inputs(replace(case, kv_dtype=kv_dtype), dtype)
    wanted, bounds = copied(inputs), inputs["qo_indptr"].tolist()
    for sequence, length in enumerate(inputs["seq_lens"].tolist()):
        for i in range(bounds[sequence + 1] - bounds[sequence]):
            by_slot(wanted, None, bounds[sequence] + i, sequence, length + i)
    ops.append_paged_kv(**inputs, backend=backend)
    assert all(same_bits(inputs[name], wanted[name]) for name in POOLS)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@each_dtype
@each_kv
@pytest.mark.parametrize("case", PAGED_CASES, ids=lambda case: case.name)
def test_commit_writes_accepted_slots_only(case: PagedCase, kv_dtype: str, dtype: torch.dtype, backend: str) -> None:
    """All layers; scratch rows that weren't accepted are NaN and would show."""
    inputs = commit_inputs(replace(case, kv_dtype=kv_dtype), dtype)
    wanted = copied(inputs)
    for sequence, length in enumerate(inputs["seq_lens"].tolist()):
        for i in range(int(inputs["accept_length"][sequence]) + 1):
            row = int(inputs["qo_indptr"][sequence]) + int(inputs["accept_index"][sequence, i])
            for layer in range(case.layers):
                by_slot(wanted, layer, row, sequence, length + i)
    ops.commit_paged_kv(**inputs, backend=backend)
    assert all(same_bits(inputs[name], wanted[name]) for name in POOLS)


@each_kv
def test_a_sequence_ignores_its_batch(kv_dtype: str) -> None:
    """Bit for bit on the cpu backend, as without quantisation."""
    from cases import one_sequence

    inputs = attention_inputs(AttentionCase("batch", (33, 700, 0), (3, 20, 9), kv_dtype=kv_dtype), torch.bfloat16)
    together, bounds = ops.tree_attention(**inputs, backend="cpu"), inputs["qo_indptr"].tolist()
    for index in range(3):
        alone = ops.tree_attention(**one_sequence(inputs, index), backend="cpu")
        for got, wanted in zip(together, alone, strict=True):
            assert torch.equal(got[bounds[index] : bounds[index + 1]], wanted), index


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_scales": None}, "k_scales is None, pages of torch.int8 need it"),
        ({"v_scales": torch.zeros(1, 16, 2)}, r"v_scales has shape \(1, 16, 2\), expected"),
        ({"k_scales": "half"}, "k_scales has dtype torch.float16, expected torch.float32"),
        ({"v_pages": "half"}, "v_pages has dtype torch.float16, expected torch.int8"),
        ({"q": "half"}, "q has dtype torch.float16, expected torch.float32"),
    ],
)
def test_refused(change: Inputs, message: str) -> None:
    inputs = attention_inputs(AttentionCase("errors", (20,), (3,), kv_dtype="int8"), torch.float32)
    change = {name: inputs[name].half() if value == "half" else value for name, value in change.items()}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        ops.tree_attention(**inputs | change)


def test_scales_without_codes_are_refused() -> None:
    inputs = attention_inputs(AttentionCase("errors", (20,), (3,)), torch.float32)
    with pytest.raises(
        ValueError, match=r"scales are for pages of int8 or float8_e4m3fn, k_pages has dtype torch.float32"
    ):
        ops.tree_attention(**inputs | {"k_scales": torch.zeros(5, 16, 2)})


@each_kv
def test_a_pools_bytes_are_what_is_allocated(kv_dtype: str) -> None:
    layers = [
        LayerKV(2, 64, 64, torch.bfloat16, torch.device("cpu")),
        LayerKV(1, 24, 16, torch.float32, torch.device("cpu")),
    ]
    pool = PagedKVPool(layers, num_pages=3, page_size=4, max_sequences=1, max_nodes=5, kv_dtype=kv_dtype)
    pages = [x for g in pool.groups for x in (g.k_pages, g.v_pages, g.k_scales, g.v_scales) if x is not None]
    assert pool.page_bytes == sum(x.nbytes for x in pages) == 12 * (2 * (128 + 8) + 40 + 8)
    assert pool.scratch_bytes == sum(x.nbytes for g in pool.groups for x in (g.k_scratch, g.v_scratch))
    assert pool.k_scales[1] is not None
    assert pool.k_scales[1].data_ptr() == pool.groups[1].k_scales.data_ptr()  # type: ignore[union-attr]


def test_unknown_kv_dtype() -> None:
    with pytest.raises(ValueError, match="kv_dtype is 'int4', expected 'int8', 'fp8' or None"):
        sk.patch(tiny_model("llama"), OracleDrafter([], 0.0), kv_dtype="int4")


FIRST = [("gemma2", "int8"), ("deepseek_v3", "fp8")]


@pytest.mark.parametrize(
    ("family", "kv_dtype"), sample(covering(FAMILIES, KV_DTYPES, first=FIRST), [("gemma2", "int8")])
)
def test_families(family: str, kv_dtype: str) -> None:
    """The cpu backend's tokens are the reference's with the same quantised pages, for a ragged batch across windows."""
    model = tiny_model(family)
    inputs = batch((40, 1, 17))
    drafter = [OracleDrafter(answers(inputs, greedy(model, inputs, 24)), 0.6) for _ in range(2)]
    outputs = []
    for backend, own in zip(("reference", "cpu"), drafter, strict=True):
        with sk.patch(
            model, own, tree=sk.DraftTree.chain(4), page_size=4, backend=backend, kv_dtype=kv_dtype
        ) as handle:
            outputs.append(greedy(model, inputs, 24))
            assert handle.plan.kv_dtype == kv_dtype
            assert handle.pool is not None
            assert handle.pool.k_pages[0].dtype == KV_DTYPES[kv_dtype]
            assert handle.stats.tokens_per_step > 1
    assert torch.equal(*outputs)


@pytest.mark.slow
@each_kv
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_peak_stays_within_the_plan(family: str, kv_dtype: str) -> None:
    """Peak bytes of live tensors; a budget holds more tokens, by the ratio of bytes per token, with the same chunks."""
    model, plans = wide_model(family, seed=20), {}
    budget = with_workspace(model, 3 << 20)
    for kv in (None, kv_dtype):
        with sk.patch(
            model, OracleDrafter([], 0.0), memory_budget=budget, tree=8, max_batch_size=2, kv_dtype=kv, prefill_chunk=64
        ) as handle:
            plans[kv] = handle.plan
            assert handle.plan.max_tokens is not None
            longest = min(handle.plan.max_tokens, 400) - 40
            assert peak_of(handle, batch((longest, longest // 2)), 20) <= sum(handle.plan.parts.values()) <= budget
    layers, plain = handle.facts.layers, plans[None]
    per_token = [sum(layer.page_bytes_per_token(kv) for layer in layers) for kv in (None, kv_dtype)]
    assert plain.max_pages is not None
    assert plans[kv_dtype].prefill_chunk == plain.prefill_chunk
    assert plans[kv_dtype].max_pages > plain.max_pages * 0.7 * per_token[0] / per_token[1]
    assert plans[kv_dtype].parts["tree_scratch"] == plain.parts["tree_scratch"], "scratch isn't quantised"


@pytest.mark.slow
def test_plans_say_so() -> None:
    model = tiny_model("llama")
    with sk.patch(model, OracleDrafter([], 0.0), memory_budget="4MiB", kv_dtype="int8") as handle:
        assert f"KV: {handle.plan.max_pages} pages of 16 tokens in int8;" in str(handle.plan)
        assert json.loads(json.dumps(handle.plan.to_json()))["kv_dtype"] == "int8"
    with sk.patch(model, OracleDrafter([], 0.0), memory_budget="4MiB") as handle:
        assert "int8" not in str(handle.plan)
        assert handle.plan.kv_dtype is None
