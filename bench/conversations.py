"""Multi-turn conversations as token ids: MT-Bench, or library files in two pieces."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmemo_kernels.cli.demo_data import is_held_out, library_files

#: Approximate characters of English per token of Llama's tokenizer, for models without a tokenizer.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Conversation:
    """The user's turns as token ids; ``question`` is the number in MT-Bench (or a count)."""

    question: int
    turns: tuple[tuple[int, ...], ...]

    def cut(self, room: int) -> Conversation:
        """Each turn's last tokens, at most ``room`` in total."""
        share = room // len(self.turns)
        return Conversation(self.question, tuple(turn[-share:] for turn in self.turns))


def mt_bench(questions: Path, tokenizer: Any, limit: int) -> list[Conversation]:
    """``limit`` questions of MT-Bench's ``question.jsonl``, evenly over the file and its categories."""
    lines = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = lines[:: max(1, len(lines) // limit)][:limit]
    return [
        Conversation(q["question_id"], tuple(tuple(tokenizer(t, verbose=False).input_ids) for t in q["turns"]))
        for q in chosen
    ]


class NoTokenizer:
    """Random ids, about as many as Llama's tokenizer would give; for models with random weights."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(self, text: str, verbose: bool) -> NoTokenizer:
        source = random.Random(text)
        count = -(-len(text) // CHARACTERS_PER_TOKEN)
        self.input_ids = [source.randrange(self._vocab_size) for _ in range(count)]
        return self


def held_out_files(tokenizer: Any, limit: int, tokens: int) -> list[Conversation]:
    """Held-out library files: the first ``tokens`` tokens, and as a second turn the next ones."""
    talks: list[Conversation] = []
    files = [file for file in library_files() if is_held_out(file)]
    random.Random(0).shuffle(files)
    for file in files:
        ids = tokenizer(file.read_text(errors="replace"), verbose=False).input_ids
        if len(ids) >= 2 * tokens and len(talks) < limit:
            talks.append(Conversation(len(talks), (tuple(ids[:tokens]), tuple(ids[tokens : 2 * tokens]))))
    return talks
