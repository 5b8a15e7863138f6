"""The HTTP application: routes, errors in OpenAI's form, limits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from specmemo_kernels.arguments import shown
from specmemo_kernels.integrations.hf.engine import EngineClosed, QueueFull
from specmemo_kernels.integrations.hf.generation import GenerationFailed
from specmemo_kernels.integrations.serve.answers import Model, TookTooLong
from specmemo_kernels.integrations.serve.errors import BadRequest, error_body, field_error
from specmemo_kernels.integrations.serve.limits import Access, BodyLimit, ClientGone
from specmemo_kernels.integrations.serve.page import add_page
from specmemo_kernels.integrations.serve.protocol import ChatRequest, CompletionRequest
from specmemo_kernels.integrations.serve.responses import respond

Form = type[CompletionRequest | ChatRequest]
#: Bodies of more bytes are parsed by another thread: with a logit bias or token ids 4 MiB take seconds.
_LARGE_BODY = 16 * 1024


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

    app = FastAPI(title="specmemo", lifespan=lifespan, openapi_url=None)  # without pages that load others' scripts
    app.add_middleware(BodyLimit, max_body=limits.max_body)
    app.add_middleware(Access, api_key=limits.api_key)

    async def answered(form: Form, request: Request) -> Response:
        content, kind = await request.body(), request.headers.get("content-type", "missing")
        large = len(content) > _LARGE_BODY
        body = await model.in_thread(lambda: _parsed(form, content, kind)) if large else _parsed(form, content, kind)
        _check_name(model, body.model)
        return await respond(model, body, request)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if not model.engine.alive:
            return JSONResponse({"status": "the engine has ended"}, 503)
        return JSONResponse({"status": "ok"})

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
    async def completions(request: Request) -> Response:
        return await answered(CompletionRequest, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await answered(ChatRequest, request)

    add_page(app, model)
    _handle_errors(app)
    return app


def _card(model: Model) -> dict[str, Any]:
    return {
        "id": model.name, "object": "model", "created": model.created, "owned_by": "specmemo",
        "max_model_len": model.longest,
    }  # fmt: skip


class ModelNotFound(BadRequest):
    """A request for another model than the served one."""


def _check_name(model: Model, name: str | None) -> None:
    if name is not None and name != model.name:
        raise ModelNotFound(f"the model {shown(name)} isn't served, {model.name!r} is", "model")


def _parsed(form: Form, content: bytes, kind: str) -> CompletionRequest | ChatRequest:
    """A request's body of the type ``kind``, checked.

    Raises:
        BadRequest, HTTPException: it is no JSON, or a field is wrong.
    """
    name = kind.partition(";")[0].strip().lower()
    if content and name != "application/json" and not (name.startswith("application/") and name.endswith("+json")):
        raise BadRequest(f"the header content-type is {kind}, it must be application/json")
    try:
        return form.model_validate(json.loads(content))
    except ValidationError as error:
        raise BadRequest(*field_error(error.errors(include_url=False)[0])) from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body isn't JSON (at character {error.pos}): {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "There was an error parsing the body") from error


def _handle_errors(app: FastAPI) -> None:
    """Statuses and bodies of errors; the messages name the value and the limit."""

    def refused(status: int, kind: str, code: str | None = None, headers: dict[str, str] | None = None) -> Any:
        async def handler(_: Request, error: Exception) -> JSONResponse:
            return JSONResponse(error_body(str(error), kind, getattr(error, "param", None), code), status, headers)

        return handler

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        if isinstance(error.__cause__, ValueError | RecursionError):  # of parsing; Python's advice follows ";"
            message += f": {str(error.__cause__).partition(';')[0]}"
        return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nginx's status for it, for the log

    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ModelNotFound, refused(404, "invalid_request_error", code="model_not_found"))
    app.add_exception_handler(BadRequest, refused(400, "invalid_request_error"))
    app.add_exception_handler(QueueFull, refused(429, "rate_limit_error", headers={"retry-after": "1"}))
    app.add_exception_handler(EngineClosed, refused(503, "server_error"))
    app.add_exception_handler(GenerationFailed, refused(500, "server_error"))
    app.add_exception_handler(TookTooLong, refused(504, "server_error"))
