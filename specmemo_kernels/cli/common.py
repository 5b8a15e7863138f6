"""What several commands need: the bundled model, and loading a model that is about to be patched."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.ops.dispatch import BackendUnavailable

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"


class UserError(Exception):
    """Something the user asked for can't be done; the message says what to do instead."""


@contextlib.contextmanager
def setting_up() -> Iterator[None]:
    """Errors of loading and patching are the user's to deal with; the same types raised later may be bugs.

    ``ValueError`` covers BudgetError, HeadsError and UnsupportedModel; ``OSError`` is what transformers raises for a
    name that is neither a folder nor on the hub.
    """
    try:
        yield
    except (ValueError, OSError, BackendUnavailable) as error:
        raise UserError(str(error) or type(error).__name__) from error


def demo_model_folder() -> Path:
    """The bundled model's folder; its heads lie in ``heads`` inside it.

    Raises:
        UserError: this installation came without it.
    """
    if not (DEMO_MODEL / "model.safetensors").is_file():
        raise UserError(f"the bundled model is missing ({DEMO_MODEL}); reinstall the package, or name a model yourself")
    return DEMO_MODEL


def torch_dtype(name: str) -> torch.dtype | str:
    """``"auto"``, or the floating-point type of that name."""
    dtype = name if name == "auto" else getattr(torch, name, None)
    if dtype != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(f"--dtype is {name!r}, expected auto, float32, bfloat16 or float16")
    return dtype


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def torch_device(name: str) -> torch.device:
    """A device that is there; of several processes on a machine each has its own."""
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return device


def load_model(folder: str | Path, dtype: torch.dtype | str, device: torch.device) -> Any:
    """A causal language model of transformers, ready to generate; under torchrun divided over its processes.

    Raises:
        UserError: transformers divides models over devices of another kind than ``device``.
    """
    from transformers import AutoModelForCausalLM

    if world_size() == 1:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.to(device).eval()
    with warnings.catch_warnings():  # newer versions prefer an argument that older ones don't have
        warnings.simplefilter("ignore", FutureWarning)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, tp_plan="auto")
    if model.device.type != device.type:
        raise UserError(f"--device {device}: under torchrun this machine's models are on {model.device.type}")
    return model.eval()


@contextlib.contextmanager
def leaving_others() -> Iterator[None]:
    """At the end the process leaves its group, whose threads would else still run when Python is gone."""
    try:
        yield
    finally:
        if world_size() > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def hide_loading_bars() -> None:
    """No progress bars of transformers' own, for a model that loads in no time."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load_tokenizer(folder: str | Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
