"""``specmemo train``: a drafter for a model, from text or from the model's own answers."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from specmemo_kernels import __version__
from specmemo_kernels.cli.common import (
    DTYPES,
    check_output_folder,
    existing_or_hub,
    hide_loading_bars,
    load_tokenizer,
    loading,
    setting_up,
    show_tables,
    terminal,
    torch_device,
    world_size,
)
from specmemo_kernels.cli.env import collect_env
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.cli.options import TrainOptions
from specmemo_kernels.cli.train_scaling import LAW, Grid, fit_laws, show_laws
from specmemo_kernels.integrations.hf.chat import longest_text
from specmemo_kernels.integrations.hf.checks import table_positions
from specmemo_kernels.planning.memory_plan import format_bytes, parse_bytes
from specmemo_kernels.planning.scaling_law import ScalingLaw
from specmemo_kernels.training.answers import read_answers, read_prompts, write_answers
from specmemo_kernels.training.checkpoint import TrainingError
from specmemo_kernels.training.curves import draw_curves, expected_tokens
from specmemo_kernels.training.recipes import LAYERS, DrafterSizes
from specmemo_kernels.training.run import Recipe, RunFolder, Trained, step_windows, train_drafter
from specmemo_kernels.training.windows import DataError, Windows, cut_windows, read_documents

#: What options mean that weren't given: tokens of EAGLE-3's vocabulary matrix, and answers to prompts.
_DRAFT_VOCAB, _ANSWER_TOKENS, _TEMPERATURE = 32000, 256, 0.8
#: Trees whose expected tokens per step are printed.
TREES = (8, 16, 32)
#: A line of progress every so many seconds where there is no terminal.
_LINE_SECONDS = 30.0


class ProgressBars:
    """Progress on a terminal: a bar with the time left; elsewhere, a line now and then."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        self._console, self._bars = console, Progress(*columns, console=console, disable=not console.is_terminal)
        self._task, self._printed = self._bars.add_task("", total=None, visible=False, note=""), 0.0

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Implements :class:`specmemo_kernels.training.run.Reporter`."""
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(name, total=total, completed=done, note="")
        self._printed = 0.0
        if not self._console.is_terminal:
            self._console.print(f"{name}: {done} of {total}" if done else f"{name}: {total}")

    def advance(self, note: str = "", count: int = 1) -> None:
        self._bars.update(self._task, advance=count, note=note)
        task = self._bars.tasks[-1]
        if self._console.is_terminal or (task.elapsed or 0) < self._printed + _LINE_SECONDS:
            return
        self._printed = task.elapsed or 0.0
        left = "" if task.time_remaining is None else f", {task.time_remaining:.0f} s left"
        self._console.print(f"{task.description}: {task.completed:.0f} of {task.total}{left} {note}".rstrip())


def run_train(options: TrainOptions) -> None:
    """Train, print the acceptance on held-out text and save everything in ``--out``.

    Raises:
        UserError, BudgetError: an option, the model or the text can't be used.
    """
    _check(options)
    hide_loading_bars()
    device = torch_device(options.device)
    waiting = InitProcessGroupKwargs(timeout=timedelta(days=7))  # for the process that writes answers
    accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[waiting])
    console = terminal(soft_wrap=True, quiet=not accelerator.is_main_process)
    name = existing_or_hub(options.model, "--model takes a hub id or a folder with a model")
    if accelerator.is_main_process:
        check_output_folder("--out", options.out)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with _user_errors():
        run = RunFolder(options.out, _arguments(options), main_process=accelerator.is_main_process)
        with console.status("loading the model"):
            tokenizer, model = load_tokenizer(name), _load(name, options.dtype, device)
        if (positions := table_positions(model)) and options.length > positions:
            raise UserError(f"--length {options.length}: {name} has {positions} positions; lower it to them or fewer")
        if options.length > (longest := longest_text(model)):
            console.print(f"--length {options.length} is above the {longest} positions that {name} was made for")
        with ProgressBars(console) as bars, run.refusals_leave_nothing():
            windows = _windows(options, run, model, tokenizer, accelerator, bars, console.print)
            console.print(
                f"{windows.training.numel():,} tokens of text, {windows.held_out.numel():,} held out, in windows of "
                f"{windows.length}"
            )
            recipe = _recipe(options, windows)
            if options.scaling:
                law = _fitted(options, model, name, windows, recipe, accelerator, bars)
                law.save(options.out / LAW, {"date": date.today().isoformat(), **collect_env()})
                show_laws(console, law)
                run.finish({"arguments": _arguments(options), "laws": LAW})
                return
            trained = train_drafter(model, windows, recipe, options.out, run.state, name, accelerator, bars)
        if accelerator.is_main_process:
            _finish(console, options, run, trained)
        accelerator.wait_for_everyone()
        accelerator.end_training()


def _check(options: TrainOptions) -> None:
    if options.drafter not in LAYERS:
        raise UserError(f"--drafter {options.drafter}: expected one of {', '.join(LAYERS)}")
    if options.dtype not in DTYPES:
        raise UserError(f"--dtype {options.dtype}: expected one of {', '.join(DTYPES)}")
    if bool(options.data) == bool(options.self_generate):
        raise UserError("give text by --data, or prompts by --self-generate, and not both")
    if 2 * options.depth >= options.length:  # the loss has a row for each place that all depths predict
        raise UserError(f"--length {options.length}: windows need more than 2 * --depth = {2 * options.depth} tokens")
    step_tokens = step_windows(options.batch_tokens, options.length, world_size()) * options.length
    if options.tokens is not None and options.tokens < step_tokens and not options.scaling:  # a grid needs more
        raise UserError(
            f"--tokens {options.tokens}: an optimiser step takes {step_tokens} tokens with --batch-tokens "
            f"{options.batch_tokens}; raise --tokens to them, or lower --batch-tokens"
        )
    if options.memory_budget is not None:
        with setting_up():
            parse_bytes(options.memory_budget, "--memory-budget")
    if options.scaling and world_size() > 1:
        raise UserError(f"--scaling: a grid of runs has one process, torchrun started {world_size()}; start one")
    if options.drafter == "medusa":
        _refuse(options, ("intermediate_size",), "Medusa heads have no MLP; leave it out, or use --layers")
    if options.drafter != "eagle3":
        _refuse(options, ("draft_vocab", "feature_layer"), "only EAGLE-3 has it; leave it out, or use --drafter eagle3")
    if not options.self_generate:
        _refuse(options, ("answer_tokens", "temperature"), "only answers have it; leave it out, or use --self-generate")


def _refuse(options: TrainOptions, names: Sequence[str], reason: str) -> None:
    """Raise if one of these options was given."""
    for name in names:
        if (value := getattr(options, name)) is not None:
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            raise UserError(f"--{name.replace('_', '-')} {shown}: {reason}")


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Errors of text, model, folder and loss as a line; these are ValueErrors and TrainingErrors."""
    try:
        with setting_up():
            yield
    except TrainingError as error:
        raise UserError(str(error)) from error


