"""Messages of a chat: the text of an answer as content, reasoning and tool calls, by the model's response template."""

from __future__ import annotations

import json
import logging
import uuid
from dataclasses import dataclass, field
from typing import Any

from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    response_events_to_chunks,
)

from specmemo_kernels.integrations.serve.protocol import ChatRequest

_log = logging.getLogger("specmemo.serve")
#: What parsers raise for text that isn't as the template says; RecursionError is of deeply nested JSON.
_PARSER_ERRORS = (KeyError, RecursionError, TypeError, ValueError)


def has_template(model: Any, tokenizer: Any) -> bool:
    """Whether the tokenizer, or transformers for the model's type, says how answers are parsed.

    Raises:
        ValueError: the tokenizer's response template is wrong.
    """
    return build_response_parser(tokenizer, model, [], None) is not None


def template_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages as chat templates take them: plain text, and arguments of tool calls as objects."""
    messages = []
    for message in request.messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.text}
        entry |= message.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
        if message.tool_calls:
            entry["tool_calls"] = [call.model_dump() for call in message.tool_calls]
            for call in entry["tool_calls"]:
                call["function"]["arguments"] = _object(call["function"]["arguments"])
        messages.append(entry)
    return messages


def _check_names(parts: list[Any]) -> None:
    """Check that names of functions are text that UTF-8 has; JSON has others.

    Raises:
        TypeError, ValueError: one isn't.
    """
    for part in parts:
        if isinstance(part, ToolCall):
            if not isinstance(part.name, str):
                raise TypeError(f"the name of a function is {type(part.name).__name__}")
            part.name.encode()


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@dataclass
class MessageParser:
    """Divides the text of one answer, piece by piece.

    Without a response template, or from the first text on that doesn't fit it, all text is content.

    Attributes:
        calls: tool calls are such; otherwise their text is content, as the request has no tools, or forbids them.
        message: OpenAI's message so far, without a role.
    """

    parser: Any = None
    calls: bool = True
    message: dict[str, Any] = field(default_factory=lambda: {"content": None})
    _held: str = ""  # text that is in no part yet, such as the beginning of a tool call

    @staticmethod
    def of(model: Any, tokenizer: Any, prompt: list[int], request: ChatRequest) -> MessageParser:
        """For the answer to ``prompt``."""
        try:
            parser = build_response_parser(tokenizer, model, prompt, request.template_tools)
        except _PARSER_ERRORS as error:  # without the template's anchor the whole prompt is parsed
            _log.warning("a prompt doesn't fit the response template: %s", type(error).__name__)
            parser = None
        return MessageParser(parser, request.uses_tools)

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """The changes of the message by more ``text``, as the ``delta`` of a stream."""
        # Single characters: what precedes a call is emitted before the call begins, so that only the call is held.
        parts = [part for some in ([text] if self.parser is None else text) for part in self._take(some)]
        if last:
            parts += self._take("", last=True)
        delta = self._add(parts)
        if last and not self.calls_tools:
            self.message["content"] = self.message["content"] or ""
        return delta

    def _take(self, text: str, *, last: bool = False) -> list[Any]:
        """The parts that ``text`` completes; from the first error of the parser on, all text that isn't in a part."""
        self._held += text
        parts: list[Any] = []
        try:
            if self.parser is not None:
                parts = response_events_to_chunks(self.parser.finalize()[1] if last else self.parser.feed(text))
                _check_names(parts)
        except _PARSER_ERRORS as error:
            _log.warning("an answer doesn't fit the response template: %s", type(error).__name__)
            self.parser, parts = None, []
        forbidden = not self.calls and any(isinstance(part, ToolCall) for part in parts)
        if self._held and (self.parser is None or forbidden):
            parts = [self._held]
        if parts:
            self._held = ""
        return parts

    @property
    def calls_tools(self) -> bool:
        return "tool_calls" in self.message

    def _add(self, parts: list[Any]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, ToolCall):
                function = {"name": part.name, "arguments": part.arguments}
                call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
                calls = self.message.setdefault("tool_calls", [])
                delta.setdefault("tool_calls", []).append({"index": len(calls)} | call)
                calls.append(call)
                continue
            name = "reasoning_content" if isinstance(part, ReasoningText) else "content"
            for target in (delta, self.message):
                target[name] = (target.get(name) or "") + str(part)
        return delta
