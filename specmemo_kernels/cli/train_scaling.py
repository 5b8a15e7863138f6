"""``specmemo train --scaling``: a grid of runs, the laws fitted to them, and how well they predict other runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specmemo_kernels.cli.common import show_tables
from specmemo_kernels.planning.scaling_law import ScalingLaw, ScalingRun, TrainedDrafter
from specmemo_kernels.training.run import MEASURED, Recipe, Reporter, RunFolder, prepare, train_drafter
from specmemo_kernels.training.scaling import (
    ROWS,
    GridRun,
    described,
    grid,
    measured,
    sources,
    store_runs,
    stored_runs,
)
from specmemo_kernels.training.windows import Windows

LAW = "scaling.json"


class Grid:
    """The runs of a grid in folders of their own; finished ones aren't repeated."""

    def __init__(
        self, out: Path, model: Any, verifier: str, windows: Windows, accelerator: Any, reporter: Reporter
    ) -> None:
        self._out, self._model, self._verifier, self._windows = out, model, verifier, windows
        self._accelerator, self._reporter = accelerator, reporter
        self._sources = sources(model, verifier, windows)

    def check_memory(self, runs: Sequence[GridRun]) -> None:
        """Raise a BudgetError before the first run if the largest unfinished one doesn't fit the memory budget."""
        recipes = [each.recipe for each in runs if not (self._out / each.name / MEASURED).exists()]
        if recipes:
            largest = max(recipes, key=lambda recipe: (recipe.sizes.layers, recipe.sizes.intermediate_size or 0))
            prepare(self._model, self._windows, largest, self._accelerator)

    def run(self, number: str, each: GridRun) -> tuple[list[ScalingRun], TrainedDrafter]:
        """Train and measure a run, or read its results."""
        folder, windows = self._out / each.name, self._windows
        arguments = asdict(each.recipe) | self._sources
        if not (folder / MEASURED).exists():
            run = RunFolder(folder, arguments)
            run.begin()
            prefixed = _Prefixed(self._reporter, number)
            with run.refusals_leave_nothing():
                trained = train_drafter(
                    self._model, windows, each.recipe, folder, run.state, self._verifier, self._accelerator, prefixed
                )
            results = measured(self._model, folder, each, windows, trained.tokens, trained.parameters)
            # Before the summary, with which the folder counts as finished.
            store_runs(folder / MEASURED, results, arguments)
            run.finish({"arguments": arguments, "tokens": trained.tokens, "seconds": trained.seconds})
        results = stored_runs(folder / MEASURED, arguments)
        return results, described(folder, results[0].tokens, results[0].parameters)


class _Prefixed:
    """A reporter whose phases have a run's number."""

    def __init__(self, inner: Reporter, number: str) -> None:
        self._inner, self._number = inner, number
        self.advance = inner.advance

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self._inner.phase(f"run {self._number}: {name}", total, done)


def fit_laws(
    grid_runs: Grid, recipe: Recipe, sizes: tuple[int, int], intermediate_size: int, length: int
) -> ScalingLaw:
    """Run the grid and fit the laws.

    Args:
        sizes: the model's hidden and vocabulary size. intermediate_size: of the middle capacity.
        length: of the text's windows.
    """
    runs: dict[bool, list[ScalingRun]] = {False: [], True: []}
    drafters: list[TrainedDrafter] = []
    wanted = grid(recipe, intermediate_size, length)
    grid_runs.check_memory(wanted)
    for i, each in enumerate(wanted, start=1):
        results, drafter = grid_runs.run(f"{i} of {len(wanted)}", each)
        runs[each.held_out] += results
        if not each.held_out:
            drafters.append(drafter)
    return ScalingLaw.fitted(recipe.drafter, sizes, ROWS, runs[False], runs[True], drafters)


def show_laws(console: Console, law: ScalingLaw) -> None:
    """Print the coefficients, the residuals, and the predictions of the held-out runs."""
    slopes = law.tokens_per_step.slopes
    console.print(
        f"tokens per step = {law.tokens_per_step.intercept:.3f} + {slopes[0]:.4f} ln(training tokens) + "
        f"{slopes[1]:.4f} ln(parameters) + {slopes[2]:.4f} ln(batch), with {law.rows} rows per step"
    )
    residuals = [abs(law.residual(run)) for run in law.runs]
    console.print(
        f"{len(law.drafters)} runs at {len(law.runs) // len(law.drafters)} batch sizes; residuals: "
        f"mean {sum(residuals) / len(residuals):.1%}, largest {max(residuals):.1%}"
    )
    table = Table(title="runs that the fit didn't see")
    for name in ("training tokens", "parameters", "batch", "predicted", "measured", "error"):
        table.add_column(name, justify="right")
    for run in law.held_out:
        table.add_row(
            f"{run.tokens:,}", f"{run.parameters:,}", str(run.batch), f"{law.tokens_per_step.at(*run.factors):.3f}",
            f"{run.tokens_per_step:.3f}", f"{law.residual(run):+.1%}",
        )  # fmt: skip
    show_tables(console, table)
