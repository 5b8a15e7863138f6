"""The output of ``specmemo demo``: completions as tokens arrive, and the closing table."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from specmemo_kernels.cli.common import show_tables
from specmemo_kernels.cli.demo_runs import SAMPLING, SIDES, DemoResult, Pair, Prompt
from specmemo_kernels.planning.memory_plan import format_bytes

TITLES = {"plain": "the model's own generate", "patched": "patched with specmemo"}
PROMPT_LINES = 6


class Feed(BaseStreamer):
    """Collects one side's tokens as text, with the step of each piece.

    Args:
        decode: token ids to text.
        step: the number of the current step; ``None``: one step per token.
        on_text: called with each new piece.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        step: Callable[[], int] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._decode, self._step, self._on_text = decode, step, on_text
        self._prompt_seen, self._text = False, ""
        self.ids: list[int] = []
        self.pieces: list[tuple[str, int]] = []
        self.started = time.perf_counter()
        self.seconds: float | None = None

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:  # generate sends the prompt first
            self._prompt_seen = True
            return
        self.ids.extend(value.flatten().tolist())
        text = self._decode(self.ids)
        if text.endswith("\ufffd"):  # an incomplete character of several tokens
            return
        piece, self._text = text[len(self._text) :], text
        self.pieces.append((piece, self._step() if self._step else len(self.ids)))
        if self._on_text:
            self._on_text(piece)

    def end(self) -> None:
        self.seconds = time.perf_counter() - self.started

    @property
    def steps(self) -> int:
        """Number of forward passes that gave tokens, prefill included."""
        return len({step for _, step in self.pieces})

    def text(self) -> Text:
        """The text so far. Accepted drafts are green: all tokens of a step but the last, which is the model's own."""
        pieces = list(self.pieces)  # Live draws in another thread
        text = Text(no_wrap=True, overflow="crop")
        next_steps = [step for _, step in pieces[1:]] + [-1]
        for (piece, step), next_step in zip(pieces, next_steps, strict=False):  # without pieces the lengths differ
            text.append(piece, style="green" if next_step == step else "")
        return text

    def summary(self) -> str:
        seconds = time.perf_counter() - self.started if self.seconds is None else self.seconds
        return f"{len(self.ids)} tokens, {self.steps} passes, {seconds:.1f} s"


def _feed(pair: Pair, side: str, on_text: Callable[[str], None] | None = None) -> Feed:
    def decode(ids: list[int]) -> str:
        text: str = pair.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    stats = pair.handle.stats
    return Feed(decode, (lambda: stats.steps) if side == "patched" else None, on_text)


class LiveView:
    """Both sides in two columns on a terminal. They run one after the other, each alone on the machine."""

    def __init__(self, console: Console, pair: Pair) -> None:
        self.console, self.pair = console, pair
        self.height = max(6, min(16, console.height - PROMPT_LINES - 7))
        console.print(Text.assemble(("green", "green"), ": guessed by the heads and accepted by the model"))

    def turn(self, title: str, prompt: Prompt) -> bool:
        """Stream one prompt's two completions; returns whether they are equal."""
        self.pair.handle.stats.reset()
        feeds: dict[str, Feed] = {}

        def draw() -> RenderableType:
            columns = Table.grid(expand=True)
            for _ in SIDES:
                columns.add_column(ratio=1)
            columns.add_row(*(self._panel(side, feeds.get(side)) for side in SIDES))
            return Group(_prompt_panel(prompt), columns)

        self.console.print(Rule(Text(title), style="bold"))
        with Live(console=self.console, get_renderable=draw, refresh_per_second=12):
            for side in SIDES:
                feeds[side] = _feed(self.pair, side)
                self.pair.sample(side, prompt, feeds[side])
        return feeds["plain"].ids == feeds["patched"].ids

    def _panel(self, side: str, feed: Feed | None) -> Panel:
        lines = list(feed.text().split(allow_blank=True)) if feed else []
        body = Text("\n", no_wrap=True, overflow="crop").join(lines[-self.height :])
        summary = feed.summary() if feed else "waiting"
        style = "green" if side == "patched" else "blue"
        return Panel(body, title=TITLES[side], subtitle=summary, height=self.height + 2, border_style=style)


def _prompt_panel(prompt: Prompt) -> Panel:
    lines = prompt.text.rstrip("\n").splitlines()[-PROMPT_LINES:]
    body = Text("\n".join(lines), style="dim", no_wrap=True, overflow="crop")
    return Panel(body, title=f"end of the prompt ({prompt.ids.shape[1]} tokens)", height=PROMPT_LINES + 2, style="dim")


class TextView:
    """Plain text where stdout isn't a terminal, one side after the other."""

    def __init__(self, console: Console, pair: Pair) -> None:
        self.console, self.pair = console, pair

    def turn(self, title: str, prompt: Prompt) -> bool:
        """Print one prompt's end and stream its two completions; returns whether they are equal."""
        self.pair.handle.stats.reset()
        self.console.out(f"\n=== {title}\n--- end of the prompt ({prompt.ids.shape[1]} tokens)", highlight=False)
        self.console.out("\n".join(prompt.text.rstrip("\n").splitlines()[-PROMPT_LINES:]), highlight=False)
        feeds: dict[str, Feed] = {}
        for side in SIDES:
            self.console.out(f"--- {TITLES[side]}", highlight=False)
            feeds[side] = _feed(self.pair, side, self._write)
            self.pair.sample(side, prompt, feeds[side])
            self.console.out(f"\n[{feeds[side].summary()}]", highlight=False)
        return feeds["plain"].ids == feeds["patched"].ids

    def _write(self, piece: str) -> None:
        self.console.out(piece, end="", highlight=False)
        self.console.file.flush()


def show_result(console: Console, result: DemoResult) -> None:
    """Print the closing table and its conditions of measurement."""
    table = Table(box=box.SIMPLE_HEAD, title="\nplain and patched, measured", title_justify="left", title_style="bold")
    for name in ("", "plain", "specmemo", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    equal, count = result.equal, len(result.prompts)
    table.add_row("tokens/s", f"{result.rate('plain'):.1f}", f"{result.rate('patched'):.1f}", f"{result.speedup:.2f}x")
    table.add_row("tokens per step", "1.00", f"{result.tokens_per_step:.2f}", f"tree of {result.tree_nodes} nodes")
    _memory_rows(table, result.memory)
    verdict = Text("yes" if equal == count else "NO", style="bold green" if equal == count else "bold red")
    table.add_row("same tokens", "", verdict, f"{equal} of {count} prompts")
    show_tables(console, table)
    console.print(
        f"Prompts: {count}; timed runs of each per side: {result.rounds}, alternating, prompt included; medians. "
        "The timed runs are greedy; the text above is sampled (temperature "
        f'{SAMPLING["temperature"]}, top-p {SAMPLING["top_p"]}, one seed for both sides). "Same tokens" is for both. '
        f"Memory: peak bytes of tensors while a prompt of {result.memory_prompt_tokens} tokens is completed, without "
        "the model's own weights; workspace: what kernels and libraries keep.",
        style="dim",
    )


def _memory_rows(table: Table, memory: dict[str, dict[str, Any]]) -> None:
    plain, patched = memory["plain"], memory["patched"]
    totals = [sum(memory[side].values()) for side in SIDES]
    table.add_row("generation memory", *map(format_bytes, totals), f"{totals[1] / totals[0]:.2f}x")
    for name in patched:
        cells = [format_bytes(parts[name]) if name in parts else "-" for parts in (plain, patched)]
        table.add_row(f"  {name}", *cells, style="dim")
