"""The operators against their peers and the machine's floor.

    python bench/bench_ops.py --device cpu --model llama3-8b --dtype bf16 --context 4096 --batch 1 --tree 1,8,32 \\
        --json out.json
    python bench/bench_ops.py --model all --context 128,1024,4096,16384 --batch 1,4,8 --tree 1,8,16,25,32,64 \\
        --dtype bf16,fp32
    python bench/bench_ops.py --device cuda --context 2048,8192,32768 --batch 1,8,32 --tree 1,25,64
    python bench/bench_ops.py --op linear --model 1b,llama3-8b --dtype bf16,fp32 --rows 1,2,4,8,16,32,64,128,256
    python bench/bench_ops.py --op linear --device cuda --model llama2-7b,llama3-8b --rows 1,8,25,64
    pytest bench/bench_ops.py            the first command through pytest-benchmark

Every result is checked against float64 before it is timed; then the operator and its peers take turns. Calls rotate
over copies of keys and values, so that they aren't in a cache. Before each call a product with a layer's weights passes
through the caches, as in a decoder. Columns:

- ``vs_best``: time of the fastest peer on gathered keys over the operator's time.
- ``vs_sdpa``: the same for SDPA as usually called. ``vs_paged``: for the fastest peer with the gather it needs.
- ``floor_fraction``: the floor over the operator's time. The floor is max(bytes / read bandwidth, flops / GEMM rate),
  both measured in the same turns.
- ``ms_near``: the same call repeated on each sequence's first four pages, so without the time to read memory.

On a GPU (``bench_gpu.py``) calls are replayed from a graph, the floor is max(bytes / copy bandwidth, flops / matmul
rate), and ``t_vs_t1`` is the time relative to one node.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import linear_op
import op_peers
import pytest
import torch
import typer
from timing import Yardstick, copies, print_rows, rotation, take_turns, write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python_tests"))

from cases import AttentionCase, attention_budget, attention_inputs

from specmemo_kernels import ops
from specmemo_kernels.cache.page_order import empty_pages

MODELS = {"llama2-7b": (32, 32, 128), "llama3-8b": (32, 8, 128), "llama-70b-tp8": (8, 1, 128)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
Row = dict[str, Any]
COLUMNS = ("op", "model", "dtype", "context", "batch", "tree", "ms", "best_peer", "vs_best", "vs_sdpa", "vs_paged",
           "floor_fraction")  # fmt: skip


def attention_case(model: str, context: int, batch: int, tree: int) -> AttentionCase:
    heads, kv_heads, dim = MODELS[model]
    name = f"{model}-{context}-b{batch}-t{tree}"
    return AttentionCase(name, (context,) * batch, (tree,) * batch, heads, kv_heads, dim)


def check(inputs: dict[str, Any], outputs: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Compare every output with float64, for one KV head of the last sequence.

    Raises:
        AssertionError: an output's error is over its budget.
    """
    start, end = inputs["qo_indptr"][-2:].tolist()
    group = inputs["q"].shape[1] // inputs["k_new"].shape[1]
    alone = {
        **inputs,
        "q": inputs["q"][start:end, -group:],
        "k_new": inputs["k_new"][start:end, -1:],
        "v_new": inputs["v_new"][start:end, -1:],
        "k_pages": inputs["k_pages"][:, :, -1:].contiguous(),
        "v_pages": inputs["v_pages"][:, :, -1:].contiguous(),
        "block_table": inputs["block_table"][-1:],
        "seq_lens": inputs["seq_lens"][-1:],
        "qo_indptr": torch.tensor([0, end - start], dtype=torch.int32, device=inputs["q"].device),
        "tree_mask": inputs["tree_mask"][start:end],
    }
    budget = attention_budget(alone, dtype)
    for name, out in outputs.items():
        error = float((out[start:end, -group:].double() - budget.out).abs().max())
        # Twice the tests' budget: peers may round scores too, and the error of a wrong mask is far larger.
        if not error <= 2 * budget.out_error:
            raise AssertionError(f"{name}: error {error:.2e} is over twice the budget {budget.out_error:.2e}")


