"""A training run in a folder: from windows of text to a saved drafter, resumed where it stopped."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from specmemo_kernels.drafting.replaced_file import replace_file
from specmemo_kernels.engine.pressure import free_bytes
from specmemo_kernels.training.checkpoint import TrainingError
from specmemo_kernels.training.loop import Schedule, Training
from specmemo_kernels.training.memory import check_parameters, windows_within
from specmemo_kernels.training.objective import HeldOut, Objective, evaluate
from specmemo_kernels.training.recipes import DrafterSizes, feature_ids, least_parameters, new_drafter
from specmemo_kernels.training.saved import save_drafter
from specmemo_kernels.training.target_states import FrozenTarget
from specmemo_kernels.training.windows import Windows

#: The folder of a run's files inside the drafter's; it is removed at the end.
RUN_FOLDER = "training"
SUMMARY = "training.json"
#: Results of a grid's finished run, in its folder inside the grid's.
MEASURED = "measured.json"
#: Files that a drafter's would replace, or that would be loaded with it.
_MODEL_FILES = ("config.json", "*.safetensors", "*.bin", "*.pt")
#: Most windows of the measurement at the end.
_EVALUATED = 64
#: Tokens of a forward pass on a CPU: more leave its caches. EAGLE-3 for the demo model, two cores: 3,200 tokens/s with
#: 2048 tokens a pass, 2,400 with 8192.
_CPU_TOKENS = 2048
#: Share of free memory for training without a budget.
_FREE_SHARE = 0.8


@dataclass(frozen=True)
class Recipe:
    """What decides a drafter's weights, besides the text.

    Attributes:
        drafter: ``"medusa"``, ``"clover2"`` or ``"eagle3"``. sizes: of it.
        tokens: of training; texts are repeated as often as needed. batch_tokens: per optimiser step.
        rate: the highest learning rate. seed: of new weights and the order of windows.
        memory_budget: bytes beside the model, which limits the windows of a forward pass; ``None``: 80 % of what is
            free.
    """

    drafter: str
    sizes: DrafterSizes
    tokens: int
    batch_tokens: int
    rate: float
    seed: int
    memory_budget: int | None = None

    def portions(self, length: int, processes: int = 1) -> tuple[int, int]:
        """Optimiser steps with windows of ``length`` tokens, and windows per step."""
        per_step = step_windows(self.batch_tokens, length, processes)
        return max(1, round(self.tokens / (per_step * length))), per_step


def step_windows(batch_tokens: int, length: int, processes: int = 1) -> int:
    """Windows of ``length`` tokens in an optimiser step of about ``batch_tokens`` tokens."""
    return max(processes, round(batch_tokens / length / processes) * processes)


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
        held_out: accuracies on text that it wasn't trained on. progress: losses and evaluations on the way.
        tokens: trained on. parameters: of the drafter. seconds: of training, without evaluation at the end.
        windows: of a forward pass.
    """

    held_out: HeldOut
    progress: dict[str, Any]
    tokens: int
    parameters: int
    windows: int

    @property
    def seconds(self) -> float:
        return float(self.progress["seconds"])


class Reporter(Protocol):
    """Receives the progress of a run, for the user's screen."""

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """A phase of ``total`` units begins, of which ``done`` are finished."""

    def advance(self, note: str = "") -> None:
        """A unit of the phase is finished."""


class RunFolder:
    """The files of a run, which a later call with the same arguments continues.

    Args:
        folder: of the drafter. arguments: all that decides the result, as JSON.
        main_process: writes the arguments; other processes only compare them.

    Raises:
        TrainingError: the folder has a finished drafter, another model, a run with other or unreadable arguments, or
            files where those of a run would be.
    """

    def __init__(self, folder: Path, arguments: dict[str, Any], *, main_process: bool = True) -> None:
        self.folder, self.files = folder, folder / RUN_FOLDER
        if (folder / SUMMARY).exists():
            raise TrainingError(f"{folder} has a trained drafter; name another folder with --out, or remove this one")
        self._noted, self._given = self.files / "arguments.json", arguments
        self._main_process, self._makes_folder = main_process, not folder.exists()
        others = _other_files(self.files, self._noted.name)  # before the arguments, which the main process writes first
        if self._noted.exists():
            check_arguments(folder, self._stored_arguments(), arguments)
        elif others:  # the run's end would remove them
            raise TrainingError(f"{self.files} has {others[0]}, which is of no run; name another folder with --out")
        elif model_files := [path.name for pattern in _MODEL_FILES for path in sorted(folder.glob(pattern))]:
            raise TrainingError(f"{folder} has {model_files[0]} of another model; name another folder with --out")

    def begin(self) -> None:
        """Write the arguments, unless they are there: from now on the folder has an unfinished run."""
        if self._main_process and not self._noted.exists():
            self.files.mkdir(parents=True, exist_ok=True)
            replace_file(self._noted, lambda path: path.write_text(json.dumps(self._given, indent=1) + "\n"))

    def _stored_arguments(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._noted.read_text()))
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"{self._noted} doesn't hold a run's arguments ({error}); name another folder with --out, or remove "
                f"{self.folder}"
            ) from error

    @property
    def state(self) -> Path:
        """Checkpoints."""
        return self.files / "state.safetensors"

    @property
    def answers(self) -> Path:
        """Self-generated text."""
        return self.files / "answers.jsonl"

    def windows(self, make: Callable[[], Windows]) -> Windows:
        """The stored windows; without any, those of ``make``, stored. Text that is refused leaves no run behind."""
        path = self.files / "windows.safetensors"
        if not path.exists():
            made = make()
            self.begin()
            replace_file(path, made.save)
        return Windows.load(path)

    @contextlib.contextmanager
    def refusals_leave_nothing(self) -> Iterator[None]:
        """Remove the run's files if options are refused before there is work to keep: others may use the folder."""
        try:
            yield
        except ValueError:
            if self._main_process and not self._has_work():
                shutil.rmtree(self.files, ignore_errors=True)
                if self._makes_folder:
                    with contextlib.suppress(OSError):  # something else is in it
                        self.folder.rmdir()
            raise

    def _has_work(self) -> bool:
        """Whether there is a checkpoint, an answer, or a finished run of a grid."""
        return self.state.exists() or _has_text(self.answers) or any(self.folder.glob(f"*/{MEASURED}"))

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, and remove the run's files."""
        replace_file(self.folder / SUMMARY, lambda path: path.write_text(json.dumps(summary, indent=1) + "\n"))
        shutil.rmtree(self.files)


