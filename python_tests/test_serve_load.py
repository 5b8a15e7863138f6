"""The server as a process under load and faults: right tokens, the right statuses, level memory, nothing left open."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from served_process import WAIT, ServedProcess, served_process

from specmemo_kernels.cli.common import demo_model_folder, load_model, load_tokenizer

MIB = 2**20
PROMPTS = ["def main(", "import os\n", "class A:\n    ", "for i in range(10):\n    print(", "x = [1, 2, 3]\n" * 20, "#"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is watched through /proc"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with served_process("--memory-budget", "32MiB", "--batch", "8", "--shutdown-seconds", "5") as served:
        yield served


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The unpatched model's greedy text behind each prompt."""
    folder = demo_model_folder()
    model, tokenizer = load_model(folder, torch.float32, torch.device("cpu")), load_tokenizer(folder)
    found = {}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        found[prompt] = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return found


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0} | fields


def raw_request(fields: dict[str, Any]) -> bytes:
    """A request that closes its connection, as bytes."""
    text = json.dumps(fields).encode()
    head = ["POST /v1/completions HTTP/1.1", "host: x", "connection: close", "content-type: application/json"]
    return "\r\n".join([*head, f"content-length: {len(text)}", "", ""]).encode() + text


async def ask_all(server: ServedProcess, bodies: Sequence[dict[str, Any]], width: int) -> list[httpx.Response | None]:
    """The responses to all bodies over ``width`` connections; ``None``: the connection failed."""
    limits = httpx.Limits(max_connections=width, max_keepalive_connections=width)
    rest, found = iter(list(enumerate(bodies))), dict[int, httpx.Response | None]()
    async with httpx.AsyncClient(timeout=WAIT, limits=limits) as client:

        async def connection() -> None:
            for number, fields in rest:
                found[number] = None
                try:
                    found[number] = await client.post(f"{server.address}/v1/completions", json=fields)
                except httpx.TransportError:
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(connection() for _ in range(width)))
    return [found[number] for number in range(len(bodies))]


def check_texts(
    responses: Sequence[httpx.Response | None], bodies: Sequence[dict[str, Any]], texts: dict[str, str]
) -> Counter[int]:
    """Every answer of status 200 is right; returns how many responses have each status (0: none)."""
    for response, fields in zip(responses, bodies, strict=True):
        if response is not None and response.status_code == 200:
            assert response.json()["choices"][0]["text"] == texts[fields["prompt"]]
    return Counter(0 if response is None else response.status_code for response in responses)


def bodies_of(count: int) -> list[dict[str, Any]]:
    return [body(prompt) for prompt in itertools.islice(itertools.cycle(PROMPTS), count)]


def test_resident_memory_under_load(server: ServedProcess, texts: dict[str, str]) -> None:
    """The first load of the process: its peak grows by the plan's bytes at most; 1,000 requests leave nothing."""
    state, before = server.state, server.resident
    server.reset_peak()
    bodies = bodies_of(500)
    assert check_texts(asyncio.run(ask_all(server, bodies, 32)), bodies, texts) == {200: 500}
    peak, planned = server.status("VmHWM") - server.status("RssFile"), sum(state["planned"].values())
    assert state["budget"] == 32 * MIB >= planned
    held, files = server.resident, server.files
    assert check_texts(asyncio.run(ask_all(server, bodies, 32)), bodies, texts) == {200: 500}
    server.wait_until_idle()
    print(
        f"peak {(peak - before) / MIB:.1f} MiB, planned {planned / MIB:.1f}, level {(server.resident - held) / MIB:.2f}"
    )
    assert peak - before <= planned + max(planned // 20, 4 * MIB)
    assert server.resident - held <= 2 * MIB
    assert server.files <= files + 2


def test_clients_that_vanish(server: ServedProcess, texts: dict[str, str]) -> None:
    """500 streams closed on the way, some before the first token, while others are answered."""
    server.wait_until_idle()
    files = server.files
    sent = raw_request(body("a", max_tokens=200, ignore_eos=True, stream=True))

    async def vanish(i: int) -> None:
        reader, writer = await asyncio.open_connection(*server.place)
        writer.write(sent)
        await writer.drain()
        for _ in range(i % 4):
            await reader.read(200)
        writer.transport.abort()

    async def run() -> list[httpx.Response | None]:
        others = asyncio.create_task(ask_all(server, bodies_of(60), 2))
        for first in range(0, 500, 10):
            await asyncio.gather(*(vanish(i) for i in range(first, first + 10)))
        return await others

    assert check_texts(asyncio.run(run()), bodies_of(60), texts) == {200: 60}
    server.wait_until_idle()
    deadline = time.monotonic() + WAIT
    while server.files > files + 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_slow_readers(server: ServedProcess, texts: dict[str, str]) -> None:
    """Clients that don't read their streams hold up nobody, and get all of it in the end."""
    slow = []
    for _ in range(6):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT)
        connection.connect(server.place)
        connection.sendall(raw_request(body("def", max_tokens=400, ignore_eos=True, stream=True, logprobs=20)))
        slow.append(connection)
    assert check_texts(asyncio.run(ask_all(server, bodies_of(100), 8)), bodies_of(100), texts) == {200: 100}
    received = []
    for connection in slow:
        with connection:
            received.append(b"")
            while data := connection.recv(65536):
                received[-1] += data
    assert all(b"data: [DONE]" in text for text in received)
    assert {text.count(b'"token_logprobs"') > 50 for text in received} == {True}
    server.wait_until_idle()


