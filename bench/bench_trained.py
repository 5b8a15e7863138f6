"""Trained drafters of one model, compared: acceptance by depth, tokens per step, bytes, tokens per second.

    python bench/bench_trained.py --drafters build/drafters/medusa,build/drafters/eagle3 --json out.json

Every side continues the same held-out texts greedily, and must write the tokens of plain ``generate``. Every step
verifies a tree of the given size; 0 stands for what ``patch`` chooses. Times are of calls in turns.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from kv_quality import prompts_from
from timing import print_rows, take_turns, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer

import specmemo_kernels as sk
from specmemo_kernels.cli.common import demo_model_folder
from specmemo_kernels.training.answers import read_prompts
from specmemo_kernels.training.run import SUMMARY


def continued(model: Any, prompts: list[torch.Tensor], new: int) -> list[list[int]]:
    """The tokens of each prompt and its greedy continuation."""
    outputs = (
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None)
        for ids in prompts
    )
    return [out[0].tolist() for out in outputs]


def counted(model: Any, drafter: Path, nodes: int | None, prompts: list[torch.Tensor], new: int) -> dict[str, Any]:
    """Tokens per step, bytes and acceptance with trees of ``nodes`` nodes, and the texts."""
    with sk.patch(model, drafter, tree=nodes) as handle:
        texts = continued(model, prompts, new)
        return {
            "tokens_per_step": handle.stats.tokens_per_step,
            "drafter_bytes": handle.bytes_by_part["heads"],
            "acceptance_by_depth": list(handle.stats.acceptance_by_depth),
            "texts": texts,
        }


def trained(folder: Path) -> dict[str, Any]:
    """What a drafter's summary says of its training."""
    summary = json.loads((folder / SUMMARY).read_text())
    accuracy = summary["held_out"]["accuracy"]
    return {name: summary[name] for name in ("tokens", "seconds", "parameters")} | {
        "name": folder.name,
        "accuracy": accuracy,
    }


def main(
    drafters: Annotated[str, typer.Option(help="folders, comma-separated")],
    model: Annotated[str | None, typer.Option(help="a folder (default: the bundled model)")] = None,
    prompts: Annotated[Path | None, typer.Option(help="a .jsonl file of prompts (default: library files)")] = None,
    nodes: Annotated[str, typer.Option(help="sizes of trees, comma-separated")] = "8,16,32,0",
    count: Annotated[int, typer.Option(help="continuations")] = 60,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 256,
    new: Annotated[int, typer.Option(help="tokens written after it")] = 64,
    seconds: Annotated[float, typer.Option(help="timed, for each size of tree")] = 60.0,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 1,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, print a table and write JSON."""
    folder = model or demo_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if prompts is None:
        chosen = prompts_from(tokenizer, count, prompt, seed)
    else:
        chosen = [torch.tensor([ids[-prompt:]]) for ids in read_prompts([prompts], tokenizer)][:count]
    expected, timed = continued(plain, chosen, new), chosen[:4]
    rows = []
    for size in map(int, nodes.split(",")):
        sides: dict[str, Any] = {"plain generate": partial(continued, plain, timed, new)}
        found: dict[str, dict[str, Any]] = {}
        for path in map(Path, drafters.split(",")):
            patched = copy.deepcopy(plain)
            found[path.name] = counted(patched, path, size or None, chosen, new)
            if found[path.name].pop("texts") != expected:
                raise RuntimeError(f"{path}, {size} nodes: other tokens than plain generate")
            sk.patch(patched, path, tree=size or None)
            sides[path.name] = partial(continued, patched, timed, new)
        times = take_turns(sides, seconds=seconds, rounds=(3, 100))
        for name, value in times.items():
            row = {"nodes": size, "side": name, "tokens_per_s": len(timed) * new / value}
            rows.append(row | {"speedup": times["plain generate"] / value} | found.get(name, {}))
    print_rows(rows, ["nodes", "side", "tokens_per_step", "drafter_bytes", "tokens_per_s", "speedup"])
    setup = {
        "dtype": "float32",
        "count": count,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "seed": seed,
    }
    summary = Path(folder) / SUMMARY
    text = json.loads(summary.read_text()) if summary.exists() else None
    write_result(
        json_, {**setup, "model": text, "training": [trained(Path(path)) for path in drafters.split(",")], "rows": rows}
    )


if __name__ == "__main__":
    typer.run(main)
