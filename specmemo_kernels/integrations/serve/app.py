"""The HTTP application: routes, errors in OpenAI's form, limits."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from specmemo_kernels.integrations.hf.engine import EngineClosed, QueueFull
from specmemo_kernels.integrations.hf.generation import GenerationFailed
from specmemo_kernels.integrations.serve.answers import BadRequest, Model, TextPiece
from specmemo_kernels.integrations.serve.limits import Access, BodyLimit, EventStream, until_disconnected
from specmemo_kernels.integrations.serve.protocol import ChatRequest, CompletionRequest, error_body, usage


@dataclass(frozen=True)
class ServerLimits:
    """What a server accepts.

    Attributes:
        api_key: required as a bearer token on ``/v1``; ``None``: no key.
        max_body: bytes of a request's body.
        shutdown_seconds: how long running requests may go on when the server stops.
    """

    api_key: str | None = None
    max_body: int = 4 << 20
    shutdown_seconds: float = 30.0


@dataclass(frozen=True)
class _Form:
    """How an endpoint writes its answers."""

    kind: str
    chunk_kind: str
    prefix: str
    choice: Callable[[TextPiece], dict[str, Any]]
    chunk: Callable[[TextPiece], dict[str, Any]]


_COMPLETION = _Form(
    "text_completion", "text_completion", "cmpl",
    lambda piece: {"text": piece.text, "logprobs": None},
    lambda piece: {"text": piece.text, "logprobs": None},
)  # fmt: skip
_CHAT = _Form(
    "chat.completion", "chat.completion.chunk", "chatcmpl",
    lambda piece: {"message": {"role": "assistant", "content": piece.text, "refusal": None}, "logprobs": None},
    lambda piece: {"delta": {"content": piece.text} if piece.text else {}, "logprobs": None},
)  # fmt: skip


def make_app(model: Model, limits: ServerLimits) -> FastAPI:
    """The application; its end closes the model's engine."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(model.engine.close, limits.shutdown_seconds)

    app = FastAPI(title="specmemo", lifespan=lifespan)
    app.add_middleware(BodyLimit, max_body=limits.max_body)
    app.add_middleware(Access, api_key=limits.api_key)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(model.metrics.text(), media_type=model.metrics.content_type)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(model)]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_name(model, name)
        return _card(model)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check_name(model, body.model)
        prompts = model.prompts(body)
        echoed = [model.decode(prompt) if body.echo else "" for prompt in prompts for _ in range(body.n)]
        return await _respond(model, body, prompts, request, _COMPLETION, echoed)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        _check_name(model, body.model)
        return await _respond(model, body, [model.chat_prompt(body)], request, _CHAT, [""] * body.n)

    _handle_errors(app)
    return app


async def _respond(
    model: Model, body: CompletionRequest | ChatRequest, prompts: list[list[int]], request: Request, form: _Form,
    echoed: list[str],
) -> Response:  # fmt: skip
    """The response with all answers, or a stream of them."""
    requests = model.requests(body, prompts)
    pieces = model.answer(requests, body.stop_strings)
    head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}
    prompt_tokens = sum(map(len, prompts))
    if body.stream:
        first = await anext(pieces)  # errors of submitting have a status
        events = _events(pieces, first, head | {"object": form.chunk_kind}, form, body, prompt_tokens, echoed)
        return EventStream(events)
    texts, last = list(echoed), dict[int, TextPiece]()

    async def collect() -> None:
        async for piece in pieces:
            texts[piece.index] += piece.text
            last[piece.index] = piece

    if not await until_disconnected(request, collect()):
        return Response(status_code=499)  # nobody reads it
    ends = [TextPiece(i, text, last[i].tokens, last[i].finish_reason) for i, text in enumerate(texts)]
    choices = [{"index": end.index, **form.choice(end), "finish_reason": end.finish_reason} for end in ends]
    counts = usage(prompt_tokens, sum(end.tokens for end in ends))
    return JSONResponse(head | {"object": form.kind, "choices": choices, "usage": counts})


async def _events(
    pieces: AsyncGenerator[TextPiece], first: TextPiece, head: dict[str, Any], form: _Form,
    body: CompletionRequest | ChatRequest, prompt_tokens: int, echoed: list[str],
) -> AsyncGenerator[bytes]:  # fmt: skip
    """Server-sent events: a chunk per piece, the token counts if they were asked for, and ``[DONE]``."""
    counts = [0] * len(echoed)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    empty = {"usage": None} if with_usage else {}

    def event(piece: TextPiece) -> bytes:
        choice = {"index": piece.index, **form.chunk(piece), "finish_reason": piece.finish_reason}
        return _event(head | {"choices": [choice]} | empty)

    try:
        for index, text in enumerate(echoed):
            if form is _CHAT:
                choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                yield _event(head | {"choices": [choice | {"finish_reason": None}]} | empty)
            elif text:
                yield event(TextPiece(index, text, 0))
        piece: TextPiece | None = first
        while piece is not None:
            counts[piece.index] = piece.tokens
            yield event(piece)
            piece = await anext(pieces, None)
        if with_usage:
            yield _event(head | {"choices": [], "usage": usage(prompt_tokens, sum(counts))})
    except GenerationFailed as error:
        yield _event(error_body(str(error), "server_error"))
    finally:
        await pieces.aclose()
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _card(model: Model) -> dict[str, Any]:
    return {
        "id": model.name, "object": "model", "created": model.created, "owned_by": "specmemo",
        "max_model_len": model.longest,
    }  # fmt: skip


def _check_name(model: Model, name: str | None) -> None:
    if name is not None and name != model.name:
        raise HTTPException(404, f"the model {name!r} isn't served, {model.name!r} is")


def _handle_errors(app: FastAPI) -> None:
    """Statuses and bodies of errors; the messages name the value and the limit."""

    def refused(status: int, kind: str, code: str | None = None, headers: dict[str, str] | None = None) -> Any:
        async def handler(_: Request, error: Exception) -> JSONResponse:
            return JSONResponse(error_body(str(error), kind, code=code), status, headers)

        return handler

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        details = error.errors()[0]
        place = ".".join(str(part) for part in details["loc"] if part != "body")
        message = f"{place}: {details['msg']}" if place else str(details["msg"])
        return JSONResponse(error_body(message, "invalid_request_error", place or None), 400)

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = "model_not_found" if error.status_code == 404 else None
        return JSONResponse(error_body(str(error.detail), "invalid_request_error", code=code), error.status_code)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(BadRequest, refused(400, "invalid_request_error"))
    app.add_exception_handler(QueueFull, refused(429, "rate_limit_error", headers={"retry-after": "1"}))
    app.add_exception_handler(EngineClosed, refused(503, "server_error"))
    app.add_exception_handler(GenerationFailed, refused(500, "server_error"))
