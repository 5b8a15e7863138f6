"""A server on loopback, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

import specmemo_kernels as sk
from specmemo_kernels.integrations.serve.answers import Model
from specmemo_kernels.integrations.serve.app import ServerLimits, make_app
from specmemo_kernels.integrations.serve.connection import Connection, Server
from specmemo_kernels.integrations.serve.metrics import Metrics


@contextmanager
def serving(
    model: Any,
    tokenizer: Any,
    limits: ServerLimits | None = None,
    max_waiting: int = 256,
    name: str = "tiny",
    max_seconds: float | None = None,
) -> Iterator[str]:
    """The address of a server for a patched model, which answers by then."""
    engine = sk.Engine(model, max_waiting=max_waiting)
    served = Model(name, engine, tokenizer, Metrics(engine), max_seconds)
    limits = limits or ServerLimits(shutdown_seconds=5)
    app = make_app(served, limits)
    config = uvicorn.Config(app, "127.0.0.1", 0, http=Connection, log_config=None, access_log=False)
    socket, server = config.bind_socket(), Server(config, engine.close, limits.shutdown_seconds)
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
