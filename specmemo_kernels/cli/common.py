"""Checks of options, output files, and loading models, for all commands."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from specmemo_kernels import ops
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.cli.options import ModelOptions, PatchOptions
from specmemo_kernels.drafting.base import PROMPT_LOOKUP
from specmemo_kernels.drafting.replaced_file import replace_file
from specmemo_kernels.drafting.source_files import HUB_ID
from specmemo_kernels.engine.pressure import is_out_of_memory
from specmemo_kernels.ops.weight_codes import CODE_BITS
from specmemo_kernels.planning.memory_plan import parse_bytes

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"
DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
#: Columns of a terminal on which every table fits.
_UNLIMITED = 10_000
#: Endings of file names, which no hub id has.
FILES = (".json", ".safetensors", ".pt", ".pth", ".bin", ".gguf")


@contextlib.contextmanager
def setting_up() -> Iterator[None]:
    """Convert a ValueError of checking, loading or patching into a UserError; later ValueErrors may be bugs.

    BudgetError, HeadsError and UnsupportedModel are ValueErrors. :func:`errors.explain` lists the types that are user
    errors at any time.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(str(error) or type(error).__name__) from error


@contextlib.contextmanager
def loading(kind: str, source: str | Path) -> Iterator[None]:
    """Convert any error of loading ``source`` to a UserError: broken files raise errors of every type."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        folder = Path(source)
        reason = f"{error}" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        files = [file for file in (folder, *sorted(folder.glob("*"))) if os.access(file, os.F_OK)]
        if closed := [file for file in files if not os.access(file, os.R_OK)]:  # transformers calls them missing
            reason = f"no permission to read {closed[0]}"
        raise UserError(f"{kind} {source} can't be loaded: {reason}") from error


def terminal(**options: Any) -> Console:
    """A console that prints text unchanged: names of files and models aren't markup."""
    return Console(highlight=False, markup=False, emoji=False, **options)


def existing_or_hub(name: str, advice: str, *, files: bool = False, hub: bool = True) -> str:
    """``name`` with its ``~`` expanded if the path exists, unchanged if it can be a hub id.

    Args:
        name: the value of an option.
        advice: what the option takes, for the message.
        files, hub: whether the option takes a file, or a hub id.

    Raises:
        UserError: ``name`` is neither.
    """
    path = Path(os.path.expanduser(name))
    if name and path.exists():
        if path.is_file() and not files:
            raise UserError(f"{name} is a file; {advice}")
        if not path.is_file() and not path.is_dir():
            raise UserError(f"{name} is neither a folder nor a file; {advice}")
        return str(path)
    if not hub or name.endswith(FILES) or not HUB_ID.fullmatch(name):
        raise UserError(f"there is no {name or repr(name)}; {advice}")
    return name


def show_tables(console: Console, *tables: Table) -> None:
    """Print tables side by side, or below each other where the terminal has too few columns.

    No value is cut off: a table that is still too wide has longer lines than the terminal.
    """
    unlimited = console.options.update(width=_UNLIMITED)
    row = Table.grid(padding=(0, 2))
    row.add_row(*tables)
    if Measurement.get(console, unlimited, row).maximum <= console.width:
        console.print(row)
        return
    for table in tables:
        for column in table.columns:
            cells = [Measurement.get(console, unlimited, cell) for cell in (column.header, *column.cells)]
            column.min_width = max(cell.maximum if column.no_wrap else cell.minimum for cell in cells)
        if (least := Measurement.get(console, unlimited, table).minimum) > console.width:
            table.width = least
        console.print(table, crop=False)


def check_output(option: str, path: Path, *, make_folders: bool = False, advice: str = "") -> None:
    """Check before the work that its result can be written to ``path``.

    Args:
        advice: what else the user can do, for the message.

    Raises:
        UserError: ``path`` is a folder, its folder is missing, or the permission is.
    """
    target = path if path.exists() else path.parent
    while make_folders and not target.exists():
        target = target.parent
    problem = None
    if path.is_dir():
        problem = "it is a folder, name a file"
    elif not target.exists():
        problem = f"there is no folder {target}"
    elif target != path and not target.is_dir():
        problem = f"{target} is no folder"
    elif not os.access(target, os.W_OK):
        problem = f"no permission to write to {target}"
    if problem is not None:
        raise UserError(f"{option} {path}: {problem}{advice}")


def check_output_folder(option: str, folder: Path) -> None:
    """Check before the work that files can be written to ``folder``: it is made if it is missing, and removed again.

    Raises:
        UserError: it can't be made, or takes no file.
    """
    missing = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option} {folder} can't be written to: {error.strerror}; name another folder") from error
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # it couldn't be made, or is used by another process already
                path.rmdir()


