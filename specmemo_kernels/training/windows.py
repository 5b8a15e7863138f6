"""Token windows of training and held-out text, read from files and kept in a run's folder."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specmemo_kernels.arguments import shown

Tensor = torch.Tensor

#: One document in so many is held out.
HELD_OUT = 16


class DataError(ValueError):
    """Text that can't be trained on; the message has the file and what is expected."""


@dataclass(frozen=True)
class Windows:
    """Text as rows of equal length.

    Attributes:
        training, held_out: ``[windows, length]`` int32.
    """

    training: Tensor
    held_out: Tensor

    @property
    def length(self) -> int:
        return self.training.shape[1]

    def save(self, path: Path) -> None:
        save_file({"training": self.training, "held_out": self.held_out}, path)

    @classmethod
    def load(cls, path: Path) -> Windows:
        """Read a file of :meth:`save`.

        Raises:
            DataError: it is damaged.
        """
        try:
            return cls(**load_file(path))
        except (SafetensorError, TypeError) as error:
            raise DataError(f"{path} is damaged ({error}); remove it, and the text is read again") from error

    def batch(self, step: int, count: int, seed: int) -> Tensor:
        """``[count, length]`` int64: the windows of a step. Every epoch has an order of its own."""
        total, order, epoch = len(self.training), torch.empty(0, dtype=torch.int64), -1
        rows = []
        for place in range(step * count, (step + 1) * count):
            if place // total != epoch:
                epoch = place // total
                order = torch.randperm(total, generator=torch.Generator().manual_seed(_mixed(seed, epoch)))
            rows.append(int(order[place % total]))
        return self.training[rows].long()


def _mixed(seed: int, epoch: int) -> int:
    return zlib.crc32(f"{seed}/{epoch}".encode())


def read_documents(paths: Sequence[Path], tokenizer: Any, vocab_size: int) -> Iterator[list[int]]:
    """The token ids of each document in files and folders, for a model with ``vocab_size`` tokens.

    A ``.jsonl`` file has a document per line: an object with ``tokens``, ``text``, ``messages`` (of the chat template),
    or ``prompt`` and ``answer``. Any other file is one document. Of a folder, all files are read, sorted by name.

    Raises:
        DataError: a file that isn't UTF-8 text, a line with none of these keys, or a token that the model doesn't have.
    """
    for where, ids in _documents(paths, tokenizer):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise DataError(f"{where} has the token {wrong}, the model's are 0 to {vocab_size - 1}")
        yield ids


def _documents(paths: Sequence[Path], tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """Documents, each with its place for messages."""
    for path in paths:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            if file.suffix.lower() != ".jsonl":
                yield str(file), _ids(tokenizer, read_text(file))
                continue
            for where, row in read_rows(file):
                yield where, _of_row(where, row, tokenizer)


def read_text(file: Path) -> str:
    """A file's text, without a byte order mark.

    Raises:
        DataError: it isn't UTF-8, or can't be read.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not a UTF-8 text: {error}") from error


def read_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a ``.jsonl`` file, each with its place for messages.

    Raises:
        DataError: a line that isn't JSON, or has half of a surrogate pair, which no tokenizer takes.
    """
    # str.splitlines also ends lines at U+2028 and others, which JSON has in strings.
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        where = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        if "\\u" in line and any("\ud800" <= c <= "\udfff" for c in json.dumps(row, ensure_ascii=False)):
            raise DataError(f"{where} has half of a surrogate pair; replace it by a whole character")
        yield where, row


def _of_row(where: str, row: Any, tokenizer: Any) -> list[int]:
    match row:
        case {"tokens": [*ids]} if all(type(token) is int for token in ids):
            return ids
        case {"text": str(text)}:
            return _ids(tokenizer, text)
        case {"messages": [*messages]}:
            return chat_ids(where, messages, tokenizer, add_generation_prompt=False)
        case {"prompt": str(prompt), "answer": str(answer)}:
            return _ids(tokenizer, prompt + answer)
    raise DataError(f'{where} needs "text", "messages", "tokens", or "prompt" and "answer"')


def chat_ids(where: str, messages: list[Any], tokenizer: Any, *, add_generation_prompt: bool) -> list[int]:
    """The token ids of a conversation by the tokenizer's chat template.

    Raises:
        DataError: a message that isn't an object, or the tokenizer has no template, or it refuses the messages.
    """
    if wrong := [message for message in messages if not isinstance(message, dict)]:
        raise DataError(f'{where} has the message {shown(wrong[0])}, expected an object with "role" and "content"')
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # templates raise errors of every type
        raise DataError(f"{where}: the tokenizer's chat template refuses the messages: {error}") from error
    return _ids(tokenizer, text, special=False)


def _ids(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def cut_windows(
    documents: Iterator[list[int]], held_out: Iterator[list[int]] | None, length: int, end: int | None
) -> Windows:
    """Documents one behind the other, ``end`` behind each, cut into windows of ``length`` tokens.

    Without ``held_out`` documents, one document in :data:`HELD_OUT` is held out, by a hash of its tokens; of fewer or
    shorter documents, the last part of the text.

    Raises:
        DataError: less than a window of training text or of held-out text.
    """
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for given, source in ((False, documents), (True, held_out or iter(()))):
        for ids in source:
            row = torch.tensor([*ids, *([] if end is None else [end])], dtype=torch.int32)
            chosen = given or (held_out is None and zlib.crc32(row.numpy().tobytes()) % HELD_OUT == 0)
            parts[chosen].append(row)
    training, apart = (_cut(parts[kind], length) for kind in (False, True))
    if held_out is None and not len(training):  # the hash of the only document with a window has chosen it
        training, apart = apart, training
    if held_out is None and len(apart) * HELD_OUT * 2 < len(training):
        count = max(1, (len(training) + len(apart)) // HELD_OUT)
        training, apart = training[:-count], torch.cat([apart, training[-count:]])
    for name, windows in (("training", training), ("held-out", apart)):
        if not len(windows):
            raise DataError(f"the {name} text has less than a window of {length} tokens; add text or lower the length")
    return Windows(training, apart)


def _cut(rows: list[Tensor], length: int) -> Tensor:
    row = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int32)
    count = len(row) // length
    return row[: count * length].view(count, length)
