"""User errors of all commands: one line on stderr and an exit status; bugs keep their traceback."""

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

#: Exit statuses: 128 + SIGINT as in shells, 1 for a closed pipe as in typer and rich, 2 for user errors.
INTERRUPTED, CLOSED_PIPE, USER_ERROR = 130, 1, 2
#: The base of typer's errors about the command line; typer exports only its subclass.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class UserError(Exception):
    """An error that the user can correct; the message has what to do."""


class Commands(TyperGroup):
    """The group of all commands, with :func:`report` as its error handler."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command and exit with its status; ``standalone_mode=False`` raises and returns, as in click."""
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
    """Print a user error in one line and return its exit status; raise any other error again."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return CLOSED_PIPE
    if isinstance(error, typer.Exit):
        return error.exit_code
    message = _usage(error) if isinstance(error, _UsageError) else explain(error)
    if message is None:
        raise error
    if message:  # empty if typer has printed the help because no command was given
        show_error(message)
    return USER_ERROR


def explain(error: BaseException) -> str | None:
    """The message of a user error, ``None`` for a bug."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'output'}: {error.strerror}"
    # Imported here: these modules import torch.
    from specmemo_kernels.engine.pressure import is_out_of_memory
    from specmemo_kernels.ops.dispatch import BackendUnavailable
    from specmemo_kernels.planning.memory_plan import BudgetError

    if isinstance(error, UserError | BudgetError | BackendUnavailable | OSError) or is_out_of_memory(error):
        return str(error).strip() or type(error).__name__
    return None


def show_error(message: str) -> None:
    """Print one line to stderr, red on a terminal; line ends become spaces, markup is printed as it is."""
    line = " ".join(part.strip() for part in message.splitlines())
    Console(stderr=True, markup=False, emoji=False, highlight=False).print(
        f"specmemo: {line}", style="red", soft_wrap=True
    )


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Exit at once on Ctrl-C: some imports swallow KeyboardInterrupt, and nothing needs cleaning up yet."""
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
    """The error of the command line and its help command."""
    message = str(error.format_message()).strip().rstrip(".").replace("Value error, ", "")  # pydantic's
    return f"{message}; see {error.ctx.command_path} --help" if message and error.ctx is not None else message


def _discard_output() -> None:
    """Redirect stdout to the null device, so that Python's flush at exit succeeds."""
    try:
        target = sys.stdout.fileno()
    except OSError:  # no file behind it
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, target)
    os.close(null)
