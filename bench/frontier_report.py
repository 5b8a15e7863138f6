"""Results of bench_frontier.py as Markdown tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from part_tracker import PARTS
from step_profile import PARTS as STEP_PARTS

Row = dict[str, Any]
MIB = 2**20
MARKS = {"plain generate": "s", "Medusa as published": "^", "Medusa, our tree": "v"}


def markdown(rows: Sequence[Row], steps: Sequence[Row]) -> str:
    """Tables of the frontier, of memory by part, and of steps by part."""
    title = ["system", "heads", "nodes", "budget", "generation memory", "beside Medusa's", "tokens/s"]
    title += ["beside Medusa's", "tokens per step"]
    lines = [
        [
            row["system"], row["heads"], str(row["nodes"]), _mib(row["budget"]), _mib(row["peak_generation_bytes"]),
            f"{row['memory_vs_medusa'] - 1:+.0%}", f"{row['tokens_per_s']:.1f}", f"{row['speed_vs_medusa']:.2f}x",
            f"{row['tokens_per_step']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    parts = []
    for row in rows:
        sizes = [*(row["bytes_by_part"][part] for part in PARTS), row["peak_generation_bytes"]]
        parts.append([row["system"], row["heads"], *map(_mib, sizes)])
    tables = [
        f"Acceptance: {rows[0]['acceptance']}.",
        _table(title, lines),
        "Generation memory at its peak:",
        _table(["system", "kind of heads", *PARTS, "together"], parts),
    ]
    if steps:
        milliseconds = [[s["system"], *(f"{s[p]:.2f}" for p in STEP_PARTS), f"{s['step']:.2f}"] for s in steps]
        tables += ["Milliseconds of a step:", _table(["system", *STEP_PARTS, "step"], milliseconds)]
    return "\n\n".join(tables) + "\n"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:.1f} MiB"


def _table(title: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    assert all(len(line) == len(title) for line in lines), f"a line doesn't fit {title}"
    rule = "|".join(["", *("---" for _ in title), ""])
    return "\n".join(["| " + " | ".join(title) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)])


def draw(folder: Path, data: dict[str, Any], rows: Sequence[Row]) -> list[Path]:
    """``frontier.png``, ``memory.png`` and ``step.png`` in ``folder``."""
    where = data["environment"]
    device = where["gpu"] if data["device"] != "cpu" else where["processor"]
    caption = f"{data['model']}, {data['dtype']}, acceptance {rows[0]['acceptance']}; {device}, {where['date']}"
    pictures = {"frontier": frontier(rows), "memory": memory(data["memory"])}
    if data["steps"]:
        pictures["step"] = steps(data["steps"])
    written = []
    for name, figure in pictures.items():
        figure.suptitle(caption, fontsize=9)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=130)
        plt.close(figure)
    return written


def frontier(rows: Sequence[Row]) -> Any:
    """Throughput over generation memory, with a line for each kind of heads of this package."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    ours: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        point = row["peak_generation_bytes"] / MIB, row["tokens_per_s"]
        if row["system"] in MARKS:
            axes.plot(*point, MARKS[row["system"]], markersize=9, linestyle="none", label=row["system"])
        else:
            ours.setdefault(row["heads"], []).append(point)
    for heads, points in ours.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"this package ({heads})")
    axes.set(xlabel="generation memory in MiB (model weights not included)", ylabel="tokens per second")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def memory(talks: Sequence[dict[str, Any]]) -> Any:
    """Bytes by part during a conversation: plain, Medusa, this package without and with the smallest budget.

    The first row of panels has one scale, the second a scale for each panel.
    """
    talks = [talk for talk in talks if talk["system"] != "Medusa, our tree"]
    talks = [*talks[:3], talks[-1]] if len(talks) > 3 else talks
    figure, panels = plt.subplots(2, len(talks), figsize=(3 * len(talks) + 1, 6.2), squeeze=False, layout="constrained")
    top = max(max(sum(values) for values in zip(*talk["series"].values(), strict=True)) for talk in talks) / MIB
    for column, talk in enumerate(talks):
        for line, axes in enumerate(panels[:, column]):
            _stack(axes, talk)
            panel_top = max(sum(values) for values in zip(*talk["series"].values(), strict=True)) / MIB
            axes.set_ylim(0, 1.05 * (top if line == 0 else panel_top))
            axes.set_xlim(0, talk["calls"][-1] / 1000)
        panels[0][column].set_title(f"{talk['system']}\nheads: {talk['heads']}", fontsize=9)
        panels[1][column].set_xlabel("thousands of operator calls", fontsize=8)
    panels[0][0].set_ylabel("MiB, one scale")
    panels[1][0].set_ylabel("MiB, scale of its own")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncol=len(PARTS))
    return figure


def _stack(axes: Axes, talk: dict[str, Any]) -> None:
    series = [[value / MIB for value in talk["series"][part]] for part in PARTS]
    calls = [call / 1000 for call in talk["calls"]]
    axes.stackplot(calls, series, labels=PARTS, linewidth=0)
    for call, label in talk["marks"]:
        x = call / 1000
        axes.axvline(x, color="grey", linewidth=0.8, linestyle=":")
        axes.text(x, 0.99, f" {label}", transform=axes.get_xaxis_transform(), fontsize=7, va="top")
    axes.tick_params(labelsize=8)


def steps(rows: Sequence[Row]) -> Any:
    """A step's milliseconds, a bar per system."""
    figure, axes = plt.subplots(figsize=(8, 1.8 + 0.5 * len(rows)), layout="constrained")
    names, left = [row["system"] for row in rows], [0.0] * len(rows)
    for part in STEP_PARTS:
        widths = [max(0.0, row[part]) for row in rows]
        axes.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per step")
    axes.grid(alpha=0.3, axis="x")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncol=4)
    return figure


def thinned(calls: Sequence[int], series: dict[str, list[int]], places: int = 500) -> Row:
    """The curves reduced to at most ``places`` points: of each interval the point with the most bytes."""
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    end = calls[-1] or 1
    best: dict[int, int] = {}
    for i, call in enumerate(calls):
        interval = min(places - 1, places * call // end)
        if interval not in best or totals[i] > totals[best[interval]]:
            best[interval] = i
    kept = sorted(best.values())
    return {"calls": [calls[i] for i in kept], "series": {p: [v[i] for i in kept] for p, v in series.items()}}
