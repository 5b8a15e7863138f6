"""``specmemo demo``: complete real files with the bundled model, plain and patched, and compare."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specmemo_kernels.cli.common import (
    check_options,
    check_output,
    demo_model_folder,
    existing_or_hub,
    hide_loading_bars,
    setting_up,
    terminal,
    write_result,
)
from specmemo_kernels.cli.demo_data import is_held_out, library_files, library_root
from specmemo_kernels.cli.demo_runs import SIDES, DemoResult, Pair, Prompt, measure, measure_memory
from specmemo_kernels.cli.demo_view import LiveView, TextView, show_result
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.cli.options import DemoOptions

PROMPT_TOKENS = (100, 300)


def library_prompts(tokenizer: Any, count: int, seed: int, room: int) -> list[Prompt]:
    """``count`` beginnings of functions or classes from held-out library files, each of at most ``room`` tokens."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for file, lines in _held_out(rng):
        starts = [i for i, line in enumerate(lines) if line.startswith(("def ", "class ", "async def "))]
        if not starts:
            continue
        start, length = rng.choice(starts), rng.randint(*PROMPT_TOKENS)
        text = _cut(tokenizer, lines[start:], min(length, room))
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        if min(PROMPT_TOKENS[0] // 2, room // 2) <= ids.shape[1]:
            name = file.relative_to(library_root()).as_posix()
            prompts.append(Prompt(f"{name}, from line {start + 1}", text, ids))
        if len(prompts) == count:
            break
    return prompts


def memory_prompt(tokenizer: Any, prompts: list[Prompt], room: int) -> Prompt:
    """A held-out file that fills the context, else the longest of ``prompts``: memory matters in long contexts."""
    for file, lines in _held_out(random.Random(0)):
        ids = tokenizer("".join(lines)[: 16 * room], verbose=False)["input_ids"]
        if len(ids) >= room:
            return Prompt(file.name, tokenizer.decode(ids[:room]), torch.tensor([ids[:room]]))
    return max(prompts, key=lambda p: p.ids.shape[1])


def _held_out(rng: random.Random) -> Iterator[tuple[Path, list[str]]]:
    """The library files held out of training, in random order, with their lines."""
    files = [file for file in library_files() if is_held_out(file)]
    rng.shuffle(files)
    for file in files:
        yield file, file.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)


def _cut(tokenizer: Any, lines: list[str], limit: int) -> str:
    """The first whole lines that fit in ``limit`` tokens."""
    text = ""
    for line in lines:
        if len(tokenizer(text + line)["input_ids"]) > limit:
            break
        text += line
    return text


def file_prompt(tokenizer: Any, file: Path, room: int) -> Prompt:
    """The text of a user's file, or its last ``room`` tokens."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file {file} is not a UTF-8 text: {error}") from error
    ids = tokenizer(text, verbose=False)["input_ids"]  # no warning: long texts are cut below
    if not ids:
        raise UserError(f"{file} is empty")
    title = str(file) if len(ids) <= room else f"{file}, the last {room} of its {len(ids)} tokens"
    return Prompt(title, tokenizer.decode(ids[-room:]), torch.tensor([ids[-room:]]))


def run_demo(options: DemoOptions) -> None:
    """Stream completions, then measure and print the closing table.

    Raises:
        UserError, BackendUnavailable: an option, the model or a file can't be used.
        typer.Exit: status 1, because the tokens of a prompt differ between runs.
    """
    hide_loading_bars()
    if options.json_out is not None:
        check_output("--json", options.json_out)
    folder = demo_model_folder()
    if options.model is not None:
        advice = "--model takes a folder with a model and, in heads/, its heads"
        folder = Path(existing_or_hub(options.model, advice, hub=False))
    device = check_options(options, torch.float32)
    console = terminal(soft_wrap=False)
    with console.status("loading the model, plain and patched"), setting_up():
        pair = Pair(folder, device, options)
        if options.prompt_file:
            prompts = [file_prompt(pair.tokenizer, file, pair.room) for file in options.prompt_file]
        else:
            prompts = library_prompts(pair.tokenizer, options.turns, options.seed, pair.room)
        if not prompts:
            raise UserError(f"no held-out library file of {library_root()} is long enough; give a --prompt-file")
        for side in SIDES:  # warm-up
            pair.generate(side, prompts[0], max_new_tokens=min(16, pair.max_new_tokens))
    view = LiveView(console, pair) if console.is_terminal else TextView(console, pair)
    titles = [f"{number} of {len(prompts)}: {prompt.title}" for number, prompt in enumerate(prompts, start=1)]
    equal_text = [view.turn(title, prompt) for title, prompt in zip(titles, prompts, strict=True)]
    total = 2 * options.rounds * len(prompts)
    description = f"timing {total} runs, nothing else shown meanwhile"
    if not console.is_terminal:
        console.print(description)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between the timed runs: a refresh thread would disturb them.
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(description, total=total)
        timed = measure(pair, prompts, options.rounds, lambda: progress.update(task, advance=1, refresh=True))
    timed = [replace(row, same_tokens=row.same_tokens and same) for row, same in zip(timed, equal_text, strict=True)]
    with console.status("measuring memory"):
        longest = max(prompts, key=lambda p: p.ids.shape[1])
        if not options.prompt_file:
            longest = memory_prompt(pair.tokenizer, prompts, pair.room)
        memory = measure_memory(pair, longest)
    result = DemoResult(timed, memory, longest.ids.shape[1], pair.handle.plan.tree.size, options.rounds)
    show_result(console, result)
    if options.json_out is not None:
        text = json.dumps(result.to_json(), indent=1) + "\n"
        write_result("--json", options.json_out, lambda path: path.write_text(text))
    if result.equal != len(prompts):
        raise typer.Exit(1)