def test_a_thousand_at_once(server: ServedProcess, texts: dict[str, str]) -> None:
    """Those that may wait are answered, the others are told when to come again; then all are welcome."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    bodies = bodies_of(1000)
    responses = asyncio.run(ask_all(server, bodies, 1000))
    statuses = check_texts(responses, bodies, texts)
    assert set(statuses) == {200, 429}
    assert statuses[200] >= 256
    assert all(r.headers["retry-after"] == "1" for r in responses if r is not None and r.status_code == 429)
    server.wait_until_idle()
    assert check_texts(asyncio.run(ask_all(server, bodies[:50], 8)), bodies[:50], texts) == {200: 50}


def test_memory_taken_away(texts: dict[str, str]) -> None:
    """A limit on the process's data under load: answers are right or errors; afterwards all are right."""
    # A server whose heap has much free memory needs no more, and doesn't feel the limit.
    levels = next(filter(any, (levels_under_limit(texts) for _ in range(4))), [0])
    assert max(levels) > 0, "the limit wasn't felt"


def levels_under_limit(texts: dict[str, str]) -> list[int]:
    """The levels of pressure of a server that gets no more memory during a load; its answers are checked."""
    with served_process("--memory-budget", "64MiB", "--batch", "8") as server:
        short = [body("#")] * 8  # one after the other: steps of several sequences need memory that isn't there yet
        assert check_texts(asyncio.run(ask_all(server, short, 1)), short, texts) == {200: 8}
        bodies, levels = bodies_of(300), list[int]()
        # Whole chunks need memory at once. They are token ids, for without memory the tokenizer ends the process.
        long = [{"prompt": [100 + i] * 600, "max_tokens": 8, "temperature": 0} for i in range(24)]

        async def run() -> list[httpx.Response | None]:
            # Before the first prompt that is longer than a few tokens.
            resource.prlimit(server.pid, resource.RLIMIT_DATA, (server.status("VmData") - 4 * MIB, -1))
            more = asyncio.create_task(ask_all(server, long, 8))
            load = asyncio.create_task(ask_all(server, bodies, 16))
            async with httpx.AsyncClient(timeout=WAIT) as client:
                # On a busy machine two seconds may pass before the server needs more memory than it has.
                while len(levels) < 8 or not (any(levels) or (load.done() and more.done())):
                    await asyncio.sleep(0.25)
                    resource.prlimit(server.pid, resource.RLIMIT_DATA, (server.status("VmData") - 4 * MIB, -1))
                    levels.append((await client.get(f"{server.address}/stats")).json()["pressure"])
            resource.prlimit(server.pid, resource.RLIMIT_DATA, (-1, -1))
            assert {0 if r is None else r.status_code for r in await more} <= {200, 429, 500, 503}
            return await load

        statuses = check_texts(asyncio.run(run()), bodies, texts)
        print(statuses, levels)
        assert set(statuses) <= {200, 429, 500, 503}
        server.wait_until_idle()
        assert check_texts(asyncio.run(ask_all(server, bodies[:60], 8)), bodies[:60], texts) == {200: 60}
    return levels
