"""Fraction of the machine's floor and ratio to the best peer over context, from the JSON of bench_ops.py.

python bench/plot_ops.py bench/results/ops_cpu.json ops_cpu.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer
from matplotlib.axes import Axes

PANELS = (("floor_fraction", "fraction of the floor"), ("vs_best", "times as fast as the best peer"))


def curves(rows: list[dict[str, Any]], value: str, trees: list[int], axes: Axes) -> None:
    """One line for each tree size over the context, in the same colour in all panels."""
    for number, tree in enumerate(trees):
        points = sorted((row["context"], row[value]) for row in rows if row["tree"] == tree and value in row)
        label = f"{tree} node" + "s" * (tree > 1)
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label, color=f"C{number}")
    axes.set_xscale("log", base=2)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.grid(alpha=0.3)


def main(
    results: Annotated[Path, typer.Argument(help="written by bench_ops.py --json")],
    picture: Annotated[Path, typer.Argument(help="a .png or .svg to write")],
    batch: Annotated[int, typer.Option(help="rows of this batch size")] = 1,
) -> None:
    """Plot a column of panels for each model and dtype in the results."""
    data = json.loads(results.read_text())
    rows = [row for row in data["rows"] if row["op"] == "tree_attention" and row["batch"] == batch]
    groups = sorted({(row["model"], row["dtype"]) for row in rows})
    if not groups:
        raise typer.BadParameter(f"{results} has no rows of tree_attention with batch {batch}")
    trees, contexts = sorted({row["tree"] for row in rows}), sorted({row["context"] for row in rows})
    figure, panels = plt.subplots(
        2, len(groups), figsize=(3.6 * len(groups), 6), squeeze=False, sharey="row", sharex=True
    )
    for column, (model, dtype) in enumerate(groups):
        selected = [row for row in rows if (row["model"], row["dtype"]) == (model, dtype)]
        for line, (value, label) in enumerate(PANELS):
            curves(selected, value, trees, panels[line][column])
            if column == 0:
                panels[line][column].set_ylabel(label)
        panels[0][column].set_title(f"{model}, {dtype}", fontsize=10)
        panels[1][column].set_xlabel("tokens of context")
    for axes in panels[:, 0]:
        axes.set_ylim(bottom=0)  # of the whole row
    panels[0][0].set_xticks(contexts, labels=[str(context) for context in contexts])
    panels[0][0].minorticks_off()
    panels[0][0].legend(fontsize=8)
    where = data["environment"]
    device = where["processor"] if data.get("device", "cpu") == "cpu" else where["gpu"]
    figure.suptitle(f"tree_attention, batch {batch}: {device}, {where['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
