"""Compile every Triton kernel for every target, without a GPU, and list the resources of each.

    python bench/aot.py --targets sm_75,sm_80,sm_86,sm_89,sm_90,gfx90a,gfx942,gfx1100 --json out.json

Exits with 1 if a kernel spills, exceeds the target's shared memory, multiplies without the target's matrix
instructions, computes a score's exponential twice, loads keys in pieces of less than 128 bits (codes: 64), or fits a
multiprocessor less often than its configuration says. ``of copying`` is the predicted share of copy bandwidth for 8
sequences of 8,192 tokens with 8 KV heads, ``alone`` for one (``bench/gpu_model.py``): not a measurement. Takes about
two minutes per target on one core; compiled kernels are cached by Triton.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aot_kernels
from timing import write_result

from specmemo_kernels.backends.kernel_target import TARGETS

#: Columns of attention kernels (:func:`aot_kernels.attention_columns`) and their titles.
LOOP_COLUMNS = {
    "loop_instructions": "loop", "exp_per_score": "exp", "load_bits": "bits", "programs_per_sm": "per SM",
    "bytes_in_flight": "in flight", "predicted_fraction": "of copying", "predicted_alone": "alone",
}  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="sm_75,sm_80,sm_86,sm_89,sm_90,gfx90a,gfx942,gfx1100")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="fp16 on targets without bfloat16")
    parser.add_argument("--head-dims", type=numbers, default=[64, 128])
    parser.add_argument("--nodes", type=numbers, default=[1, 8, 25, 64])
    parser.add_argument("--groups", type=numbers, default=[1, 4, 8], help="query heads per KV head")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    args.targets = args.targets.split(",")
    if unknown := [name for name in args.targets if name not in TARGETS]:
        parser.error(f"unknown targets {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    return args


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    columns = ("kernel", "D", "T", "GQA", "M x N", "warps", "stages", "regs", "stack", "KiB", "matrix")
    columns += tuple(LOOP_COLUMNS.values())
    table = Table(*columns, title=title)
    for row in rows:
        block = row["config"]
        matrix = " ".join(f"{count} {family}" for family, count in row["matrix"].items())
        cells = [
            row["kernel"], row["head_dim"], row["nodes"], row["gqa"],
            f"{block['block_m']} x {block['block_n']}", block["num_warps"], block["num_stages"],
            row["registers"], row["stack_bytes"], f"{row['shared_bytes'] / 1024:.0f}", matrix or "-",
            *(row.get(key, "") for key in LOOP_COLUMNS),
        ]  # fmt: skip
        table.add_row(*map(str, cells), style="red" if row["problem"] else None)
    return table


def main() -> int:
    args = parse()
    console = Console(width=None if sys.stdout.isatty() else 170)
    rows: list[dict[str, Any]] = []
    for target in args.targets:
        dtype = "fp16" if args.dtype == "bf16" and not TARGETS[target].bf16 else args.dtype
        start = time.perf_counter()
        jobs = list(aot_kernels.all_jobs(target, DTYPES[dtype], args.head_dims, args.nodes, args.groups))
        target_rows = [job.row(target) for job in jobs]
        rows += target_rows
        bad = sum(bool(row["problem"]) for row in target_rows)
        seconds = time.perf_counter() - start
        console.print(table_of(target_rows, f"{target}: {len(jobs)} kernels in {seconds:.0f} s, {bad} with a problem"))
    for row in rows:
        if row["problem"]:
            console.print(f"{row['target']} {row['kernel']} D {row['head_dim']} T {row['nodes']}: {row['problem']}")
    if args.json:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        write_result(args.json, {"versions": versions, "dtype": args.dtype, "rows": rows})
    return int(any(row["problem"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
