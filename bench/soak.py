"""A long soak test: random requests with aborts; every few dozen requests a new random budget and drafter.

    python bench/soak.py --requests 2000 --json soak.json

Compares every finished output with the unpatched model's. All pages must be free after each round, and the bytes of
live tensors must not grow. The process's resident bytes are recorded.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from batch_runs import first_layers
from timing import write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python_tests"))

from soak import soak

import specmemo_kernels as sk
from specmemo_kernels.cli.common import demo_model_folder, load_model, load_tokenizer
from specmemo_kernels.cli.demo_data import is_held_out, library_files


def main(
    requests: Annotated[int, typer.Option(help="number of requests")] = 2000,
    prompts: Annotated[int, typer.Option(help="different prompts")] = 60,
    new_tokens: Annotated[int, typer.Option(help="maximum new tokens of a request")] = 48,
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    json_: Annotated[Path | None, typer.Option("--json", help="write the report here")] = None,
) -> None:
    """Run the test on the bundled model in float32; raises on the first error."""
    folder = demo_model_folder()
    model, tokenizer = load_model(folder, torch.float32, torch.device("cpu")), load_tokenizer(folder)
    model.generation_config.eos_token_id = None
    rng = random.Random(seed)
    files = [
        file.read_text(encoding="utf-8", errors="ignore")[:20_000] for file in library_files() if is_held_out(file)
    ]
    texts = [tokenizer(rng.choice(files), verbose=False).input_ids for _ in range(prompts)]
    cut = [text[: rng.randint(1, 300)] for text in texts]
    small = first_layers(model, 2)
    drafters = [lambda: folder / "heads", lambda: "prompt-lookup", lambda: sk.DraftModel(small, tokens=4)]
    process, resident = psutil.Process(), [0]
    started = time.perf_counter()

    def progress(done: int) -> None:
        resident.append(process.memory_info().rss)
        print(f"{done} requests, {time.perf_counter() - started:.0f} s, {resident[-1] / 2**20:.0f} MiB", flush=True)

    report = soak(model, drafters, cut, new_tokens=new_tokens, requests=requests, seed=seed, progress=progress)
    settled = report.tensor_bytes[len(report.tensor_bytes) // 4 :]
    if max(settled) > 1.05 * min(settled):
        raise AssertionError(f"tensors pile up: {report.tensor_bytes}")
    result = {**asdict(report), "resident_bytes": resident[1:], "seconds": time.perf_counter() - started}
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, list | tuple)}, indent=1))
    write_result(json_, result)


if __name__ == "__main__":
    typer.run(main)
