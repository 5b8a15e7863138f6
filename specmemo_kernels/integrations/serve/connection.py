"""uvicorn's server and its connections."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from socket import socket
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_READ_BYTES = 16 * 1024


class Connection(H11Protocol):
    """uvicorn's connection with reads of 16 KiB. When the server stops, requests that haven't arrived are dropped.

    asyncio allocates 256 KiB for each read, which the C library maps anew: when memory is short that fails first, and
    asyncio closes the connection, also of requests that the engine could still answer.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if hasattr(transport, "max_size"):  # asyncio's own transports; uvloop's have one buffer for all
            transport.max_size = _READ_BYTES
        super().connection_made(transport)

    def shutdown(self) -> None:
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.transport.close()  # the rest of the body may never come
        else:
            super().shutdown()


#: For the last pieces of aborted answers, and for the step in progress.
_GRACE_SECONDS = 5


class Server(uvicorn.Server):
    """uvicorn's server; when it stops, running requests have ``seconds``, then ``close`` ends their answers.

    A second signal ends them at once. A third one is what uvicorn's second is: Ctrl-C drops the connections.

    Args:
        close: of the engine; called with ``seconds`` by a thread of its own.
    """

    def __init__(self, config: uvicorn.Config, close: Callable[[float], None], seconds: float) -> None:
        config.timeout_graceful_shutdown = math.ceil(seconds) + _GRACE_SECONDS
        super().__init__(config)
        self._close, self._seconds, self._hurries = close, seconds, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self.should_exit
        super().handle_exit(sig, frame)
        if again and not self._hurries:
            self._hurries, self.force_exit = True, False
            self._begin_closing(0.0)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._begin_closing(self._seconds)
        await super().shutdown(sockets)

    def _begin_closing(self, seconds: float) -> None:
        threading.Thread(target=self._close, args=(seconds,), daemon=True).start()
