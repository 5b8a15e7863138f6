"""Scaling laws of drafters (Scylla, arXiv 2505.07858), fitted to one's own training runs.

Acceptance is linear in the logarithms of the training tokens, of the drafter's parameters and of the batch size. There
are no coefficients but those that a fit to measured runs gave.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

_MOST = 1 - 1e-4


@dataclass(frozen=True)
class LogLinear:
    """``intercept + sum(slope * ln(factor))``."""

    intercept: float
    slopes: tuple[float, ...]

    @classmethod
    def fitted(
        cls, factors: Sequence[Sequence[float]], values: Sequence[float], *, relative: bool = False
    ) -> LogLinear:
        """The least-squares fit to ``values`` at ``factors``, one row of positive factors per value.

        ``relative``: the errors relative to the values, which are positive, have the least squares.

        Raises:
            ValueError: fewer rows than coefficients, or factors that don't vary independently.
        """
        rows = torch.tensor([[1.0, *map(math.log, row)] for row in factors], dtype=torch.float64)
        if len(rows) < rows.shape[1] or torch.linalg.matrix_rank(rows) < rows.shape[1]:
            raise ValueError(f"{len(rows)} points don't determine {rows.shape[1]} coefficients; vary every factor")
        wanted = torch.tensor(values, dtype=torch.float64)[:, None]
        weights = 1 / wanted if relative else torch.ones_like(wanted)
        solution = torch.linalg.lstsq(rows * weights, wanted * weights).solution
        intercept, *slopes = solution[:, 0].tolist()
        return cls(intercept, tuple(slopes))

    def at(self, *factors: float) -> float:
        """The value at ``factors``."""
        return self.intercept + sum(s * math.log(x) for s, x in zip(self.slopes, factors, strict=True))


@dataclass(frozen=True)
class ScalingRun:
    """A trained drafter, measured in generation.

    Attributes:
        tokens: trained on. parameters: of the drafter.
        batch: sequences at once. nodes: of each one's tree, so that all steps verify as many rows.
        tokens_per_step: of a sequence.
    """

    tokens: int
    parameters: int
    batch: int
    nodes: int
    tokens_per_step: float

    @property
    def factors(self) -> tuple[float, float, float]:
        return self.tokens, self.parameters, self.batch


@dataclass(frozen=True)
class TrainedDrafter:
    """A drafter's held-out accuracies, ``[depth][k]``, and what a plan needs to know its size.

    Attributes:
        config: its ``config.json``. elements: of its tensors, by internal key.
    """

    tokens: int
    parameters: int
    accuracy: tuple[tuple[float, ...], ...]
    config: Mapping[str, Any]
    elements: Mapping[str, int]


@dataclass(frozen=True)
class ScalingLaw:
    """The laws of a kind of drafter for one model.

    Attributes:
        kind: of drafter. hidden_size, vocab_size: of the model.
        rows: verified per step in every run.
        runs, held_out: the runs of the fit, and runs that it didn't see.
        drafters: those of the fit.
        tokens_per_step: over training tokens, parameters and batch.
        accuracy: ``[depth][k]``, over training tokens and parameters.
    """

    kind: str
    hidden_size: int
    vocab_size: int
    rows: int
    runs: tuple[ScalingRun, ...]
    held_out: tuple[ScalingRun, ...]
    drafters: tuple[TrainedDrafter, ...]
    tokens_per_step: LogLinear
    accuracy: tuple[tuple[LogLinear, ...], ...]

    @classmethod
    def fitted(
        cls,
        kind: str,
        sizes: tuple[int, int],
        rows: int,
        runs: Sequence[ScalingRun],
        held_out: Sequence[ScalingRun],
        drafters: Sequence[TrainedDrafter],
    ) -> ScalingLaw:
        """Fit the laws; ``sizes``: the model's hidden and vocabulary size.

        Raises:
            ValueError: too few runs, or a factor that doesn't vary.
        """
        # Relative, as :meth:`residual`: a plan compares speeds by their ratios.
        law = LogLinear.fitted([run.factors for run in runs], [run.tokens_per_step for run in runs], relative=True)
        factors = [(drafter.tokens, drafter.parameters) for drafter in drafters]
        first = drafters[0].accuracy
        accuracy = tuple(
            tuple(LogLinear.fitted(factors, [d.accuracy[depth][k] for d in drafters]) for k in range(len(row)))
            for depth, row in enumerate(first)
        )
        return cls(kind, *sizes, rows, tuple(runs), tuple(held_out), tuple(drafters), law, accuracy)

    def residual(self, run: ScalingRun) -> float:
        """Predicted tokens per step of a run over the measured ones, less 1."""
        return self.tokens_per_step.at(*run.factors) / run.tokens_per_step - 1

    def accuracy_at(self, tokens: int, parameters: int) -> list[list[float]]:
        """Predicted accuracies ``[depth][k]``, each within 0..1 and rising with k."""
        table = []
        for laws in self.accuracy:
            row: list[float] = []
            for law in laws:
                row.append(max(row[-1] if row else 0.0, min(_MOST, max(0.0, law.at(tokens, parameters)))))
            table.append(row)
        return table

    @property
    def volumes(self) -> tuple[int, int]:
        """The fewest and the most training tokens of the fit."""
        counts = [drafter.tokens for drafter in self.drafters]
        return min(counts), max(counts)

    def save(self, path: Path, environment: Mapping[str, str]) -> None:
        """Write the runs and where they were measured as JSON.

        Coefficients are written for readers, and fitted again by :meth:`load`.
        """
        values = {"environment": dict(environment), **asdict(self)}
        del values["accuracy"]
        path.write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> ScalingLaw:
        """Read a file of :meth:`save`.

        Raises:
            ValueError: not such a file.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            runs, held_out = ([ScalingRun(**row) for row in values[name]] for name in ("runs", "held_out"))
            drafters = [
                TrainedDrafter(**{**row, "accuracy": tuple(map(tuple, row["accuracy"]))}) for row in values["drafters"]
            ]
            sizes = values["hidden_size"], values["vocab_size"]
            return cls.fitted(values["kind"], sizes, values["rows"], runs, held_out, drafters)
        except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"{path} isn't a file of specmemo train --scaling: {error!r}") from error
