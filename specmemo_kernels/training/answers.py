"""Training text that the model writes itself, by batched speculative decoding."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from specmemo_kernels.engine.sampling import Sampling
from specmemo_kernels.integrations.hf.batch import Request, stream_batch
from specmemo_kernels.integrations.hf.chat import longest_text
from specmemo_kernels.integrations.hf.patch import patch
from specmemo_kernels.training.windows import DataError, chat_ids, read_rows, read_text

#: Tokens of a prompt that is a part of a plain text.
PROMPT_TOKENS = 128
#: Sequences at once, and requests of a batch.
_BATCH, _REQUESTS = 8, 64


def read_prompts(paths: Sequence[Path], tokenizer: Any) -> Iterator[list[int]]:
    """The token ids of each prompt in files.

    A ``.jsonl`` file has a prompt per line: ``messages`` or ``turns`` (of the chat template; of turns, the first), or
    ``prompt``. Any other file is cut into prompts of :data:`PROMPT_TOKENS` tokens.

    Raises:
        DataError: a file or line that has none.
    """
    for path in paths:
        if path.suffix.lower() != ".jsonl":
            ids = tokenizer(read_text(path), verbose=False)["input_ids"]
            yield from (ids[i : i + PROMPT_TOKENS] for i in range(0, len(ids), PROMPT_TOKENS))
            continue
        for where, row in read_rows(path):
            yield _of_row(where, row, tokenizer)


def _of_row(where: str, row: Any, tokenizer: Any) -> list[int]:
    match row:
        case {"messages": [*messages]}:
            while messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
                messages.pop()
            return chat_ids(where, messages, tokenizer, add_generation_prompt=True)
        case {"turns": [str(first), *_]}:
            if tokenizer.chat_template is None:
                ids: list[int] = tokenizer(first)["input_ids"]
                return ids
            return chat_ids(where, [{"role": "user", "content": first}], tokenizer, add_generation_prompt=True)
        case {"prompt": str(prompt)}:
            ids = tokenizer(prompt)["input_ids"]
            return ids
    raise DataError(f'{where} needs "messages", "turns" or "prompt"')


def write_answers(
    model: Any,
    prompts: list[list[int]],
    path: Path,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    memory_budget: int | str | None,
    tick: Callable[[int], None],
) -> int:
    """Append a line ``{"index": i, "tokens": [...]}`` to ``path`` for every prompt that has none yet.

    The tokens are the prompt and its answer. Empty prompts are skipped, and those that are too long for the model or
    for the budget with ``max_new_tokens`` behind them.

    Args:
        temperature: 0 for greedy answers. seed: with a prompt's index, of its sampling.
        memory_budget: of generation, see :func:`specmemo_kernels.patch`. tick: called with the number of finished ones.

    Returns:
        The number of skipped prompts.

    Raises:
        DataError: an answer that is there isn't to the prompt with its index: the prompts have changed. Or a line that
            is there is no answer.
    """
    done = set()
    for index, tokens in _stored_answers(path):
        prompt = prompts[index] if index < len(prompts) else None
        if prompt is None or tokens[: len(prompt)] != prompt:
            raise DataError(
                f"{path} has an answer to prompt {index + 1} as it was before the prompts changed; restore them, "
                f"remove {path}, or name another folder with --out"
            )
        done.add(index)
    room = longest_text(model) - max_new_tokens
    waiting = [i for i, prompt in enumerate(prompts) if i not in done and 0 < len(prompt) <= room]
    skipped = len(prompts) - len(done) - len(waiting)
    if not waiting:
        tick(len(prompts))
        return skipped
    with patch(model, "prompt-lookup", memory_budget=memory_budget, max_batch_size=_BATCH) as handle:
        if handle.max_length is not None:
            fitting = [i for i in waiting if len(prompts[i]) + max_new_tokens <= handle.max_length]
            skipped, waiting = skipped + len(waiting) - len(fitting), fitting
        tick(len(prompts) - len(waiting))
        for first in range(0, len(waiting), _REQUESTS):
            part = waiting[first : first + _REQUESTS]
            requests = [
                Request(prompts[i], max_new_tokens, sampling=_sampling(temperature, f"{seed}/{i}")) for i in part
            ]
            texts = [list(prompts[i]) for i in part]
            with stream_batch(model, requests) as run, path.open("a") as file:
                for piece in run:
                    texts[piece.index] += piece.tokens
                    if piece.finished:
                        file.write(json.dumps({"index": part[piece.index], "tokens": texts[piece.index]}) + "\n")
                        file.flush()
                        tick(1)
    return skipped


def read_answers(path: Path) -> list[list[int]]:
    """The texts of :func:`write_answers` by index."""
    return [tokens for _, tokens in sorted(_stored_answers(path), key=itemgetter(0))]


def _stored_answers(path: Path) -> list[tuple[int, list[int]]]:
    """Index and tokens of the answers in a file.

    Raises:
        DataError: a line is no answer.
    """
    answers = []
    for place, line in enumerate(_whole_lines(path), 1):
        try:
            row = json.loads(line)
            index, tokens = row["index"], row["tokens"]
            if type(index) is not int or index < 0 or not all(type(token) is int for token in tokens):
                raise ValueError
        except (ValueError, LookupError, TypeError):
            raise DataError(
                f"{path}:{place} is no answer of this run; remove the file, or name another folder with --out"
            ) from None
        answers.append((index, tokens))
    return answers


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file; one that a crash cut off is removed."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return whole.splitlines()


def _sampling(temperature: float, key: str) -> Sampling | None:
    return Sampling(temperature=temperature, seed=zlib.crc32(key.encode())) if temperature else None
