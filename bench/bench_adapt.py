"""Adaptive trees against fixed trees: the bundled model over held-out library files.

    python bench/bench_adapt.py --nodes 0,4,8,16,64 --json bench/results/adapt.json

For each planned tree (0: the tree that ``patch`` plans for this device) the model continues the same prompts in turns:
with the whole tree in every step (static), and with the part that the tree chooser selects (adaptive). ``ratio`` is the
median over prompts of static over adaptive seconds. The outputs must agree.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from kv_quality import prompts_from
from timing import print_rows, write_result

import specmemo_kernels as sk
from specmemo_kernels.cli.common import demo_model_folder, load_model, load_tokenizer
from specmemo_kernels.integrations.hf.draft import Setup
from specmemo_kernels.integrations.hf.plan import make_chooser
from specmemo_kernels.tree.choice import TreeChooser

Row = dict[str, Any]


def run(handle: sk.SpecMemo, chooser: TreeChooser | None, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, Row]:
    """One continuation: its tokens, its seconds and its counters."""
    handle.chooser, stats = chooser, handle.stats
    stats.reset()
    started = time.perf_counter()
    output = handle.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
    )
    seconds = time.perf_counter() - started
    return output, {"seconds": seconds, "tokens": stats.tokens, "steps": stats.steps, "drafted": stats.drafted}


def compare(model: Any, folder: Path, nodes: int, prompts: list[torch.Tensor], new: int, rounds: int) -> Row:
    """Compare static and adaptive steps of one planned tree."""
    with sk.patch(model, folder / "heads", tree=nodes or None, max_batch_size=1, reuse_prefix=False) as handle:
        heads = handle.drafter.heads  # type: ignore[attr-defined]
        setup = Setup(model, handle.facts, handle.drafter, heads.cumulative_topk_accuracy, handle.backend, handle.ranks)
        chooser = handle.chooser or make_chooser(setup, handle.plan, handle.graphs)
        sides: dict[str, TreeChooser | None] = {"static": None, "adaptive": chooser}
        for side in sides.values():
            run(handle, side, prompts[0], 16)
        by_prompt: dict[str, list[Row]] = {side: [] for side in sides}
        for ids in prompts:
            outputs, runs = [], {side: [] for side in sides}
            for turn in range(rounds):
                for side in sides if turn % 2 == 0 else reversed(sides):
                    output, row = run(handle, sides[side], ids, new)
                    outputs.append(output)
                    runs[side].append(row)
            if not all(torch.equal(output, outputs[0]) for output in outputs):
                raise AssertionError("the tokens depend on the tree")
            for side, rows in runs.items():
                seconds = statistics.median(row["seconds"] for row in rows)
                means = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
                by_prompt[side].append(means | {"s": seconds})
        row: Row = {"planned_nodes": handle.plan.tree.size}
        for side, rows in by_prompt.items():
            row[f"{side}_tokens_per_s"] = statistics.median(new / r["s"] for r in rows)
            row[f"{side}_tokens_per_step"] = sum(r["tokens"] for r in rows) / sum(r["steps"] for r in rows)
            row[f"{side}_nodes"] = 1 + sum(r["drafted"] for r in rows) / sum(r["steps"] for r in rows)
        row["ratio"] = statistics.median(a["s"] / b["s"] for a, b in zip(*by_prompt.values(), strict=True))
        return row


def main(
    model: Annotated[Path | None, typer.Option(help="a folder, heads in heads/; default: the bundled one")] = None,
    nodes: Annotated[str, typer.Option(help="sizes of planned trees; 0: patch plans the tree")] = "0,8,64",
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
    print_rows(rows)
    setup = {"dtype": dtype, "prompt_tokens": prompt, "new_tokens": new, "prompts": count}
    write_result(json_, {**setup, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
