"""``ChatSession``: a conversation with a patched model that computes only the new tokens of each turn."""

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
    """The oldest part of a conversation no longer fits and is left out; the message has the token count."""


class NoTokens(ValueError):
    """The first message of a conversation without a chat template has no tokens."""


@dataclass(frozen=True)
class _Turn:
    """The next prompt: its messages, text and tokens, and the size of the part that was left out."""

    messages: list[dict[str, str]]
    text: str
    ids: list[int]
    left_out_messages: int = 0
    left_out_tokens: int = 0


class ChatSession:
    """A conversation with a model, turn by turn.

    The keys and values of the conversation stay in the patched model's pages: a turn computes the new message and its
    reply only. An unpatched model computes all tokens again. Replies keep the model's own tokens, because encoding
    their text again could give tokens that no cached page has.

    With a chat template, turns are messages. A tokenizer without a template causes a warning, and the model completes
    one growing text with a line per message.

    Args:
        model: a model with ``generate``, patched or not.
        tokenizer: the model's tokenizer.
        system: a message of the role "system" that precedes the conversation.
        max_tokens: limit of prompt and reply together; ``None``: the limit of the model and the memory plan. Beyond
            the limit the oldest messages (without a template: the first tokens) are left out, with a
            :class:`LeftOutWarning` per turn. A new message is never cut: if it doesn't fit alone, the turn raises.
        generate_options: options of each turn's ``generate``; ``max_new_tokens`` is 256 unless they or their
            ``generation_config`` have it.

    Attributes:
        messages: the conversation as chat templates take it, without the messages that were left out.
        left_out: tokens left out since the conversation began.

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
        self.options = generate_options
        limit = longest_text(model)
        self.max_tokens = limit if max_tokens is None else min(max_tokens, limit)
        self._room(self._merged({}))
        if not self.templated:
            if system is not None:
                raise ValueError("the tokenizer has no chat template, so system must be None")
            warnings.warn(
                "specmemo: the tokenizer has no chat template; the model completes the conversation as one text",
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
        """Start a new conversation."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.left_out = 0
        # The last prompt and reply, as text and as tokens.
        self._text = ""
        self._ids: list[int] = []

    def prompt(self, text: str) -> list[int]:
        """The tokens of the next prompt with the user's ``text``; the conversation doesn't change.

        Raises:
            BudgetError: the message alone is too long.
        """
        return self._turn(text, self._merged({})).ids

    def ask(self, text: str, *, streamer: Any = None, **options: Any) -> str:
        """The model's reply to ``text``. After an exception, also ``KeyboardInterrupt``, the conversation is as before.

        Args:
            streamer: gets the reply's tokens, as with ``generate``.
            options: further options of this turn's ``generate``.

        Raises:
            BudgetError: the message alone is too long.
            NoTokens: there is no chat template, and the text is empty.
        """
        options = self._merged(options)
        if streamer is not None:
            options["streamer"] = streamer
        if options.get("stop_strings"):
            options["tokenizer"] = self.tokenizer
        turn = self._turn(text, options)
        left_out = self.left_out + turn.left_out_tokens
        if turn.left_out_tokens:
            count = f" ({turn.left_out_messages} messages)" if turn.left_out_messages else ""
            warnings.warn(
                f"specmemo: the conversation no longer fits; its oldest {turn.left_out_tokens} tokens{count} are left "
                f"out from this turn on, {left_out} since it began",
                LeftOutWarning,
                stacklevel=2,
            )
        row = torch.tensor([turn.ids], device=self.model.device)
        output = self.model.generate(row, attention_mask=torch.ones_like(row), **options)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        new = sequences[0, len(turn.ids) :].tolist()
        reply = str(self.tokenizer.decode(new, skip_special_tokens=True))
        self.messages, self.left_out = [*turn.messages, {"role": "assistant", "content": reply}], left_out
        while new and new[-1] in self.tokenizer.all_special_ids:  # the template writes the end-of-turn tokens
            del new[-1]
        self._text, self._ids = turn.text + self._decode(new), turn.ids + new
        return reply

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """:meth:`ask` as an iterator over pieces of the reply; ``generate`` runs in another thread.

        Closing the iterator early ends the reply.
        """
        stopped = threading.Event()
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        own = (self.options | options).get("stopping_criteria") or ()
        options["stopping_criteria"] = StoppingCriteriaList([*own, _Stopped(stopped)])
        failure: list[BaseException] = []

        def run() -> None:
            try:
                self.ask(text, streamer=streamer, **options)
            except BaseException as error:  # raised again in the reading thread
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

    def _merged(self, options: dict[str, Any]) -> dict[str, Any]:
        """The session's options and a turn's, with a length: the turn's, else the session's."""
        merged = self.options | options
        if "max_new_tokens" not in options and _length(options) is not None:
            merged.pop("max_new_tokens", None)
        if "max_new_tokens" not in merged and _length(merged) is None:
            merged["max_new_tokens"] = 256
        return merged

    def _turn(self, text: str, options: dict[str, Any]) -> _Turn:
        """The next prompt, without the oldest part of a conversation that is too long."""
        room = self._room(options)
        messages = [*self.messages, {"role": "user", "content": text}]
        if not self.templated:
            line = f"\n{text}" if self._ids else text
            new = self._encode(line, special=not self._ids)
            if not self._ids and not new:
                raise NoTokens(f"the message {text!r} has no tokens; the first message needs at least one")
            self._check_room(len(new), room)
            ids = [*self._ids, *new]
            extra = max(0, len(ids) - room)
            return _Turn(messages, self._text + line, ids[extra:], left_out_tokens=extra)
        first, full_length, count = int(messages[0]["role"] == "system"), 0, len(messages)
        while True:
            prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = self._encode_conversation(prompt)
            full_length = full_length or len(ids)
            if len(ids) <= room:
                return _Turn(messages, prompt, ids, count - len(messages), full_length - len(ids))
            if len(messages) == first + 1:
                self._check_room(len(ids), room)
            del messages[first : _next_turn(messages, first)]

    def _room(self, options: dict[str, Any]) -> int:
        """Most tokens of a prompt."""
        new = _length(options)
        if not isinstance(new, int) or not 1 <= new < self.max_tokens:
            raise ValueError(
                f"max_new_tokens is {new}, it must be from 1 to {self.max_tokens - 1}: prompt and reply may take "
                f"{self.max_tokens} tokens together"
            )
        return self.max_tokens - new

    def _check_room(self, tokens: int, room: int) -> None:
        if tokens > room:
            raise BudgetError(
                f"the message takes {tokens} tokens, there is room for {room} beside "
                f"max_new_tokens={self.max_tokens - room}; shorten or divide it"
            )

    def _encode_conversation(self, prompt: str) -> list[int]:
        """The tokens of a rendered conversation, with the tokens of the last prompt and reply as they were."""
        encoded = self._encode(prompt, special=False)
        if not self._ids or not prompt.startswith(self._text):
            return encoded
        spliced = [*self._ids, *self._encode(prompt[len(self._text) :], special=False)]
        # Some tokenizers add a prefix to every text; the parts then differ from the whole conversation.
        return spliced if self._decode(spliced) == self._decode(encoded) else encoded

    def _encode(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _length(options: dict[str, Any]) -> Any:
    """``max_new_tokens`` of the options or their ``generation_config``; ``None``: of neither."""
    return options.get("max_new_tokens", getattr(options.get("generation_config"), "max_new_tokens", None))


def _next_turn(messages: list[dict[str, str]], first: int) -> int:
    """The place of the next user's message after ``first``; the last message is one."""
    return next(i for i in range(first + 1, len(messages)) if i + 1 == len(messages) or messages[i]["role"] == "user")


class _Stopped(StoppingCriteria):
    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


def longest_text(model: Any) -> int:
    """Most tokens of prompt and reply together: the model's positions, and a patched model's plan."""
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
    planned = getattr(getattr(model, "specmemo", None), "max_length", None)
    return limit if planned is None else min(limit, planned)
