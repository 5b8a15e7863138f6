"""Errors that a user can correct: one line on stderr and an exit status, converted in one place for all commands."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

#: Of an exit status: the shell's 128 + SIGINT, a closed pipe (as typer and rich have it), an error of the user's.
INTERRUPTED, CLOSED_PIPE, USER_ERROR = 130, 1, 2
#: The base of typer's errors about the command line; typer exports only its subclass.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class UserError(Exception):
    """A request that can't be served; the message says what to do instead."""


class Commands(TyperGroup):
    """The group of all commands. Errors that a user can correct become one line; a bug keeps its traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command and exit with its status; ``standalone_mode=False`` raises and returns instead, as in click."""
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        options["standalone_mode"] = False
        if isinstance(sys.stdout, io.TextIOWrapper):  # ASCII terminals: unknown characters become question marks
            sys.stdout.reconfigure(errors="replace")
        try:
            status = super().main(*args, **options) or 0
        except (Exception, KeyboardInterrupt) as error:
            status = report(error)
        if status == INTERRUPTED:
            show_error("interrupted")
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError as error:
            _discard_output()
            status = status or report(error)
        sys.exit(status)


def report(error: BaseException) -> int:
    """Show an error of the user's in one line and return the exit status; raises any other error again."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return CLOSED_PIPE
    if isinstance(error, typer.Exit):
        return error.exit_code
    message = _usage(error) if isinstance(error, _UsageError) else explain(error)
    if message is None:
        raise error
    if message:  # typer shows the help itself where no command is given
        show_error(message)
    return USER_ERROR


def explain(error: BaseException) -> str | None:
    """The message of an error that a user can correct, ``None`` for a bug."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'output'}: {error.strerror}"
    # Imported late: they import torch.
    from specmemo_kernels.engine.pressure import is_out_of_memory
    from specmemo_kernels.ops.dispatch import BackendUnavailable
    from specmemo_kernels.planning.memory_plan import BudgetError

    if isinstance(error, UserError | BudgetError | BackendUnavailable | OSError) or is_out_of_memory(error):
        return str(error).strip() or type(error).__name__
    return None


def show_error(message: str) -> None:
    """One line on stderr, red on a terminal, whatever line ends and markup the message holds."""
    line = " ".join(part.strip() for part in message.splitlines())
    Console(stderr=True, markup=False, emoji=False, highlight=False).print(
        f"specmemo: {line}", style="red", soft_wrap=True
    )


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Ctrl-C ends the process at once: an import may swallow KeyboardInterrupt, and nothing needs cleaning up yet."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def leave(*_: Any) -> None:
        os.write(2, b"specmemo: interrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _usage(error: Any) -> str:
    """What is wrong with the command line, and which help tells more."""
    message = str(error.format_message()).strip().rstrip(".")
    return f"{message}; see {error.ctx.command_path} --help" if message and error.ctx is not None else message


def _discard_output() -> None:
    """Point stdout at the null device; else Python's flush at exit fails again."""
    try:
        target = sys.stdout.fileno()
    except OSError:  # no file behind it
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, target)
    os.close(null)
