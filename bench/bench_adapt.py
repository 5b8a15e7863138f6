"""Trees that follow the text against trees that stay: the bundled model over library files it has never seen.

    python bench/bench_adapt.py --nodes 0,4,8,16,64 --json bench/results/adapt.json

For each planned tree (0: the one that ``patch`` plans for this device) the same model continues the same prompts with
all of the tree in every step, and with the part that its running acceptance and the measured times make the best, in
turns. ``ratio`` is the median over prompts of the seconds of the one over those of the other. The outputs must agree.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from kv_quality import prompts_from
from rich.console import Console
from rich.table import Table
from timing import environment

import specmemo_kernels as sk
from specmemo_kernels.cli.common import demo_model_folder, load_model, load_tokenizer
from specmemo_kernels.integrations.hf.draft import Setup
from specmemo_kernels.integrations.hf.plan import make_chooser
from specmemo_kernels.tree.choice import TreeChooser

Row = dict[str, Any]


def run(handle: sk.SpecMemo, chooser: TreeChooser | None, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, Row]:
    """One continuation: its tokens, the seconds of it, and what was verified."""
    handle.chooser, stats = chooser, handle.stats
    stats.reset()
    started = time.perf_counter()
    output = handle.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
    )
    seconds = time.perf_counter() - started
    return output, {"seconds": seconds, "tokens": stats.tokens, "steps": stats.steps, "drafted": stats.drafted}


def compare(model: Any, folder: Path, nodes: int, prompts: list[torch.Tensor], new: int, rounds: int) -> Row:
    """Both ways of one planned tree."""
    with sk.patch(model, folder / "heads", tree=nodes or None, max_batch_size=1, reuse_prefix=False) as handle:
        heads = handle.drafter.heads  # type: ignore[attr-defined]
        setup = Setup(model, handle.facts, handle.drafter, heads.cumulative_topk_accuracy, handle.backend, handle.ranks)
        chooser = handle.chooser or make_chooser(setup, handle.plan, handle.graphs)
        sides: dict[str, TreeChooser | None] = {"static": None, "adaptive": chooser}
        for side in sides.values():
            run(handle, side, prompts[0], 16)
        found: dict[str, list[Row]] = {side: [] for side in sides}
        for ids in prompts:
            outputs, taken = [], {side: [] for side in sides}
            for turn in range(rounds):
                for side in sides if turn % 2 == 0 else reversed(sides):
                    output, row = run(handle, sides[side], ids, new)
                    outputs.append(output)
                    taken[side].append(row)
            if not all(torch.equal(output, outputs[0]) for output in outputs):
                raise AssertionError("the tokens depend on the tree")
            for side, rows in taken.items():
                seconds = statistics.median(row["seconds"] for row in rows)
                found[side].append({name: statistics.mean(r[name] for r in rows) for name in rows[0]} | {"s": seconds})
        row: Row = {"planned_nodes": handle.plan.tree.size}
        for side, each in found.items():
            row[f"{side}_tokens_per_s"] = statistics.median(new / r["s"] for r in each)
            row[f"{side}_tokens_per_step"] = sum(r["tokens"] for r in each) / sum(r["steps"] for r in each)
            row[f"{side}_nodes"] = 1 + sum(r["drafted"] for r in each) / sum(r["steps"] for r in each)
        row["ratio"] = statistics.median(a["s"] / b["s"] for a, b in zip(*found.values(), strict=True))
        return row


def main(
    model: Annotated[Path | None, typer.Option(help="a folder, heads in heads/; default: the bundled one")] = None,
    nodes: Annotated[str, typer.Option(help="sizes of planned trees; 0: what patch plans")] = "0,8,64",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16")] = "float32",
    count: Annotated[int, typer.Option(help="prompts")] = 12,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 128,
    new: Annotated[int, typer.Option(help="tokens written after it")] = 128,
    rounds: Annotated[int, typer.Option(help="runs of each side per prompt")] = 3,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, print a table and write JSON."""
    folder = model or demo_model_folder()
    target = load_model(folder, getattr(torch, dtype), torch.device("cpu"))
    prompts = prompts_from(load_tokenizer(folder), count, prompt, seed=0)
    rows = [compare(target, folder, int(size), prompts, new, rounds) for size in nodes.split(",")]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{cell:.4g}" for cell in row.values()))
    Console(width=180).print(table)
    if json_ is not None:
        setup = {"dtype": dtype, "prompt_tokens": prompt, "new_tokens": new, "prompts": count}
        json_.parent.mkdir(parents=True, exist_ok=True)
        json_.write_text(json.dumps({"environment": environment(), **setup, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