def our_call(inputs: dict[str, Any]) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """``tree_attention`` as a function of the pages, called as the engine calls it (:func:`ops.kernels`).

    For cases without window, softcap and sinks.
    """
    q, k_new, v_new, block_table, seq_lens, qo_indptr, tree_mask = (
        inputs[name] for name in ("q", "k_new", "v_new", "block_table", "seq_lens", "qo_indptr", "tree_mask")
    )
    scale, max_qo_len, max_seq_len = (inputs[name] for name in ("scale", "max_qo_len", "max_seq_len"))

    attend = ops.kernels("cpu", q.device).tree_attention

    def call(k_pages: torch.Tensor, v_pages: torch.Tensor) -> Any:
        return attend(
            q, k_new, v_new, k_pages, v_pages, block_table, seq_lens, qo_indptr, tree_mask,
            scale, None, None, None, max_qo_len, max_seq_len, False, None, None, None,
        )  # fmt: skip

    return call


def attention_row(case: AttentionCase, dtype: torch.dtype, yard: Yardstick, peers: list[str], seconds: float) -> Row:
    """One row of ``tree_attention``."""
    # All sequences get the mask of the first: SDPA takes one mask.
    inputs = attention_inputs(case, dtype)
    nodes, batch, context = case.nodes[0], len(case.nodes), case.seq_lens[0]
    inputs["tree_mask"] = inputs["tree_mask"][:nodes].repeat(batch, 1)  # type: ignore[index]
    problem = op_peers.dense(inputs)
    pools = {name: inputs[name] for name in ("k_pages", "v_pages")}
    pages = tuple(pools.values())
    rest = {name: value for name, value in inputs.items() if name not in pools}
    ours = our_call(inputs)
    outputs = {"ours": ours(*pages)[0]}
    paged, dense = copies(*pages), copies(problem.k, problem.v)
    functions = {"ours": rotation(ours, paged)}
    for name in peers:
        try:
            run = op_peers.PEERS[name](problem)
            outputs[name] = problem.rows(run(problem.k, problem.v))
        except Exception as error:  # print peers that can't run this case
            print(f"{case.name}: {name} left out: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            continue
        functions[name] = rotation(run, dense)
    check(inputs, outputs, dtype)
    functions["gather"] = rotation(lambda k, v: op_peers.gather({**rest, "k_pages": k, "v_pages": v}), paged)
    times = take_turns(functions | yard.functions, seconds=seconds, between=yard.layer)
    keys, size = context + nodes, dtype.itemsize
    nbytes = batch * size * (2 * case.num_kv_heads * keys + 2 * case.num_qo_heads * nodes) * case.head_dim
    flops = 4 * batch * nodes * case.num_qo_heads * case.head_dim * (context + nodes / 2)
    floor = yard.floor(times, nbytes, flops)
    own, gather = times.pop("ours"), times.pop("gather")
    best = min(times, key=times.__getitem__)
    table = torch.as_tensor(inputs["block_table"])
    four_pages = rest | {"block_table": table[:, torch.arange(table.shape[1]) % 4].contiguous()}
    near_call = functools.partial(our_call(four_pages), *pages)
    near = take_turns({"near": near_call}, seconds=seconds / 4)["near"]
    return {
        "ms": own * 1e3,
        "ms_near": near * 1e3,
        "best_peer": best,
        "vs_best": times[best] / own,
        "vs_sdpa": times["sdpa"] / own,
        "vs_paged": (times[best] + gather) / own,
        "floor_fraction": floor / own,
    }


def commit_row(
    case: AttentionCase, dtype: torch.dtype, yard: Yardstick, seconds: float, layers: int = 32, accepted: int = 3
) -> Row:
    """``commit_paged_kv`` of ``accepted`` nodes in every layer against one memcpy of the same bytes."""
    nodes, heads, dim = case.nodes[0], case.num_kv_heads, case.head_dim
    batch, length = len(case.nodes), case.seq_lens[0]
    k, v = (torch.randn(layers, batch * nodes, heads, dim).to(dtype) for _ in range(2))
    pages = -(-(length + nodes) // 16)
    # Other slots in each call, as in each step, so that they aren't in a cache.
    tables = [torch.randperm(batch * pages).int().view(batch, pages) for _ in range(64)]
    k_pages, v_pages = (empty_pages((layers, batch * pages, 16, heads), dim, dtype, k.device).zero_() for _ in range(2))
    lengths = torch.full((batch,), length, dtype=torch.int32)
    bounds = torch.arange(batch + 1, dtype=torch.int32) * nodes
    kept = min(accepted, nodes)
    index = torch.arange(nodes - kept, nodes, dtype=torch.int32).repeat(batch, 1)
    count = torch.full((batch,), kept - 1, dtype=torch.int32)

    commit = ops.kernels("cpu", k.device).commit_paged_kv

    def run(k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> None:
        commit(k, v, k_pages, v_pages, table, lengths, bounds, index, count, None, None)

    table = tables[0]
    run(k, v, table)
    at = length + torch.arange(kept)
    for b in range(batch):
        assert torch.equal(k_pages[:, table[b, at // 16].long(), at % 16], k[:, b * nodes + index[b].long()])
    moved = 2 * layers * batch * kept * heads * dim
    room, source = torch.zeros(2, moved, dtype=dtype)
    memcpy = rotation(lambda room, source: room.copy_(source), copies(room, source))
    turns = ((*rows, table) for rows, table in zip(copies(k, v), itertools.cycle(tables), strict=True))
    functions = {"ours": rotation(run, turns), "memcpy": memcpy}
    times = take_turns(functions, seconds=seconds, between=yard.layer)
    return {
        "ms": times["ours"] * 1e3,
        "best_peer": "memcpy",
        "vs_best": times["memcpy"] / times["ours"],
        "bytes": moved * dtype.itemsize,
    }


def lm_head_row(
    rows: int, dtype: torch.dtype, yard: Yardstick, seconds: float, vocab: int = 32000, hidden_size: int = 4096
) -> Row:
    """``lm_head_argmax`` against the matrix product alone, and against product and argmax."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, hidden_size, generator=g).to(dtype)
    weight = (torch.randn(vocab, hidden_size, generator=g) / hidden_size**0.5).to(dtype)
    run = functools.partial(ops.kernels("cpu", hidden.device).lm_head_argmax, hidden, weight, None)
    exact = hidden.double() @ weight.double().T
    # The chosen token's exact logit may be below the best by the rounding of two logits.
    short = (exact.amax(1) - exact.gather(1, run()[:, None])[:, 0]).amax()
    assert float(short) <= 2 * torch.finfo(dtype).eps * float(exact.abs().amax()), "lm_head_argmax chose a worse token"
    matmul = lambda: torch.nn.functional.linear(hidden, weight)  # noqa: E731
    functions = {"ours": run, "matmul": matmul, "matmul+argmax": lambda: matmul().argmax(-1)}
    times = take_turns(functions | yard.functions, seconds=seconds, between=yard.layer)
    floor = yard.floor(times, weight.nbytes, 2.0 * rows * vocab * hidden_size)
    return {
        "ms": times["ours"] * 1e3,
        "best_peer": "matmul",
        "vs_best": times["matmul"] / times["ours"],
        "vs_argmax": times["matmul+argmax"] / times["ours"],
        "floor_fraction": floor / times["ours"],
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def rows_for(
    models: list[str], dtypes: list[str], contexts: list[int], batches: list[int], trees: list[int],
    operators: list[str], peers: list[str], seconds: float,
) -> Iterator[Row]:  # fmt: skip
    """One row for each combination, measured on iteration."""
    for dtype in dtypes:
        kind = DTYPES[dtype]
        yard = Yardstick(kind, huge=True)
        if "lm_head_argmax" in operators:
            for tree in trees:
                head = {"model": "4096x32000", "dtype": dtype, "context": 0, "batch": 1, "tree": tree}
                yield {"op": "lm_head_argmax", **head, **lm_head_row(tree, kind, yard, seconds)}
        for model in models:
            for context in contexts:
                for batch in batches:
                    for tree in trees:
                        case = attention_case(model, context, batch, tree)
                        head = {"model": model, "dtype": dtype, "context": context, "batch": batch, "tree": tree}
                        if "tree_attention" in operators:
                            yield {"op": "tree_attention", **head, **attention_row(case, kind, yard, peers, seconds)}
                        if "commit_paged_kv" in operators:
                            yield {"op": "commit_paged_kv", **head, **commit_row(case, kind, yard, seconds)}


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    model: Annotated[
        str, typer.Option(help=f"of {', '.join(MODELS)}, or all; for linear of {', '.join(linear_op.MODELS)}")
    ] = "llama3-8b",
    dtype: Annotated[str, typer.Option(help="bf16, fp32, fp16")] = "bf16",
    context: Annotated[str, typer.Option(help="committed tokens of each sequence")] = "4096",
    batch: Annotated[str, typer.Option(help="sequences")] = "1",
    tree: Annotated[str, typer.Option(help="nodes of each tree")] = "1,8,32",
    op: Annotated[
        str, typer.Option(help="operators, or linear alone")
    ] = "tree_attention,commit_paged_kv,lm_head_argmax",
    rows: Annotated[str, typer.Option(help="rows of linear")] = "1,2,4,8,16,32,64",
    peers: Annotated[
        str, typer.Option(help="of " + ", ".join(op_peers.PEERS) + ", on a GPU flashinfer and xqa too")
    ] = "sdpa,sdpa_folded",
    limit_s: Annotated[float, typer.Option(help="on a GPU: no row starts after these seconds")] = 1800,
    seconds: Annotated[float, typer.Option(help="time for one row")] = 1.0,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, print a table and write JSON."""
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"device is {device!r}, expected cpu, or cuda where torch sees a GPU")
    models = list(MODELS) if model == "all" else model.split(",")
    sizes = numbers(context), numbers(batch), numbers(tree)
    columns: tuple[str, ...] | None = COLUMNS
    kinds = {name: DTYPES[name] for name in dtype.split(",")}
    if op == "linear" and device == "cuda":
        import gpu_linear  # needs triton

        columns, measured = None, gpu_linear.rows_for(models, kinds, numbers(rows))
    elif op == "linear":
        columns, measured = None, linear_op.rows_for(models, kinds, numbers(rows), seconds)
    elif device == "cuda":
        import bench_gpu

        cases = [attention_case(m, c, b, t) for m in models for c in sizes[0] for b in sizes[1] for t in sizes[2]]
        measured = bench_gpu.rows_for(cases, kinds, peers.split(","), limit_s, check)
    else:
        measured = rows_for(models, dtype.split(","), *sizes, op.split(","), peers.split(","), seconds)
    results = []
    with torch.inference_mode():  # as in decoding
        for row in measured:
            results.append(row)
            print(json.dumps(row), flush=True)
    print_rows(results, columns)
    write_result(json_, {"device": device, "rows": results})


@pytest.mark.parametrize("tree", [1, 8, 32])
@pytest.mark.parametrize("side", ["ours", *op_peers.PEERS])
@torch.inference_mode()
def test_tree_attention(benchmark: Any, side: str, tree: int) -> None:
    """Llama-3-8B, 4096 tokens, bf16: one row of pytest-benchmark's table for each side (``--benchmark-json``)."""
    benchmark.group = f"tree_attention llama3-8b 4096 T={tree}"
    inputs = attention_inputs(attention_case("llama3-8b", 4096, 1, tree), torch.bfloat16)
    problem = op_peers.dense(inputs)
    if side == "ours":
        call = our_call(inputs)
        run: Callable[[], torch.Tensor] = lambda: call(inputs["k_pages"], inputs["v_pages"])[0]  # noqa: E731
    else:
        peer = op_peers.PEERS[side](problem)
        run = lambda: problem.rows(peer(problem.k, problem.v))  # noqa: E731
    check(inputs, {side: run()}, torch.bfloat16)
    benchmark(run)


if __name__ == "__main__":
    typer.run(main)
