"""Tree attention with other block sizes: each result is checked against float64, then timed; a JSON line per row.

    python bench/gpu_sweep.py                    # on a GPU: tiles, stages and pages; the best of each case at the end
    python bench/gpu_sweep.py --table out.json   # the same, and the best classes for kernel_table.use_kernel_table
    python bench/gpu_sweep.py --compile          # compile the kernels of the sweep in parallel, without timing
    python bench/gpu_sweep.py --counters         # ncu's counters of the chosen tiles, if ncu is installed
    python bench/gpu_sweep.py --device cpu       # tiny sizes in Triton's interpreter (TRITON_INTERPRET=1), untimed

A row's ``config`` are the arguments of :class:`KernelConfig`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_ops import AttentionCase, attention_case, check

from specmemo_kernels.backends.kernel_config import NO_LIMIT, KernelConfig, attention_configs
from specmemo_kernels.backends.kernel_target import INTERPRETER, target_of_gpu

DTYPE = torch.bfloat16
#: Contexts, batches and nodes of Llama-3-8B on a GPU.
CASES = ((8192, 8, 1), (8192, 8, 25), (8192, 8, 64), (8192, 1, 25), (1024, 1, 25), (32768, 1, 1))
TINY = ((40, 2, 1), (70, 1, 9))
_NODES = {attention_case("llama3-8b", *case).name: case[2] for case in CASES}
#: Variations of a chosen configuration: fields that change.
CHANGES: tuple[dict[str, int], ...] = (
    {}, {"num_stages": 2}, {"num_stages": 3}, {"num_stages": 4}, {"nodes_n": 16}, {"nodes_n": 32}, {"nodes_n": 64},
    {"block_n": 64, "direct_n": 64}, {"block_n": 128, "direct_n": 128}, {"block_m": 64, "num_warps": 4},
    {"block_m": 64, "num_warps": 8}, {"block_m": 128, "num_warps": 8}, {"resident": 1}, {"resident": 2},
)  # fmt: skip
PAGE_SIZES = (16, 64)
#: ncu's counters: bytes from memory and L2, issue slots, tensor pipe, stalls.
METRICS = (
    "dram__bytes_read.sum,lts__t_bytes.sum,sm__inst_issued.avg.pct_of_peak_sustained_active,"
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active,smsp__warp_issue_stalled_long_scoreboard.avg"
)
Row = dict[str, Any]


def chosen(case: AttentionCase, target: str) -> KernelConfig:
    """The configuration that the launcher takes for a case."""
    group = case.num_qo_heads // case.num_kv_heads
    classes = attention_configs(target, case.head_dim, case.head_dim, group, DTYPE)
    return next(c for c in classes if case.nodes[0] <= c.max_nodes)


def variants(case: AttentionCase, target: str, changes: tuple[dict[str, int], ...] = CHANGES) -> list[KernelConfig]:
    """The chosen configuration and its variations, each once, for any number of nodes."""
    base = replace(chosen(case, target), min_nodes=1, max_nodes=NO_LIMIT)
    changed = (replace(base, **change) for change in changes)
    return list(dict.fromkeys(replace(c, split_size=max(c.split_size, c.block_n, c.direct_n)) for c in changed))


def table(rows: Sequence[Row], target: str) -> Row:
    """The classes for :func:`kernel_table.use_kernel_table`: of each, the configuration with the least relative time.

    Relative to the best of a case, summed over the cases of a class and page sizes. Configurations that failed in one
    of them are left out; a class without a case keeps its rule.
    """
    case = attention_case("llama3-8b", *CASES[0])
    group = case.num_qo_heads // case.num_kv_heads
    best: dict[tuple[str, int], float] = {}
    for row in rows:
        if "ms" in row:
            cell = row["case"], row["page_size"]
            best[cell] = min(best.get(cell, row["ms"]), row["ms"])
    classes = []
    for rule in attention_configs(target, case.head_dim, case.head_dim, group, DTYPE):
        cells = {cell for cell in best if rule.min_nodes <= _NODES[cell[0]] <= rule.max_nodes}
        times: dict[KernelConfig, dict[tuple[str, int], float]] = {}
        for row in rows:
            if "ms" in row and (cell := (row["case"], row["page_size"])) in cells:
                times.setdefault(KernelConfig(**row["config"]), {})[cell] = row["ms"] / best[cell]
        complete = {config: sum(of.values()) for config, of in times.items() if set(of) == cells}
        winner = min(complete, key=complete.__getitem__) if complete else rule
        classes.append(replace(winner, min_nodes=rule.min_nodes, max_nodes=rule.max_nodes))
    unit = max(config.split_size for config in classes)
    entry = {"target": target, "head_dim": case.head_dim, "group": group, "dtype": str(DTYPE).removeprefix("torch.")}
    entry |= {"quantised": False, "classes": [asdict(replace(config, split_size=unit)) for config in classes]}
    return {"version": 1, "entries": [entry]}


def run(case: AttentionCase, config: KernelConfig, page_size: int, device: str, timed: bool) -> Row:
    """Check a configuration and time it; ``error`` instead of ``ms`` if it doesn't compile or its result is wrong."""
    import bench_gpu  # after bench_ops, which adds the tests' folder to the path

    from specmemo_kernels.backends import triton

    row: Row = {"case": case.name, "page_size": page_size, "config": asdict(config)}
    inputs = bench_gpu.device_inputs(case, DTYPE if device == "cuda" else torch.float32, device, page_size)

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        arguments = (inputs | {"k_pages": k, "v_pages": v}).values()
        return triton.tree_attention(*arguments, configs=(config,))[0]

    try:
        check(inputs, {"sweep": call(inputs["k_pages"], inputs["v_pages"])}, inputs["q"].dtype)
        if timed:
            from gpu_timing import graph_seconds

            row["ms"] = 1e3 * graph_seconds(call, (inputs["k_pages"], inputs["v_pages"]))
    except Exception as error:  # the next configuration may work
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return row


