"""What several commands need: the bundled model, and loading a model that is about to be patched."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specmemo_kernels import ops
from specmemo_kernels.cache.kv_storage import page_dtype
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.drafting.head_files import HUB_ID
from specmemo_kernels.engine.pressure import is_out_of_memory
from specmemo_kernels.ops.weight_codes import check_bits
from specmemo_kernels.planning.memory_plan import parse_bytes

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"
#: Endings of files, which no hub id has.
FILES = (".json", ".safetensors", ".pt", ".pth", ".bin", ".gguf")


@contextlib.contextmanager
def setting_up() -> Iterator[None]:
    """ValueErrors of checking, loading and patching are the user's to correct; later ones may be bugs.

    BudgetError, HeadsError and UnsupportedModel are ValueErrors; the errors that are always the user's are in
    :func:`errors.explain`.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(str(error) or type(error).__name__) from error


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Any error of transformers on files that it can't read: broken ones raise errors of every type."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        named = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        raise UserError(f"{what} can't be loaded: {named}{error}") from error


def terminal(**options: Any) -> Console:
    """A console that prints text as it is: names of files and models are no markup."""
    return Console(highlight=False, markup=False, emoji=False, **options)


def existing_or_hub(name: str, advice: str, *, files: bool = False, hub: bool = True) -> str:
    """``name`` with its ``~`` expanded where it exists, or as it is where it can be a hub id.

    Args:
        name: what an option was given; files, hub: whether it takes a file, or a hub id. advice: what it takes.

    Raises:
        UserError: neither.
    """
    path = Path(os.path.expanduser(name))
    if name and path.exists():
        if path.is_file() and not files:
            raise UserError(f"{name} is a file; {advice}")
        return str(path)
    if not hub or name.endswith(FILES) or not HUB_ID.fullmatch(name):
        raise UserError(f"there is no {name or repr(name)}; {advice}")
    return name


def check_output(option: str, path: Path, *, make_folders: bool = False) -> None:
    """See before the work that its result can be written to ``path``.

    Raises:
        UserError: a folder, no folder to write to, or no permission.
    """
    place = path if path.exists() else path.parent
    while make_folders and not place.exists():
        place = place.parent
    if path.is_dir():
        raise UserError(f"{option} {path}: it is a folder, name a file")
    if not place.exists():
        raise UserError(f"{option} {path}: there is no folder {place}")
    if place != path and not place.is_dir():
        raise UserError(f"{option} {path}: {place} is no folder")
    if not os.access(place, os.W_OK):
        raise UserError(f"{option} {path}: no permission to write to {place}")


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Errors of writing ``path`` name the option.

    Raises:
        UserError: it can't be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror or error}") from error


def check_options(
    device: str,
    dtype: torch.dtype | str,
    backend: str | None,
    memory_budget: str | None,
    kv_dtype: str | None,
    head_bits: int | None = None,
) -> torch.device:
    """See before a model is loaded that these options make sense; returns the device.

    Raises:
        UserError, BackendUnavailable: one that doesn't; the message names it.
    """
    place = torch_device(device)
    known = dtype if isinstance(dtype, torch.dtype) else torch.float32  # a stored dtype is checked while patching
    with setting_up():
        if reason := ops.unsuited(ops.backend_name(backend, place), place, known):
            raise UserError(f"--backend {backend}: {reason}")
        if memory_budget is not None:
            parse_bytes(memory_budget, "--memory-budget")
        page_dtype(kv_dtype)
        check_bits(head_bits)
    return place


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
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise UserError(f"--dtype is {name!r}, expected auto, float32, bfloat16 or float16")
    dtype: torch.dtype | str = name if name == "auto" else getattr(torch, name)
    return dtype


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal():
        raise UserError(f"WORLD_SIZE is {size!r} in the environment, expected a number; torchrun sets it")
    return int(size)


def torch_device(name: str) -> torch.device:
    """A device that computes; of several processes on a machine each has its own.

    Raises:
        UserError: it doesn't exist, or its tensors hold no data ("meta").
    """
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0].split(". ")[0]
        raise UserError(f"--device {name or repr(name)}: {reason}") from error
    return torch.device("cpu") if device.type == "cpu" else device  # torch ignores an index of the CPU


def load_model(folder: str | Path, dtype: torch.dtype | str, device: torch.device) -> Any:
    """A causal language model of transformers, ready to generate; under torchrun divided over its processes.

    A model that brings its own code is refused: loading it would ask on the terminal whether to run that code.

    Raises:
        UserError: the files can't be loaded, or transformers divides models over another kind of device.
    """
    from transformers import AutoModelForCausalLM

    if world_size() == 1:
        with loading(f"the model {folder}"):
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        return model.to(device).eval()
    with warnings.catch_warnings():  # newer versions prefer an argument that older ones don't have
        warnings.simplefilter("ignore", FutureWarning)
        with loading(f"the model {folder}"):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False, tp_plan="auto")
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

    with loading(f"the tokenizer of {folder}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
