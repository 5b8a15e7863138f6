"""The state of a training run in one safetensors file, replaced atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specmemo_kernels.drafting.replaced_file import replace_file

Tensor = torch.Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingError(RuntimeError):
    """A run that can't go on; the message has what to do."""


@dataclass
class Progress:
    """What a run has done so far.

    Attributes:
        step: number of finished steps.
        losses: each step's cross-entropy by depth.
        evaluations: steps with their held-out losses and accuracies.
        seconds: spent in training, over all starts.
        micro: windows of a forward pass; others round differently. 0: not stored, as by earlier versions.
    """

    step: int = 0
    losses: list[list[float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    micro: int = 0


def save_state(
    path: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Write parameters, AdamW's moments and the progress."""
    tensors = {f"parameter.{name}": value.detach() for name, value in parameters.items()}
    for name, value in parameters.items():
        tensors |= {f"{moment}.{name}": optimizer.state[value][moment] for moment in _MOMENTS}
    metadata = {"progress": json.dumps(vars(progress))}
    dense = {key: tensor.contiguous() for key, tensor in tensors.items()}
    replace_file(path, lambda fresh: save_file(dense, fresh, metadata))


@torch.no_grad()
def load_state(path: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Progress:
    """Read a file of :func:`save_state` into parameters and optimizer.

    Raises:
        TrainingError: it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            progress = Progress(**json.loads(file.metadata()["progress"]))
            for name, value in parameters.items():
                value.copy_(file.get_tensor(f"parameter.{name}"))
                state = {moment: file.get_tensor(f"{moment}.{name}").to(value.device) for moment in _MOMENTS}
                # The fused kernel reads the step where the parameter is.
                optimizer.state[value] = {"step": torch.tensor(float(progress.step), device=value.device), **state}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise TrainingError(f"{path} is damaged ({error}); remove it, and the run starts again") from error
    return progress
