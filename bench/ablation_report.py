"""Pictures of ablation.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, Any]
MIB, GIB = 2**20, 2**30
#: Parts in stacking order, under one name where a part replaces another one.
PARTS = {
    "heads": "heads",
    "kv_cache": "keys and values",
    "kv_pages": "keys and values",
    "tree_scratch": "scratch",
    "logits": "logits",
    "attention_scores": "attention scores",
    "activations": "activations",
    "slack": "rounding, metadata, workspace",
    "metadata": "rounding, metadata, workspace",
    "workspace": "rounding, metadata, workspace",
}
AXES = {"heads": "heads", "nodes": "nodes of the tree", "kv": "tokens of the sequence"}


def draw(folder: Path, scale: str, rows: Sequence[Row], curves: Sequence[Row]) -> None:
    """``ablation.svg`` for the first context of ``rows``, and ``sensitivity.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    context = rows[0]["context"]
    bars = [row for row in rows if row["table"] == "cumulative" and row["context"] == context]
    title = f"predicted: {scale}, one sequence of {context} tokens"
    pictures = {"ablation": stacked(bars, title), "sensitivity": sensitivity(curves)}
    with plt.rc_context({"svg.hashsalt": "ablation"}):
        for name, figure in pictures.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


def stacked(rows: Sequence[Row], title: str) -> Any:
    """Bytes by part, a bar per combination, with its tokens per second beside it."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4.8), sharey=True, width_ratios=(3, 1), layout="constrained"
    )
    names, start = [row["system"] for row in rows], [0.0] * len(rows)
    for part in dict.fromkeys(PARTS.values()):
        keys = [key for key, name in PARTS.items() if name == part]
        widths = [sum(row["bytes_by_part"].get(key, 0) for key in keys) / MIB for row in rows]
        if any(widths):
            left.barh(names, widths, left=start, label=part)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    for place, total in enumerate(start):
        left.text(total, place, f" {total:.0f}", va="center", fontsize=8)
    left.set(xlabel="generation memory in MiB (model weights not included)", xlim=(0, 1.08 * max(start)))
    speeds = [row["tokens_per_s"] for row in rows]
    right.barh(names, speeds, color="grey")
    for place, speed in enumerate(speeds):
        right.text(speed, place, f" {speed:.1f}", va="center", fontsize=8)
    right.set(xlabel="tokens per second", xlim=(0, 1.2 * max(speeds)))
    left.invert_yaxis()
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=10)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncol=4)
    return figure


def sensitivity(rows: Sequence[Row]) -> Any:
    """Memory and speed, a column of panels per axis, a line per model; int8 pages dashed."""
    figure, panels = plt.subplots(2, len(AXES), figsize=(10.5, 6), layout="constrained")
    for column, (axis, label) in enumerate(AXES.items()):
        top, bottom = panels[:, column]
        for number, scale in enumerate(dict.fromkeys(row["scale"] for row in rows)):
            found = [row for row in rows if row["scale"] == scale and row["axis"] == axis]
            for coded in (False, True):
                line = [row for row in found if (row["kv_dtype"] == "int8") == coded]
                if line:
                    _line(top, line, "generation_bytes", GIB, number, coded, scale)
                    _line(bottom, line, "tokens_per_s", 1, number, coded, scale)
        top.set_yscale("log", base=2)
        top.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel(label)
        for axes in (top, bottom):
            axes.grid(alpha=0.3)
            if axis != "heads":
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
                axes.tick_params(axis="x", labelsize=8)
    panels[0][0].set_ylabel("GiB per device")
    panels[1][0].set_ylabel("tokens per second")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncol=3)
    title = "predicted: generation memory and speed of the fastest plan for each value, one sequence"
    figure.suptitle(title, fontsize=10)
    return figure


def _line(axes: Axes, rows: Sequence[Row], name: str, unit: float, number: int, coded: bool, scale: str) -> None:
    label = f"{scale}, int8 pages" if coded else scale
    style = "--" if coded else "-"
    values = [row[name] / unit for row in rows]
    axes.plot([row["value"] for row in rows], values, f"o{style}", color=f"C{number}", markersize=4, label=label)