def _arguments(options: TrainOptions) -> dict[str, Any]:
    """What a repeated command must have in common to continue a run."""
    return {name: [str(v) for v in value] if isinstance(value, list) else value for name, value in
            ((name, str(value) if isinstance(value, Path) else value) for name, value in asdict(options).items())
            if name != "out"}  # fmt: skip


def _load(name: str, dtype: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    with loading("the model", name):
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype], trust_remote_code=False)
    return model.to(device).eval()


def _windows(
    options: TrainOptions, run: RunFolder, model: Any, tokenizer: Any, accelerator: Any, bars: ProgressBars,
    note: Callable[[str], None],
) -> Windows:  # fmt: skip
    """The text in windows; the main process reads or writes it first, the others read its file."""
    end, length = tokenizer.eos_token_id, options.length
    vocab_size = int(model.get_input_embeddings().weight.shape[0])

    def make() -> Windows:
        held_out = read_documents(options.held_out, tokenizer, vocab_size) if options.held_out else None
        if options.data:
            return cut_windows(read_documents(options.data, tokenizer, vocab_size), held_out, length, end)
        prompts = list(read_prompts(options.self_generate or (), tokenizer))
        run.begin()
        bars.phase("writing answers (prompts)", len(prompts))
        answer_tokens = options.answer_tokens or _ANSWER_TOKENS
        skipped = write_answers(
            model, prompts, run.answers, max_new_tokens=answer_tokens,
            temperature=_TEMPERATURE if options.temperature is None else options.temperature, seed=options.seed,
            memory_budget=options.memory_budget, tick=lambda count: bars.advance(count=count),
        )  # fmt: skip
        if skipped:
            why = (
                f"{skipped} of {len(prompts)} prompts are skipped: empty, or with --answer-tokens {answer_tokens} "
                f"longer than the model's {longest_text(model)} positions or what --memory-budget holds"
            )
            if skipped == len(prompts):
                raise DataError(f"{why}; lower --answer-tokens, or give other prompts")
            note(why)
        return cut_windows(iter(read_answers(run.answers)), held_out, length, None)

    with accelerator.main_process_first():
        return run.windows(make)


