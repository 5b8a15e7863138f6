"""Greedy tokens that change with quantised pages: the bundled model over held-out library files.

    python bench/kv_quality.py --model specmemo_kernels/demo_model --json bench/results/kv_quality.json

Every continuation is generated with pages in the model's dtype, then with quantised pages. Texts diverge after the
first changed token, so only first changes count. Their rate is the number of changed continuations over the tokens up
to and including the first change.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from timing import print_rows, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer

import specmemo_kernels
from specmemo_kernels.cli.common import demo_model_folder
from specmemo_kernels.cli.demo_data import is_held_out, library_files


def prompts_from(tokenizer: Any, count: int, tokens: int, seed: int) -> list[torch.Tensor]:
    """``count`` prompts of ``tokens`` tokens each, ``[1, tokens]`` int64, from random places of held-out files."""
    rng, prompts = random.Random(seed), []
    files = [file for file in library_files() if is_held_out(file)]
    while len(prompts) < count:
        ids = tokenizer(rng.choice(files).read_text(errors="replace"), return_tensors="pt").input_ids
        if ids.shape[1] > tokens:
            start = rng.randrange(ids.shape[1] - tokens)
            prompts.append(ids[:, start : start + tokens])
    return prompts


def written(model: Any, folder: Path, prompts: list[torch.Tensor], new: int, kv_dtype: str | None) -> list[list[int]]:
    """The patched model's continuation of each prompt."""
    with specmemo_kernels.patch(model, folder / "heads", kv_dtype=kv_dtype):
        outputs = [model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None) for ids in prompts]
    return [out[0, ids.shape[1] :].tolist() for out, ids in zip(outputs, prompts, strict=True)]


def first_change(a: list[int], b: list[int]) -> int | None:
    """The first index at which two token lists differ, or ``None``."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def compared(plain: list[list[int]], codes: list[list[int]]) -> dict[str, float]:
    """Changed continuations, tokens up to the first changes, and first changes per 1000 tokens."""
    places = [first_change(a, b) for a, b in zip(plain, codes, strict=True)]
    changed = [place for place in places if place is not None]
    seen = sum(len(text) if place is None else place + 1 for text, place in zip(plain, places, strict=True))
    equal = sum(x == y for a, b in zip(plain, codes, strict=True) for x, y in zip(a, b, strict=True))
    return {
        "continuations": len(plain),
        "changed": len(changed),
        "tokens_up_to_first_changes": seen,
        "first_changes_per_1000_tokens": 1000 * len(changed) / seen,
        "tokens_equal_by_place": equal / sum(map(len, plain)),
    }


def main(
    model: Annotated[Path | None, typer.Option(help="a folder, heads in heads/; default: the bundled one")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16")] = "float32",
    count: Annotated[int, typer.Option(help="continuations")] = 50,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 256,
    new: Annotated[int, typer.Option(help="tokens written after it")] = 64,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Generate, compare, print a table and write JSON."""
    folder = model or demo_model_folder()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    prompts = prompts_from(AutoTokenizer.from_pretrained(folder), count, prompt, seed)
    plain = written(target, folder, prompts, new, None)
    rows = [{"kv_dtype": kv, **compared(plain, written(target, folder, prompts, new, kv))} for kv in ("int8", "fp8")]
    print_rows(rows)
    setup = {"dtype": dtype, "prompt_tokens": prompt, "new_tokens": new, "seed": seed}
    write_result(json_, {**setup, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