def jobs(device: str) -> Iterator[tuple[AttentionCase, KernelConfig, int]]:
    """Chosen configurations first, then the variations."""
    tiny = device == "cpu"
    target = INTERPRETER if tiny else target_of_gpu(torch.device(device))
    for changes in (({},), CHANGES[1:2] if tiny else CHANGES[1:]):
        for context, batch, nodes in TINY if tiny else CASES:
            case = attention_case("llama3-8b", context, batch, nodes)
            for config in variants(case, target, changes):
                for page_size in PAGE_SIZES[:1] if tiny else PAGE_SIZES:
                    yield case, config, page_size


def compile_one(job: tuple[AttentionCase, KernelConfig, int]) -> None:
    """Compile a kernel by running it on a short context."""
    case, config, page_size = job
    run(replace(case, seq_lens=(256,), nodes=case.nodes[:1]), config, page_size, "cuda", timed=False)


def counters() -> None:
    """Run the chosen configurations under ncu; the rows are its CSV lines."""
    ncu = shutil.which("ncu")
    if ncu is None:
        print("no ncu here: no counters")
        return
    command = [ncu, "--clock-control", "none", "--csv", "--metrics", METRICS, "-k", "regex:tree_attention|merge_splits"]
    output = subprocess.run(
        [*command, sys.executable, __file__, "--chosen"], capture_output=True, text=True, check=False
    ).stdout
    for line in output.splitlines():
        if line.startswith('"') and ("tree_attention" in line or "merge_splits" in line):
            print(json.dumps({"ncu": line}), flush=True)


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu for the interpreter")] = "cuda",
    compile_: Annotated[bool, typer.Option("--compile", help="only compile, in parallel")] = False,
    count: Annotated[bool, typer.Option("--counters", help="only ncu's counters")] = False,
    only_chosen: Annotated[bool, typer.Option("--chosen", help="run the chosen configurations once, untimed")] = False,
    table_: Annotated[Path | None, typer.Option("--table", help="write the best classes here")] = None,
) -> None:
    """Run the sweep and print a JSON line per row."""
    if count:
        counters()
    elif compile_:
        with ProcessPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
            done = sum(1 for _ in pool.map(compile_one, list(jobs(device))))
        print(json.dumps({"compiled": done}), flush=True)
    elif only_chosen:
        for case, config, page_size in jobs(device):
            if page_size == PAGE_SIZES[0] and config in variants(case, target_of_gpu(torch.device(device)), ({},)):
                run(case, config, page_size, device, timed=False)
    else:
        best: dict[str, Row] = {}
        rows: list[Row] = []
        for case, config, page_size in jobs(device):
            row = run(case, config, page_size, device, timed=device == "cuda")
            print(json.dumps(row), flush=True)
            rows.append(row)
            # Rewritten after each row: the sweep may be stopped.
            if table_ is not None and "ms" in row:
                table_.write_text(json.dumps(table(rows, target_of_gpu(torch.device(device))), indent=1) + "\n")
            if "ms" in row and (case.name not in best or row["ms"] < best[case.name]["ms"]):
                best[case.name] = row
        for row in best.values():
            print(json.dumps({"best": row}), flush=True)


if __name__ == "__main__":
    typer.run(main)
