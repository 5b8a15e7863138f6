"""Responses of both endpoints, whole or as server-sent events."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import Request, Response

from specmemo_kernels.integrations.hf.engine import EngineClosed
from specmemo_kernels.integrations.hf.generation import GenerationFailed
from specmemo_kernels.integrations.serve.answers import Model, TextPiece, TookTooLong
from specmemo_kernels.integrations.serve.errors import error_body
from specmemo_kernels.integrations.serve.limits import STOPPED, EventStream, failure, unless_gone
from specmemo_kernels.integrations.serve.logprobs import chat_logprobs, completion_logprobs
from specmemo_kernels.integrations.serve.messages import MessageParser
from specmemo_kernels.integrations.serve.protocol import ChatRequest, CompletionRequest, usage

_log = logging.getLogger("specmemo.serve")


async def respond(model: Model, body: CompletionRequest | ChatRequest, request: Request) -> Response:
    """The response to a request.

    Raises:
        BadRequest, QueueFull, EngineClosed, GenerationFailed, TookTooLong, ClientGone: before the response has begun.
    """
    special = isinstance(body, ChatRequest) and model.parses_messages
    prompts, requests = await model.prepared(body)
    pieces = model.answer(requests, body.stop_strings, special=special)
    answers = _Answers(model, body, [prompt for prompt in prompts for _ in range(body.n)])

    async def first() -> TextPiece:
        return await anext(pieces)

    async def whole() -> bytes:
        async for piece in pieces:
            answers.add(piece)
        return await answers.whole()

    if body.stream:
        return EventStream(answers.events(pieces, await unless_gone(request, first())))
    return Response(await unless_gone(request, whole()), media_type="application/json")


class _Answers:
    """The answers to one request so far, in the form of its endpoint."""

    def __init__(self, model: Model, body: CompletionRequest | ChatRequest, prompts: list[list[int]]) -> None:
        self._model, self._body, self._prompts = model, body, prompts
        self._chat = isinstance(body, ChatRequest)
        self._echo = isinstance(body, CompletionRequest) and bool(body.echo)
        self._pieces: list[TextPiece | None] = [None] * len(prompts)
        self._offsets = [0] * len(prompts)  # ends of the texts with log-probabilities
        self._messages: list[MessageParser] = []
        if isinstance(body, ChatRequest):
            served = model.engine.handle.model
            self._messages = [MessageParser.of(served, model.tokenizer, prompt, body) for prompt in prompts]
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": model.name}

    def add(self, piece: TextPiece) -> tuple[TextPiece, dict[str, Any]]:
        """Add a piece to its answer; returns it and its content in a stream.

        A completion's first piece has the echo of the prompt. A message that calls tools ends with this reason.
        """
        if self._body.limit == 0:
            piece = piece.without_tokens()
        before = self._pieces[piece.index]
        if before is None and self._echo:
            piece = piece.behind(self._prompt_text(piece.index))
        content: dict[str, Any] = {"text": piece.text}
        if self._chat:
            parser = self._messages[piece.index]
            delta = parser.feed(piece.text, last=piece.finish_reason is not None)
            content = {"delta": ({"role": "assistant"} if before is None else {}) | delta}
            if parser.calls_tools and piece.finish_reason == "stop":
                piece = replace(piece, finish_reason="tool_calls")
        self._pieces[piece.index] = piece if before is None else before.joined(piece)
        return piece, content

    async def whole(self) -> bytes:
        """The whole response as JSON.

        Raises:
            EngineClosed: the engine was closed before an answer was complete.
        """
        choices = []
        for piece in self._pieces:
            assert piece is not None, "every answer has a piece"
            if piece.finish_reason == "abort":
                raise EngineClosed(STOPPED)
            content: dict[str, Any] = {"text": piece.text}
            if self._chat:
                content = {"message": {"role": "assistant", "refusal": None} | self._messages[piece.index].message}
            choices.append(await self._choice(piece, content, echo=True))
        kind = "chat.completion" if self._chat else "text_completion"
        return _with_choices(self._head | {"object": kind, "usage": self._usage()}, choices)

    async def events(self, pieces: AsyncGenerator[TextPiece], first: TextPiece) -> AsyncGenerator[bytes]:
        """A chunk per piece, the token counts if the request includes them, and ``[DONE]``."""
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        head = self._head | {"object": "chat.completion.chunk" if self._chat else "text_completion"}
        chunk = head | ({"usage": None} if with_usage else {})
        try:
            piece: TextPiece | None = first
            while piece is not None:
                begins = self._pieces[piece.index] is None
                piece, content = self.add(piece)
                choice = await self._choice(piece, content, echo=begins)
                yield _event(_with_choices(chunk, [choice]))
                piece = await anext(pieces, None)
            if with_usage:
                yield _event(_with_choices(head | {"usage": self._usage()}, []))
        except (GenerationFailed, TookTooLong) as error:
            yield _event(_json(error_body(str(error), "server_error")))
        except Exception as error:
            _log.exception("%s failed", self._head["id"])
            yield _event(_json(error_body(failure(error), "server_error")))
        finally:
            await pieces.aclose()
        yield b"data: [DONE]\n\n"

    def _prompt_text(self, index: int) -> str:
        """The text of a completion's prompt as it was given, or that of its tokens without special ones."""
        given = self._body.prompts[index // self._body.n] if isinstance(self._body, CompletionRequest) else ""
        return given if isinstance(given, str) else self._model.decode(self._prompts[index])

    async def _choice(self, piece: TextPiece, content: dict[str, Any], *, echo: bool) -> bytes:
        """A choice as JSON. Another thread writes log-probabilities: of a long prompt they take a part of a second."""

        def written() -> bytes:
            return _json(self._fields(piece, content, echo=echo), ascii_only=bool(self._body.stream))

        return written() if self._body.top is None else await self._model.in_thread(written)

    def _fields(self, piece: TextPiece, content: dict[str, Any], *, echo: bool) -> dict[str, Any]:
        """A choice with its log-probabilities; with ``echo`` the prompt's too, if it is echoed."""
        logprobs = None
        if self._body.top is not None and self._chat:
            logprobs = chat_logprobs(self._model, piece.scores)
        elif self._body.top is not None:
            prompt = self._prompts[piece.index] if echo and self._echo else []
            scores, start = piece.prompt_scores if prompt else [], self._offsets[piece.index]
            logprobs, self._offsets[piece.index] = completion_logprobs(
                self._model, piece.scores, prompt, self._prompt_text(piece.index) if prompt else "", scores, start
            )
        return {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _usage(self) -> dict[str, int]:
        prompts = sum(map(len, self._prompts[:: self._body.n]))
        return usage(prompts, sum(piece.tokens for piece in self._pieces if piece is not None))


def _json(data: dict[str, Any], *, ascii_only: bool = True) -> bytes:
    """In ASCII for streams: some clients end a line at U+2028 and others that JSON has in texts."""
    return json.dumps(data, ensure_ascii=ascii_only, allow_nan=False, separators=(",", ":")).encode()


def _with_choices(fields: dict[str, Any], choices: list[bytes]) -> bytes:
    """A response of these fields and of choices that are JSON already."""
    return _json(fields)[:-1] + b',"choices":[' + b",".join(choices) + b"]}"


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
