"""``specmemo demo``: the bundled model completes real files, plain and patched, and the two are compared."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specmemo_kernels.cli.common import (
    check_options,
    check_output,
    demo_model_folder,
    existing_or_hub,
    hide_loading_bars,
    setting_up,
    terminal,
    writing,
)
from specmemo_kernels.cli.demo_data import is_held_out, library_files, library_root
from specmemo_kernels.cli.demo_runs import SIDES, DemoResult, Pair, Prompt, measure, measure_memory
from specmemo_kernels.cli.demo_view import LiveView, TextView, show_result
from specmemo_kernels.cli.errors import UserError

PROMPT_TOKENS = (100, 300)


@dataclass(frozen=True)
class DemoOptions:
    """The command line of ``specmemo demo``."""

    prompt_files: tuple[Path, ...]
    turns: int
    max_new_tokens: int
    rounds: int
    tree: int | None
    memory_budget: str | None
    json_out: Path | None
    seed: int
    model: str | None
    device: str
    backend: str | None
    kv_dtype: str | None


def library_prompts(tokenizer: Any, count: int, seed: int, room: int) -> list[Prompt]:
    """``count`` places in library files that the model was not trained on, each a function or class cut at a line."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for file, lines in _held_out(rng):
        starts = [i for i, line in enumerate(lines) if line.startswith(("def ", "class ", "async def "))]
        if not starts:
            continue
        start, wanted = rng.choice(starts), rng.randint(*PROMPT_TOKENS)
        text = _cut(tokenizer, lines[start:], min(wanted, room))
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        if min(PROMPT_TOKENS[0] // 2, room // 2) <= ids.shape[1]:
            name = file.relative_to(library_root()).as_posix()
            prompts.append(Prompt(f"{name}, from line {start + 1}", text, ids))
        if len(prompts) == count:
            break
    return prompts


def memory_prompt(tokenizer: Any, prompts: list[Prompt], room: int) -> Prompt:
    """A held-out file that fills the context, which is where memory matters; else the longest of ``prompts``."""
    for file, lines in _held_out(random.Random(0)):
        ids = tokenizer("".join(lines)[: 16 * room], verbose=False)["input_ids"]
        if len(ids) >= room:
            return Prompt(file.name, tokenizer.decode(ids[:room]), torch.tensor([ids[:room]]))
    return max(prompts, key=lambda p: p.ids.shape[1])


def _held_out(rng: random.Random) -> Iterator[tuple[Path, list[str]]]:
    """The library files that were kept out of training, in random order, with their lines."""
    files = [file for file in library_files() if is_held_out(file)]
    rng.shuffle(files)
    for file in files:
        yield file, file.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)


def _cut(tokenizer: Any, lines: list[str], limit: int) -> str:
    """As many whole lines from the start as fit in ``limit`` tokens."""
    text = ""
    for line in lines:
        if len(tokenizer(text + line)["input_ids"]) > limit:
            break
        text += line
    return text


def file_prompt(tokenizer: Any, file: Path, room: int) -> Prompt:
    """A user's own text; the end of it if it is longer than the model's context."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file {file} is not a UTF-8 text: {error}") from error
    ids = tokenizer(text, verbose=False)["input_ids"]  # too long is dealt with here
    if not ids:
        raise UserError(f"{file} is empty")
    title = str(file) if len(ids) <= room else f"{file}, the last {room} of its {len(ids)} tokens"
    return Prompt(title, tokenizer.decode(ids[-room:]), torch.tensor([ids[-room:]]))


def run_demo(options: DemoOptions) -> bool:
    """Show, measure, report; whether every run of every prompt gave the same tokens."""
    hide_loading_bars()
    if options.json_out is not None:
        check_output("--json", options.json_out)
    folder = demo_model_folder()
    if options.model is not None:
        advice = "--model takes a folder with a model and, in heads/, its heads"
        folder = Path(existing_or_hub(options.model, advice, hub=False))
    device = check_options(options.device, torch.float32, options.backend, options.memory_budget, options.kv_dtype)
    console = terminal(soft_wrap=False)
    with console.status("loading the model, plain and patched"), setting_up():
        pair = Pair(
            folder, options.max_new_tokens, options.tree, options.memory_budget, device, options.backend,
            options.kv_dtype,
        )  # fmt: skip
        if options.prompt_files:
            prompts = [file_prompt(pair.tokenizer, file, pair.room) for file in options.prompt_files]
        else:
            prompts = library_prompts(pair.tokenizer, options.turns, options.seed, pair.room)
        if not prompts:
            raise UserError(f"no held-out library file of {library_root()} is long enough; give a --prompt-file")
        for side in SIDES:  # warm-up: the first call pays for set-up that later ones don't
            pair.generate(side, prompts[0], max_new_tokens=min(16, pair.max_new_tokens))
    view = LiveView(console, pair) if console.is_terminal else TextView(console, pair)
    for number, prompt in enumerate(prompts, start=1):
        view.turn(f"{number} of {len(prompts)}: {prompt.title}", prompt)
    with _progress(console, 2 * options.rounds * len(prompts)) as tick:
        timed = measure(pair, prompts, options.rounds, tick)
    with console.status("measuring memory"):
        longest = max(prompts, key=lambda p: p.ids.shape[1])
        weighed = longest if options.prompt_files else memory_prompt(pair.tokenizer, prompts, pair.room)
        memory = measure_memory(pair, weighed)
    result = DemoResult(timed, memory, weighed.ids.shape[1], pair.handle.plan.tree.size, options.rounds)
    show_result(console, result)
    if options.json_out is not None:
        with writing("--json", options.json_out):
            options.json_out.write_text(json.dumps(result.to_json(), indent=1) + "\n")
    return result.equal == len(prompts)


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, one line elsewhere."""
    what = f"timing {total} runs, nothing else shown meanwhile"
    if not console.is_terminal:
        console.print(what)
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn when a run ends, between two clocks, and never by a thread while one is running.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(what, total=total)

        def tick() -> None:
            progress.advance(task)
            progress.refresh()

        progress.refresh()
        yield tick
