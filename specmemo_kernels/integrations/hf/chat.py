"""``ChatSession``: a conversation with a patched model that computes only what is new in each turn."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from specmemo_kernels.planning.memory_plan import BudgetError


class LeftOutWarning(UserWarning):
    """The oldest part of a conversation no longer fits and is left out of a turn; says how much that is."""


class NoTokens(ValueError):
    """A message without tokens begins a text that has none either."""


@dataclass(frozen=True)
class _Turn:
    """The next prompt: its messages, text and tokens, and what was left out of it to make room."""

    messages: list[dict[str, str]]
    text: str
    ids: list[int]
    left_out_messages: int = 0
    left_out_tokens: int = 0


class ChatSession:
    """A conversation with a model, turn by turn.

    The keys and values of everything said stay in the patched model's pages, so that a turn computes the new message
    and its reply alone; a model that isn't patched computes all of it anew. Replies keep the tokens that the model
    wrote: what the tokenizer would make of their text could be others, from which on pages were no use.

    With a chat template turns are messages. A tokenizer without one gets a warning, and what is said becomes one
    growing text, a line per message, that the model completes.

    Args:
        model: for ``generate``, patched or not.
        tokenizer: the model's own.
        system: a message of the role "system" that precedes the conversation.
        max_tokens: of prompt and reply together; ``None``: as many as model and memory plan hold. When they are
            reached, the oldest messages (of a text without turns: its first tokens) are left out, with a
            :class:`LeftOutWarning` in each turn where that happens. A message is never cut: one that doesn't fit
            alone is an error.
        generate_options: of each turn's ``generate``; ``max_new_tokens`` is 256 unless given.

    Attributes:
        messages: what was said, as chat templates take it; those that were left out are gone.
        left_out: tokens that were left out since the conversation began.

    Raises:
        ValueError: ``max_new_tokens`` or ``max_tokens`` leave no room, or a system message without a chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        **generate_options: Any,
    ) -> None:
        self.model, self.tokenizer, self.system = model, tokenizer, system
        self.options = {"max_new_tokens": 256} | generate_options
        most = longest_text(model)
        self.max_tokens = most if max_tokens is None else min(max_tokens, most)
        if not 1 <= self.options["max_new_tokens"] < self.max_tokens:
            raise ValueError(
                f"max_new_tokens is {self.options['max_new_tokens']}, it must be from 1 to {self.max_tokens - 1}: "
                f"prompt and reply may take {self.max_tokens} tokens together"
            )
        if not self.templated:
            if system is not None:
                raise ValueError("the tokenizer has no chat template, so there is no place for a system message")
            warnings.warn(
                "specmemo: the tokenizer has no chat template; the model completes what is said as one text",
                UserWarning,
                stacklevel=2,
            )
        self.messages: list[dict[str, str]] = []
        self.reset()

    @property
    def templated(self) -> bool:
        """Whether turns are messages of a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.left_out = 0
        # The newest prompt and reply, as text and as tokens.
        self._text = ""
        self._ids: list[int] = []

    def prompt(self, text: str) -> list[int]:
        """The tokens that the model gets if the user now says ``text``; nothing is noted.

        Raises:
            BudgetError: the message alone is too long.
        """
        return self._turn(text).ids

    def ask(self, text: str, *, streamer: Any = None, **options: Any) -> str:
        """The model's reply to ``text``.

        Args:
            streamer: gets the reply's tokens as they come, as with ``generate``.
            options: of this turn's ``generate``, beside those of the session.

        Raises:
            BudgetError: the message alone is too long.
            NoTokens: there is no chat template, and no text either.
                Whatever is raised, also ``KeyboardInterrupt``, nothing of this turn is noted.
        """
        turn = self._turn(text, options)
        left_out = self.left_out + turn.left_out_tokens
        if turn.left_out_tokens:
            what = f" ({turn.left_out_messages} messages)" if turn.left_out_messages else ""
            warnings.warn(
                f"specmemo: the conversation no longer fits; its oldest {turn.left_out_tokens} tokens{what} are left "
                f"out from this turn on, {left_out} since it began",
                LeftOutWarning,
                stacklevel=2,
            )
        row = torch.tensor([turn.ids], device=self.model.device)
        output = self.model.generate(
            row, attention_mask=torch.ones_like(row), streamer=streamer, **self.options | options
        )
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        new = sequences[0, len(turn.ids) :].tolist()
        reply = str(self.tokenizer.decode(new, skip_special_tokens=True))
        self.messages, self.left_out = [*turn.messages, {"role": "assistant", "content": reply}], left_out
        while new and new[-1] in self.tokenizer.all_special_ids:  # the template writes what ends a turn itself
            del new[-1]
        self._text, self._ids = turn.text + self._decode(new), turn.ids + new
        return reply

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """:meth:`ask` as an iterator over pieces of the reply; a reply that isn't read to its end is cut there.

        ``generate`` runs in a thread of its own meanwhile.
        """
        stopped = threading.Event()
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        own = [*options.pop("stopping_criteria", ()), _Stopped(stopped)]
        failure: list[BaseException] = []

        def run() -> None:
            try:
                self.ask(text, streamer=streamer, stopping_criteria=StoppingCriteriaList(own), **options)
            except BaseException as error:  # raised where the reply is read
                failure.append(error)
                streamer.end()  # type: ignore[no-untyped-call]

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield from streamer
        finally:
            stopped.set()
            thread.join()
        if failure:
            raise failure[0]

    def _turn(self, text: str, options: dict[str, Any] | None = None) -> _Turn:
        """The next prompt, the oldest part of the conversation left out where it would get too long."""
        room = self.max_tokens - int((self.options | (options or {}))["max_new_tokens"])
        messages = [*self.messages, {"role": "user", "content": text}]
        if not self.templated:
            said = f"\n{text}" if self._ids else text
            new = self._encode(said, special=not self._ids)
            if not self._ids and not new:
                raise NoTokens(f"the message {text!r} has no tokens, and nothing was said before")
            self._check_room(len(new), room)
            ids = [*self._ids, *new]
            extra = max(0, len(ids) - room)
            return _Turn(messages, self._text + said, ids[extra:], left_out_tokens=extra)
        first, whole, count = 0 if self.system is None else 1, 0, len(messages)
        while True:
            prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = self._with_own_tokens(prompt)
            whole = whole or len(ids)
            if len(ids) <= room:
                return _Turn(messages, prompt, ids, count - len(messages), whole - len(ids))
            if len(messages) == first + 1:
                self._check_room(len(ids), room)
            del messages[first : first + 2]

    def _check_room(self, tokens: int, room: int) -> None:
        if tokens > room:
            raise BudgetError(
                f"the message takes {tokens} tokens, there is room for {room} beside "
                f"max_new_tokens={self.max_tokens - room}; shorten or divide it"
            )

    def _with_own_tokens(self, prompt: str) -> list[int]:
        """The tokens of a rendered conversation; those that the model itself read and wrote last are kept."""
        whole = self._encode(prompt, special=False)
        if not self._ids or not prompt.startswith(self._text):
            return whole
        spliced = [*self._ids, *self._encode(prompt[len(self._text) :], special=False)]
        # Some tokenizers put something in front of every text; then the pieces are no longer the conversation.
        return spliced if self._decode(spliced) == self._decode(whole) else whole

    def _encode(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class _Stopped(StoppingCriteria):
    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


def longest_text(model: Any) -> int:
    """The most tokens of prompt and reply together: the model's positions, and what a patched model's plan holds."""
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
    planned = getattr(getattr(model, "specmemo", None), "max_length", None)
    return limit if planned is None else min(limit, planned)
