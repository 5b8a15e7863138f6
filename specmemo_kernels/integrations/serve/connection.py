"""An HTTP connection that needs little memory to read."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

_READ_BYTES = 16 * 1024


class Connection(H11Protocol):
    """uvicorn's connection with reads of 16 KiB.

    asyncio allocates 256 KiB for each read, which the C library maps anew: when memory is short that fails first, and
    asyncio closes the connection, also of requests that the engine could still answer.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if hasattr(transport, "max_size"):  # asyncio's own transports; uvloop's have one buffer for all
            transport.max_size = _READ_BYTES
        super().connection_made(transport)
