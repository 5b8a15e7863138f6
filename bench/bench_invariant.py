"""Invariant mode over Spec-Bench prompts: the same tokens with every drafter, batch size and chunk, and its cost.

    python bench/bench_invariant.py --questions FILE --json out.json
    python bench/bench_invariant.py --questions FILE --cost --batch 1,8 --chunk 256 --limit 64 --json out.json

FILE is Spec-Bench's question.jsonl; the last ``--prompt-tokens`` of each first turn are used, greedy, bfloat16. The
first setting (no drafts, batch 1) decodes one prompt after the other; its tokens are the reference. Every other setting
gets the prompts in reverse order, every seventh is aborted after its first piece and submitted again, and from batch 4
on its pages hold a part of the tokens, so that sequences are preempted.

- ``identical``: prompts whose tokens are all equal to the reference's. ``digest``: of all tokens, so that runs can be
  compared.
- With ``--cost``: undisturbed; ``invariant=True`` and ``False`` take turns. ``tokens_per_s``, ``default_tokens_per_s``:
  their speeds. ``relative``: the ratio. ``default_identical``: prompts with the same tokens in both.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import batch_runs as runs
import typer
from shapes import twin
from timing import print_rows, write_result

from specmemo_kernels.cli.common import demo_model_folder

Row = dict[str, Any]
#: Fixed tree sizes by drafter; Medusa heads have adaptive trees.
TREES = {"none": 1, "lookup": 6, "draft": 6}
#: Prompts per turn of the two sides of ``--cost``.
GROUP = 16


@dataclass(frozen=True)
class Setting:
    """One configuration of ``patch``; ``batch``: sequences at once, ``chunk``: prompt tokens per pass."""

    drafter: str
    batch: int
    chunk: int


def side(work: runs.Work, setting: Setting, budget: int | None, disturb: bool, invariant: bool = True) -> runs.Ours:
    """A patched twin of the model."""
    drafter = "lookup" if setting.drafter == "none" else setting.drafter
    heads = runs.heads_for(drafter, work, demo_model_folder(), 2)
    options: Row = {"invariant": invariant, "prefill_chunk": setting.chunk}
    tree = TREES.get(setting.drafter)
    return runs.Ours(twin(work.model), heads, setting.batch, budget, disturb, tree, **options)


def scarce_budget(work: runs.Work, setting: Setting, share: float) -> int:
    """Bytes for all parts but pages, and pages for ``share * batch`` of the longest sequence, one at least."""
    patched = side(work, setting, None, disturb=False)
    slot = sum(layer.bytes_per_token for layer in patched.handle.facts.layers)
    longest = max(map(len, work.prompts)) + work.new_tokens + patched.handle.plan.tree.size
    parts, page_size = patched.handle.plan.generation_bytes, patched.handle.plan.page_size
    patched.close()
    pages = math.ceil(max(1, share * setting.batch) * longest / page_size)
    return parts + pages * page_size * slot


def identical(answers: list[list[int]], reference: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(answers, reference, strict=True))


def digest(answers: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]


def same_tokens(work: runs.Work, settings: list[Setting], share: float) -> list[Row]:
    """Compare every setting's tokens with the first setting's; returns and prints a row per setting."""
    reference: list[list[int]] = []
    rows: list[Row] = []
    for setting in settings:
        budget = scarce_budget(work, setting, share) if setting.batch >= 4 else None
        ours = side(work, setting, budget, disturb=bool(reference))
        answers = ours.answer(work.prompts, work.new_tokens)
        reference = reference or answers
        counts = {name: ours.counts()[name] for name in ("tokens_per_step", "preemptions")}
        row = asdict(setting) | {
            "prompts": len(answers), "identical": identical(answers, reference), "digest": digest(answers),
        } | counts  # fmt: skip
        ours.close()
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def costs(work: runs.Work, settings: list[Setting]) -> list[Row]:
    """The speed of both modes; prints each row."""
    rows: list[Row] = []
    for setting in settings:
        sides: dict[str, runs.Side] = {
            name: side(work, setting, None, disturb=False, invariant=name == "invariant")
            for name in ("invariant", "default")
        }
        outcomes = runs.take_turns(work, sides, max(GROUP, setting.batch))
        invariant, default = outcomes["invariant"], outcomes["default"]
        row = asdict(setting) | {
            "prompts": len(invariant.answers), "tokens_per_s": invariant.tokens_per_s,
            "default_tokens_per_s": default.tokens_per_s,
            "relative": invariant.tokens_per_s / default.tokens_per_s,
            "default_identical": identical(invariant.answers, default.answers),
        }  # fmt: skip
        for each in sides.values():
            each.close()
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main(
    questions: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl", exists=True)],
    drafter: Annotated[str, typer.Option(help="none, or of " + ", ".join(runs.DRAFTERS))] = "none,medusa,lookup,draft",
    batch: Annotated[str, typer.Option(help="sequences at once")] = "1,4,8,16",
    chunk: Annotated[str, typer.Option(help="prompt tokens per pass")] = "16,256",
    limit: Annotated[int, typer.Option(help="prompts")] = 480,
    prompt_tokens: Annotated[int, typer.Option(help="of each prompt, at most")] = 256,
    new_tokens: Annotated[int, typer.Option(help="written for each prompt")] = 32,
    pages: Annotated[float, typer.Option(help="share of the pages that the longest sequences would take")] = 0.6,
    cost: Annotated[bool, typer.Option(help="compare speeds instead of tokens")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Run every combination, print a table and write JSON."""
    work = runs.load_work(demo_model_folder(), "bf16", questions, limit, new_tokens)
    work = runs.Work(work.model, work.tokenizer, [prompt[-prompt_tokens:] for prompt in work.prompts], new_tokens)
    choices = itertools.product(drafter.split(","), map(int, batch.split(",")), map(int, chunk.split(",")))
    settings = [Setting(*choice) for choice in choices]
    rows = costs(work, settings) if cost else same_tokens(work, settings, pages)
    print_rows(rows)
    options = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "pages": pages}
    write_result(json_, {"options": options, "cost" if cost else "tokens": rows})


if __name__ == "__main__":
    typer.run(main)
