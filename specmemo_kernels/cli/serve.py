"""``specmemo serve``: a patched model behind OpenAI's API."""

from __future__ import annotations

import logging
import os
import signal
import socket
from dataclasses import asdict

import torch

from specmemo_kernels.arguments import number
from specmemo_kernels.cli.common import (
    leave_ranks,
    load_with_heads,
    model_arguments,
    setting_up,
    terminal,
    torch_device,
)
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.cli.options import ServeOptions
from specmemo_kernels.integrations.distributed.ranks import RankError
from specmemo_kernels.integrations.hf.engine import Engine
from specmemo_kernels.integrations.hf.patch import patch
from specmemo_kernels.planning.host_memory import host_memory
from specmemo_kernels.planning.memory_plan import format_bytes, parse_bytes

try:
    import uvicorn

    from specmemo_kernels.integrations.serve.answers import Model
    from specmemo_kernels.integrations.serve.app import ServerLimits, make_app
    from specmemo_kernels.integrations.serve.connection import Connection, Server
    from specmemo_kernels.integrations.serve.metrics import Metrics
except ImportError as error:
    raise UserError(f"{error.name} isn't installed; pip install fastapi uvicorn prometheus-client") from error


def run_serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish running requests. Under torchrun rank 0 serves, the others follow it.

    Raises:
        UserError: an option, the model or its heads can't be used, or the port is taken.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        _serve(options)
    except RankError as error:
        raise UserError(str(error)) from error
    finally:
        leave_ranks()


def check_key(key: str | None) -> None:
    """Check that the key isn't empty; an empty variable, which typer takes for none, isn't either.

    Raises:
        UserError: it is.
    """
    if (os.environ.get("SPECMEMO_API_KEY") if key is None else key) == "":
        raise UserError("--api-key or SPECMEMO_API_KEY is empty; give a key, or leave both out to admit all clients")


def check_texts(options: ServeOptions) -> None:
    """Check that no option is an empty text, which isn't as if it were left out: an empty host is every interface.

    Raises:
        UserError: one is.
    """
    for name, value in asdict(options).items():
        if isinstance(value, str) and not value.strip():
            raise UserError(f"--{name.replace('_', '-')} is empty; give a value, or leave it out")


def check_keep_free(options: ServeOptions) -> None:
    """Check that the device has the memory that ``--keep-free`` reserves.

    Raises:
        UserError: it has less. ValueError: not a size.
    """
    if options.keep_free is None:
        return
    device = torch_device(options.device)
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_memory()
    if parse_bytes(options.keep_free, "--keep-free") >= memory:
        raise UserError(f"--keep-free {options.keep_free}: {device} has {format_bytes(memory)}; leave less free")


def url_of(host: str, port: int) -> str:
    """Where an address is reached; one of IPv6 is in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _serve(options: ServeOptions) -> None:
    with setting_up():
        check_key(options.api_key)
        check_texts(options)
        number("--shutdown-seconds", options.shutdown_seconds, 0)
        check_keep_free(options)
        loaded = load_with_heads(options)
        arguments = model_arguments(options) | {"max_batch_size": options.batch, "keep_free": options.keep_free}
        handle = patch(loaded.model, loaded.heads, **arguments)
    folder = "specmemo-demo" if options.model is None else os.path.abspath(loaded.name)
    name = options.served_name or os.path.basename(folder)
    engine = Engine(loaded.model, max_waiting=options.max_waiting)
    if handle.ranks.rank:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)  # rank 0 has it too, and finishes running requests first
        engine.join()
        return
    with setting_up():
        model = Model(name, engine, loaded.tokenizer, Metrics(engine), options.max_seconds)
    app = make_app(model, ServerLimits(options.api_key, options.max_body, options.shutdown_seconds))
    config = uvicorn.Config(app, options.host, options.port, http=Connection, log_config=None, access_log=False)
    try:
        listener = config.bind_socket()
    except SystemExit as error:  # uvicorn has logged the reason
        raise UserError(
            f"--host {options.host} --port {options.port} can't be listened on; give an address of this machine and a "
            "free port"
        ) from error
    # Accepted connections inherit it: asyncio sets it only where the protocol is named, which uvicorn doesn't. Without
    # it the first token waits for the acknowledgement of the header, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    console, url = terminal(soft_wrap=True), url_of(*listener.getsockname()[:2])
    console.print(f"{loaded.name}, served as {name} on {url}/v1", style="dim")
    console.print(f"chat at {url}/", style="dim")
    console.print(f"{handle.plan}", style="dim")
    Server(config, engine.close, options.shutdown_seconds).run([listener])
