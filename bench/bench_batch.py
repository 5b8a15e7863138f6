"""Batched speculative decoding over Spec-Bench prompts, against plain and assisted generate of transformers.

    python bench/bench_batch.py --questions FILE --batch 1,8 --drafter medusa --json out.json
    python bench/bench_batch.py --questions FILE --batch 1,2,4,8,10,16 --drafter medusa,draft,lookup \\
        --dtype fp32,bf16 --json out.json --plot out.png

FILE is Spec-Bench's question.jsonl; first turns are used, cut to the model's context. All sides of a batch size take
turns, four batches of prompts each. The draft model is the first layers of the model itself.

- ``exact_match``, ``partial_match``: against batch-1 greedy decoding of the unpatched model.
- ``floor_s``: sum of the forward passes' floors. A floor is the longer of reading the weights once and the products of
  all rows, prompts included, at rates measured in the same run.
- ``scaling``: tokens/s relative to the same drafter at batch 1.
- ``allowed``: the scaling of the roofline, ``floor_s`` at batch 1 over ``floor_s``.
- ``kv_bytes_written`` equals ``kv_bytes_committed``: nothing is realigned.
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
from shapes import twin
from timing import Yardstick, print_rows, take_turns, write_result

from specmemo_kernels.cli.common import demo_model_folder, load_model

Row = dict[str, Any]
PLAIN = "none (plain HF)"
COLUMNS = ("drafter", "dtype", "batch", "tokens_per_s", "vs_plain", "tokens_per_step", "exact_match", "partial_match",
           "scaling", "allowed", "peak_generation_bytes")  # fmt: skip


class Roofline:
    """Minimum times of forward passes by their rows, without attention and drafting."""

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
    """The sides of one batch size; this package patches a twin of the model for each drafter.

    All sides read the same weights: a copy elsewhere in memory makes a pass up to 1.5 times as long.
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
    """Add throughput relative to batch 1, and to plain generate at the same batch size."""
    ours = {(row["drafter"], row["dtype"], row["batch"]): row for row in rows if "floor_s" in row}
    for (drafter, dtype, _), row in ours.items():
        if (one := ours.get((drafter, dtype, 1))) is not None:  # all write the same number of tokens
            row["allowed"] = one["floor_s"] / row["floor_s"]
    speed = {(row["drafter"], row["dtype"], row["batch"]): row["tokens_per_s"] for row in rows}
    for row in rows:
        one = speed.get((row["drafter"], row["dtype"], 1))
        plain = speed.get((PLAIN, row["dtype"], row["batch"]))
        row["scaling"] = row["tokens_per_s"] / one if one else None
        row["vs_plain"] = row["tokens_per_s"] / plain if plain else None


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
    disturb: Annotated[bool, typer.Option(help="reverse the order, abort requests and submit them again")] = False,
    memory_budget: Annotated[
        str | None, typer.Option(help="as for patch, one or one per batch size; a small budget causes preemptions")
    ] = None,
    tree: Annotated[
        int | None, typer.Option(help="nodes verified for each sequence in every step; default: adaptive")
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
    print_rows(rows, COLUMNS)
    write_result(json_, {"rows": rows})
    if picture is not None:
        plot(rows, picture)


if __name__ == "__main__":
    typer.run(main)
