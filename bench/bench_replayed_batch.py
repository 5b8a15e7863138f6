"""Batches of a shape with random weights: plain generate of transformers, and this package without and with drafts.

    python bench/bench_replayed_batch.py --device cuda --model vicuna-7b,llama-2-70b --batch 1,4,10,16 \\
        --questions mt_bench/question.jsonl --published medusa --json out.json
    python bench/bench_replayed_batch.py --model 125m --batch 1,8

Prompts are random tokens, one per four characters of MT-Bench's first turns (``--questions``), or of a built-in list
of lengths. Memory and time are real, acceptance is *replayed* (``bench/replay.py``) from Medusa's published heads. Each
system writes ``--new-tokens`` tokens for every prompt of a batch, prompts included in the time; the end of the text is
ignored. Systems take turns. One patched copy serves all batch sizes.

- ``first_s``: seconds of the first run, which compiles kernels and captures graphs. ``--warm-up`` runs aren't timed.
- ``tokens_per_s``: median of the rounds. ``vs_plain``: against plain generate with the same batch. ``vs_plain_1``:
  against plain generate of one prompt at a time.
- ``peak_generation_bytes``: largest memory that torch allocated on the GPU beyond what it held before the system was
  made; heads included.
- ``graph_steps``: part of the steps that were replayed from a graph or captured.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from batch_runs import Plain, Work
from bench_step import DTYPES
from conversations import NoTokenizer, mt_bench
from replay import Published, ReplayedTarget
from shapes import SHAPES, random_heads, random_model, twin
from timing import print_rows, write_result

import specmemo_kernels as sk

Row = dict[str, Any]
Prompts = list[list[int]]
PLAIN = "plain generate"
#: Tokens of prompts where no questions are given.
LENGTHS = (37, 112, 64, 250, 21, 90, 150, 48)
#: Heads of our systems, with the model's lm_head.
HEADS = 4


class PlainBatch:
    """``generate`` of transformers, left-padded."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def answer(self, prompts: Prompts, new_tokens: int) -> None:
        Plain(Work(self._model, None, [], 0), len(prompts)).answer(prompts, new_tokens)

    def counts(self) -> Row:
        return {"tokens_per_step": 1.0}


class OurBatch:
    """``generate_batch`` of a patched twin with replayed acceptance; ``tree``: as of ``patch``."""

    def __init__(self, model: Any, published: Published, batch: int, tree: int | None) -> None:
        heads = random_heads(model, HEADS, own_lm_head=False)
        self._model, self._published = twin(model), published
        self.handle = sk.patch(self._model, heads, max_batch_size=batch, tree=tree, reuse_prefix=False)
        self._target = ReplayedTarget(self.handle.target)
        self.handle.target = self._target  # type: ignore[assignment]

    def answer(self, prompts: Prompts, new_tokens: int) -> None:
        self._target.begin([self._published.ranks(i, 0, new_tokens + 8) for i in range(len(prompts))])
        self.handle.stats.reset()
        sk.generate_batch(self._model, prompts, max_new_tokens=new_tokens, eos_token_ids=[])

    def counts(self) -> Row:
        stats, plan = self.handle.stats, self.handle.plan
        steps = max(1, stats.steps)
        nodes = 1 + stats.drafted / max(1, stats.sequence_steps)
        return {
            "planned_nodes": plan.tree.size, "nodes": nodes, "tokens_per_step": stats.tokens_per_step,
            "graph_steps": stats.graph_steps / steps,
        }  # fmt: skip