def write_result(option: str, path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with ``path`` or a file beside it that then replaces it: an error leaves the old file, or none.

    Raises:
        UserError: it can't be written.
    """
    try:
        if (path.exists() and not path.is_file()) or (path.parent.exists() and not os.access(path.parent, os.W_OK)):
            write(path)  # a pipe, or a file in a folder that takes no other one
        else:
            replace_file(path.resolve(), write)
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror or error}") from error


def check_options(options: PatchOptions, dtype: torch.dtype | str) -> torch.device:
    """Check options before a model is loaded in ``dtype``; returns the device.

    Raises:
        UserError, BackendUnavailable: an option is wrong; the message has its name.
    """
    device = torch_device(options.device)
    compute_dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32  # patch checks a stored dtype
    with setting_up():
        if reason := ops.unsuited(ops.backend_name(options.backend, device), device, compute_dtype):
            raise UserError(f"--backend {options.backend}: {reason}")
        if options.memory_budget is not None:
            parse_bytes(options.memory_budget, "--memory-budget")
    return device


def check_head_bits(bits: int | None) -> None:
    """Raise a UserError unless ``--head-bits`` has a supported value."""
    if bits not in (None, CODE_BITS):
        raise UserError(f"--head-bits is {bits}, expected {CODE_BITS}; leave it out for heads as stored")


def patch_arguments(options: PatchOptions) -> dict[str, Any]:
    """Keyword arguments of ``patch``, for one sequence at a time."""
    names = ("memory_budget", "context", "tree", "backend", "kv_dtype")
    return {name: getattr(options, name) for name in names} | {"max_batch_size": 1}


def model_arguments(options: ModelOptions) -> dict[str, Any]:
    """The same, of the commands that run any model."""
    return patch_arguments(options) | {"head_bits": options.head_bits, "compress": options.compress}


def demo_model_folder() -> Path:
    """The bundled model's folder; its heads are in ``heads/``.

    Raises:
        UserError: this installation has no bundled model.
    """
    if not (DEMO_MODEL / "model.safetensors").is_file():
        raise UserError(f"the bundled model is missing ({DEMO_MODEL}); reinstall the package, or name a model yourself")
    return DEMO_MODEL


def world_size() -> int:
    """Number of processes that torchrun started; 1 without torchrun."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal():
        raise UserError(f"WORLD_SIZE is {size!r} in the environment, expected a number; torchrun sets it")
    return int(size)


def leave_ranks() -> None:
    """Destroy torchrun's process group, whose threads must not outlive the interpreter."""
    if world_size() > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def torch_device(name: str) -> torch.device:
    """The device of an option; ``cuda`` is each rank's own device under torchrun.

    Raises:
        UserError: the device doesn't exist, or its tensors hold no data ("meta").
    """
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name or repr(name)}: expected cpu, cuda or cuda:N") from error
    if device.type == "meta":
        raise UserError(f"--device {name}: its tensors hold no data; expected cpu, cuda or cuda:N")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0].split(". ")[0]
        raise UserError(f"--device {name or repr(name)}: {reason}") from error
    return torch.device("cpu") if device.type == "cpu" else device  # torch ignores an index of the CPU


def load_model(folder: str | Path, dtype: torch.dtype | str, device: torch.device) -> Any:
    """A causal language model of transformers in eval mode; sharded over the ranks under torchrun.

    Models with their own code are refused: transformers would prompt on the terminal to run it.

    Raises:
        UserError: the files can't be loaded, or transformers shards models over another kind of device.
    """
    from transformers import AutoModelForCausalLM

    if world_size() == 1:
        with loading("the model", folder):
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        return model.to(device).eval()
    with warnings.catch_warnings():  # newer versions replace tp_plan by an argument that older ones lack
        warnings.simplefilter("ignore", FutureWarning)
        with loading("the model", folder):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False, tp_plan="auto")
    if model.device.type != device.type:
        raise UserError(f"--device {device}: under torchrun this machine's models are on {model.device.type}")
    return model.eval()


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer, its drafter's folder, and its name for messages."""

    name: str
    model: Any
    tokenizer: Any
    heads: str


def load_with_heads(options: ModelOptions) -> LoadedModel:
    """Check the options, and load the model and tokenizer that they name, or the bundled ones.

    Raises:
        UserError, ValueError, BackendUnavailable: an option, or the model, can't be used.
    """
    if options.model is not None and options.heads is None:
        raise UserError(f"--model {options.model} needs --heads: a drafter, or {PROMPT_LOOKUP}")
    if options.model is None and options.heads not in (None, PROMPT_LOOKUP):
        raise UserError(f"--heads {options.heads} needs --model; leave both out for the bundled model")
    if options.dtype not in DTYPES:
        raise UserError(f"--dtype is {options.dtype!r}, expected auto, float32, bfloat16 or float16")
    dtype = DTYPES[options.dtype]
    if options.model is None:
        hide_loading_bars()
        folder = str(demo_model_folder())
        heads = options.heads or str(demo_model_folder() / "heads")
        name = "the bundled demo model, which completes Python code"
        dtype = torch.float32 if dtype == "auto" else dtype
    else:
        name = folder = existing_or_hub(options.model, "--model takes a folder or a hub id")
        heads = existing_or_hub(str(options.heads), "--heads takes a folder, a file or a hub id", files=True)
    check_head_bits(options.head_bits)
    device = check_options(options, dtype)
    tokenizer = load_tokenizer(folder)
    return LoadedModel(name, load_model(folder, dtype, device), tokenizer, heads)


def hide_loading_bars() -> None:
    """Disable transformers' progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load_tokenizer(folder: str | Path) -> Any:
    from transformers import AutoTokenizer

    with loading("the tokenizer of", folder):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
