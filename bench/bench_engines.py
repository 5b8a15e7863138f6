"""Tokens per second and generation memory of whole engines on the CPU, in turns.

    python bench/bench_engines.py --shape bundled,125m,1b --dtype bfloat16 --batch 1,8 --json out.json
    python bench/bench_engines.py --shape 1b --engines "llama.cpp;specmemo, heads" --batch 1
    python bench/bench_engines.py --engines "vllm;vllm, our attention;vllm, our trees;specmemo, heads" --shape bundled

Each engine has a process of its own with its own copy of the weights, and all run the same prompts in turn. llama.cpp
(``pip install llama-cpp-python gguf``) reads them from a GGUF file in the same dtype. vLLM runs in another Python
(``--vllm-python``; ``make test-vllm`` makes one with this package); engines that aren't installed are left out.

- Prompts are random tokens for random weights, Python files for the bundled model. The end of the text is ignored.
- ``tokens_per_s``: new tokens per second, prompts included; ``decode_per_s``: after the first token (of all prompts).
  Medians over the rounds.
- ``tokens_per_step``, the mean of the rounds, are the bundled model's own. Those of random weights are replayed
  (``bench/replay.py``), with other draws in each round: of heads from Medusa's published accuracies, of EAGLE-3 from a
  published run with chains. EAGLE-3 runs with random weights only, one prompt at a time.
- ``mib``: peak of a run's anonymous resident memory beyond that of the weights and the loaded library, in a process of
  its own that returns freed blocks of 256 KiB and more at once. (glibc's default is up to 32 MiB, so that loading
  leaves holes in the heap.)
- ``weights_mib``: the model's weights as the engine keeps them, without a drafter's; not given by vLLM.
- ``equal``: the part of the new tokens before the first one that differs from the first engine's, mean over the
  prompts. Not given for replayed runs.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from conversations import held_out_files
from engine_worker import ENGINES, Setup, Tokens
from random_drafters import write_drafter
from shapes import SHAPES, random_model
from timing import print_rows, write_result

from specmemo_kernels.cli.common import demo_model_folder, hide_loading_bars, load_model, load_tokenizer
from specmemo_kernels.planning.host_allocator import MAPPED_BYTES

Row = dict[str, Any]
BUNDLED = "bundled"
WORKER = Path(__file__).with_name("engine_worker.py")


class Worker:
    """A process that runs an engine, with more variables in its environment.

    Raises:
        RuntimeError: it ended before a result; its standard error is shown.
    """

    def __init__(self, engine: str, setup: Setup, python: str, **environment: str) -> None:
        self.engine, self._arguments = engine, (engine, setup, python)
        command = [python, str(WORKER), engine, json.dumps(asdict(setup))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )
        self._read()

    def memory(self, prompts: Tokens, new_tokens: int) -> int:
        """Bytes at the peak of a second run, in another process."""
        other = Worker(*self._arguments, MALLOC_MMAP_THRESHOLD_=str(MAPPED_BYTES))
        other.run(prompts, new_tokens)
        found: int = other.run(prompts, new_tokens, watch=True)["bytes"]
        other.close()
        return found

    def run(self, prompts: Tokens, new_tokens: int, watch: bool = False) -> Row:
        assert self._process.stdin is not None
        print(
            json.dumps({"prompts": prompts, "new_tokens": new_tokens, "watch": watch}),
            file=self._process.stdin, flush=True,
        )  # fmt: skip
        return self._read()

    def _read(self) -> Row:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self.engine} ended with exit code {self._process.wait()}")
        result: Row = json.loads(line)
        return result

    def close(self) -> None:
        self._process.communicate()


def make_model(
    shape: str, dtype: torch.dtype, folder: Path, context: int, prompts: int, gguf: bool
) -> tuple[Path, Tokens]:
    """A folder with the model (with ``gguf``, ``model.gguf`` too), and ``prompts`` prompts of ``context`` tokens."""
    hide_loading_bars()
    if shape == BUNDLED:
        model = load_model(demo_model_folder(), dtype, torch.device("cpu"))
        files = held_out_files(load_tokenizer(demo_model_folder()), prompts, context)
        texts = [list(talk.turns[0]) for talk in files]
    else:
        model = random_model(SHAPES[shape], dtype, "cpu")
        source = random.Random(0)
        texts = [[source.randrange(model.config.vocab_size) for _ in range(context)] for _ in range(prompts)]
    model.save_pretrained(folder)
    if shape == BUNDLED:
        (folder / "heads").symlink_to(demo_model_folder() / "heads")
    else:
        write_drafter("eagle3", model, folder / "eagle3")
    if gguf:
        import gguf_file  # needs a package that other engines don't

        gguf_file.write(model, folder / "model.gguf")
    return folder, texts


def measure(workers: list[Worker], texts: Tokens, batch: int, new_tokens: int, rounds: int, replay: bool) -> list[Row]:
    """A row per engine; in each round every engine writes one batch, in alternating order."""
    groups = [texts[i : i + batch] for i in range(0, len(texts) - batch + 1, batch)]
    for worker in workers:
        worker.run(groups[0], new_tokens)
    results: dict[str, list[Row]] = {worker.engine: [] for worker in workers}
    for turn in range(rounds):
        for worker in workers[:: -1 if turn % 2 else 1]:
            results[worker.engine].append(worker.run(groups[turn % len(groups)], new_tokens))
    memory = {worker.engine: worker.memory(groups[0], new_tokens) for worker in workers}
    rows = []
    for worker in workers:
        runs, total = results[worker.engine], batch * new_tokens
        row: Row = {"engine": worker.engine, "batch": batch}
        row["tokens_per_s"] = total / statistics.median(run["seconds"] for run in runs)
        decode = [run["seconds"] - first for run in runs if (first := run["first_token_seconds"]) is not None]
        row["decode_per_s"] = (total - batch) / statistics.median(decode) if decode else None
        counted = [run["tokens_per_step"] for run in runs if run["tokens_per_step"] is not None]
        row["tokens_per_step"] = statistics.mean(counted) if counted else None
        row["mib"] = memory[worker.engine] / 2**20
        row["weights_mib"] = runs[0]["model_bytes"] and runs[0]["model_bytes"] / 2**20
        if not (replay and worker.engine.endswith(("heads", "EAGLE-3"))):
            row["equal"] = statistics.mean(
                common_prefix(tokens, expected)
                for run, other in zip(runs, results[workers[0].engine], strict=True)
                for tokens, expected in zip(run["tokens"], other["tokens"], strict=True)
            )
        rows.append(row)
    return rows


def common_prefix(tokens: list[int], expected: list[int]) -> float:
    """The part of ``expected`` before the first difference."""
    same = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), len(expected))
    return same / len(expected)


def installed(engines: list[str], vllm_python: str | None) -> dict[str, str]:
    """The Python of each engine that can run; prints those that can't."""
    pythons: dict[str, str] = {}
    for name in engines:
        python = (vllm_python or sys.executable) if name.startswith("vllm") else sys.executable
        module = {"llama.cpp": "llama_cpp", "vllm": "vllm"}.get(name.split(",")[0], "torch")
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)"
        if subprocess.run([python, "-c", probe], check=False).returncode:
            print(f"{name}: {module} isn't installed in {python}")
        else:
            pythons[name] = python
    return pythons


