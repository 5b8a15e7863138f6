"""The plot of ``specmemo plan --plot``: predicted speed over generation memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmemo_kernels.cli.common import check_output, write_result
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.cli.plan_report import RETAIN, Row
from specmemo_kernels.planning.memory_plan import MemoryPlan
from specmemo_kernels.planning.predicted_shape import weight_bytes
from specmemo_kernels.planning.search import PlanCandidate, PlanRequest, frontier

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30


def check_plot(path: Path) -> None:
    """Check before planning that a plot can be written to ``path``.

    Raises:
        UserError: matplotlib is missing, has no format for the ending, or the file can't be written.
    """
    _pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise UserError(f"--plot {path}: its ending decides the format, expected {', '.join(sorted(formats))}")
    check_output("--plot", path)


def draw(path: Path, request: PlanRequest, choices: list[PlanCandidate], plan: MemoryPlan, rows: list[Row]) -> None:
    """Plot the frontier and the alternatives into ``path``; its ending decides the format."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    _curve(axes, request, choices)
    _points(axes, rows)
    generation_budget = (plan.budget or 0) - plan.parts["weights"]
    if generation_budget <= 1.5 * max(row.generation_bytes for row in rows):
        axes.axvline(generation_budget / GIB, color="grey", linestyle="--", linewidth=1, label="budget")
    work = request.workload
    axes.set_title(
        f"{Path(request.spec.name).name} on {request.device.name}, {work.batch} x {work.context} tokens (predicted)",
        fontsize=10,
    )
    axes.set_xlabel("generation memory in GiB (model weights not included)")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    try:
        write_result("--plot", path, lambda file: figure.savefig(file, dpi=150, format=path.suffix[1:].lower()))
    finally:
        plt.close(figure)


def _curve(axes: Axes, request: PlanRequest, choices: list[PlanCandidate]) -> None:
    """Draw the frontier as steps, and a line at 96 % of its highest speed."""
    weights = weight_bytes(request.spec, request.tp)
    best = frontier(choices)
    sizes = [(c.total_bytes - weights) / GIB for c in best]
    speeds = [c.speed.tokens_per_second for c in best]
    axes.step([*sizes, sizes[-1] * 1.05 + 0.1], [*speeds, speeds[-1]], where="post", label="best plan of each size")
    axes.axhline(
        RETAIN * speeds[-1], color="tab:green", linewidth=0.8, linestyle=":", label=f"{RETAIN:.0%} of the fastest"
    )


def _points(axes: Axes, rows: list[Row]) -> None:
    marks = {"this plan": "o", "plain generate": "s", "Medusa as published": "^"}
    for row in rows:
        if row.name in marks:
            x, y = row.generation_bytes / GIB, row.speed.tokens_per_second
            axes.plot([x], [y], marks[row.name], markersize=8, label=row.name)


def _pyplot() -> Any:
    """matplotlib's pyplot with a file backend.

    Raises:
        UserError: matplotlib isn't installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from error
    return plt
