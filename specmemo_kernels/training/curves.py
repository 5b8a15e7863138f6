"""A run's losses and accuracies as a picture, and what its accuracies promise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specmemo_kernels.training.run import Trained
from specmemo_kernels.tree.acceptance import Accuracy, best_first_paths, expected_tokens_per_step, extrapolated

#: Points of a smoothed curve.
_POINTS = 200


def expected_tokens(accuracy: Accuracy, nodes: int) -> float:
    """Tokens per step of the best static tree with ``nodes`` nodes, its root included, by held-out accuracies."""
    table = extrapolated(accuracy, nodes)
    return expected_tokens_per_step(best_first_paths(table, nodes - 1), table)


def draw_curves(path: Path, name: str, trained: Trained) -> bool:
    """Draw losses and held-out accuracies by depth over the training tokens.

    Returns:
        Whether there is a picture: without matplotlib there is none.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    losses, evaluations = trained.progress["losses"], trained.progress["evaluations"]
    per_step, depth = trained.tokens / len(losses), len(losses[0])
    for d in range(depth):
        xs, ys = _smoothed([row[d] for row in losses])
        left.plot([x * per_step / 1e6 for x in xs], ys, color=f"C{d}", label=f"{d + 1}")
    for d in range(depth):
        xs = [point["step"] * per_step / 1e6 for point in evaluations]
        right.plot(xs, [point["accuracy"][d] for point in evaluations], marker="o", color=f"C{d}", label=f"{d + 1}")
    left.set_ylabel("training loss in nats")
    right.set_ylabel("held-out accuracy of the best guess")
    right.set_ylim(0, 1)
    for axes in (left, right):
        axes.set_xlabel("training tokens in millions")
        axes.grid(alpha=0.3)
        axes.legend(title="tokens ahead", fontsize=8)
    figure.suptitle(f"{name}, {trained.parameters:,} parameters", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def _smoothed(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means of at most :data:`_POINTS` groups of values, at the groups' middles."""
    size = max(1, -(-len(values) // _POINTS))
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    return [i * size + len(group) / 2 for i, group in enumerate(groups)], [sum(g) / len(g) for g in groups]
