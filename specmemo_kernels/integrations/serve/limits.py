"""Around every request: its key, its number in the log, the size of its body, and clients that go away."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specmemo_kernels.arguments import shown
from specmemo_kernels.integrations.serve.errors import error_body

_log = logging.getLogger("specmemo.serve")
Result = TypeVar("Result")
#: Of an answer that the server's end has cut off.
STOPPED = "the server stopped before the answer was complete; send the request again"


def failure(error: BaseException) -> str:
    """What clients are told about an unexpected error."""
    return f"the server failed with {type(error).__name__}; its log has the details"


class Access:
    """Checks the API key of paths below ``/v1``, numbers requests, and logs them without their contents.

    A request's number is the client's ``x-request-id``, or a new one; the response has it too. Unexpected errors are
    logged and answered with status 500; 503 answers a request that uvicorn cancels when it stops.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode("utf-8", "surrogateescape")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, path, started = Headers(scope=scope), scope["path"], time.monotonic()
        number = headers.get("x-request-id", "")[:64].rstrip() or uuid.uuid4().hex

        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = number
                seconds = time.monotonic() - started
                _log.info("%r %s %r %d after %.3f s", number, scope["method"], path, message["status"], seconds)
            await send(message)

        if self._key is not None and path.startswith("/v1") and not self._admits(headers.get("authorization", "")):
            body = error_body("the API key is wrong or missing", "authentication_error", code="invalid_api_key")
            return await JSONResponse(body, 401, {"www-authenticate": "Bearer"})(scope, receive, sending)
        try:
            return await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            status, text = 503, STOPPED
        except Exception as error:
            _log.exception("%r failed", number)
            status, text = 500, failure(error)
        if not begun:
            await JSONResponse(error_body(text, "server_error"), status)(scope, receive, sending)

    def _admits(self, authorization: str) -> bool:
        """Whether the header has the key; compared as bytes, which headers are."""
        scheme, _, key = authorization.partition(" ")
        assert self._key is not None
        return scheme.lower() == "bearer" and secrets.compare_digest(key.strip().encode("latin-1"), self._key)


class BodyLimit:
    """Reads a request's body before the application, and answers 413 beyond ``max_body`` bytes.

    A larger one that the header declares isn't read at all, nor is a compressed one, whose answer is 415.
    """

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app, self._max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)

        async def refuse(status: int, text: str) -> None:
            await JSONResponse(error_body(text, "invalid_request_error"), status)(scope, receive, send)

        headers = Headers(scope=scope)
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            text = f"the header content-encoding is {shown(encoding)}; send the body as it is, without compression"
            return await refuse(415, text)
        too_large = f"the body has more than {self._max_body} bytes, the most that this server takes"
        if int(headers.get("content-length", 0)) > self._max_body:
            return await refuse(413, too_large)
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body.extend(message.get("body", b""))
            more = message.get("more_body", False)
            if len(body) > self._max_body:
                return await refuse(413, too_large)
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Message:
            return first.pop() if first else await receive()

        return await self._app(scope, replayed, send)


class EventStream(StreamingResponse):
    """Server-sent events whose generator is closed with the connection, not when it is collected."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


class ClientGone(Exception):
    """The client has closed its connection."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled when the client goes away.

    Raises:
        ClientGone: it has gone away.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
