"""The HTTP application: routes, errors in OpenAI's form, limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
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
from specmemo_kernels.integrations.serve.answers import BadRequest, Model, TookTooLong
from specmemo_kernels.integrations.serve.limits import Access, BodyLimit, ClientGone
from specmemo_kernels.integrations.serve.page import add_page
from specmemo_kernels.integrations.serve.protocol import ChatRequest, CompletionRequest, error_body
from specmemo_kernels.integrations.serve.responses import respond


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
        return await respond(model, body, model.prompts(body), request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        _check_name(model, body.model)
        return await respond(model, body, [model.chat_prompt(body)], request)

    add_page(app, model)
    _handle_errors(app)
    return app


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

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nginx's status for it, for the log

    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(BadRequest, refused(400, "invalid_request_error"))
    app.add_exception_handler(QueueFull, refused(429, "rate_limit_error", headers={"retry-after": "1"}))
    app.add_exception_handler(EngineClosed, refused(503, "server_error"))
    app.add_exception_handler(GenerationFailed, refused(500, "server_error"))
    app.add_exception_handler(TookTooLong, refused(504, "server_error"))
