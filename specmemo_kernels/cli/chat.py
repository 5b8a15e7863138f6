"""``specmemo chat``: a conversation with a patched model."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError
from rich.console import Console
from transformers import TextStreamer

from specmemo_kernels.cli.common import (
    leave_ranks,
    load_with_heads,
    model_arguments,
    setting_up,
    terminal,
)
from specmemo_kernels.cli.errors import UserError, show_error
from specmemo_kernels.cli.options import ChatOptions
from specmemo_kernels.integrations.distributed.ranks import RankError
from specmemo_kernels.integrations.hf.chat import ChatSession, LeftOutWarning, NoTokens, longest_text
from specmemo_kernels.integrations.hf.patch import patch
from specmemo_kernels.planning.memory_plan import BudgetError, format_bytes

HELP = '/reset clears the conversation, /stats shows counters, /exit quits; """ opens and closes text of several lines'
_QUOTES = '"""'


class Chat:
    """A conversation with a patched model, and its commands."""

    def __init__(self, model: Any, handle: Any, tokenizer: Any, max_new_tokens: int, console: Console) -> None:
        self.handle, self.tokenizer, self.console = handle, tokenizer, console
        longest = longest_text(model)
        self.max_new_tokens = min(max_new_tokens, max(1, longest // 2))
        if self.max_new_tokens < max_new_tokens:
            self.note(f"replies have at most {self.max_new_tokens} tokens: prompt and reply share {longest}")
        with warnings.catch_warnings():  # start_chat prints that there is no chat template
            warnings.simplefilter("ignore", UserWarning)
            # Chat models' generation settings often enable sampling; replies here are greedy.
            self.session = ChatSession(
                model, tokenizer, max_new_tokens=self.max_new_tokens, do_sample=False, temperature=None, top_p=None,
                top_k=None,
            )  # fmt: skip
        self.last_rate = 0.0

    def note(self, text: str) -> None:
        """Print a remark to stderr, on rank 0 only."""
        if not self.console.quiet:
            terminal(stderr=True).print(text, style="dim", soft_wrap=True)

    def read(self, interactive: bool) -> tuple[str, bool] | None:
        """:func:`read_message` of rank 0, for all ranks; ``None`` at the end of the input.

        Raises:
            UserError: the input isn't UTF-8. On a terminal the error is shown and the next message read instead.
        """

        def attempt() -> tuple[tuple[str, bool] | None, str | None]:
            try:
                return read_message(interactive), None
            except UserError as error:  # sent as text, so that every rank raises it
                return None, str(error)

        while True:
            message, error = self.handle.ranks.broadcast_input(attempt)
            if error is None:
                return message  # type: ignore[no-any-return]
            if not interactive:
                raise UserError(error)
            self._show_error(error)

    def command(self, line: str) -> bool:
        """Run a ``/command``; ``False`` ends the conversation."""
        if line in ("/exit", "/quit"):
            return False
        if line == "/reset":
            self.session.reset()
            self.console.print("the conversation starts anew", style="dim")
        elif line == "/stats":
            self.show_stats()
        else:
            self.console.print(HELP, style="dim")
        return True

    def reply(self, text: str, interactive: bool) -> None:
        """Stream the model's reply to ``text``; on a terminal Ctrl-C ends the reply, not the conversation."""
        started, tokens_before = time.perf_counter(), self.handle.stats.tokens
        streamer = None  # rank 0 only
        if not self.console.quiet:
            streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            with self._left_out_as_notes():
                self.session.ask(text, streamer=streamer)
        except KeyboardInterrupt:
            if not interactive:
                raise
            self.console.print("\n(interrupted)", style="dim")
        except (BudgetError, NoTokens) as error:
            self._show_error(str(error))
        except TemplateError as error:
            self._show_error(f"the tokenizer's chat template fails: {error}")
        else:
            self.last_rate = (self.handle.stats.tokens - tokens_before) / (time.perf_counter() - started)

    @contextlib.contextmanager
    def _left_out_as_notes(self) -> Iterator[None]:
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
            if issubclass(category, LeftOutWarning):
                self.note(str(message))
            else:
                show(message, category, *location, **options)

        with warnings.catch_warnings():
            warnings.simplefilter("always", LeftOutWarning)
            warnings.showwarning = note
            yield

    def _show_error(self, message: str) -> None:
        if not self.console.quiet:
            show_error(message)

    def show_stats(self) -> None:
        stats = self.handle.stats
        depths = ", ".join(f"{share:.2f}" for share in stats.acceptance_by_depth) or "-"
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.handle.bytes_by_part.items())
        self.console.print(
            f"{stats.tokens} tokens in {stats.steps} steps: {stats.tokens_per_step:.2f} tokens per step; last reply "
            f"{self.last_rate:.1f} tokens/s\n"
            f"prompt tokens: {stats.prefill_tokens} computed, {stats.reused_tokens} reused from earlier turns\n"
            f"accepted at least 1, 2, ... drafts: {depths}\nmemory: {parts}\n"
            f"plan: {self.handle.plan}",
            style="dim",
        )  # fmt: skip


def read_message(interactive: bool) -> tuple[str, bool] | None:
    """The next message, and whether it is a command; ``None`` at the end of the input.

    Text between triple quotes, of several lines or one, is never a command.

    Raises:
        UserError: a line that isn't UTF-8.
    """
    line = read_line(">>> ", interactive)
    if line is None:
        return None
    if not line.startswith(_QUOTES):
        return line, line.startswith("/")
    lines = [line.removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        if (line := read_line("... ", interactive)) is None:  # the end of the input closes the quotes
            return "\n".join(lines), False
        lines.append(line)
    return "\n".join(lines).rstrip().removesuffix(_QUOTES), False


def read_line(prompt: str, interactive: bool) -> str | None:
    """A line of UTF-8 from stdin without its end; ``None`` at the end of the input.

    Raises:
        UserError: the line isn't UTF-8.
    """
    try:
        if interactive:
            text = input(prompt)
            text.encode()  # a terminal in another locale passes bytes on as surrogates
            return text
        line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
        return line.decode().rstrip("\r\n") if line else None
    except EOFError:
        return None
    except UnicodeError as error:
        raise UserError(f"the input is not UTF-8 text: {error}; convert it, for example with iconv -t UTF-8") from error


def start_chat(options: ChatOptions, console: Console) -> Chat:
    """Check the options, load and patch the model, and print the first line.

    Raises:
        UserError, ValueError, BackendUnavailable: an option, the model or its heads can't be used.
    """
    loaded = load_with_heads(options)
    handle = patch(loaded.model, loaded.heads, **model_arguments(options))
    chat = Chat(loaded.model, handle, loaded.tokenizer, options.max_new_tokens, console)
    mode = "chat" if chat.session.templated else "completion of your text: the tokenizer has no chat template"
    console.print(f"{loaded.name} ({mode}); {HELP}", style="dim")
    return chat


def run_chat(options: ChatOptions) -> None:
    """Answer messages until ``/exit`` or the end of the input; under torchrun rank 0 reads and writes.

    Raises:
        UserError: the model or its heads can't be used, or another rank has failed.
    """
    console = terminal(quiet=os.environ.get("RANK", "0") != "0")
    console.soft_wrap = not console.is_terminal
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (the import gives input() line editing and a history)
    try:
        with setting_up():
            chat = start_chat(options, console)
        while (read := chat.read(interactive)) is not None:
            message, is_command = read
            if is_command:
                if not chat.command(message.strip()):
                    break
            elif message.strip():
                chat.reply(message, interactive)
        chat.handle.undo()
    except RankError as error:
        raise UserError(str(error)) from error
    finally:
        leave_ranks()
