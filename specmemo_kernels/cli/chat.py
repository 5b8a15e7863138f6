"""``specmemo chat``: a conversation with a patched model."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TextStreamer

from specmemo_kernels.cli.common import (
    UserError,
    demo_model_folder,
    hide_loading_bars,
    leaving_others,
    load_model,
    load_tokenizer,
    setting_up,
    torch_device,
    torch_dtype,
)
from specmemo_kernels.integrations.hf import patch
from specmemo_kernels.integrations.hf_chat import ChatSession, longest_text
from specmemo_kernels.integrations.ranks import RankError
from specmemo_kernels.memory_plan import BudgetError, format_bytes

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
        self.max_new_tokens = min(max_new_tokens, max(1, longest_text(model) // 2))
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

    def read(self, interactive: bool) -> str | None:
        """:func:`read_message` of rank 0, which the others hear from it."""
        message: str | None = self.handle.ranks.ask(lambda: read_message(interactive))
        return message

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
            self.console.print(HELP, style="dim", markup=False)
        return True

    def reply(self, text: str) -> None:
        """Stream the model's reply to ``text``; Ctrl-C cuts it short."""
        started, before = time.perf_counter(), self.handle.stats.tokens
        try:
            self.session.ask(text, streamer=self.streamer)
        except KeyboardInterrupt:
            self.console.print("\n(interrupted)", style="dim")
        except BudgetError as error:
            self.console.print(f"specmemo: {error}", style="red", markup=False)
        else:
            self.last_rate = (self.handle.stats.tokens - before) / (time.perf_counter() - started)

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
            style="dim", markup=False, highlight=False,
        )  # fmt: skip


def read_message(interactive: bool) -> str | None:
    """The next message or command, several lines between triple quotes; ``None`` at the end of the input."""

    def line(prompt: str) -> str:
        if interactive:
            return input(prompt)
        text = sys.stdin.readline()
        if not text:
            raise EOFError
        return text.rstrip("\n")

    try:
        text = line(">>> ")
        if not text.startswith('"""'):
            return text
        lines = [text[3:]]
        while not lines[-1].endswith('"""'):
            lines.append(line("... "))
        return "\n".join(lines)[:-3]
    except (EOFError, KeyboardInterrupt):
        return None


def start_chat(options: ChatOptions, console: Console) -> Chat:
    """Load and patch.

    Raises:
        UserError, ValueError, OSError, BackendUnavailable: the model or its heads can't be used.
    """
    if (options.model is None) != (options.heads is None):
        raise UserError("--model and --heads go together: heads are trained for one model")
    for name in (options.model, options.heads):
        if name is not None and name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().exists():
            raise UserError(f"there is no {name}")
    bundled = options.model is None
    if bundled:
        hide_loading_bars()
    folder = str(demo_model_folder()) if options.model is None else options.model
    heads = str(demo_model_folder() / "heads") if options.heads is None else options.heads
    dtype = "float32" if bundled and options.dtype == "auto" else options.dtype
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, torch_dtype(dtype), torch_device(options.device))
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
    console.print(f"{name} ({mode}); {HELP}", style="dim", markup=False, highlight=False)
    return chat


def run_chat(options: ChatOptions) -> None:
    """Answer messages until ``/exit`` or the end of the input; under torchrun rank 0 reads and writes.

    Raises:
        UserError: the model or its heads can't be used, or another rank is gone.
    """
    console = Console(soft_wrap=not sys.stdout.isatty(), quiet=os.environ.get("RANK", "0") != "0")
    interactive = sys.stdin.isatty()
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
                chat.reply(message)
        chat.handle.undo()
