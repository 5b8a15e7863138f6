"""Steps with published drafters (random weights): dynamic trees beside static trees of the same size and depth.

Run ``python bench/bench_drafters.py --help``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_step import DTYPES, Steps, random_prompt, synchronised
from random_drafters import KINDS, write_drafter
from shapes import SHAPES, random_model, twin
from timing import print_rows, take_turns, write_result

import specmemo_kernels as sk
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, best_first_paths
from specmemo_kernels.tree.tree_budget import beam_of


def measure(
    kind: str, model: Any, folder: Path, nodes: int, depth: int, full_beam: bool, context: int, seconds: float
) -> dict[str, Any]:
    """Median milliseconds of steps: with dynamic trees, also in 4 bits, static trees, and without drafts, in turns."""
    write_drafter(kind, model, folder)
    table = [*DEFAULT_ACCURACY[:depth], *[DEFAULT_ACCURACY[-1]] * (depth - len(DEFAULT_ACCURACY))]
    paths = best_first_paths(table, 2000)
    chain = [(0,) * d for d in range(1, depth + 1)]
    static = sorted([*chain, *[p for p in paths if p not in chain][: nodes - 1 - depth]], key=len)
    budget = sk.TreeBudget(nodes, depth, nodes - 1 if full_beam or kind == "dflash" else beam_of(nodes))
    sides: dict[str, tuple[Any, int | None]] = {
        "dynamic": (budget, None), "static": (sk.DraftTree.from_paths(static), None), "plain": (1, None),
        "coded": (budget, 4),
    }  # fmt: skip
    handles, steps, written = [], {}, {}
    for name, (tree, bits) in sides.items():
        patched = twin(model)
        handles.append(sk.patch(patched, str(folder), tree=tree, max_batch_size=1, head_bits=bits))
        written[name] = sk.generate_batch(patched, [random_prompt(model, context)], max_new_tokens=16)[0].tokens
        steps[name] = synchronised(Steps(patched, context, span=128), model.device.type)
        for _ in range(12):  # captured after eight steps
            steps[name]()
    if model.dtype == torch.float32 and any(tokens != written["plain"] for tokens in written.values()):
        raise RuntimeError(f"{kind}: the steps write different tokens: {written}")
    times = take_turns(steps, seconds=seconds, rounds=(5, 400))
    setup = {"drafter": kind, "nodes": nodes, "depth": depth, "captured": all(h.stats.graph_steps for h in handles)}
    for handle in handles:
        handle.__exit__()
    milliseconds = {f"{name}_ms": value * 1e3 for name, value in times.items()}
    ratios = {
        f"{name}/{other}": times[name] / times[other] for name, other in (("dynamic", "static"), ("coded", "dynamic"))
    }
    return setup | milliseconds | ratios


def main(
    shape: Annotated[str, typer.Option(help="of " + ", ".join(SHAPES))] = "125m,1b",
    dtype: Annotated[str, typer.Option(help="of " + ", ".join(DTYPES))] = "bf16",
    kinds: Annotated[str, typer.Option(help="of " + ", ".join(KINDS))] = ",".join(KINDS),
    nodes: Annotated[str, typer.Option(help="sizes of trees")] = "8,16",
    depth: Annotated[int, typer.Option(help="of the trees")] = 4,
    full_beam: Annotated[bool, typer.Option(help="expand all nodes, not a third of them")] = False,
    context: Annotated[int, typer.Option(help="tokens of the prompt")] = 256,
    seconds: Annotated[float, typer.Option(help="for each row")] = 12.0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    folder: Annotated[Path, typer.Option(help="where drafters are written")] = Path("build/drafters"),
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, print a table and write JSON."""
    rows = []
    for name in shape.split(","):
        model = random_model(SHAPES[name], DTYPES[dtype], device)
        for kind in kinds.split(","):
            for size in map(int, nodes.split(",")):
                row = {"shape": name, "dtype": dtype, "context": context}
                rows.append(row | measure(kind, model, folder / name / kind, size, depth, full_beam, context, seconds))
                print(json.dumps(rows[-1]), flush=True)
    print_rows(rows, title="steps with published drafters")
    write_result(json_, {"rows": rows})


if __name__ == "__main__":
    typer.run(main)
