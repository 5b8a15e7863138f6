"""Guarantees of the C++ backend: every instruction set, and the same bits in any batch, chunk and thread count."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
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
from instruction_sets import each_isa  # noqa: F401  # the fixture isa
from op_cases import PAGED_CASES, PagedCase, append_inputs, commit_inputs
from selection import sample

from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LONG = AttentionCase("several_splits", (1500, 40, 511), (9, 3, 2), num_qo_heads=4, num_kv_heads=1)
LONGER = AttentionCase("long_context", (4096,), (8,), num_qo_heads=4, num_kv_heads=1, head_dim=128)
# Sequences of few rows, which are read where they lie: many heads, long and short, beside one that isn't.
FEW = [
    AttentionCase("few_mha", (1500, 40, 700, 64), (1, 2, 2, 1), num_qo_heads=60, num_kv_heads=60),
    AttentionCase("few_wide", (33, 600), (2, 1), num_qo_heads=2, num_kv_heads=2, head_dim=256, v_head_dim=128),
    AttentionCase("few_128", (90, 511, 513), (3, 1, 2), num_qo_heads=6, num_kv_heads=6, head_dim=128, page_size=7),
    AttentionCase("few_unequal", (100, 20), (7, 5), num_qo_heads=2, num_kv_heads=2, head_dim=32, v_head_dim=96),
    AttentionCase(
        "few_each", (600,) * 8, tuple(range(1, 9)), num_qo_heads=3, num_kv_heads=3, head_dim=160, v_head_dim=80
    ),
    AttentionCase("few_short", (300, 0, 17), (1, 4, 9), num_qo_heads=8, num_kv_heads=4, by_head=False),
    AttentionCase("few_chunk", (3, 500), (8, 5), num_qo_heads=1, num_kv_heads=1, tree=False, page_size=1),
    AttentionCase("few_extras", (75, 900), (2, 2), num_qo_heads=3, num_kv_heads=3, window=16, softcap=8.0, sinks=True),
]
CODES = [c for c in QUANTISED_CASES if c.name.startswith(("ragged-", "head_dim_80-", "v_narrower-", "all_extras-"))]


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", sample(DTYPES, DTYPES[:2]), ids=str)
@pytest.mark.parametrize(
    "case",
    sample([*ATTENTION_CASES, LONG, LONGER, *FEW, *CODES], [*ATTENTION_CASES, LONG, LONGER, *FEW[1:], *CODES]),
    ids=lambda c: c.name,
)
def test_attention_of_every_instruction_set(isa: str, case: AttentionCase, dtype: torch.dtype) -> None:
    inputs = attention_inputs(case, dtype)
    budget = case_budget(case, dtype)
    for invariant in (False, True):
        out, lse = ops.tree_attention(**{**inputs, "invariant": invariant}, backend="cpu")
        assert float((out.double() - budget.out).abs().max()) <= budget.out_error, invariant
        assert float((lse.double() - budget.lse).abs().max()) <= budget.lse_error, invariant


@pytest.mark.parametrize("head_dim", [2, 12, 20, 40, 60, 104, 200])
def test_head_dims_that_fill_no_register(isa: str, head_dim: int) -> None:
    case = AttentionCase("odd", (70, 9), (5, 7), head_dim=head_dim, v_head_dim=head_dim + 2)
    for dtype in DTYPES:
        inputs = attention_inputs(case, dtype)
        budget = case_budget(case, dtype)
        out, _ = ops.tree_attention(**inputs, backend="cpu")
        assert float((out.double() - budget.out).abs().max()) <= budget.out_error, dtype


@pytest.mark.parametrize("dtype", sample(DTYPES, DTYPES[:2]), ids=str)
@pytest.mark.parametrize(
    "name", ["ragged", "page_edges", "window", "all_extras", "several_splits", *(c.name for c in FEW)]
)
def test_a_sequence_is_the_same_bits_alone_and_in_a_batch(isa: str, name: str, dtype: torch.dtype) -> None:
    case = next(c for c in [*ATTENTION_CASES, LONG, *FEW] if c.name == name)
    inputs = attention_inputs(case, dtype)
    out, lse = ops.tree_attention(**inputs, backend="cpu")
    bounds = inputs["qo_indptr"].tolist()
    for row in (row for row, nodes in enumerate(case.nodes) if nodes):
        own, own_lse = ops.tree_attention(**one_sequence(inputs, row), backend="cpu")
        assert torch.equal(own, out[bounds[row] : bounds[row + 1]])
        assert torch.equal(own_lse, lse[bounds[row] : bounds[row + 1]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("length", [2100, 100])
@pytest.mark.parametrize("nodes", [33, 2])
def test_the_number_of_threads_changes_no_bit(
    threads: Any, length: int, nodes: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """Whether work is divided by heads, by splits or by nodes."""
    heads = 8 if nodes > 2 else kv_heads
    case = AttentionCase("threads", (length,), (nodes,), num_qo_heads=heads, num_kv_heads=kv_heads)
    inputs = attention_inputs(case, dtype)
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        results.append(ops.tree_attention(**inputs, backend="cpu"))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def with_room(inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The inputs of one sequence with pages for ``tokens`` more, ids in order."""
    page_size, length = inputs["k_pages"].shape[1], int(inputs["seq_lens"][0])
    pages = -(-(length + tokens) // page_size)
    used = inputs["block_table"][0, : -(-length // page_size)].long()
    result = inputs | {"block_table": torch.arange(pages, dtype=torch.int32)[None]}
    for name in ("k_pages", "v_pages"):
        result[name] = inputs[name].new_full((pages, *inputs[name].shape[1:]), math.nan)
        result[name][: len(used)] = inputs[name][used]
    return result


def one_after_another(inputs: dict[str, Any], path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of a path's nodes, each alone after the earlier ones were appended to the pages."""
    bounds, results = torch.tensor([0, 1], dtype=torch.int32), []
    inputs = inputs | {name: inputs[name].clone() for name in ("k_pages", "v_pages")}
    for depth, node in enumerate(path):
        row = {name: inputs[name][node : node + 1] for name in ("q", "k_new", "v_new")}
        row |= {"seq_lens": inputs["seq_lens"] + depth, "qo_indptr": bounds}
        results.append(ops.tree_attention(**inputs | row | {"tree_mask": None}, backend="cpu"))
        pages = (inputs["k_pages"], inputs["v_pages"], inputs["block_table"])
        ops.append_paged_kv(row["k_new"], row["v_new"], *pages, row["seq_lens"], bounds, backend="cpu")
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


PATHS = [
    AttentionCase("path", (0,), (20,)),
    AttentionCase("across_blocks", (60,), (20,)),
    AttentionCase("across_splits", (500,), (70,), num_qo_heads=6, num_kv_heads=2),
    AttentionCase("at_a_split", (511,), (20,), head_dim=40, v_head_dim=24, page_size=5),
    AttentionCase("extras", (130,), (30,), window=9, softcap=8.0, sinks=True),
    AttentionCase("window_of_new_rows", (62,), (66,), num_qo_heads=3, num_kv_heads=3, window=3),
    AttentionCase("tasks", (90,), (40,), num_qo_heads=64, num_kv_heads=2, head_dim=16),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PATHS, ids=lambda c: c.name)
@pytest.mark.parametrize("shape", ["tree", "chain", "chunk", "root and leaves"])
def test_a_path_is_the_same_bits_as_one_token_after_another(
    isa: str, case: AttentionCase, shape: str, dtype: torch.dtype
) -> None:
    """In invariant mode every node's key is at its position, whatever other nodes are in the pass."""
    nodes = case.nodes[0]
    inputs = with_room(attention_inputs(case, dtype), nodes) | {"invariant": True}
    parents = list(range(-1, nodes - 1))
    if shape == "tree":
        g = torch.Generator().manual_seed(nodes)
        parents = [-1] + [int(torch.randint(max(0, i - 5), i, (), generator=g)) for i in range(1, nodes)]
    elif shape == "root and leaves":
        parents = [-1] + [0] * (nodes - 1)
    mask = mask_words(torch.tensor(parents, dtype=torch.int32), (nodes + 63) // 64)
    inputs["tree_mask"] = None if shape == "chunk" else mask
    out, lse = ops.tree_attention(**inputs, backend="cpu")
    for leaf in sorted(set(range(nodes)) - set(parents))[-8:]:
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        expected = one_after_another(inputs, path)
        assert torch.equal(out[path], expected[0])
        assert torch.equal(lse[path], expected[1])


@pytest.mark.parametrize("dtype", sample(DTYPES, DTYPES[:2]), ids=str)
@pytest.mark.parametrize(
    ("length", "nodes", "few"), [(100, 8, True), (100, 9, False), (900, 8, True), (900, 9, False), (900, 2, True)]
)
def test_few_nodes_have_a_kernel_of_their_own(isa: str, length: int, nodes: int, few: bool, dtype: torch.dtype) -> None:
    """This kernel sums in another order, which shows that both kernels are tested."""
    case = AttentionCase("few", (length,), (nodes,), num_qo_heads=32, num_kv_heads=32, head_dim=128, tree=False)
    inputs = attention_inputs(case, dtype)
    lse, packed = (ops.tree_attention(**{**inputs, "invariant": on}, backend="cpu")[1] for on in (False, True))
    assert torch.equal(lse, packed) is not few


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PAGED_CASES, ids=lambda c: c.name)
def test_rows_are_copied_by_every_instruction_set(isa: str, case: PagedCase, dtype: torch.dtype) -> None:
    """Each has its own stores. Bits equal the reference's, and all other bits of random pages stay."""
    for make, copy in ((append_inputs, ops.append_paged_kv), (commit_inputs, ops.commit_paged_kv)):
        own, wanted = make(case, dtype), make(case, dtype)
        copy(**own, backend="cpu")
        copy(**wanted, backend="reference")
        for pages in ("k_pages", "v_pages"):
            bits = [x[pages].contiguous().view(torch.uint8) for x in (own, wanted)]
            assert torch.equal(*bits), (copy.__name__, pages)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("what", ["q", "k_new"])
def test_nan_comes_through(isa: str, what: str, invariant: bool, softcap: float | None) -> None:
    """NaN must not become finite numbers."""
    inputs = attention_inputs(AttentionCase("nan", (30,), (4,), tree=False, softcap=softcap), torch.float32)
    inputs[what][1, 0, 0] = float("nan")
    out, lse = ops.tree_attention(**{**inputs, "invariant": invariant}, backend="cpu")
    assert out[1, 0].isnan().all()
    assert lse[1, 0].isnan()
    assert out[0].isfinite().all()


HIDDEN = [
    case
    for case in [*ATTENTION_CASES, LONG, *FEW, *CODES]
    if case.name.startswith(("page_edges", "gqa8", "wide", "causal", "window", "all_extras", "several", "few_"))
    and case.nodes[0] > 1
]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", sample(DTYPES, DTYPES[:1]), ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpu", "invariant"])
@pytest.mark.parametrize("case", HIDDEN, ids=lambda c: c.name)
def test_values_that_a_node_does_not_see(case: AttentionCase, backend: str, dtype: torch.dtype, bad: float) -> None:
    """NaN and infinity of a sibling, or of a token before the window, are in no result but those that see them."""
    inputs, error = attention_inputs(case, dtype), case_budget(case, dtype).out_error
    inputs["invariant"], kind = backend == "invariant", "reference" if backend == "reference" else "cpu"
    places: list[tuple[str, Any]] = [("v_new", case.nodes[0] // 2)]
    if case.window is not None and case.seq_lens[0] > case.window:
        page, slot = divmod(case.seq_lens[0] - case.window + 1, case.page_size)  # in the root's window alone
        place = (int(inputs["block_table"][0, page]), slot)
        places.append(("v_pages" if case.kv_dtype is None else "v_scales", place))
    for name, place in places:
        results = []
        for value in (0.0, 1.0, bad):
            changed = inputs[name].clone()
            changed[place] = value
            results.append(ops.tree_attention(**{**inputs, name: changed}, backend=kind)[0])
        without, other, found = results
        sees = (without != other).flatten(1).any(1)
        assert sees.any()
        assert not sees.all()
        assert float((found - without)[~sees].abs().max()) <= 2 * error
        assert not found[sees].isfinite().all(2).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab", "hidden"), [(1, 7, 3), (5, 1000, 64), (25, 3001, 200), (7, 97, 2085)])
def test_lm_head_of_every_instruction_set(isa: str, rows: int, vocab: int, hidden: int, dtype: torch.dtype) -> None:
    """Small integers make every sum exact, so the tokens are those of float64, ties to the lowest."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randint(-1, 2, (rows, hidden), generator=g).double()
    w = torch.randint(-1, 2, (vocab, hidden), generator=g).double()
    bias = torch.randint(-2, 3, (vocab,), generator=g).double()
    logits = (x @ w.T + bias).to(dtype)
    k = min(vocab, 10)
    values, tokens = ops.lm_head_topk(x.to(dtype), w.to(dtype), bias.to(dtype), k=k, backend="cpu")
    order = torch.argsort(logits.double(), dim=1, descending=True, stable=True)[:, :k]
    assert torch.equal(tokens, order)
    assert torch.equal(values, logits.gather(1, order))
    assert torch.equal(ops.lm_head_argmax(x.to(dtype), w.to(dtype), bias.to(dtype), backend="cpu"), order[:, 0])


def test_lm_head_takes_nan_for_the_largest_as_torch_does(isa: str) -> None:
    hidden, weight = torch.ones(1, 4), torch.arange(400.0).reshape(100, 4)
    weight[17, 2] = weight[60, 0] = float("nan")
    logits = hidden @ weight.T
    assert ops.lm_head_argmax(hidden, weight, backend="cpu").item() == logits.argmax().item() == 17
    assert ops.lm_head_topk(hidden, weight, k=3, backend="cpu")[1].tolist() == [[17, 60, 99]]


def test_a_block_of_keys_without_finite_scores(isa: str) -> None:
    """Scores of minus infinity have no weight, however small the later ones are."""
    keys = torch.full((70, 1, 1), -math.inf)
    keys[64:, 0, 0] = torch.linspace(-800, -810, 6)
    q, values = torch.ones(70, 1, 1), torch.randn(70, 1, 3, generator=torch.Generator().manual_seed(0))
    pages, bounds = torch.empty(0, 1, 1, 1), torch.tensor([0, 70], dtype=torch.int32)
    table, lengths = torch.empty(1, 0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out, lse = ops.tree_attention(
        q, keys, values, pages, pages.new_empty(0, 1, 1, 3), table, lengths, bounds, scale=1.0, backend="cpu"
    )
    scores = keys[:, 0, 0].double()
    rounding = {"rtol": 1e-4, "atol": 1e-4}  # of scores of 800 in float32
    torch.testing.assert_close(out[-1, 0].double(), scores.softmax(0) @ values[:, 0].double(), **rounding)
    torch.testing.assert_close(lse[-1, 0].double(), scores.logsumexp(0), **rounding)


def test_log_probs_of_the_least_logits(isa: str) -> None:
    hidden, weight = torch.ones(1, 1), torch.full((40, 1), torch.finfo(torch.float32).min)
    values, _, lse = ops.lm_head_log_probs(hidden, weight, k=2, backend="cpu")
    assert lse.item() == weight[0].item()
    assert values.tolist() == [[0.0, 0.0]]


def test_lm_head_rows_that_are_apart(isa: str) -> None:
    g = torch.Generator().manual_seed(0)
    wide, weight = torch.randn(6, 3, 64, generator=g), torch.randn(500, 64, generator=g)
    rows = wide[:, 1]
    assert not rows.is_contiguous()
    expected = (rows.double() @ weight.double().T).argmax(1)
    assert torch.equal(ops.lm_head_argmax(rows, weight, backend="cpu"), expected)


# A sequence has fewer KV heads than there are threads, or more; threads are more than the machine's, or fewer.
WORKSPACES = [((8, 1), "int8", 2), ((32, 8), None, 5), ((8, 1), None, 2), ((8, 1), None, 1), ((4, 4), None, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_dtype", "threads_set"), WORKSPACES)
def test_the_workspace_is_no_larger_than_declared(
    heads: tuple[int, int], kv_dtype: str | None, threads_set: int
) -> None:
    """The kernels' workspace after trees, chunks and batches, in a fresh process."""
    code = f"""
import sys, torch
sys.path.insert(0, {os.path.dirname(__file__)!r})
from cases import AttentionCase, attention_inputs
from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu
from specmemo_kernels.cache.kv_storage import LayerKV
torch.set_num_threads({threads_set})
splits, case_dtype = 0, {"torch.int8" if kv_dtype else None}
for lengths, nodes, tree in (((3000,), (64,), True), ((900, 5), (7, 64), True), ((0, 100), (300, 200), False)):
    case = AttentionCase("", lengths, nodes, *{heads}, 64, tree=tree, kv_dtype={kv_dtype!r})
    ops.tree_attention(**attention_inputs(case, torch.float32), backend="cpu")
    splits = max(splits, sum(n * (-(-(length + n) // 512) + 1) for length, n in zip(lengths, nodes)))
layer = LayerKV({heads[1]}, 64, 64, torch.float32, torch.device("cpu"))
fixed = ops.fixed_workspace("cpu", layer, {heads[0]}, case_dtype)
_, row_bytes = ops.split_workspace("cpu", layer, {heads[0]})
print(_cpu.arena_bytes(), fixed + splits * row_bytes)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    held, declared = map(int, result.stdout.split())
    assert 0 < held <= declared + (threads_set + 1) * 4096, "arenas are whole pages"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_sinks_may_have_another_dtype(dtype: torch.dtype) -> None:
    """They keep their precision, and the range of float32."""
    inputs = attention_inputs(AttentionCase("sinks", (30, 4), (3, 5), sinks=True), torch.bfloat16)
    same = inputs | {"sinks": inputs["sinks"].to(dtype)}
    assert torch.equal(ops.tree_attention(**same, backend="cpu")[0], ops.tree_attention(**inputs, backend="cpu")[0])
    other = inputs | {"sinks": torch.linspace(1, 7.03, len(inputs["sinks"])).to(dtype)}
    found, expected = (ops.tree_attention(**other, backend=backend)[1] for backend in ("cpu", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_are_tensors_like_any_other(mode: Any) -> None:
    inputs = attention_inputs(AttentionCase("results", (30, 4), (3, 5), v_head_dim=24), torch.bfloat16)
    with mode():
        for result in ops.tree_attention(**inputs, backend="cpu"):
            like = torch.empty(result.shape, dtype=result.dtype)
            assert type(result) is torch.Tensor
            assert (result.stride(), result.device) == (like.stride(), like.device)
            assert (result.is_inference(), result.requires_grad) == (like.is_inference(), False)
            assert result.untyped_storage().nbytes() == like.untyped_storage().nbytes()
            assert result.data_ptr() % 64 == 0


def test_float64_is_refused_by_name() -> None:
    inputs = attention_inputs(ATTENTION_CASES[0], torch.float64)
    with pytest.raises(ValueError, match=r"q has dtype torch\.float64; backend 'cpu' computes float32"):
        ops.tree_attention(**inputs, backend="cpu")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_instruction_set_can_be_forced() -> None:
    code = "import torch; from specmemo_kernels.backends import _cpu; print(_cpu.isa())"
    for name in _cpu.isas():
        assert run_python(code, SPECMEMO_CPU_ISA=name).stdout.strip() == name


@pytest.mark.slow
def test_an_unknown_instruction_set_is_an_error_that_lists_the_known() -> None:
    code = "import torch; from specmemo_kernels.backends import _cpu; print(_cpu.isa())"
    result = run_python(code, SPECMEMO_CPU_ISA="mmx")
    assert result.returncode != 0
    assert "SPECMEMO_CPU_ISA is 'mmx', this machine can run" in result.stderr
    with pytest.raises(ValueError, match=r"instruction set 'mmx' can't be used here; there are .*(baseline|neon)"):
        _cpu.use_isa("mmx")


def test_kernels_run_on_the_threads_that_torch_has() -> None:
    """No second OpenMP runtime: the kernels use torch's."""
    mapped = Path("/proc/self/maps").read_text().split() if sys.platform == "linux" else []
    loaded = {Path(path).name for path in mapped if path.startswith("/")}
    expected = next((kind for kind in ("libgomp", "libomp") if any(kind in name for name in loaded)), "std::thread")
    assert _cpu.thread_runtime() == expected


@pytest.mark.skipif(not Path("/proc/self/task").exists() or _cpu.thread_runtime() != "libgomp", reason="libgomp, /proc")
def test_a_thread_gives_its_workers_back(threads: Any) -> None:
    """OpenMP's workers of the calling thread end, those of others stay, and the next loop has new ones."""
    threads(3)
    inputs = attention_inputs(AttentionCase("threads", (600,), (4,), num_qo_heads=12, num_kv_heads=12), torch.float32)
    counts = []

    def compute() -> torch.Tensor:
        return ops.tree_attention(**inputs, backend="cpu")[0]

    def in_a_thread() -> None:
        torch.set_num_threads(3)
        compute()
        counts.append(len(os.listdir("/proc/self/task")))
        _cpu.release_threads()
        deadline = time.monotonic() + 60
        while len(os.listdir("/proc/self/task")) > counts[0] - 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append(len(os.listdir("/proc/self/task")))
        assert torch.equal(compute(), expected)
        counts.append(len(os.listdir("/proc/self/task")))

    expected = compute()
    other = threading.Thread(target=in_a_thread)
    other.start()
    other.join()
    assert counts == [counts[0], counts[0] - 2, counts[0]]
    assert torch.equal(compute(), expected)


TWO_COPIES = """
import importlib.util, sys
from specmemo_kernels.backends import _cpu

spec = importlib.util.spec_from_file_location("other._cpu", sys.argv[1])
other = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
assert other.Blocks is not _cpu.Blocks
print(other.Blocks(4096).nbytes, _cpu.Blocks(4096).nbytes, other.isa() == _cpu.isa())
"""


def test_two_copies_of_the_module(tmp_path: Path) -> None:
    """As a hub kernel beside the package."""
    copied = tmp_path / Path(_cpu.__file__).name
    copied.write_bytes(Path(_cpu.__file__).read_bytes())
    command = [sys.executable, "-c", TWO_COPIES, str(copied)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "0", "True"], done.stderr
