"""``bench_ops.py --device cuda``: tree_attention on a GPU against its peers and the GPU's own measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import gpu_peers
import op_peers
import torch
from cases import AttentionCase, mask_words, random_parents
from gpu_timing import copy_bandwidth, graph_seconds, matmul_rate

from specmemo_kernels import ops
from specmemo_kernels.cache.page_order import swap_order

Row = dict[str, Any]
Check = Callable[[dict[str, Any], dict[str, torch.Tensor], torch.dtype], None]
PAGE_SIZE = 16


def device_inputs(
    case: AttentionCase, dtype: torch.dtype, device: str = "cuda", page_size: int = PAGE_SIZE
) -> dict[str, Any]:
    """Keyword arguments of ``tree_attention`` on the device: shuffled pages with room for the nodes, one tree.

    Pages have the memory order of this package's pool.
    """
    batch, nodes, context = len(case.nodes), case.nodes[0], case.seq_lens[0]
    pages = -(-(context + nodes) // page_size)
    words = mask_words(random_parents(nodes, torch.Generator().manual_seed(0)), -(-nodes // 64))
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, case.head_dim, device=device, dtype=dtype)

    kv, rows = case.num_kv_heads, batch * nodes
    return {
        "q": random(rows, case.num_qo_heads) * 2,
        "k_new": random(rows, kv),
        "v_new": random(rows, kv),
        "k_pages": swap_order(random(batch * pages, kv, page_size)),
        "v_pages": swap_order(random(batch * pages, kv, page_size)),
        "block_table": torch.randperm(batch * pages, device=device).int().view(batch, pages),
        "seq_lens": torch.full((batch,), context, dtype=torch.int32, device=device),
        "qo_indptr": torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes,
        "tree_mask": words.repeat(batch, 1).to(device),
        "scale": case.head_dim**-0.5,
        "window": None,
        "softcap": None,
        "sinks": None,
        "max_qo_len": nodes,
        "max_seq_len": context,
        "invariant": False,
        "k_scales": None,
        "v_scales": None,
        "min_qo_len": nodes,
    }


def floor_seconds(case: AttentionCase, size: int, bandwidth: float, rate: float) -> float:
    """The longer of reading keys, values and queries and of multiplying, at the rates measured in this run."""
    batch, nodes, context = len(case.nodes), case.nodes[0], case.seq_lens[0]
    read = 2 * case.num_kv_heads * (context + nodes) + 2 * case.num_qo_heads * nodes
    flops = 4 * batch * nodes * case.num_qo_heads * case.head_dim * (context + nodes / 2)
    return max(batch * size * read * case.head_dim / bandwidth, flops / rate)


def attention_row(
    case: AttentionCase, dtype: torch.dtype, peers: list[str], rates: tuple[float, float], check: Check
) -> Row:
    """One row of the table.

    Raises:
        AssertionError: a result's error is over its budget.
    """
    inputs = device_inputs(case, dtype)
    pages = (inputs["k_pages"], inputs["v_pages"])
    rest = {name: value for name, value in inputs.items() if name not in ("k_pages", "v_pages")}
    ours = lambda k, v: ops.tree_attention(**rest, k_pages=k, v_pages=v, backend="triton")[0]  # noqa: E731
    problem = op_peers.dense(inputs)
    calls: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {"ours": (ours, pages)}
    outputs, times = {"ours": ours(*pages)}, {}
    for name in peers:
        try:
            if name in gpu_peers.PEERS:
                run = gpu_peers.PEERS[name](inputs)
                outputs[name], calls[name] = run(*pages), (run, pages)
            else:
                run = op_peers.PEERS[name](problem)
                outputs[name], calls[name] = problem.rows(run(problem.k, problem.v)), (run, (problem.k, problem.v))
        except Exception as error:  # print peers that can't run this case
            print(f"{case.name}: {name} left out: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    check(inputs, outputs, dtype)
    for name, (function, data) in calls.items():
        times[name] = graph_seconds(function, data)
    own = times.pop("ours")
    row: Row = {"ms": own * 1e3, "floor_fraction": floor_seconds(case, dtype.itemsize, *rates) / own}
    if times:
        best = min(times, key=times.__getitem__)
        row |= {"best_peer": best, "vs_best": times[best] / own, "peers_ms": {n: t * 1e3 for n, t in times.items()}}
    return row | ({"vs_sdpa": times["sdpa"] / own} if "sdpa" in times else {})


def rows_for(
    cases: list[AttentionCase], dtypes: dict[str, torch.dtype], peers: list[str], seconds: float, check: Check
) -> Iterator[Row]:
    """A row for each case and dtype; no row starts after ``seconds``.

    ``t_vs_t1`` is missing if the case of one node hasn't run before.
    """
    begin = time.perf_counter()
    for label, dtype in dtypes.items():
        rates = copy_bandwidth(), matmul_rate(dtype)
        yield {"op": "rates", "dtype": label, "copy_bytes_per_s": rates[0], "matmul_flops_per_s": rates[1]}
        single: dict[tuple[str, int, int], float] = {}
        for case in cases:
            model, context, batch, tree = case.name.rsplit("-", 3)[0], case.seq_lens[0], len(case.nodes), case.nodes[0]
            head = {"op": "tree_attention", "model": model, "dtype": label, "context": context, "batch": batch}
            if time.perf_counter() - begin > seconds:
                print(f"{case.name} {label}: left out, {seconds:.0f} s are spent (--limit-s)")
                continue
            try:
                row = {**head, "tree": tree, **attention_row(case, dtype, peers, rates, check)}
            except torch.OutOfMemoryError as error:
                print(f"{case.name} {label}: left out: {str(error).splitlines()[0][:120]}")
                continue
            finally:
                torch.cuda.empty_cache()
            if tree == 1:
                single[model, context, batch] = row["ms"]
            elif (model, context, batch) in single:
                row["t_vs_t1"] = row["ms"] / single[model, context, batch]
            yield row
