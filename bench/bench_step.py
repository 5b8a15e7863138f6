"""One decode step, its matrix products timed alone in the same run, and its parts.

    python bench/bench_step.py --shape 125m,bundled --dtype bf16,fp32 --tree 8 --context 1024 --json out.json
    python bench/bench_step.py --shape vicuna-7b --dtype bf16 --tree 25 --device cuda

The step is the patched model's own loop (draft, forward, verify, commit) at batch 1. The products are torch's linears
with the same weights and rows, in sequence: seven per layer and the lm_head over all nodes, the heads' blocks and the
lm_head over one row per head. Both take turns, and each reads all weights, so neither finds them in a cache. ``ratio``
is the median step over the median of the products. The step's parts come from torch's profiler
(``bench/step_profile.py``), in separate steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from shapes import SHAPES, random_heads, random_model
from step_profile import breakdown
from timing import print_rows, take_turns, write_result
from torch import nn

import specmemo_kernels as sk
from specmemo_kernels.cli.common import demo_model_folder, hide_loading_bars, load_model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Row = dict[str, Any]
BUNDLED = "bundled"
#: The ``steps`` of :func:`step_profile.breakdown`.
PROFILED = 12


class Steps:
    """Decode steps of one sequence, one per call; the sequence starts again after ``span`` tokens."""

    def __init__(self, model: Any, context: int, span: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._prompt = torch.randint(model.config.vocab_size, (context,), generator=generator).tolist()
        self._model, self._span = model, span
        self._pieces: Iterator[sk.Piece] = iter(())

    def __call__(self) -> sk.Piece:
        piece = next(self._pieces, None)
        if piece is None or piece.finished:
            run = sk.stream_batch(self._model, [self._prompt], max_new_tokens=self._span, eos_token_ids=[])
            self._pieces = iter(run)
            next(self._pieces)  # the prompt
            piece = next(self._pieces)
        return piece


def products(model: Any, heads: sk.MedusaHeads, depth: int, nodes: int) -> Callable[[], None]:
    """All matrix products of a step over a tree of ``nodes`` nodes and this ``depth``."""
    lm_head = model.get_output_embeddings().weight
    jobs: list[tuple[torch.Tensor, int]] = []
    for layer in model.model.layers:
        jobs += [(m.weight, nodes) for m in layer.modules() if isinstance(m, nn.Linear)]
    jobs.append((lm_head, nodes))
    for head in range(depth):
        jobs += [(heads.linear(head, layer).weight, 1) for layer in range(heads.num_layers)]
        if heads.own_lm_head:
            jobs.append((heads.lm_head_weight(head, lm_head), 1))
    if not heads.own_lm_head:
        jobs.append((lm_head, depth))
    rows = {(w.shape[1], n): torch.randn(n, w.shape[1]).to(device=w.device, dtype=w.dtype) for w, n in jobs}

    @torch.inference_mode()
    def run() -> None:
        for weight, count in jobs:
            nn.functional.linear(rows[weight.shape[1], count], weight)

    return run


def synchronised(job: Callable[[], object], device: str) -> Callable[[], object]:
    """``job``, followed by a synchronisation on a GPU."""
    if device == "cpu":
        return job

    def wait() -> None:
        job()
        torch.cuda.synchronize(device)

    return wait


def load(shape: str, dtype: torch.dtype, device: str, own: bool) -> tuple[Any, sk.MedusaHeads]:
    """A model and four heads: bundled, or random weights."""
    if shape != BUNDLED:
        model = random_model(SHAPES[shape], dtype, device)
        return model, random_heads(model, 4, own)
    hide_loading_bars()
    folder = demo_model_folder()
    heads = sk.MedusaHeads.from_pretrained(folder / "heads", dtype=dtype, device=torch.device(device))
    return load_model(folder, dtype, torch.device(device)), heads


def measure(
    shape: str, dtype: str, tree: int | None, context: int, own: bool, seconds: float, device: str, graph: bool | None
) -> Row:
    """One row: the step of this shape, its products, and its parts."""
    model, heads = load(shape, DTYPES[dtype], device, own)
    context = min(context, model.config.max_position_embeddings // 2)
    with sk.patch(model, heads, tree=tree, max_batch_size=1, graph=graph) as handle:
        plan, depth = handle.plan, handle.plan.tree.max_depth
        step = Steps(model, context, span=128)
        for _ in range(4):  # a graph is captured in the second step
            step()
        alone = products(model, heads, depth, plan.tree.size)
        jobs = {"step": synchronised(step, device), "products": synchronised(alone, device)}
        times = take_turns(jobs, seconds=seconds, rounds=(20, 400))
        parts = breakdown(step, PROFILED, torch.device(device))
        return {
            "shape": shape, "dtype": dtype, "context": context, "nodes": plan.tree.size, "depth": depth,
            "heads": "own lm_head" if heads.own_lm_head else "shared lm_head", "graph": handle.stats.graph_steps > 0,
            "step_ms": times["step"] * 1e3, "products_ms": times["products"] * 1e3,
            "ratio": times["step"] / times["products"], "parts_ms": parts,
        }  # fmt: skip


def main(
    shape: Annotated[str, typer.Option(help="of " + ", ".join((BUNDLED, *SHAPES)))] = "125m",
    dtype: Annotated[str, typer.Option(help="of " + ", ".join(DTYPES))] = "bf16,fp32",
    tree: Annotated[str, typer.Option(help="nodes, or 'plan': patch chooses the tree")] = "plan,8",
    context: Annotated[int, typer.Option(help="tokens of the prompt")] = 1024,
    own: Annotated[bool, typer.Option("--own-lm-head", help="heads with a vocabulary matrix each")] = False,
    seconds: Annotated[float, typer.Option(help="for each row")] = 6.0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    graph: Annotated[bool | None, typer.Option("--graph/--no-graph", help="default: as patch chooses")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, print a table and write JSON."""
    rows = [
        measure(name, kind, None if size == "plan" else int(size), context, own, seconds, device, graph)
        for name in shape.split(",")
        for kind in dtype.split(",")
        for size in tree.split(",")
    ]
    times = [{name: cell for name, cell in row.items() if name != "parts_ms"} for row in rows]
    print_rows(times, title="a step and its products")
    setup = ("shape", "dtype", "nodes")
    print_rows([{name: row[name] for name in setup} | row["parts_ms"] for row in rows], title="ms by part")
    write_result(json_, {"rows": rows})


if __name__ == "__main__":
    typer.run(main)