def _recipe(options: TrainOptions, windows: Windows) -> Recipe:
    budget = options.memory_budget
    return Recipe(
        drafter=options.drafter,
        sizes=DrafterSizes(
            options.depth,
            options.layers or LAYERS[options.drafter],
            options.intermediate_size,
            _DRAFT_VOCAB if options.draft_vocab is None else options.draft_vocab,
            tuple(options.feature_layer or ()),
        ),
        tokens=options.tokens or 2 * windows.training.numel(),
        batch_tokens=options.batch_tokens,
        rate=options.rate,
        seed=options.seed,
        memory_budget=None if budget is None else parse_bytes(budget, "--memory-budget"),
    )


def _fitted(
    options: TrainOptions, model: Any, name: str, windows: Windows, recipe: Recipe, accelerator: Any, bars: ProgressBars
) -> ScalingLaw:
    """The laws of a grid of runs around the recipe."""
    config = model.config.get_text_config()
    sizes = config.hidden_size, config.vocab_size
    inner = options.intermediate_size or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    grid_runs = Grid(options.out, model, name, windows, accelerator, bars)
    return fit_laws(grid_runs, recipe, sizes, inner, windows.length)


def _finish(console: Console, options: TrainOptions, run: RunFolder, trained: Trained) -> None:
    """Print the result, draw the curves, write the summary."""
    accuracy = trained.held_out.accuracy
    expected = {nodes: expected_tokens(accuracy, nodes) for nodes in TREES}
    summary = {
        "arguments": _arguments(options), "tokens": trained.tokens, "parameters": trained.parameters,
        "seconds": round(trained.seconds, 1), "windows_per_pass": trained.windows,
        "held_out": asdict(trained.held_out), "expected_tokens_per_step": {str(k): v for k, v in expected.items()},
        "progress": trained.progress,
        "versions": {
            "specmemo_kernels": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }  # fmt: skip
    draw_curves(run.folder / "training.png", options.drafter, trained)
    run.finish(summary)
    show_tables(console, _table(accuracy))
    console.print(
        "expected tokens per step: " + ", ".join(f"{value:.2f} with {nodes} nodes" for nodes, value in expected.items())
    )
    nbytes = sum(file.stat().st_size for file in run.folder.glob("*.safetensors"))
    console.print(
        f"{trained.tokens:,} tokens in {trained.seconds:.0f} s; {trained.parameters:,} parameters, "
        f"{format_bytes(nbytes)} in {run.folder}"
    )


def _table(accuracy: Sequence[Sequence[float]]) -> Table:
    table = Table(title="accuracy on held-out text: share of tokens among the best k guesses")
    ranks = [k for k in (1, 2, 3, 5, 10) if k <= len(accuracy[0])]
    table.add_column("tokens ahead")
    for k in ranks:
        table.add_column(f"k = {k}", justify="right")
    for depth, row in enumerate(accuracy, start=1):
        table.add_row(str(depth), *(f"{row[k - 1]:.3f}" for k in ranks))
    return table
