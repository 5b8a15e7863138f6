"""MT-Bench's two-turn questions as conversations with a patched model: reused tokens, memory, equal replies.

    python bench/bench_chat.py --questions FILE --json bench/results/chat.json

Both turns of a question go through a ``ChatSession`` on a patched model with prefix reuse. Then each turn's prompt goes
through a patched model without prefix reuse (``fresh_seconds``) and through the unpatched model, in float32. Questions
are cut to the model's context. ``peak_bytes`` is the peak of live tensors and heads in a separate run over the first
``--tracked`` questions; ``planned_bytes`` is the plan's prediction for the turn's length.
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
from shapes import twin
from timing import print_rows, write_result

import specmemo_kernels as sk
from specmemo_kernels.cli.common import demo_model_folder, load_model, load_tokenizer
from specmemo_kernels.planning.memory_tracker import MemoryTracker

Row = dict[str, Any]


class Sides:
    """One model, its heads in ``heads/``, three times: patched, patched without prefix reuse, plain."""

    def __init__(self, folder: Path, new_tokens: int) -> None:
        self.plain = load_model(folder, torch.float32, torch.device("cpu"))
        self.plain.generation_config.eos_token_id = None  # all replies have the same length
        self.model, self.without_reuse = twin(self.plain), twin(self.plain)
        self.tokenizer, self.new_tokens = load_tokenizer(folder), new_tokens
        self.handle = sk.patch(self.model, folder / "heads", max_batch_size=1)
        sk.patch(self.without_reuse, folder / "heads", max_batch_size=1, reuse_prefix=False)

    def session(self) -> sk.ChatSession:
        """A new conversation, without the pages of earlier ones."""
        self.handle.release()
        with warnings.catch_warnings():  # the bundled model has no chat template
            warnings.simplefilter("ignore", UserWarning)
            return sk.ChatSession(self.model, self.tokenizer, max_new_tokens=self.new_tokens, do_sample=False)

    def cut(self, turns: list[str]) -> list[str]:
        """The turns, each short enough that all of them and their replies fit the context."""
        room = (self.plain.config.max_position_embeddings - 32) // len(turns) - self.new_tokens
        return [self.tokenizer.decode(self.tokenizer(text, verbose=False).input_ids[:room]) for text in turns]

    def fresh(self, model: Any, prompt: list[int]) -> tuple[str, float]:
        """A reply without prefix reuse, and its seconds."""
        row, started = torch.tensor([prompt]), time.perf_counter()
        output = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=self.new_tokens)
        seconds = time.perf_counter() - started
        return self.tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True), seconds

    def talk(self, turns: list[str]) -> list[Row]:
        """Both turns in one conversation, then each of them without prefix reuse and unpatched."""
        session, rows, replies = self.session(), [], []
        for turn, text in enumerate(turns, start=1):
            prompt, stats = session.prompt(text), self.handle.stats
            stats.reset()
            started = time.perf_counter()
            replies.append((prompt, session.ask(text)))
            row: Row = {"turn": turn, "prompt_tokens": len(prompt), "seconds": time.perf_counter() - started}
            rows.append(row | {"prefilled": stats.prefill_tokens, "reused": stats.reused_tokens})
        for row, (prompt, reply) in zip(rows, replies, strict=True):
            again, row["fresh_seconds"] = self.fresh(self.without_reuse, prompt)
            row |= {"equals_fresh": reply == again, "equals_plain": reply == self.fresh(self.plain, prompt)[0]}
        return rows

    def weigh(self, turns: list[str]) -> list[Row]:
        """Bytes after each turn: held pages, peak so far, and planned for a text of that length."""
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
    """Print medians of figures and counts of true flags, by turn."""
    summary: list[Row] = []
    for turn in sorted({row["turn"] for row in rows}):
        cells: Row = {}
        for name in rows[0]:
            values = [row[name] for row in rows if row["turn"] == turn and name in row]
            flags = isinstance(values[0], bool)
            cells[name] = f"{sum(values)} of {len(values)}" if flags else statistics.median(values)
        summary.append(cells)
    print_rows(summary)


def main(
    questions: Annotated[Path, typer.Option(help="MT-Bench's question.jsonl", exists=True)],
    model: Annotated[Path | None, typer.Option(help="a folder, heads in heads/; default: the bundled one")] = None,
    limit: Annotated[int, typer.Option(help="questions")] = 80,
    new_tokens: Annotated[int, typer.Option(help="of each reply")] = 64,
    tracked: Annotated[int, typer.Option(help="questions whose memory is tracked, which is slow")] = 8,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, compare, print a table and write JSON."""
    sides = Sides(model or demo_model_folder(), new_tokens)
    lines = questions.read_text(encoding="utf-8").splitlines()[:limit]
    talks = [sides.cut(json.loads(line)["turns"]) for line in lines]
    sides.talk(talks[0])  # warms up
    rows = [row for turns in talks for row in sides.talk(turns)]
    for row, weight in zip(rows, (row for turns in talks[:tracked] for row in sides.weigh(turns)), strict=False):
        row |= weight
    show(rows)
    write_result(json_, {"new_tokens": new_tokens, "tree_nodes": sides.handle.plan.tree.size, "rows": rows})
    if not all(row["equals_fresh"] and row["equals_plain"] for row in rows):
        raise SystemExit("a reply differs from a fresh run's")


if __name__ == "__main__":
    typer.run(main)
