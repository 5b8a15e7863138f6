"""A simulation of batches on a GPU whose steps are captured: sizes of partial trees, with and without padding.

    python bench/padded_steps.py --json bench/results/padded_steps.json

The tree chooser is the package's, acceptance is replayed from Medusa's published accuracies (``bench/replay.py``). A
step takes the measured seconds of an H200 (Vicuna-7B's shape): of its recorded pass by rows and 1.2 ms besides; its
first run, which is eager, 50 ms; its capture 300 ms. Batches of random texts follow each other. All of them are
predictions.

- ``tokens_per_s``: over all batches. ``warm``: the median of the last third of the batches.
- ``captures``: steps that were captured.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from replay import Published, walk_ranks
from timing import print_rows, write_result

from specmemo_kernels.engine.step_graph import padded_sequences
from specmemo_kernels.integrations.hf.plan import GRAPH_SIZES, PADDED_SIZES
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, RunningAcceptance, best_first_paths, extrapolated
from specmemo_kernels.tree.choice import PassSeconds, TreeChooser
from specmemo_kernels.tree.draft_tree import DraftTree

Row = dict[str, Any]
#: Seconds of a recorded pass by its rows; the last two are guesses.
PASSES = PassSeconds(((1, 3.05e-3), (8, 3.07e-3), (32, 3.17e-3), (128, 3.87e-3), (256, 5.2e-3), (640, 11e-3)))
#: Seconds of a step besides its pass, of its first run, and of a capture.
REST, EAGER, CAPTURE = 1.2e-3, 0.05, 0.3
NODES = 64


class Gpu:
    """Steps by their shape: the seconds of each run."""

    def __init__(self, seed: int) -> None:
        self._noise, self.runs = random.Random(seed), Counter[tuple[int, ...]]()

    def seconds(self, shape: tuple[int, ...]) -> tuple[float, bool]:
        """Seconds of a step of this shape (sequences, nodes, ...), and whether it was a replay."""
        self.runs[shape] += 1
        if self.runs[shape] <= 2:
            return (EAGER, CAPTURE)[self.runs[shape] - 1], False
        return (PASSES.at(shape[0] * shape[1]) + REST) * self._noise.uniform(0.97, 1.05), True

    @property
    def captures(self) -> int:
        return sum(count > 1 for count in self.runs.values())


def simulate(sizes: frozenset[int], padded: bool, batch: int, batches: int, new_tokens: int, seed: int) -> Row:
    """``batches`` batches of ``batch`` texts, one after the other, with one chooser."""
    accuracy, published, gpu = extrapolated(DEFAULT_ACCURACY[:4], 10), Published(), Gpu(seed)
    tree = DraftTree.from_paths(best_first_paths(accuracy, NODES - 1))
    room = partial(padded_sequences, most=batch) if padded else int
    chooser = TreeChooser(tree, RunningAcceptance(tree, accuracy), PASSES, sizes=sizes, padded=room)
    spent, speeds = 0.0, []
    for number in range(batches):
        first, begun = number * batch + 1000 * seed, spent
        texts = [published.ranks(first + i, 0, new_tokens + 8) for i in range(batch)]
        written = [1] * batch
        while running := [i for i in range(batch) if written[i] < new_tokens]:
            part = chooser.tree_for(len(running))
            depth = 0 if padded else part.max_depth
            seconds, replayed = gpu.seconds((room(len(running)), part.size, depth))
            spent += seconds
            assert isinstance(part, DraftTree), "Medusa's trees are static"
            paths = [walk_ranks(part, texts[i][written[i]]) for i in running]
            for i, path in zip(running, paths, strict=True):
                written[i] += len(path)
            chooser.stepped(part, paths, seconds if replayed else None)
        speeds.append(batch * new_tokens / (spent - begun))
    warm = statistics.median(speeds[-max(1, batches // 3) :])
    return {"tokens_per_s": batches * batch * new_tokens / spent, "warm": warm, "captures": gpu.captures}


def main(
    batch: Annotated[str, typer.Option(help="sequences at once")] = "1,4,10,32,64",
    batches: Annotated[int, typer.Option(help="that follow each other")] = 10,
    new_tokens: Annotated[int, typer.Option(help="of each sequence")] = 128,
    seeds: Annotated[int, typer.Option(help="runs with other texts; means are printed")] = 4,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Simulate, print a table and write JSON."""
    kinds: dict[str, tuple[frozenset[int], bool]] = {
        "as many sequences as run": (GRAPH_SIZES, False),
        "padded": (GRAPH_SIZES, True),
        "padded, powers of two": (PADDED_SIZES, True),
    }
    rows: list[Row] = []
    for size in map(int, batch.split(",")):
        for name, (sizes, padded) in kinds.items():
            runs = [simulate(sizes, padded, size, batches, new_tokens, seed) for seed in range(seeds)]
            means = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
            rows.append({"batch": size, "steps": name, "sizes": sorted(sizes)} | means)
    print_rows(rows)
    write_result(json_, {"predicted": True, "batches": batches, "new_tokens": new_tokens, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
