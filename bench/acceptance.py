"""Predicted and measured tokens per step, from files in the layout of FasterDecoding/Medusa's publications.

    python bench/acceptance.py trees.json head_accuracy.json --run mt_bench_7b.json --model 7b --tree mc_sim_7b_63

``trees.json`` holds named lists of rank paths, ``head_accuracy.json`` ``cumulative_topk_accuracy`` by model, a run
``questions`` with ``steps`` and ``new_tokens`` per turn. Nothing is fitted to the run.

Known differences between prediction and run:

- Medusa's scripts count steps from 0, so every turn took one step more than its file says.
- The accuracies were counted on the heads' training text; the run is on other text.
- Tokens per step differ by category, by more than the prediction's error. ``--categories question.jsonl`` splits the
  run into the categories that FastChat generates at temperature 0 (extraction, math, coding, reasoning: regular text,
  exact acceptance) and the sampled ones (free prose, typical acceptance).
- Heads are assumed to be independent. In real text their hits are correlated, so accepted paths are longer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specmemo_kernels.tree.acceptance import expected_tokens_per_step

#: Categories that FastChat's MT-Bench generates greedily (its ``temperature_config``).
GREEDY = {"extraction", "math", "coding", "reasoning"}
File = typer.Argument(exists=True, dir_okay=False)


def measured(questions: list[dict[str, Any]]) -> tuple[float, float]:
    """Tokens per step as the files count steps, and with one more step per turn."""
    tokens = sum(sum(q["new_tokens"]) for q in questions)
    steps = sum(sum(q["steps"]) for q in questions)
    return tokens / steps, tokens / (steps + sum(len(q["steps"]) for q in questions))


def splits(run: Path, categories: Path | None) -> dict[str, list[dict[str, Any]]]:
    """The questions of the run, and of its greedy and its sampled part if ``categories`` is given."""
    questions = json.loads(run.read_text())["questions"]
    if categories is None:
        return {"all": questions}
    lines = [json.loads(line) for line in categories.read_text().splitlines() if line.strip()]
    greedy = {line["question_id"] for line in lines if line["category"] in GREEDY}
    return {
        "all": questions,
        "temperature 0": [q for q in questions if q["question_id"] in greedy],
        "sampled": [q for q in questions if q["question_id"] not in greedy],
    }


def main(
    trees: Annotated[Path, File],
    accuracies: Annotated[Path, File],
    run: Annotated[Path | None, typer.Option(help="a measured run", exists=True, dir_okay=False)] = None,
    model: Annotated[str, typer.Option(help="the model of the run, a key of ACCURACIES")] = "7b",
    tree: Annotated[str, typer.Option(help="the run's tree")] = "mc_sim_7b_63",
    categories: Annotated[Path | None, typer.Option(help="MT-Bench's question.jsonl", exists=True)] = None,
) -> None:
    """Print predictions for every tree and model, and compare the run with its prediction."""
    console = Console()
    paths = json.loads(trees.read_text())
    tables = json.loads(accuracies.read_text())["cumulative_topk_accuracy"]
    predictions = Table("tree", *tables, title="predicted tokens per step")
    for name, nodes in paths.items():
        if isinstance(nodes, list):
            predictions.add_row(name, *(f"{expected_tokens_per_step(nodes, table):.3f}" for table in tables.values()))
    console.print(predictions)
    if run is None:
        return
    predicted = expected_tokens_per_step(paths[tree], tables[model])
    compared = Table("questions", "predicted", "measured", "off by", "one more step a turn", "off by", title=run.name)
    for name, questions in splits(run, categories).items():
        row = [f"{predicted:.3f}"]
        for value in measured(questions):
            row += [f"{value:.3f}", f"{predicted / value - 1:+.1%}"]
        compared.add_row(f"{name} ({len(questions)})", *row)
    console.print(compared)


if __name__ == "__main__":
    typer.run(main)
