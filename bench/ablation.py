"""Ablation: what each saving gives, on paper and measured; and memory and speed against heads, nodes and KV size.

    python bench/ablation.py paper --json bench/results/ablation_paper.json --pictures docs/benchmarks
    python bench/ablation.py speed --published medusa --json bench/results/ablation_speed_cpu.json
    python bench/ablation.py memory --published medusa --planned 2,8 --json bench/results/ablation_memory_cpu.json

- ``paper`` predicts bytes and tokens per second from Medusa as published to this package, one saving at a time, and
  without each saving alone (:mod:`ablation_paper`). It measures nothing.
- ``speed`` and ``memory`` run a shape with random weights; acceptance is replayed (``replay.py``), from Medusa's
  published run with ``--published FOLDER``, else from the accuracies of its heads. In float32 all lossless systems must
  first write the same tokens with real acceptance, and systems with the same fixed tree must take as many steps.
  Memory and speed are separate commands, because tracking is slow and needs no quiet machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import ablation_paper
import ablation_report
import ablation_runs
import typer
from ablation_sensitivity import SCALES, Row, Scale, request_of, sensitivity
from bench_step import DTYPES
from replay import Published
from shapes import SHAPES, random_heads, random_model
from timing import print_rows, write_result

from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, best_first_paths
from specmemo_kernels.tree.draft_tree import DraftTree

app = typer.Typer(add_completion=False)
Json = Annotated[Path | None, typer.Option("--json", help="write the rows here")]


def paper_rows(scale: Scale, context: int) -> list[Row]:
    """Every combination for one length; the plan is chosen for heads in 4 bits."""
    request = request_of(scale, context)
    plan = ablation_paper.chosen(ablation_paper.coded(request))
    tables = {"cumulative": ablation_paper.cumulative(), "left out": ablation_paper.left_out()}
    rows = []
    for table, combinations in tables.items():
        for name, on in combinations:
            found = ablation_paper.predict(on, request, plan)
            rows.append(
                {
                    "table": table, "context": context, "system": name, "heads": found.loaded_heads,
                    "nodes": found.nodes, "generation_bytes": found.nbytes, "tokens_per_s": found.tokens_per_second,
                    "tokens_per_step": found.tokens_per_step, "step_ms": 1e3 * found.step_seconds,
                    "prefill_ms": 1e3 * found.prefill_seconds, "rejected_bytes": found.rejected_bytes,
                    "bytes_by_part": found.parts,
                }
            )  # fmt: skip
    return rows


@app.command()
def paper(
    model: Annotated[str, typer.Option(help=", ".join(scale.model for scale in SCALES))] = "Vicuna-7B",
    device: Annotated[str, typer.Option(help="a known device")] = "titan-rtx",
    devices: Annotated[int, typer.Option(help="number of such devices, tensor parallel")] = 1,
    contexts: Annotated[str, typer.Option(help="tokens, half of them prompt")] = "512,2048",
    json_: Json = None,
    pictures: Annotated[Path | None, typer.Option(help="a folder for ablation.svg and sensitivity.svg")] = None,
) -> None:
    """Predict; print tables, write JSON and pictures."""
    scale = Scale(model, device, devices)
    rows = [row for context in contexts.split(",") for row in paper_rows(scale, int(context))]
    curves = [row for each in SCALES for row in sensitivity(each)]
    print_rows(rows, [name for name in rows[0] if name != "bytes_by_part"], "predicted")
    print_rows(curves, title="predicted")
    write_result(json_, {"command": command(), "scale": scale.name, "sensitivity": curves, "rows": rows})
    if pictures is not None:
        ablation_report.draw(pictures, scale.name, rows, curves)


Shape = Annotated[str, typer.Option(help=", ".join(SHAPES))]
Dtype = Annotated[str, typer.Option(help=", ".join(DTYPES))]
Folder = Annotated[Path | None, typer.Option("--published", help="folder with Medusa's published files", exists=True)]
Count = Annotated[int, typer.Option("--conversations", help="conversations of two turns")]
Prompt = Annotated[int, typer.Option(help="random tokens of each turn's prompt")]
New = Annotated[int, typer.Option(help="tokens written in each turn")]
Chunk = Annotated[int, typer.Option(help="prompt tokens of a pass with chunked prefill")]
Planned = Annotated[str | None, typer.Option(help="HEADS,NODES instead of what patch plans for this machine")]


def work_of(
    shape: str,
    dtype: str,
    folder: Path | None,
    count: int,
    prompt: int,
    new_tokens: int,
    chunk: int,
    planned: str | None,
) -> ablation_runs.Work:
    """The model, heads and conversations of a measurement, and the planned tree."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"--shape is {shape!r}, expected one of {', '.join(SHAPES)}")
    model = random_model(SHAPES[shape], DTYPES[dtype], "cpu")
    published = Published() if folder is None else Published.load(folder)
    talks = ablation_runs.conversations(published, count, prompt, model.config.vocab_size)
    work = ablation_runs.Work(model, random_heads(model, 5, own_lm_head=True), published, talks, new_tokens, chunk)
    if planned is None:
        return work.with_planned_tree()
    heads, nodes = map(int, planned.split(","))
    return work.with_tree(DraftTree.from_paths(best_first_paths(DEFAULT_ACCURACY[:heads], nodes - 1)))


def write(path: Path | None, work: ablation_runs.Work, rows: list[Row], title: str) -> None:
    """Print the rows, and write them with the settings."""
    print_rows(rows, [name for name in rows[0] if name not in ("bytes_by_part", "seconds")], title)
    setting: Row = {
        "command": command(), "dtype": str(work.model.dtype).removeprefix("torch."), "acceptance": "replayed",
        "conversations": len(work.talks), "prompt": len(work.talks[0].turns[0]), "new_tokens": work.new_tokens,
        "chunk": work.chunk, "planned_heads": work.tree.max_depth, "planned_nodes": work.tree.size,
    }  # fmt: skip
    write_result(path, {**setting, "rows": rows})


@app.command()
def speed(
    shape: Shape = "125m", dtype: Dtype = "fp32", published: Folder = None, count: Count = 2, prompt: Prompt = 256,
    new_tokens: New = 32, chunk: Chunk = 64, planned: Planned = None,
    rounds: Annotated[int, typer.Option(help="of each conversation and system, at most")] = 3,
    seconds: Annotated[float, typer.Option(help="no later round starts after these")] = 180.0,
    json_: Json = None,
) -> None:  # fmt: skip
    """Tokens per second of all systems, in turns."""
    work = work_of(shape, dtype, published, count, prompt, new_tokens, chunk, planned)
    write(json_, work, ablation_runs.measure_speed(work, rounds, seconds), "measured; acceptance replayed")


@app.command()
def memory(
    shape: Shape = "125m", dtype: Dtype = "fp32", published: Folder = None, prompt: Prompt = 256, new_tokens: New = 32,
    chunk: Chunk = 64, planned: Planned = None, json_: Json = None,
) -> None:  # fmt: skip
    """Peak generation memory of all systems in one conversation."""
    work = work_of(shape, dtype, published, 1, prompt, new_tokens, chunk, planned)
    write(json_, work, ablation_runs.measure_memory(work), "measured; acceptance replayed")


def command() -> str:
    return " ".join(["python", *(Path(word).name if word.startswith("/") else word for word in sys.argv)])


if __name__ == "__main__":
    app()
