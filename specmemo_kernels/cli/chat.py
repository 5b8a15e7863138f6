"""``specmemo chat``: a conversation with a patched model."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from rich.console import Console
from transformers import TextStreamer

from specmemo_kernels.cli.common import (
    check_options,
    demo_model_folder,
    existing_or_hub,
    hide_loading_bars,
    leaving_others,
    load_model,
    load_tokenizer,
    setting_up,
    terminal,
    torch_dtype,
)
from specmemo_kernels.cli.errors import UserError, show_error
from specmemo_kernels.integrations.distributed.ranks import RankError
from specmemo_kernels.integrations.hf.chat import ChatSession, LeftOutWarning, NoTokens, longest_text
from specmemo_kernels.integrations.hf.patch import patch
from specmemo_kernels.planning.memory_plan import BudgetError, format_bytes

HELP = '/reset forgets all, /stats shows counters, /exit leaves; """ opens and closes text of several lines'


@dataclass(frozen=True)
class ChatOptions:
    """The command line of ``specmemo chat``."""

    model: str | None
    heads: str | None
    memory_budget: str | None
    dtype: str
    device: str
    backend: str | None
    max_new_tokens: int
    tree: int | None
    kv_dtype: str | None
    head_bits: int | None = None


class ConsoleStreamer(TextStreamer):
    """Writes a reply as it grows, as plain text: model output is not markup."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.console.out(text, end="\n" if stream_end else "", highlight=False)
        self.console.file.flush()


class Chat:
    """A patched model, its conversation and the commands."""

    def __init__(self, model: Any, handle: Any, tokenizer: Any, max_new_tokens: int, console: Console) -> None:
        self.handle, self.tokenizer, self.console = handle, tokenizer, console
        longest = longest_text(model)
        self.max_new_tokens = min(max_new_tokens, max(1, longest // 2))
        if self.max_new_tokens < max_new_tokens:
            self.note(f"replies have at most {self.max_new_tokens} tokens: prompt and reply share {longest}")
        with warnings.catch_warnings():  # the command says in its own words that there is no chat template
            warnings.simplefilter("ignore", UserWarning)
            # A chat model's own settings often ask for sampling; a reply is the likeliest one here.
            self.session = ChatSession(
                model, tokenizer, max_new_tokens=self.max_new_tokens, do_sample=False, temperature=None, top_p=None,
                top_k=None,
            )  # fmt: skip
        self.last_rate = 0.0

    @property
    def streamer(self) -> ConsoleStreamer | None:
        """Where a reply goes as it grows; of several ranks the first one writes."""
        return None if self.console.quiet else ConsoleStreamer(self.tokenizer, self.console)

    def note(self, text: str) -> None:
        """A remark about the conversation, on stderr; of several ranks the first one writes."""
        if not self.console.quiet:
            terminal(stderr=True).print(text, style="dim", soft_wrap=True)

    def read(self, interactive: bool) -> str | None:
        """:func:`read_message` of rank 0, for all ranks; ``None`` at the end of the input.

        Raises:
            UserError: the input isn't UTF-8. On a terminal the error is shown and the next message read instead.
        """

        def attempt() -> tuple[str | None, str | None]:
            try:
                return read_message(interactive), None
            except UserError as error:  # every rank raises it, not the first one alone
                return None, str(error)

        message, error = self.handle.ranks.ask(attempt)
        while error is not None:
            if not interactive:
                raise UserError(error)
            self._refuse(error)
            message, error = self.handle.ranks.ask(attempt)
        return message  # type: ignore[no-any-return]

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
        """Stream the model's reply to ``text``; on a terminal Ctrl-C ends the reply and not the conversation."""
        started, before = time.perf_counter(), self.handle.stats.tokens
        try:
            with self._notes():
                self.session.ask(text, streamer=self.streamer)
        except KeyboardInterrupt:
            if not interactive:
                raise
            self.console.print("\n(interrupted)", style="dim")
        except (BudgetError, NoTokens) as error:
            self._refuse(str(error))
        except TemplateError as error:
            self._refuse(f"the tokenizer's chat template fails: {error}")
        else:
            self.last_rate = (self.handle.stats.tokens - before) / (time.perf_counter() - started)

    @contextlib.contextmanager
    def _notes(self) -> Iterator[None]:
        """Show what a turn leaves out as a note."""
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, LeftOutWarning):
                self.note(str(message))
            else:
                show(message, category, *place, **more)

        with warnings.catch_warnings():
            warnings.simplefilter("always", LeftOutWarning)
            warnings.showwarning = note
            yield

    def _refuse(self, reason: str) -> None:
        if not self.console.quiet:
            show_error(reason)

    def show_stats(self) -> None:
        stats = self.handle.stats
        depths = ", ".join(f"{share:.2f}" for share in stats.acceptance_by_depth) or "-"
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.handle.bytes_by_part.items())
        self.console.print(
            f"{stats.tokens} tokens in {stats.steps} steps: {stats.tokens_per_step:.2f} tokens per step; last reply "
            f"{self.last_rate:.1f} tokens/s\n"
            f"prompt tokens: {stats.prefill_tokens} computed, {stats.reused_tokens} known from before\n"
            f"accepted at least 1, 2, ... drafts: {depths}\nheld: {parts}\n"
            f"plan: {self.handle.plan}",
            style="dim",
        )  # fmt: skip


