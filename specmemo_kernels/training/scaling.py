"""A grid of small training runs, measured in generation, to which scaling laws are fitted."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.drafting.published import open_drafter
from specmemo_kernels.drafting.replaced_file import replace_file
from specmemo_kernels.integrations.hf.batch import generate_batch
from specmemo_kernels.integrations.hf.patch import patch
from specmemo_kernels.planning.scaling_law import ScalingRun, TrainedDrafter
from specmemo_kernels.training.checkpoint import TrainingError
from specmemo_kernels.training.recipes import DrafterSizes
from specmemo_kernels.training.run import Recipe, check_arguments
from specmemo_kernels.training.target_states import FrozenTarget
from specmemo_kernels.training.windows import Windows

#: Rows that a step verifies at every batch size: a sequence's tree has ROWS / batch nodes.
ROWS, BATCHES = 32, (1, 2, 4, 8)
#: Shares of the largest training volume in the grid, and factors of a drafter's capacity.
VOLUMES, CAPACITIES = (1 / 8, 1 / 4, 1 / 2, 1.0), (1 / 4, 1.0, 4.0)
#: Volume and capacity of runs between the grid's, which the fit doesn't see, and the batch of their comparison.
HELD_OUT = ((0.18, 1.0, 1), (0.35, 2.0, 2), (0.7, 0.5, 4))
#: Continuations of a measurement, tokens of a prompt, and new tokens.
_PROMPTS, _PROMPT, _NEW = 32, 64, 48


@dataclass(frozen=True)
class GridRun:
    """A run of the grid. ``batches``: at which it is measured."""

    name: str
    recipe: Recipe
    batches: tuple[int, ...]
    held_out: bool


def grid(recipe: Recipe, intermediate_size: int, length: int) -> list[GridRun]:
    """The runs for a recipe: its tokens are the largest volume, its sizes the middle capacity.

    Capacity is the width of the drafter's MLPs, or a Medusa head's number of blocks.

    Args:
        intermediate_size: of the middle capacity. length: of the text's windows.

    Raises:
        ValueError: volumes that are the same number of training steps.
    """
    _check_volumes(recipe, length)
    runs = []
    points: list[tuple[float, float, tuple[int, ...], bool]] = [
        *((v, c, BATCHES, False) for c in CAPACITIES for v in VOLUMES),
        *((v, c, (batch,), True) for v, c, batch in HELD_OUT),
    ]
    for volume, capacity, batches, held_out in points:
        sizes = scaled(recipe.drafter, recipe.sizes, capacity, intermediate_size)
        size = sizes.layers if recipe.drafter == "medusa" else sizes.intermediate_size
        part = _part(recipe, volume)
        name = f"{size}-{part.tokens}" + ("-held-out" if held_out else "")
        runs.append(GridRun(name, replace(part, sizes=sizes), batches, held_out))
    return runs


def _part(recipe: Recipe, volume: float) -> Recipe:
    """The recipe with a share of its tokens."""
    return replace(recipe, tokens=max(recipe.batch_tokens, round(volume * recipe.tokens)))


def _check_volumes(recipe: Recipe, length: int) -> None:
    def steps(tokens: int) -> list[int]:
        return [_part(replace(recipe, tokens=tokens), volume).portions(length)[0] for volume in VOLUMES]

    def differ(tokens: int) -> bool:
        return len(set(steps(tokens))) == len(VOLUMES)

    if not differ(recipe.tokens):
        step_tokens = recipe.portions(length)[1] * length
        least = next(tokens for tokens in itertools.count(step_tokens, step_tokens) if differ(tokens))
        raise ValueError(
            f"--tokens {recipe.tokens} with --batch-tokens {recipe.batch_tokens} and --length {length}: the volumes of "
            f"--scaling are {', '.join(map(str, steps(recipe.tokens)))} training steps, which must differ; raise "
            f"--tokens to at least {least}, or lower --batch-tokens"
        )


def scaled(kind: str, sizes: DrafterSizes, capacity: float, intermediate_size: int) -> DrafterSizes:
    """The sizes of a drafter ``capacity`` times as large."""
    if kind == "medusa":  # 1, 2 and 4 blocks
        return replace(sizes, layers=max(1, round(2 * capacity**0.5)))
    return replace(sizes, intermediate_size=max(8, round(capacity * intermediate_size)))


def measured(
    model: Any, folder: Path, run: GridRun, windows: Windows, tokens: int, parameters: int
) -> list[ScalingRun]:
    """A drafter's tokens per step at its batch sizes, over the beginnings of held-out windows."""
    count, length = len(windows.held_out), min(_PROMPT, windows.length)
    chosen = torch.linspace(0, count - 1, min(count, _PROMPTS)).round().long()
    prompts = windows.held_out[chosen, :length].tolist()
    rows = []
    for batch in run.batches:
        nodes = ROWS // batch
        with patch(model, folder, tree=nodes, max_batch_size=batch):
            results = generate_batch(model, prompts, max_new_tokens=_NEW)
        steps = sum(result.steps for result in results)
        accepted = sum(result.accepted for result in results)
        rows.append(ScalingRun(tokens, parameters, batch, nodes, (accepted + steps) / steps))
    return rows


def described(folder: Path, tokens: int, parameters: int) -> TrainedDrafter:
    """A saved drafter's accuracies and sizes."""
    config = json.loads((folder / "config.json").read_text())
    accuracy = tuple(tuple(row) for row in config.pop("cumulative_topk_accuracy"))
    published = open_drafter(folder)  # None: Medusa heads, whose config has all sizes
    return TrainedDrafter(tokens, parameters, accuracy, config, published.elements if published else {})


def sources(model: Any, name: str, windows: Windows) -> dict[str, Any]:
    """The model and text that decide a run's results besides its recipe, by checksums."""
    return {
        "model": [name, _checksum(FrozenTarget(model, ()).weight)],
        "text": [windows.length, _checksum(windows.training), _checksum(windows.held_out)],
    }


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


def stored_runs(path: Path, arguments: dict[str, Any]) -> list[ScalingRun]:
    """The measurements that a finished run of the grid has in its folder.

    Raises:
        TrainingError: they were made with other arguments, or are damaged.
    """
    try:
        stored = json.loads(path.read_text())
        made_with, runs = dict(stored["arguments"]), [ScalingRun(**row) for row in stored["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise TrainingError(f"{path} is damaged ({error}); remove {path.parent}, and the run is repeated") from error
    check_arguments(path.parent, made_with, arguments)
    return runs


def store_runs(path: Path, runs: Sequence[ScalingRun], arguments: dict[str, Any]) -> None:
    """Write a run's measurements beside its arguments."""
    stored = {"arguments": arguments, "runs": [vars(run) for run in runs]}
    replace_file(path, lambda fresh: fresh.write_text(json.dumps(stored, indent=1) + "\n"))
