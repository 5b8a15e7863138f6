"""Tokens per step of a trained drafter's dynamic trees, by the number of nodes that each depth expands (the beam).

    python bench/bench_beams.py build/drafters/eagle3 --json out.json

The rule behind a beam's default (:func:`specmemo_kernels.tree.tree_budget.beam_of`) is compared with the best of the
beams. Texts are the model's own continuations of held-out library files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from kv_quality import prompts_from
from timing import print_rows, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer

import specmemo_kernels as sk
from specmemo_kernels.cli.common import demo_model_folder
from specmemo_kernels.tree.tree_budget import beam_of, most_nodes

#: Nodes and depth of the trees.
TREES = ((3, 2), (4, 3), (5, 4), (6, 5), (7, 5), (8, 5), (10, 5), (12, 5), (16, 5), (24, 6), (32, 6))


def measure(model: Any, drafter: Path, prompts: list[list[int]], new: int, budget: sk.TreeBudget) -> float:
    """Tokens per step of all prompts with trees of this size."""
    with sk.patch(model, drafter, tree=budget, max_batch_size=8) as handle:
        sk.generate_batch(model, prompts, max_new_tokens=new, eos_token_ids=[])
        found: float = handle.stats.tokens_per_step
    return found


def main(
    drafter: Annotated[Path, typer.Argument(help="a folder, trained for the model")],
    model: Annotated[str | None, typer.Option(help="a folder (default: the bundled model)")] = None,
    beams: Annotated[str, typer.Option(help="nodes expanded per depth")] = "1,2,3,4,6,8,10",
    count: Annotated[int, typer.Option(help="continuations")] = 40,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 256,
    new: Annotated[int, typer.Option(help="tokens written after it")] = 64,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, print a table and write JSON."""
    folder = model or demo_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [ids[0].tolist() for ids in prompts_from(tokenizer, count, prompt, 1)]
    rows = []
    for size, depth in TREES:
        widths = sorted({*map(int, beams.split(",")), beam_of(size)})
        found = {
            width: measure(target, drafter, prompts, new, sk.TreeBudget(size, depth, width))
            for width in widths
            if size <= most_nodes(depth, width)
        }
        row: dict[str, Any] = {"nodes": size, "depth": depth, "default": beam_of(size)}
        row |= {f"beam {width}": found.get(width) for width in widths}
        rows.append(row | {"default/best": found[min(beam_of(size), max(found))] / max(found.values())})
    print_rows(rows, list(dict.fromkeys(key for row in rows for key in row)))
    write_result(json_, {"drafter": drafter.name, "count": count, "new_tokens": new, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