class HeldMemory:
    """GPU memory that one system holds among others: torch's allocations during :meth:`during`; 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._held, self.peak = device.type == "cuda", 0, 0

    @contextmanager
    def during(self) -> Iterator[None]:
        """Work of this system alone."""
        if not self._on_gpu:
            yield
            return
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        self.peak = self._held + torch.cuda.max_memory_allocated() - before
        self._held += torch.cuda.memory_allocated() - before


def prompts_of(questions: Path | None, vocab_size: int, count: int) -> Prompts:
    """Random tokens, as many as each question would have."""
    tokenizer = NoTokenizer(vocab_size)
    if questions is None:
        return [tokenizer("x" * 4 * LENGTHS[i % len(LENGTHS)] + str(i), False).input_ids for i in range(count)]
    return [list(talk.turns[0]) for talk in mt_bench(questions, tokenizer, count)]


@contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    print(f"{what} in {time.perf_counter() - started:.2f} s", flush=True)


def measure(
    model: Any, published: Published, prompts: Prompts, batches: list[int], new_tokens: int, rounds: int, warm_up: int
) -> list[Row]:
    """A row per system and batch size."""
    makers: dict[str, Callable[[], PlainBatch | OurBatch]] = {
        PLAIN: lambda: PlainBatch(model),
        "specmemo, no drafts": lambda: OurBatch(model, published, max(batches), 1),
        "specmemo, heads": lambda: OurBatch(model, published, max(batches), None),
    }
    systems, memory = {}, {name: HeldMemory(model.device) for name in makers}
    for name, make in makers.items():
        with timed(f"{name}: made"), memory[name].during():
            systems[name] = make()
    rows: list[Row] = []
    for batch in batches:
        texts, first = prompts[:batch], {}
        for name, system in systems.items():
            started = time.perf_counter()
            with memory[name].during():
                system.answer(texts, new_tokens)
            first[name] = time.perf_counter() - started
            for _ in range(0 if name == PLAIN else warm_up - 1):  # nothing of it is made on demand
                system.answer(texts, new_tokens)
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for turn in range(rounds):
            for name in sorted(systems, reverse=bool(turn % 2)):
                started = time.perf_counter()
                systems[name].answer(texts, new_tokens)
                seconds[name].append(time.perf_counter() - started)
        for name, system in systems.items():
            speed = batch * new_tokens / statistics.median(seconds[name])
            row = {"system": name, "batch": batch, "tokens_per_s": speed, "seconds": seconds[name]}
            row["first_s"] = first[name]
            rows.append(row | system.counts() | {"peak_generation_bytes": memory[name].peak})
            print(rows[-1], flush=True)
    plain = {row["batch"]: row["tokens_per_s"] for row in rows if row["system"] == PLAIN}
    for row in rows:
        row["vs_plain"] = row["tokens_per_s"] / plain[row["batch"]]
        row["vs_plain_1"] = row["tokens_per_s"] / plain[1] if 1 in plain else None
    return rows


def main(
    model: Annotated[str, typer.Option(help="of " + ", ".join(SHAPES))] = "125m",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    batch: Annotated[str, typer.Option(help="prompts at once")] = "1,4,10,16",
    questions: Annotated[Path | None, typer.Option(help="MT-Bench's question.jsonl", exists=True)] = None,
    published: Annotated[Path | None, typer.Option(help="folder with Medusa's published files", exists=True)] = None,
    new_tokens: Annotated[int, typer.Option(help="written for each prompt")] = 128,
    rounds: Annotated[int, typer.Option(help="timed runs of each system")] = 3,
    warm_up: Annotated[int, typer.Option(help="runs before, of this package's systems")] = 3,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, print a table and write JSON."""
    batches = [int(size) for size in batch.split(",")]
    source = Published() if published is None else Published.load(published)
    rows: list[Row] = []
    for name in model.split(","):
        made = random_model(SHAPES[name], DTYPES[dtype], device)
        prompts = prompts_of(questions, made.config.vocab_size, max(batches))
        measured = measure(made, source, prompts, batches, new_tokens, rounds, warm_up)
        rows += [{"model": name} | row for row in measured]
        del made
        gc.collect()
        options = {"device": device, "dtype": dtype, "new_tokens": new_tokens, "rounds": rounds, "warm_up": warm_up}
        write_result(json_, options | {"heads": HEADS, "acceptance": "replayed", "rows": rows})
    print_rows(rows, [key for key in rows[-1] if key != "seconds"])


if __name__ == "__main__":
    typer.run(main)
