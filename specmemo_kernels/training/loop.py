"""The training loop: AdamW with a cosine schedule over the windows of a text, resumed from its last checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specmemo_kernels.training.checkpoint import Progress, TrainingError, load_state, save_state
from specmemo_kernels.training.objective import Objective, evaluate
from specmemo_kernels.training.target_states import FrozenTarget
from specmemo_kernels.training.windows import Windows

Tensor = torch.Tensor

#: AdamW's betas, the largest norm of a gradient, and the share of warm-up steps (Clover-2's recipe; Medusa's warm-up).
BETAS, CLIP, WARM_UP = (0.9, 0.95), 0.5, 0.1
#: Seconds between checkpoints: a killed run loses at most these.
CHECKPOINT_SECONDS = 45.0
#: Evaluations on the way, the last one at the end, and their number of windows.
EVALUATIONS, EVALUATED = 8, 8


@dataclass(frozen=True)
class Schedule:
    """How long and in which portions a drafter is trained.

    Attributes:
        steps: optimiser steps. windows: per step, over all processes. micro: windows of a forward pass.
        rate: the highest learning rate, after the warm-up. seed: of the order of windows and of new weights.
    """

    steps: int
    windows: int
    micro: int
    rate: float
    seed: int

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to a tenth."""
        warm = max(1, round(WARM_UP * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        share = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


class Training:
    """A run: steps until the schedule ends, with checkpoints.

    Args:
        accelerator: of accelerate; it has one process, or torchrun's.
        state: the file of checkpoints; an existing one is resumed, with its windows of a forward pass.
    """

    def __init__(
        self, accelerator: Any, target: FrozenTarget, objective: Objective, windows: Windows, schedule: Schedule,
        state: Path,
    ) -> None:  # fmt: skip
        self.target, self.objective, self.windows = target, objective, windows
        self._accelerator, self._state = accelerator, state
        self.parameters = dict(objective.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=schedule.rate, betas=BETAS, weight_decay=0.0, fused=True
        )
        self.progress = load_state(state, self.parameters, self._optimizer) if state.exists() else Progress()
        self.progress.micro = self.progress.micro or schedule.micro
        self.schedule = replace(schedule, micro=self.progress.micro)
        self._parallel: nn.Module = accelerator.prepare_model(objective) if accelerator.num_processes > 1 else objective

    def run(self, report: Callable[[list[float]], None]) -> None:
        """Train until the schedule ends; ``report`` is called with each step's losses.

        Raises:
            TrainingError: the loss isn't finite.
        """
        schedule, saved = self.schedule, time.monotonic()
        moments = {round((i + 1) * schedule.steps / EVALUATIONS) for i in range(EVALUATIONS)}
        while self.progress.step < schedule.steps:
            started = time.monotonic()
            losses = self._step(self.progress.step)
            if not math.isfinite(sum(losses)):
                raise TrainingError(
                    f"the loss of step {self.progress.step} is {losses}; lower the learning rate, {schedule.rate:g}, "
                    "and start in another folder"
                )
            self.progress.step += 1
            self.progress.losses.append(losses)
            if self.progress.step in moments:
                self._evaluate()
            self.progress.seconds += time.monotonic() - started
            report(losses)
            if self._accelerator.is_main_process and time.monotonic() - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = time.monotonic()

    def save(self) -> None:
        """Write a checkpoint."""
        save_state(self._state, self.parameters, self._optimizer, self.progress)

    def _step(self, step: int) -> list[float]:
        """An optimiser step; returns each depth's cross-entropy, the mean over all processes."""
        accelerator, schedule = self._accelerator, self.schedule
        ids = self.windows.batch(step, schedule.windows, schedule.seed)
        ids = ids[accelerator.process_index :: accelerator.num_processes]
        for group in self._optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        total = torch.zeros(self.objective.drafter.depth, device=self.target.device)
        parts = [ids[i : i + schedule.micro] for i in range(0, len(ids), schedule.micro)]
        for i, part in enumerate(parts):
            share = len(part) / len(ids)
            with accelerator.no_sync(self._parallel) if i + 1 < len(parts) else nullcontext():
                loss, losses = self._parallel(self.target.states(part.to(self.target.device)))
                accelerator.backward(loss * share)
            total += losses * share
            del loss, losses  # with their graph, before the next pass
        nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        mean: list[float] = accelerator.reduce(total, reduction="mean").tolist()
        return mean

    def _evaluate(self) -> None:
        count = len(self.windows.held_out)
        chosen = torch.linspace(0, count - 1, min(count, EVALUATED)).round().long()
        result = evaluate(self.objective, self.windows.held_out[chosen], self.target.states, _nothing)
        row = {"step": self.progress.step, "losses": result.losses, "accuracy": [r[0] for r in result.accuracy]}
        self.progress.evaluations.append(row)


def _nothing() -> None:
    pass
