"""Every operator on a real GPU: the shared cases, the same bits in any batch, a step captured in a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import ATTENTION_CASES, QUANTISED_CASES, AttentionCase, attention_budget, attention_inputs, one_sequence
from op_cases import (
    CODE_CASES,
    LM_HEAD_CASES,
    PAGED_CASES,
    VERIFY_CASES,
    LmHeadCase,
    PagedCase,
    VerifyCase,
    append_inputs,
    commit_inputs,
    hard_rows,
    lm_head_code_inputs,
    lm_head_inputs,
    verify_inputs,
)
from test_families import batch, greedy
from test_linear import check_linear
from test_ops import same_bits
from tiny_models import random_heads, tiny_model

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.backends import reference
from specmemo_kernels.cache.kv_storage import LayerKV

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
Inputs = dict[str, Any]
POOLS = ("k_pages", "v_pages", "k_scales", "v_scales")
# Compiling takes a second a kernel: all cases in one dtype, some in the others and over codes.
SOME = ("ragged", "gqa8", "wide_mask", "v_narrower", "all_extras", "long")
ATTENTION = [
    *((case, torch.float16) for case in ATTENTION_CASES),
    *((case, dtype) for case in ATTENTION_CASES if case.name in SOME for dtype in (torch.bfloat16, torch.float32)),
    *((case, torch.bfloat16) for case in QUANTISED_CASES if case.name.rpartition("-")[0] in SOME),
]


def on_gpu(inputs: Inputs) -> Inputs:
    return {name: x.cuda() if torch.is_tensor(x) else x for name, x in inputs.items()}


def supported(head_dim: int, dtype: torch.dtype) -> None:
    """Skip cases that the target's rule refuses on this GPU (the refusal is tested without a GPU)."""
    try:
        ops.fixed_workspace("triton", LayerKV(1, head_dim, head_dim, dtype, torch.device("cuda")), 1)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("case", "dtype"), ATTENTION, ids=lambda x: getattr(x, "name", str(x)))
def test_attention(case: AttentionCase, dtype: torch.dtype) -> None:
    supported(case.head_dim, dtype)
    inputs = attention_inputs(case, dtype)
    budget = attention_budget(inputs, dtype)
    out, lse = ops.tree_attention(**on_gpu(inputs), backend="triton")
    assert float((out.cpu().double() - budget.out).abs().max()) <= budget.out_error
    # A GPU's exp2 and log2 are good to a few units in the last place, each of a sum's terms likewise.
    assert float((lse.cpu().double() - budget.lse).abs().max()) <= budget.lse_error


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
@pytest.mark.parametrize("case", PAGED_CASES, ids=lambda case: case.name)
def test_pages_are_written_as_the_reference_writes_them(case: PagedCase, kv_dtype: str | None) -> None:
    """Appending and committing, bit for bit in every slot."""
    for make, name in ((append_inputs, "append_paged_kv"), (commit_inputs, "commit_paged_kv")):
        inputs = make(replace(case, kv_dtype=kv_dtype), torch.float16)
        mine = on_gpu(inputs)
        getattr(ops, name)(**inputs, backend="reference")
        getattr(ops, name)(**mine, backend="triton")
        for pool in POOLS:
            assert inputs[pool] is None or same_bits(mine[pool].cpu(), inputs[pool]), (name, pool)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_of_hard_rows(dtype: torch.dtype) -> None:
    rows = hard_rows(torch.float32)
    pages = torch.zeros(1, len(rows), 1, rows.shape[1], dtype=torch.uint8).view(dtype).cuda()
    scales = torch.zeros(1, len(rows), 1).cuda()
    table, zero = torch.zeros(1, 1, dtype=torch.int32).cuda(), torch.zeros(1, dtype=torch.int32).cuda()
    bounds = torch.tensor([0, len(rows)], dtype=torch.int32).cuda()
    new, own = rows[:, None].cuda(), (pages, pages.clone())
    ops.append_paged_kv(new, new, *own, table, zero, bounds, k_scales=scales, v_scales=scales.clone(), backend="triton")
    codes, wanted = reference.quantize(rows, dtype)
    assert same_bits(pages[0, :, 0].cpu(), codes)
    assert same_bits(scales[0, :, 0].cpu(), wanted)