def check_arguments(folder: Path, stored: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Compare the stored arguments of the run in ``folder`` with those of a command.

    Raises:
        TrainingError: they differ.
    """
    given = json.loads(json.dumps(arguments))
    if stored != given:
        changed = [name for name in given if stored.get(name) != given[name]]
        raise TrainingError(
            f"{folder} has an unfinished run with other arguments ({', '.join(changed) or 'fewer of them'}); "
            "repeat its arguments to continue it, name another folder with --out, or remove this one"
        )


def _other_files(folder: Path, arguments: str) -> list[str]:
    """The files of a run's folder, or of a user's in its place; without what a crash leaves of new arguments."""
    return sorted({path.name for path in folder.iterdir()} - {f"{arguments}.new"}) if folder.is_dir() else []


def _has_text(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def train_drafter(
    model: Any, windows: Windows, recipe: Recipe, folder: Path, state: Path, verifier: str, accelerator: Any,
    reporter: Reporter,
) -> Trained:  # fmt: skip
    """Train a drafter for ``model``, measure it on held-out text and save it in ``folder``.

    Args:
        state: the checkpoints' file; an existing one is continued. verifier: the model's name in the drafter's files.
        accelerator: of accelerate.

    Raises:
        BudgetError: the budget is too small for one window. TrainingError: the loss isn't finite.
        UnsupportedModel: the model has no floating-point lm_head, or no list of layers.
    """
    target, objective, schedule = prepare(model, windows, recipe, accelerator)
    training = Training(accelerator, target, objective, windows, schedule, state)
    length, step_tokens = windows.length, schedule.windows * windows.length
    reporter.phase(f"training (steps of {step_tokens:,} tokens)", schedule.steps, training.progress.step)
    training.run(lambda losses: reporter.advance(f"loss {losses[0]:.3f}"))
    if accelerator.is_main_process:
        training.save()
    chosen = torch.linspace(0, len(windows.held_out) - 1, min(len(windows.held_out), _EVALUATED)).round().long()
    reporter.phase(f"measuring acceptance (windows of {length:,} tokens)", len(chosen))
    held_out = evaluate(objective, windows.held_out[chosen], target.states, reporter.advance)
    if accelerator.is_main_process:
        save_drafter(objective.drafter, folder, held_out, verifier)
    parameters = sum(parameter.numel() for parameter in objective.parameters())
    return Trained(
        held_out, asdict(training.progress), schedule.steps * step_tokens, parameters, training.schedule.micro
    )


def prepare(model: Any, windows: Windows, recipe: Recipe, accelerator: Any) -> tuple[FrozenTarget, Objective, Schedule]:
    """The target, a new drafter's objective, and the schedule, whose passes fit the memory budget.

    Raises:
        BudgetError, UnsupportedModel: as :func:`train_drafter`.
    """
    layers = model.config.get_text_config().num_hidden_layers
    target = FrozenTarget(model, feature_ids(recipe.drafter, recipe.sizes, layers))
    budget = recipe.memory_budget or int(_FREE_SHARE * free_bytes(target.device))
    check_parameters(budget, least_parameters(recipe.drafter, target, recipe.sizes))
    objective = Objective(new_drafter(recipe.drafter, target, recipe.sizes, windows.training, recipe.seed))
    length, processes = windows.length, accelerator.num_processes
    steps, per_step = recipe.portions(length, processes)
    most = per_step // processes
    if target.device.type == "cpu":
        most = min(most, max(1, _CPU_TOKENS // length))
    fitting = windows_within(budget, most, objective, target.states, length, processes)
    # The least of all processes: a checkpoint has one number.
    micro = int(accelerator.gather(torch.tensor([fitting], device=target.device)).min())
    return target, objective, Schedule(steps, per_step, micro, recipe.rate, recipe.seed)
