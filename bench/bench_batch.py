"""Batched speculative decoding over Spec-Bench prompts, against plain and assisted generate of transformers.

    python bench/bench_batch.py --questions FILE --batch 1,8 --drafter medusa --json out.json
    python bench/bench_batch.py --questions FILE --batch 1,2,4,8,10,16 --drafter medusa,draft,lookup \\
        --dtype fp32,bf16 --json out.json --plot out.png

FILE is Spec-Bench's question.jsonl; first turns are used, cut to the model's context. All sides of a batch size take
turns, four batches of prompts each. The draft model is the first layers of the model itself. ``exact_match`` and
``partial_match`` compare with batch-1 greedy decoding of the unpatched model. ``scaling`` is tokens/s over those of the
same drafter at batch 1, ``allowed`` what the roofline of its own steps lets it be: tokens per second of floor, relative
to batch 1. The floor of each forward pass is the longer of reading the weights once and the products of all its rows,
those of prompts among them, at rates measured in the same run; ``floor_s`` is their sum. ``kv_bytes_written`` equals
``kv_bytes_committed``: nothing is realigned.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import batch_runs as runs
import matplotlib.pyplot as plt
import torch
import typer
from rich.console import Console
from rich.table import Table
from shapes import twin
from timing import Yardstick, environment, take_turns

from specmemo_kernels.cli.common import demo_model_folder, load_model

Row = dict[str, Any]
PLAIN = "none (plain HF)"


class Roofline:
    """How long forward passes must take for their rows alone; attention and drafting are left out."""

    def __init__(self, model: Any) -> None:
        yard = Yardstick(model.dtype)
        self._yard, self._times = yard, take_turns(yard.functions, seconds=2)
        parameters = {p.data_ptr(): p for p in model.parameters()}.values()
        self._bytes = sum(p.nbytes for p in parameters)
        self._lm_head_flops = 2 * model.get_output_embeddings().weight.numel()
        self._row_flops = 2 * sum(p.numel() for p in model.model.layers.parameters())

    def floor(self, passes: Counter[runs.Pass]) -> float:
        """Seconds of all ``passes``."""
        return sum(
            count
            * self._yard.floor(dict(self._times), self._bytes, rows * self._row_flops + kept * self._lm_head_flops)
            for (rows, kept), count in passes.items()
        )


def sides_for(
    work: runs.Work, folder: Path, drafters: list[str], batch: int, peers: bool, options: dict[str, Any]
) -> dict[str, runs.Side]:
    """What takes turns at one batch size; each of ours patches a twin of the model.

    All read the same weights: copies of them that lie elsewhere in memory make a pass up to 1.5 times as long.
    """
    layers, budget, disturb = options["draft_layers"], options["memory_budget"].get(batch), options["disturb"]
    sides: dict[str, runs.Side] = {}
    if peers:
        sides[PLAIN] = runs.Plain(work, batch)
    if peers and batch == 1:
        small = runs.first_layers(work.model, layers)
        small.generation_config.num_assistant_tokens = 5
        small.generation_config.num_assistant_tokens_schedule = "constant"
        sides["draft (HF assisted)"] = runs.Plain(work, 1, assistant_model=small)
    for name in drafters:
        heads = runs.heads_for(name, work, folder, layers)
        sides[name] = runs.Ours(twin(work.model), heads, batch, budget, disturb, options["tree"])
    return sides


def rows_of(
    work: runs.Work, dtype: str, batch: int, sides: dict[str, runs.Side], roofline: Roofline,
    reference: list[list[int]],
) -> Iterator[Row]:  # fmt: skip
    """A row for each side."""
    full = load_model(work.model.name_or_path, torch.float32, torch.device("cpu")) if dtype != "fp32" else None
    for name, outcome in runs.take_turns(work, sides, 4 * batch).items():
        exact, partial = runs.matches(work, outcome.answers, reference)
        row: Row = {"drafter": name, "batch": batch, "dtype": dtype, "tokens_per_s": outcome.tokens_per_s}
        row |= outcome.counts | {"exact_match": exact, "partial_match": partial}
        row["peak_generation_bytes"] = runs.peak_bytes(sides[name], work, batch)
        if (passes := outcome.passes) is not None:
            row |= {"rows_per_pass": sum(rows * n for (rows, _), n in passes.items()) / passes.total()}
            row |= {"passes": passes.total(), "floor_s": roofline.floor(passes)}
            if row["kv_bytes_written"] != row["kv_bytes_committed"]:
                raise AssertionError(f"keys and values were copied: {row}")
        if full is not None:
            row |= runs.near_ties(work, full, outcome.answers, reference)
        elif exact < 1 and passes is not None:
            raise AssertionError(f"{name}, batch {batch}: {1 - exact:.1%} of the rows differ in float32")
        yield row


def add_scaling(rows: list[Row]) -> None:
    """Throughput over that of batch 1, and over plain generate at the same batch size."""
    ours = {(row["drafter"], row["dtype"], row["batch"]): row for row in rows if "floor_s" in row}
    for (drafter, dtype, _), row in ours.items():
        if (one := ours.get((drafter, dtype, 1))) is not None:  # all write as many tokens
            row["allowed"] = one["floor_s"] / row["floor_s"]
    speed = {(row["drafter"], row["dtype"], row["batch"]): row["tokens_per_s"] for row in rows}
    for row in rows:
        one = speed.get((row["drafter"], row["dtype"], 1))
        plain = speed.get((PLAIN, row["dtype"], row["batch"]))
        row["scaling"] = row["tokens_per_s"] / one if one else None
        row["vs_plain"] = row["tokens_per_s"] / plain if plain else None


def show(rows: list[Row]) -> None:
    """The rows as a table."""
    columns = ["drafter", "dtype", "batch", "tokens_per_s", "vs_plain", "tokens_per_step", "exact_match",
               "partial_match", "scaling", "allowed", "peak_generation_bytes"]  # fmt: skip
    table = Table(*columns)
    for row in rows:
        cells = [row.get(name) for name in columns]
        table.add_row(*["" if c is None else f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells])
    Console(width=160).print(table)


def plot(rows: list[Row], picture: Path) -> None:
    """Tokens per second over the batch size, a panel per dtype."""
    dtypes = sorted({row["dtype"] for row in rows})
    figure, panels = plt.subplots(1, len(dtypes), figsize=(5 * len(dtypes), 4), squeeze=False)
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        for drafter in dict.fromkeys(row["drafter"] for row in rows):
            points = [(r["batch"], r["tokens_per_s"]) for r in rows if (r["drafter"], r["dtype"]) == (drafter, dtype)]
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=drafter)
        axes.set(xlabel="batch", ylabel="tokens per second", title=dtype, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=130)


def main(
    questions: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl", exists=True)],
    batch: Annotated[str, typer.Option(help="sequences at once")] = "1,8",
    drafter: Annotated[str, typer.Option(help="of " + ", ".join(runs.DRAFTERS))] = "medusa",
    dtype: Annotated[str, typer.Option(help="of " + ", ".join(runs.DTYPES))] = "fp32",
    model: Annotated[
        Path | None, typer.Option(help="folder with the model, its heads in heads/; default: bundled")
    ] = None,
    limit: Annotated[int, typer.Option(help="prompts")] = 480,
    new_tokens: Annotated[int, typer.Option(help="written for each prompt")] = 64,
    draft_layers: Annotated[int, typer.Option(help="layers of the draft model")] = 2,
    peers: Annotated[bool, typer.Option(help="measure plain and assisted generate too")] = True,
    disturb: Annotated[bool, typer.Option(help="reverse the order, abort requests and ask for them again")] = False,
    memory_budget: Annotated[
        str | None, typer.Option(help="as for patch, one or one per batch size: little makes preemptions")
    ] = None,
    tree: Annotated[
        int | None, typer.Option(help="nodes verified for each sequence in every step; default: as many as pay")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="a .png or .svg to write")] = None,
) -> None:
    """Measure, print a table, write JSON and a plot."""
    folder = demo_model_folder() if model is None else model
    batches = [int(size) for size in batch.split(",")]
    rows: list[Row] = []
    given = memory_budget.split(",") if memory_budget else []
    if len(given) not in (0, 1, len(batches)):
        raise typer.BadParameter(
            f"{len(given)} memory budgets for {len(batches)} batch sizes; give one or one for each"
        )
    budgets = dict(zip(batches, given * len(batches) if len(given) == 1 else given, strict=False))
    options = {"draft_layers": draft_layers, "memory_budget": budgets, "disturb": disturb, "tree": tree}
    for kind in dtype.split(","):
        work = runs.load_work(folder, kind, questions, limit, new_tokens)
        reference = runs.Plain(work, 1).answer(work.prompts, new_tokens)
        roofline = Roofline(work.model)
        for size in batches:
            sides = sides_for(work, folder, drafter.split(","), size, peers, options)
            for row in rows_of(work, kind, size, sides, roofline, reference):
                rows.append(row)
                print(json.dumps(row), flush=True)
            for side in sides.values():
                side.close()
    add_scaling(rows)
    show(rows)
    if json_ is not None:
        json_.parent.mkdir(parents=True, exist_ok=True)
        json_.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    if picture is not None:
        plot(rows, picture)


if __name__ == "__main__":
    typer.run(main)