@pytest.mark.parametrize("case", VERIFY_CASES, ids=lambda case: case.name)
def test_verify(case: VerifyCase) -> None:
    inputs = verify_inputs(case)
    mine = ops.verify_tree_greedy(**on_gpu(inputs), max_depth=case.max_depth, backend="triton")
    wanted = ops.verify_tree_greedy(**inputs, max_depth=case.max_depth, backend="reference")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("case", CODE_CASES, ids=lambda case: case.name)
def test_lm_head_of_codes(case: LmHeadCase) -> None:
    inputs = lm_head_code_inputs(case, torch.float16)
    mine = ops.lm_head_topk(**on_gpu(inputs), k=case.k, backend="triton")
    wanted = ops.lm_head_topk(**inputs, k=case.k, backend="reference")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("case", LM_HEAD_CASES, ids=lambda case: case.name)
def test_lm_head(case: LmHeadCase) -> None:
    """Integers, so that every sum is exact and ties are certain."""
    inputs = lm_head_inputs(case, torch.float16)
    mine = on_gpu(inputs)
    wanted = ops.lm_head_argmax(**inputs, backend="reference")
    assert torch.equal(ops.lm_head_argmax(**mine, backend="triton").cpu(), wanted)
    for a, b in zip(
        ops.lm_head_topk(**mine, k=case.k, backend="triton"),
        ops.lm_head_topk(**inputs, k=case.k, backend="reference"),
        strict=True,
    ):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("rows", [1, 25, 32])
