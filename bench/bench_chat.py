"""MT-Bench's two-turn questions as conversations with a patched model: what is computed, what is held, what is said.

    python bench/bench_chat.py --questions FILE --json bench/results/chat.json

Both turns of a question go through a ``ChatSession`` on a patched model, whose pages stay between turns; then each
turn's prompt through one that keeps nothing (``fresh_seconds``) and through the unpatched model, in float32.
Questions are cut to what the model's context holds. ``peak_bytes`` is the peak of live tensors and heads in a run of
its own (its first ``--tracked`` questions), ``planned_bytes`` what the plan's formulas say for the turn's length.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from shapes import twin
from timing import environment

import specmemo_kernels as sk
from specmemo_kernels.cli.common import demo_model_folder, load_model, load_tokenizer
from specmemo_kernels.planning.memory_tracker import MemoryTracker

Row = dict[str, Any]


class Sides:
    """One model, its heads in ``heads/``, three times: patched, patched and keeping nothing, plain."""

    def __init__(self, folder: Path, new_tokens: int) -> None:
        self.plain = load_model(folder, torch.float32, torch.device("cpu"))
        self.plain.generation_config.eos_token_id = None  # every reply is as long
        self.model, self.forgetful = twin(self.plain), twin(self.plain)
        self.tokenizer, self.new_tokens = load_tokenizer(folder), new_tokens
        self.handle = sk.patch(self.model, folder / "heads", max_batch_size=1)
        sk.patch(self.forgetful, folder / "heads", max_batch_size=1, reuse_prefix=False)

    def session(self) -> sk.ChatSession:
        """A new conversation, nothing kept of the ones before."""
        self.handle.release()
        with warnings.catch_warnings():  # the bundled model has no chat template, which is fine here
            warnings.simplefilter("ignore", UserWarning)
            return sk.ChatSession(self.model, self.tokenizer, max_new_tokens=self.new_tokens, do_sample=False)

    def cut(self, turns: list[str]) -> list[str]:
        """The turns, each short enough that all of them and their replies fit the context."""
        room = (self.plain.config.max_position_embeddings - 32) // len(turns) - self.new_tokens
        return [self.tokenizer.decode(self.tokenizer(text, verbose=False).input_ids[:room]) for text in turns]

    def fresh(self, model: Any, prompt: list[int]) -> tuple[str, float]:
        """The reply to a prompt that nothing is known of, and the seconds that it takes."""
        row, started = torch.tensor([prompt]), time.perf_counter()
        output = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=self.new_tokens)
        seconds = time.perf_counter() - started
        return self.tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True), seconds

    def talk(self, turns: list[str]) -> list[Row]:
        """Both turns, then each of them from nothing."""
        session, rows, replies = self.session(), [], []
        for turn, text in enumerate(turns, start=1):
            prompt, stats = session.prompt(text), self.handle.stats
            stats.reset()
            started = time.perf_counter()
            replies.append((prompt, session.ask(text)))
            row: Row = {"turn": turn, "prompt_tokens": len(prompt), "seconds": time.perf_counter() - started}
            rows.append(row | {"prefilled": stats.prefill_tokens, "reused": stats.reused_tokens})
        for row, (prompt, reply) in zip(rows, replies, strict=True):
            again, row["fresh_seconds"] = self.fresh(self.forgetful, prompt)
            row |= {"equals_fresh": reply == again, "equals_plain": reply == self.fresh(self.plain, prompt)[0]}
        return rows

    def weigh(self, turns: list[str]) -> list[Row]:
        """Bytes after each turn: held, at the peak so far, and planned for a text of that length."""
        session, rows = self.session(), []
        plan, layers = self.handle.plan, self.handle.facts.layers
        with MemoryTracker() as tracker:
            for text in turns:
                length = len(session.prompt(text)) + self.new_tokens + plan.tree.max_depth
                session.ask(text)
                slots = -(-length // plan.page_size) * plan.page_size
                pages = slots * sum(layer.page_bytes_per_token(plan.kv_dtype) for layer in layers)
                heads, workspace = self.handle.drafter.nbytes, plan.parts["workspace"]
                row: Row = {"held_pages": self.handle.bytes_by_part["kv_pages"], "planned_pages": pages}
                row |= {"peak_bytes": tracker.peak + heads, "planned_bytes": plan.total_bytes - workspace + pages}
                rows.append(row)
        return rows


def show(rows: list[Row]) -> None:
    """Medians of the figures, and of what is true or false how often, by turn."""
    names = list(rows[0])
    table = Table(*names)
    for turn in sorted({row["turn"] for row in rows}):
        cells = []
        for name in names:
            values = [row[name] for row in rows if row["turn"] == turn and name in row]
            flags = isinstance(values[0], bool)
            cells.append(f"{sum(values)} of {len(values)}" if flags else f"{statistics.median(values):.4g}")
        table.add_row(*cells)
    Console(width=180).print(table)


def main(
    questions: Annotated[Path, typer.Option(help="MT-Bench's question.jsonl", exists=True)],
    model: Annotated[Path | None, typer.Option(help="a folder, heads in heads/; default: the bundled one")] = None,
    limit: Annotated[int, typer.Option(help="questions")] = 80,
    new_tokens: Annotated[int, typer.Option(help="of each reply")] = 64,
    tracked: Annotated[int, typer.Option(help="questions whose memory is tracked, which is slow")] = 8,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Talk, compare, print a table and write JSON."""
    sides = Sides(model or demo_model_folder(), new_tokens)
    lines = questions.read_text(encoding="utf-8").splitlines()[:limit]
    talks = [sides.cut(json.loads(line)["turns"]) for line in lines]
    sides.talk(talks[0])  # warms up
    rows = [row for turns in talks for row in sides.talk(turns)]
    for row, weight in zip(rows, (row for turns in talks[:tracked] for row in sides.weigh(turns)), strict=False):
        row |= weight
    show(rows)
    if json_ is not None:
        json_.parent.mkdir(parents=True, exist_ok=True)
        setup = {"new_tokens": new_tokens, "tree_nodes": sides.handle.plan.tree.size}
        json_.write_text(json.dumps({"environment": environment(), **setup, "rows": rows}, indent=1) + "\n")
    if not all(row["equals_fresh"] and row["equals_plain"] for row in rows):
        raise SystemExit("a reply differs from a fresh run's")


if __name__ == "__main__":
    typer.run(main)