def main(
    shape: Annotated[str, typer.Option(help="of " + ", ".join((BUNDLED, *SHAPES)))] = "bundled,125m",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    batch: Annotated[str, typer.Option(help="prompts at once")] = "1,8",
    engines: Annotated[str, typer.Option(help="names, separated by semicolons")] = ";".join(ENGINES),
    context: Annotated[int, typer.Option(help="tokens of a prompt")] = 256,
    new_tokens: Annotated[int, typer.Option(help="written for each prompt")] = 64,
    rounds: Annotated[int, typer.Option(help="batches that each engine writes")] = 5,
    threads: Annotated[int, typer.Option(help="of every engine")] = torch.get_num_threads(),
    memory_budget: Annotated[str | None, typer.Option(help="of this package's engines, such as 20MiB")] = None,
    prefill_chunk: Annotated[int, typer.Option(help="of this package's engines, in tokens")] = 256,
    vllm_python: Annotated[str | None, typer.Option(help="a Python with vLLM")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, print a table and write JSON."""
    pythons, rows = installed(engines.split(";"), vllm_python), []
    for name in shape.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            gguf = any(engine.startswith("llama.cpp") for engine in pythons)
            folder, texts = make_model(name, getattr(torch, dtype), Path(temporary), context, 16, gguf)
            for size in map(int, batch.split(",")):
                setup = Setup(
                    str(folder),
                    dtype,
                    size,
                    context + new_tokens,
                    threads,
                    name != BUNDLED,
                    memory_budget,
                    prefill_chunk,
                )
                workers = [
                    Worker(engine, setup, python)
                    for engine, python in pythons.items()
                    if runs(engine, size, setup.replay)
                ]
                for row in measure(workers, texts, size, new_tokens, rounds, setup.replay):
                    rows.append({"shape": name, "dtype": dtype} | row)
                    print(json.dumps(rows[-1]), flush=True)
                for worker in workers:
                    worker.close()
    print_rows(rows, list(dict.fromkeys(key for row in rows for key in row)))
    write_result(
        json_,
        {
            "context": context,
            "new_tokens": new_tokens,
            "rounds": rounds,
            "memory_budget": memory_budget,
            "prefill_chunk": prefill_chunk,
            "rows": rows,
        },
    )


def runs(engine: str, batch: int, replay: bool) -> bool:
    """Whether an engine supports this batch size and text.

    Prompt lookup finds no n-grams in random text. That of transformers and llama.cpp takes one prompt at a time.
    """
    if engine == "vllm, our trees" and replay:  # random heads guess nothing
        return False
    if engine.endswith("EAGLE-3"):
        return replay and batch == 1
    return "lookup" not in engine or (not replay and (batch == 1 or engine.startswith("specmemo")))


if __name__ == "__main__":
    typer.run(main)