@pytest.mark.parametrize("inputs", [1000, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_layers(dtype: torch.dtype, inputs: int, rows: int) -> None:
    """Near float64, in one kernel with the bits of separate calls, which may have other blocks."""
    from specmemo_kernels.backends import triton

    torch.manual_seed(0)
    x = torch.randn(rows, inputs, dtype=dtype, device="cuda")
    for sizes in ((700, 130, 64), (9000, 1024, 640), (1, 1, 2)):
        weights = [torch.randn(size, inputs, dtype=dtype, device="cuda") for size in sizes]
        for biases in ([None] * 3, [torch.randn(size, dtype=dtype, device="cuda") for size in sizes]):
            for weight, bias, found in zip(weights, biases, triton.linears(x, weights, biases), strict=True):
                check_linear(x.cpu(), weight.cpu(), None if bias is None else bias.cpu(), found.cpu())
                assert torch.equal(found, triton.linear(x, weight, bias, None, False))


@pytest.mark.parametrize(("rows", "dtype"), [(65, torch.bfloat16), (3, torch.float32)], ids=str)
def test_linear_layers_of_torch(rows: int, dtype: torch.dtype) -> None:
    """More rows than the kernels take, and float32: torch's product."""
    from specmemo_kernels.backends import triton

    x, weight = (torch.randn(count, 256, dtype=dtype, device="cuda") for count in (rows, 100))
    assert torch.equal(triton.linears(x, [weight], [None])[0], torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("rows", [7, 64, 300])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
def test_gated_mlp(activation: str, rows: int) -> None:
    torch.manual_seed(0)
    shapes = (rows, 200), (700, 200), (700, 200), (200, 700)
    for dtype in (torch.bfloat16, torch.float16):
        x, *matrices = ((torch.randn(*shape, device="cuda") * shape[1] ** -0.5).to(dtype) for shape in shapes)
        biases = [torch.randn(len(matrix), device="cuda").to(dtype) for matrix in matrices]
        wanted = reference.gated_mlp(*(t.double() for t in (x, *matrices, *biases)), activation, False)
        found = ops.gated_mlp(x, *matrices, *biases, activation=activation, backend="triton")
        error = (found.double() - wanted).norm() / wanted.norm()
        assert float(error) <= 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("heads", [(32, 8), (1, 4), (4, 1), (1, 1)], ids=str)
def test_rotary_pair(heads: tuple[int, int]) -> None:
    """The bits of two calls."""
    from specmemo_kernels.backends import triton

    x, y = (torch.randn(25, count, 128, dtype=torch.bfloat16, device="cuda") for count in heads)
    cos, sin = torch.randn(2, 25, 128, dtype=torch.bfloat16, device="cuda")
    found = triton.rotary_pair(x, y, cos, sin)
    assert torch.equal(found[0], triton.rotary(x, cos, sin))
    assert torch.equal(found[1], triton.rotary(y, cos, sin))


def test_rotary_stored() -> None:
    """The bits of :func:`rotary_pair`, and copies of nothing else."""
    from specmemo_kernels.backends import triton

    x, y, v = (torch.randn(25, count, 128, dtype=torch.bfloat16, device="cuda") for count in (32, 8, 16))
    cos, sin = torch.randn(2, 25, 128, dtype=torch.bfloat16, device="cuda")
    keys, values = torch.full((2, 27, 8, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    found = triton.rotary_stored(x, y, v[:, ::2], cos, sin, keys[1:26], values[1:26])
    expected = triton.rotary_pair(x, y, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(keys[1:26], expected[1])
    assert torch.equal(values[1:26], v[:, ::2])
    assert all(rows.isnan().all() for rows in (keys[0], keys[26], values[0], values[26]))


@pytest.mark.parametrize("in_graph", [False, True])
def test_kernels_that_overlap_read_complete_inputs(in_graph: bool) -> None:
    """Chains of kernels, each behind one that writes its input: the bits of kernels that ran one by one."""
    from specmemo_kernels.backends import triton

    torch.use_deterministic_algorithms(False)
    case = attention_inputs(AttentionCase("chain", (900, 70), (12, 12)), torch.bfloat16)
    fixed = on_gpu(case) | {"min_qo_len": 12}
    shape = fixed["q"].shape
    size = shape[1] * shape[2]
    gate, up, down, wide = ((torch.randn(size, size, device="cuda") * size**-0.5).bfloat16() for _ in range(4))
    weight = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    lengths = torch.stack([fixed["seq_lens"] - i for i in range(16)])
    inputs = torch.randn(16, shape[0], size, device="cuda").bfloat16()
    x = torch.empty_like(inputs[0])

    def chain(after: Any) -> list[torch.Tensor]:
        results = []
        for row, length in zip(inputs, lengths, strict=True):
            x.copy_(row)
            fixed["seq_lens"].copy_(length)
            for _ in range(3):
                (q,) = triton.linears(x, [wide], [None])
                after()
                out, _ = ops.tree_attention(**fixed | {"q": q.view(shape)}, backend="triton")
                after()
                total, normed = triton.add_rms_norm(out.reshape(x.shape), x, weight, 1e-5, 0.0, True)
                after()
                x.copy_(triton.gated_mlp(normed, gate, up, down, None, None, None, "silu", False))
                after()
                _, best = triton.lm_head_topk(x, wide, None, 2)
                after()
            results += [total, x.clone(), best]
        return results

    expected = chain(torch.cuda.synchronize)
    run = chain
    if in_graph:
        chain(lambda: None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = chain(lambda: None)

        def run(_: Any) -> list[torch.Tensor]:
            graph.replay()
            return held

    for _ in range(5):
        found = run(lambda: None)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_probe() -> None:
    """Large products are faster than those of few rows, and few rows cost about as much as one."""
    from specmemo_kernels.planning.device_probe import probe

    profile = probe("cuda", 0.5)
    curve = dict(profile.curves["bfloat16"])
    assert profile.matmul_rate["bfloat16"] >= 1.5 * 2 * 64 / curve[64]
    assert curve[8] <= 2 * curve[1]


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_an_invariant_sequence_ignores_its_batch(kv_dtype: str | None) -> None:
    """Bit for bit."""
    case = AttentionCase("batch", (33, 5, 0, 1100), (3, 20, 9, 1), window=600, sinks=True, kv_dtype=kv_dtype)
    inputs = attention_inputs(case, torch.float16)
    together, bounds = ops.tree_attention(**on_gpu(inputs), backend="triton"), inputs["qo_indptr"].tolist()
    for index in range(4):
        alone = ops.tree_attention(**on_gpu(one_sequence(inputs, index)), backend="triton")
        for got, wanted in zip(together, alone, strict=True):
            assert torch.equal(got[bounds[index] : bounds[index + 1]], wanted), index


def test_an_invariant_chain_is_decoding() -> None:
    """Verifying a chain gives the bits of decoding it one token at a time, each committed before the next."""
    length, nodes = 700, 9
    inputs = on_gpu(attention_inputs(AttentionCase("chain", (length + nodes,), (nodes,), tree=False), torch.float16))
    inputs |= {"seq_lens": torch.tensor([length], dtype=torch.int32).cuda(), "max_seq_len": length, "invariant": True}
    chain, _ = ops.tree_attention(**inputs, backend="triton")
    bounds = torch.tensor([0, 1], dtype=torch.int32).cuda()
    for step in range(nodes):
        at = torch.tensor([length + step], dtype=torch.int32).cuda()
        own = {name: inputs[name][step : step + 1] for name in ("q", "k_new", "v_new")}
        changes = {"seq_lens": at, "qo_indptr": bounds, "max_qo_len": 1, "max_seq_len": length + step}
        one, _ = ops.tree_attention(**inputs | own | changes, backend="triton")
        assert torch.equal(one[0], chain[step]), step
        places = (inputs["k_pages"], inputs["v_pages"], inputs["block_table"], at, bounds)
        ops.append_paged_kv(own["k_new"], own["v_new"], *places, backend="triton")


class Step:
    """One layer's verification step on static tensors: attention, verification, commit."""

    def __init__(self, kv_dtype: str | None) -> None:
        self.case = AttentionCase("step", (90, 37), (12, 12), kv_dtype=kv_dtype)
        # Pages for more tokens than there are, so that lengths can grow.
        room = replace(self.case, seq_lens=(130, 80))
        self.attention = on_gpu(attention_inputs(room, torch.float16)) | {"min_qo_len": min(room.nodes)}
        self.attention["seq_lens"] = torch.tensor(self.case.seq_lens, dtype=torch.int32).cuda()
        self.verify = on_gpu(verify_inputs(VerifyCase("step", self.case.nodes, 11, tokens=2)))
        self.first = {n: x.clone() for n, x in self.attention.items() if n in POOLS and x is not None}

    def restore(self) -> None:
        for name, x in self.first.items():
            self.attention[name].copy_(x)

    def run(self) -> tuple[torch.Tensor, ...]:
        a = self.attention
        out, lse = ops.tree_attention(**a, backend="triton")
        verdict = ops.verify_tree_greedy(**self.verify, max_depth=11, backend="triton")
        pools = {name: None if a[name] is None else a[name][None] for name in POOLS}
        ops.commit_paged_kv(
            a["k_new"][None], a["v_new"][None], pools["k_pages"], pools["v_pages"], a["block_table"], a["seq_lens"],
            a["qo_indptr"], *verdict[:2], k_scales=pools["k_scales"], v_scales=pools["v_scales"], backend="triton",
        )  # fmt: skip
        return out, lse, *verdict

    def pools(self) -> list[torch.Tensor]:
        return [self.attention[name].clone() for name in self.first]


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
def test_a_step_in_a_graph(kv_dtype: str | None) -> None:
    """Captured once, replayed with other lengths and tokens: the same bits as without a graph."""
    torch.use_deterministic_algorithms(False)  # filling fresh memory would be captured as well
    step = Step(kv_dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step.run()
    for lengths, seed in (((90, 37), 0), ((101, 5), 1), ((118, 68), 2)):
        step.attention["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        for name, x in verify_inputs(VerifyCase("step", step.case.nodes, 11, tokens=2), seed).items():
            if name in ("draft_tokens", "target_tokens"):
                step.verify[name].copy_(x)
        step.restore()
        graph.replay()
        got, pools = [x.clone() for x in held], step.pools()
        step.restore()
        wanted = step.run()
        torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=0)
        assert all(torch.equal(a, b) for a, b in zip(got[2:], wanted[2:], strict=True))
        assert all(same_bits(a.cpu(), b.cpu()) for a, b in zip(pools, step.pools(), strict=True))


@pytest.mark.parametrize(("family", "lengths"), [("llama", (12,)), ("llama", (40, 1, 17)), ("gemma2", (30, 9))])
def test_generation_from_graphs(family: str, lengths: tuple[int, ...]) -> None:
    """Captured steps write the tokens of eager steps, in later calls too; the graphs' memory is within the plan."""
    torch.use_deterministic_algorithms(False)
    model = tiny_model(family).cuda()
    inputs = on_gpu(batch(lengths))
    with sk.patch(model, random_heads(model), tree=12, graph=False):
        expected = greedy(model, inputs, 60)
    with sk.patch(model, random_heads(model), tree=12) as handle:
        assert handle.graphs.reason == ""
        for _ in range(2):
            assert torch.equal(greedy(model, inputs, 60), expected)
        stats, kept = handle.stats, handle._pools.steps
        assert kept is not None
        assert kept.failed == ""
        assert stats.graph_steps > 0.8 * stats.steps
        assert sum(step.replay is not None for step in kept._steps.values()) >= 1
        assert handle.bytes_by_part["graphs"] <= handle.plan.parts["graphs"]
        assert torch.equal(greedy(model, inputs, 60), expected)
        pool = handle.pool
        assert pool is not None
        pool.check_integrity()


@pytest.mark.parametrize("sampled", [False, True])
def test_batches_from_padded_graphs(sampled: bool) -> None:
    """Sequences that end one after the other: few graphs, and the tokens of eager steps."""
    torch.use_deterministic_algorithms(False)
    model, written = tiny_model("llama").cuda(), []
    sampling = [sk.Sampling(seed=i) if sampled else None for i in range(9)]
    requests = [sk.Request([5, 6, *range(8, 8 + i)], 10 + 6 * i, [], sampling[i]) for i in range(9)]
    for graph in (False, None):
        with sk.patch(model, random_heads(model), tree=12, graph=graph, max_batch_size=7) as handle:
            written.append([[done.tokens for done in sk.generate_batch(model, requests)] for _ in range(2)])
            kept = handle._pools.steps
            if graph is None:
                assert kept is not None
                assert {shape.sequences for shape in kept._steps} <= {1, 2, 4, 7}
                assert any(step.replay is not None for shape, step in kept._steps.items() if 1 < shape.sequences < 7)
                assert handle.bytes_by_part["graphs"] <= handle.plan.parts["graphs"]
                assert handle.pool is not None
                handle.pool.check_integrity()
    assert written[0] == written[1]


def test_sampled_steps_from_graphs() -> None:
    """The host verifies captured passes: the tokens of eager steps."""
    torch.use_deterministic_algorithms(False)
    model, written = tiny_model("llama").cuda(), []
    requests = [sk.Request([5, 6, 7 + i], 30, [], sk.Sampling(seed=i) if i else None) for i in range(3)]
    for graph in (False, None):
        with sk.patch(model, random_heads(model), tree=12, graph=graph) as handle:
            written.append([completion.tokens for completion in sk.generate_batch(model, requests)])
            kept = handle._pools.steps
            if graph is None:
                assert kept is not None
                assert any(not shape.verified and step.replay is not None for shape, step in kept._steps.items())
                assert handle.bytes_by_part["graphs"] <= handle.plan.parts["graphs"]
    assert written[0] == written[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees one GPU")
def test_a_gpu_that_is_not_the_current_one() -> None:
    """The same tokens, and the current device doesn't change."""
    found = []
    for device in ("cuda:0", "cuda:1"):
        model = tiny_model("llama").to(device)
        inputs = {name: x.to(device) for name, x in batch((40, 1, 17)).items()}
        with sk.patch(model, random_heads(model), tree=12):
            found.append(greedy(model, inputs, 30).cpu())
        assert torch.cuda.current_device() == 0
    assert torch.equal(*found)
