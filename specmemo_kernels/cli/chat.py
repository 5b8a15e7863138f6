"""``specmemo chat``: a conversation with a patched model."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TextStreamer

from specmemo_kernels.cli.common import (
    UserError,
    context_length,
    demo_model_folder,
    hide_loading_bars,
    load_model,
    load_tokenizer,
    setting_up,
    torch_device,
    torch_dtype,
)
from specmemo_kernels.integrations.hf import patch
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


class ConsoleStreamer(TextStreamer):
    """Writes a reply as it grows, as plain text: model output is not markup."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.console.out(text, end="\n" if stream_end else "", highlight=False)
        self.console.file.flush()


@dataclass
class Conversation:
    """What was said so far, and how to turn it into a prompt that fits.

    With a chat template the turns are messages; without one they are one growing text that the model completes.
    """

    tokenizer: Any
    room: int
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""

    @property
    def templated(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def reset(self) -> None:
        self.messages, self.text = [], ""

    def ask(self, text: str) -> torch.Tensor:
        """The prompt ``[1, L]`` after the user said ``text``; the oldest turns go when it gets too long.

        Raises:
            UserError: the message alone is too long.
        """
        if not self.templated:
            self.text = f"{self.text}\n{text}" if self.text else text
            return self._encode(self.text)[:, -self.room :]
        self.messages.append({"role": "user", "content": text})
        while (ids := self._template()).shape[1] > self.room:
            if len(self.messages) == 1:
                self.reset()
                raise UserError(f"the message takes {ids.shape[1]} tokens, there is room for {self.room}")
            del self.messages[:2]
        return ids

    def answer(self, text: str) -> None:
        """Note the model's reply."""
        if self.templated:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.text += text

    def withdraw(self) -> None:
        """Forget a message that got no answer, so that roles keep alternating."""
        if self.messages:
            self.messages.pop()

    def _template(self) -> torch.Tensor:
        text = self.tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool = True) -> torch.Tensor:
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return torch.tensor([ids])


class Chat:
    """A patched model, its conversation and the commands."""

    def __init__(self, model: Any, handle: Any, tokenizer: Any, max_new_tokens: int, console: Console) -> None:
        self.model, self.handle, self.tokenizer, self.console = model, handle, tokenizer, console
        plan = handle.plan
        total = context_length(model)
        if plan.max_tokens is not None:  # a step's deepest candidate lies behind the last token wanted
            total = min(total, plan.max_tokens - plan.tree.max_depth)
        self.max_new_tokens = min(max_new_tokens, max(1, total // 2))
        self.conversation = Conversation(tokenizer, room=max(1, total - self.max_new_tokens))
        self.last_rate = 0.0

    def command(self, line: str) -> bool:
        """Run a ``/command``; ``False`` ends the conversation."""
        if line in ("/exit", "/quit"):
            return False
        if line == "/reset":
            self.conversation.reset()
            self.console.print("the conversation starts anew", style="dim")
        elif line == "/stats":
            self.show_stats()
        else:
            self.console.print(HELP, style="dim", markup=False)
        return True

    def reply(self, text: str) -> None:
        """Stream the model's reply to ``text``; Ctrl-C cuts it short."""
        try:
            ids = self.conversation.ask(text).to(self.model.device)
            if ids.shape[1] == 0:
                return
            started, before = time.perf_counter(), self.handle.stats.tokens
            # A chat model's own settings often ask for sampling, which speculation doesn't do yet.
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.max_new_tokens, do_sample=False,
                temperature=None, top_p=None, top_k=None, streamer=ConsoleStreamer(self.tokenizer, self.console),
            )  # fmt: skip
        except KeyboardInterrupt:
            self.console.print("\n(interrupted)", style="dim")
            return self.conversation.withdraw()
        except (UserError, BudgetError) as error:
            self.console.print(f"specmemo: {error}", style="red", markup=False)
            return self.conversation.withdraw()
        self.last_rate = (self.handle.stats.tokens - before) / (time.perf_counter() - started)
        self.conversation.answer(self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))

    def show_stats(self) -> None:
        stats = self.handle.stats
        depths = ", ".join(f"{share:.2f}" for share in stats.acceptance_by_depth) or "-"
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.handle.bytes_by_part.items())
        self.console.print(
            f"{stats.tokens} tokens in {stats.steps} steps: {stats.tokens_per_step:.2f} tokens per step; last reply "
            f"{self.last_rate:.1f} tokens/s\naccepted at least 1, 2, ... drafts: {depths}\nheld: {parts}\n"
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
    )
    chat = Chat(model, handle, tokenizer, options.max_new_tokens, console)
    name = "the bundled demo model, which completes Python code" if bundled else folder
    mode = "chat" if chat.conversation.templated else "completion of your text: the tokenizer has no chat template"
    console.print(f"{name} ({mode}); {HELP}", style="dim", markup=False, highlight=False)
    return chat


def run_chat(options: ChatOptions) -> None:
    """Answer messages until ``/exit`` or the end of the input."""
    console = Console(soft_wrap=not sys.stdout.isatty())
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (importing it gives input() line editing and a history)
    with setting_up():
        chat = start_chat(options, console)
    while (message := read_message(interactive)) is not None:
        if message.startswith("/"):
            if not chat.command(message.strip()):
                break
        elif message.strip():
            chat.reply(message)