def read_message(interactive: bool) -> str | None:
    """The next message or command, several lines between triple quotes; ``None`` at the end of the input.

    Raises:
        UserError: a line that isn't UTF-8.
    """
    text = read_line(">>> ", interactive)
    if text is None or not text.startswith('"""'):
        return text
    lines = [text[3:]]
    while not lines[-1].endswith('"""'):
        line = read_line("... ", interactive)
        if line is None:  # the end of the input closes the quotes
            return "\n".join(lines)
        lines.append(line)
    return "\n".join(lines)[:-3]


def read_line(prompt: str, interactive: bool) -> str | None:
    """A line of UTF-8 from stdin without its end; ``None`` at the end of the input.

    Raises:
        UserError: other bytes.
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
    """Load and patch.

    Raises:
        UserError, ValueError, BackendUnavailable: an option, the model or its heads can't be used.
    """
    if (options.model is None) != (options.heads is None):
        raise UserError("--model and --heads go together: heads are trained for one model")
    bundled = options.model is None
    if bundled:
        hide_loading_bars()
    folder, heads = str(demo_model_folder()), str(demo_model_folder() / "heads")
    if options.model is not None:
        folder = existing_or_hub(options.model, "--model takes a folder or a hub id")
    if options.heads is not None:
        heads = existing_or_hub(options.heads, "--heads takes a folder, a file or a hub id", files=True)
    dtype = torch_dtype("float32" if bundled and options.dtype == "auto" else options.dtype)
    device = check_options(
        options.device, dtype, options.backend, options.memory_budget, options.kv_dtype, options.head_bits
    )
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype, device)
    handle = patch(
        model,
        heads,
        memory_budget=options.memory_budget,
        tree=options.tree,
        backend=options.backend,
        max_batch_size=1,
        kv_dtype=options.kv_dtype,
        head_bits=options.head_bits,
    )
    chat = Chat(model, handle, tokenizer, options.max_new_tokens, console)
    name = "the bundled demo model, which completes Python code" if bundled else folder
    mode = "chat" if chat.session.templated else "completion of your text: the tokenizer has no chat template"
    console.print(f"{name} ({mode}); {HELP}", style="dim")
    return chat


def run_chat(options: ChatOptions) -> None:
    """Answer messages until ``/exit`` or the end of the input; under torchrun rank 0 reads and writes.

    Raises:
        UserError: the model or its heads can't be used, or another rank is gone.
    """
    console = terminal(quiet=os.environ.get("RANK", "0") != "0")
    console.soft_wrap = not console.is_terminal
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (importing it gives input() line editing and a history)
    try:
        converse(options, console, interactive)
    except RankError as error:
        raise UserError(str(error)) from error


def converse(options: ChatOptions, console: Console, interactive: bool) -> None:
    """:func:`run_chat` once the terminal is set up."""
    with leaving_others():
        with setting_up():
            chat = start_chat(options, console)
        while (message := chat.read(interactive)) is not None:
            if message.startswith("/"):
                if not chat.command(message.strip()):
                    break
            elif message.strip():
                chat.reply(message, interactive)
        chat.handle.undo()
