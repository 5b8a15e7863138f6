"""Throughput and generation memory: plain generate, Medusa as published, and this package at several budgets.

    python bench/bench_frontier.py --device cpu --model bundled --json out.json
    python bench/bench_frontier.py --device cpu --model 125m --questions mt_bench/question.jsonl --published medusa \\
        --json out.json --pictures folder
    python bench/bench_frontier.py --device cuda --model vicuna-7b --questions ... --published ... --json out.json

Models:

- ``bundled``, the trained model of the package. Acceptance is real, and all systems must write the same tokens
  (float32). It knows Python only, so its conversations are held-out library files, two pieces of each as two turns.
  ``--questions`` replaces them by MT-Bench.
- Shapes with random weights. Memory and time are real, acceptance is *replayed* (``bench/replay.py``): with
  ``--published FOLDER`` (``trees.json`` and ``mt_bench_7b.json``) from Medusa's published run of Vicuna-7B, question by
  question, else from the accuracies of its heads. Prompts are random tokens, one per four characters of the text. Heads
  with a shared lm_head are replayed with the accuracies of heads with their own.

A turn's prompt is the whole conversation so far. Answers have ``--new-tokens`` tokens; the end of text is ignored.

Systems take turns conversation by conversation. Tokens/s are all new tokens over the sum of the conversations' median
seconds, prompts included. Generation memory is the peak of live tensor bytes without the model's weights, heads
included, in a separate run over the conversation with the most tokens. Budgets are shares of the memory of Medusa as
published; budgets above the package's memory without a budget are left out. "Medusa, our tree" is Medusa with the
package's smaller tree, to separate the effect of the tree.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_step import DTYPES
from conversations import Conversation, NoTokenizer, held_out_files, mt_bench
from frontier_report import Row, draw, markdown, thinned
from frontier_runs import Memory, take_turns, weigh
from frontier_systems import MedusaSystem, OurSystem, PlainSystem, System, Turn, heads_name
from replay import Published
from shapes import SHAPES, random_heads, random_model, twin
from step_profile import PASSES, breakdown
from timing import environment

import specmemo_kernels as sk
from specmemo_kernels.cli.common import demo_model_folder, hide_loading_bars, load_model, load_tokenizer
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, best_first_paths
from specmemo_kernels.tree.draft_tree import DraftTree

BUNDLED = "bundled"
#: Tried in this order until the conversations fit the budget: ``patch`` doesn't know their length.
PREFILL_CHUNKS = (256, 64, 16)
#: Nodes of the trees that Medusa publishes, root included.
PUBLISHED_NODES = 64
#: Shares of Medusa's memory. 0.35 are the paper's savings of 65 %; the smallest shares are below the possible.
BUDGETS = "0.35,0.2,0.17,0.14,0.1,0.05,0.02"
#: Medusa publishes five heads.
PUBLISHED_HEADS = 5


class Setup:
    """A model with its heads, trees and conversations.

    Attributes:
        heads: kinds of heads; Medusa as published takes the first.
        published: source of replayed acceptance, or ``None``.
    """

    def __init__(self, name: str, dtype: str, device: str, questions: Path | None, folder: Path | None) -> None:
        self.name, self.device, self.questions = name, torch.device(device), questions
        self.published: Published | None = None
        if name == BUNDLED:
            source = demo_model_folder()
            hide_loading_bars()
            self.model = load_model(source, DTYPES[dtype], self.device)
            self.model.generation_config.eos_token_id = None
            self.tokenizer = load_tokenizer(source)
            heads = sk.MedusaHeads.from_pretrained(source / "heads", dtype=DTYPES[dtype], device=self.device)
            self.heads = [heads]
            accuracy = heads.cumulative_topk_accuracy or DEFAULT_ACCURACY
            self.tree = DraftTree.from_paths(best_first_paths(accuracy, PUBLISHED_NODES - 1))
            return
        if name not in SHAPES:
            raise typer.BadParameter(f"--model is {name!r}, expected {BUNDLED} or one of {', '.join(SHAPES)}")
        self.model = random_model(SHAPES[name], DTYPES[dtype], device)
        self.tokenizer = NoTokenizer(self.model.config.vocab_size)
        self.heads = [random_heads(self.model, PUBLISHED_HEADS, own) for own in (True, False)]
        self.published = Published() if folder is None else Published.load(folder)
        self.tree = self.published.tree

    @property
    def acceptance(self) -> str:
        return "real" if self.published is None else "replayed"

    def conversations(self, limit: int, new_tokens: int) -> list[Conversation]:
        """``limit`` conversations, cut so that prompts, answers and Medusa's 64 slots fit the context."""
        context = self.model.config.max_position_embeddings
        room = context - 2 * new_tokens - PUBLISHED_NODES
        if self.questions is None:
            return held_out_files(self.tokenizer, limit, min(256, room // 2))
        return [talk.cut(room) for talk in mt_bench(self.questions, self.tokenizer, limit)]


def our_systems(
    setup: Setup, shares: list[float], medusa_peak: int, tokens: int, weighed: Callable[[System], Memory]
) -> Iterator[tuple[OurSystem, Memory]]:
    """For each kind of heads a system without a budget, and one for each budget below that system's memory.

    Budgets that can't hold ``tokens`` tokens are left out; the first of them is printed.
    """
    for heads in setup.heads:
        peak = medusa_peak
        for share in [None, *sorted(shares, reverse=True)]:
            name = "this, no budget" if share is None else f"this, {share:.0%} of Medusa's"
            budget = None if share is None else int(share * medusa_peak)
            if budget is not None and budget >= peak:
                continue
            system = fitting(setup, name, heads, budget, tokens)
            if system is None:  # smaller budgets don't fit either
                break
            memory = weighed(system)
            peak = memory.peak if share is None else peak
            yield system, memory


def fitting(setup: Setup, name: str, heads: sk.MedusaHeads, budget: int | None, tokens: int) -> OurSystem | None:
    """A system that holds ``tokens`` tokens in its budget, with the largest prefill chunk that fits; else ``None``."""
    for chunk in PREFILL_CHUNKS:
        try:
            replayed = setup.published is not None
            system = OurSystem(name, twin(setup.model), heads, budget, replayed, prefill_chunk=chunk)
        except sk.BudgetError as error:
            print(f"{name} ({heads_name(heads)}) left out: {str(error)[:200]}")
            return None
        plan = system.handle.plan
        if plan.max_tokens is None or plan.max_tokens >= tokens + plan.tree.max_depth:
            return system
        print(f"{name} ({heads_name(heads)}), prefill chunk {chunk}: it holds {plan.max_tokens} of {tokens} tokens")
        system.close()
    return None


def rows_of(setup: Setup, systems: list[System], memories: list[Memory], timings: list[Any]) -> list[Row]:
    """A row for each system; Medusa as published is the second."""
    medusa_peak, medusa_speed = memories[1].peak, timings[1].tokens_per_s
    return [
        {
            "model": setup.name, "system": system.name, "heads": system.heads, "nodes": system.nodes,
            "budget": system.budget, "prefill_chunk": prefill_chunk(system),
            "tokens_per_s": timing.tokens_per_s, "tokens_per_step": timing.tokens_per_step,
            "peak_generation_bytes": memory.peak, "bytes_by_part": memory.parts, "acceptance": setup.acceptance,
            "memory_vs_medusa": memory.peak / medusa_peak, "speed_vs_medusa": timing.tokens_per_s / medusa_speed,
        }
        for system, memory, timing in zip(systems, memories, timings, strict=True)
    ]  # fmt: skip


def prefill_chunk(system: System) -> int | None:
    """Rows of a prefill pass; ``None``: the whole prompt."""
    return system.handle.plan.prefill_chunk if isinstance(system, OurSystem) else None


def step_rows(setup: Setup, systems: list[MedusaSystem | OurSystem], steps: int = 12) -> list[Row]:
    """Each system's step by part, after a prompt of half the context, at most 1024 tokens."""
    prompt = min(1024, setup.model.config.max_position_embeddings // 2)
    ids = torch.randint(setup.model.config.vocab_size, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    new_tokens = PASSES * steps * (setup.tree.max_depth + 1) + 1
    ranks = None
    if setup.published is not None:
        ranks = setup.published.ranks(0, 0, new_tokens)
    rows = []
    for system in systems:
        with system.stepping(Turn(ids, new_tokens, ranks)) as step:
            parts = breakdown(step, steps, setup.device)
        name = f"{system.name} ({system.heads})"
        rows.append({"system": name, "nodes": system.nodes, "context": prompt, "step": sum(parts.values())} | parts)
    return rows


def measure(
    setup: Setup, shares: list[float], limit: int, new_tokens: int, rounds: int, seconds: float
) -> tuple[list[Row], list[Row], list[Row]]:
    """The rows, each system's memory through a conversation, and steps by part.

    Raises:
        AssertionError: acceptance is real, in float32, and a system's tokens differ from plain generate's.
    """
    talks, vocab = setup.conversations(limit, new_tokens), setup.model.config.vocab_size
    heaviest = max(talks, key=lambda talk: sum(map(len, talk.turns)))
    until = time.perf_counter() + seconds

    def weighed(system: System) -> Memory:
        memory = weigh(system, heaviest, new_tokens, setup.published, vocab)
        print(f"{system.name} ({system.heads}): {memory.peak / 2**20:.1f} MiB", flush=True)
        return memory

    systems: list[System] = [PlainSystem(setup.model)]
    systems.append(MedusaSystem("Medusa as published", setup.model, setup.heads[0], setup.tree))
    memories = [weighed(system) for system in systems]
    tokens = sum(map(len, heaviest.turns)) + len(heaviest.turns) * new_tokens
    ours = list(our_systems(setup, shares, memories[1].peak, tokens, weighed))
    systems.append(MedusaSystem("Medusa, our tree", setup.model, setup.heads[0], ours[0][0].handle.plan.tree))
    memories.append(weighed(systems[-1]))
    systems += [system for system, _ in ours]
    memories += [memory for _, memory in ours]
    for system in systems:
        system.reset()
    timings = take_turns(systems, talks, new_tokens, setup.published, rounds, until)
    if setup.published is None and setup.model.dtype == torch.float32:
        for system, timing in zip(systems, timings, strict=True):
            if timing.answers != timings[0].answers:
                raise AssertionError(f"{system.name} writes other tokens than plain generate")
    curves = [
        {"system": s.name, "heads": s.heads, "marks": m.marks, **thinned(m.calls, m.series)}
        for s, m in zip(systems, memories, strict=True)
    ]
    rows = rows_of(setup, systems, memories, timings)
    steps = step_rows(setup, [s for s in systems if isinstance(s, MedusaSystem | OurSystem) and s.budget is None])
    for system in systems:
        system.close()
    return rows, curves, steps


def main(
    model: Annotated[str, typer.Option(help=f"{BUNDLED}, or a shape: " + ", ".join(SHAPES))] = BUNDLED,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="default: fp32 for the bundled model, else bf16")] = None,
    questions: Annotated[Path | None, typer.Option(help="MT-Bench's question.jsonl", exists=True)] = None,
    published: Annotated[Path | None, typer.Option(help="folder with Medusa's published files", exists=True)] = None,
    budgets: Annotated[str, typer.Option(help="shares of the memory of Medusa as published")] = BUDGETS,
    limit: Annotated[int, typer.Option(help="conversations")] = 4,
    new_tokens: Annotated[int, typer.Option(help="written in each turn")] = 64,
    rounds: Annotated[int, typer.Option(help="of each conversation and system, at most")] = 3,
    seconds: Annotated[float, typer.Option(help="no round starts after these")] = 180.0,
    json_: Annotated[Path | None, typer.Option("--json", help="write all results here")] = None,
    pictures: Annotated[Path | None, typer.Option(help="a folder for frontier.md and the pictures")] = None,
) -> None:
    """Measure; print the tables, write JSON, Markdown and pictures."""
    kind = dtype or ("fp32" if model == BUNDLED else "bf16")
    setup = Setup(model, kind, device, questions, published)
    rows, curves, steps = measure(setup, [float(b) for b in budgets.split(",")], limit, new_tokens, rounds, seconds)
    data: dict[str, Any] = {
        "environment": environment(), "command": " ".join(["python", *sys.argv]), "model": model, "device": device,
        "dtype": kind, "conversations": limit, "new_tokens": new_tokens,
        "prompts": "library files" if questions is None else "MT-Bench", "rows": rows, "memory": curves, "steps": steps,
    }  # fmt: skip
    text = markdown(rows, data["steps"])
    print(text)
    if json_ is not None:
        json_.parent.mkdir(parents=True, exist_ok=True)
        json_.write_text(json.dumps(data, indent=1) + "\n")
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        (pictures / "frontier.md").write_text(text)
        print(*draw(pictures, data, rows), sep="\n")


if __name__ == "__main__":
    typer.run(main)
