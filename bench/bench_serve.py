"""Servers under load: throughput, time to the first token and per further token, by number of connections.

    python bench/bench_serve.py --widths 1,2,4,8,16,32 --json bench/results/serve_cpu.json

``specmemo serve`` and ``transformers serve``, the latter with and without continuous batching, serve the bundled model
in float32. Each connection asks for one streamed completion after the other, greedy, of parts of Python files that the
model hasn't been trained on, each part once per server, so that no server finds a prompt in its cache. The servers run
side by side and are loaded in turns, each first with two requests per connection that don't count. The answers of all
are compared before anything is timed.

Columns: ``tokens_per_s`` over all connections, the median over rounds; ``first_ms`` and ``token_ms``, seconds to the
first token and per further token of a request, median and 99th percentile over all requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from timing import print_rows, write_result

from specmemo_kernels.cli.common import demo_model_folder
from specmemo_kernels.cli.demo_data import is_held_out, library_files

NAMES = ("specmemo", "transformers", "transformers, continuous batching")


@dataclass(frozen=True)
class Answer:
    """One request: its text, its tokens, and when each of its pieces came, in seconds since it was sent."""

    text: str
    tokens: int
    times: list[float]

    @property
    def per_token(self) -> float:
        """Seconds per token behind the first piece."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)


def command(name: str, port: int) -> list[str]:
    folder = str(demo_model_folder())
    if name == "specmemo":
        return [sys.executable, "-m", "specmemo_kernels.cli", "serve", "--port", str(port), "--batch", "32"]
    options = ["serve", folder, "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    return [str(Path(sys.executable).parent / "transformers"), *options, *["--continuous-batching"] * ("," in name)]


@contextlib.contextmanager
def server(name: str) -> Iterator[str]:
    """A server's address; it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(command(name, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            if process.poll() is not None:
                raise typer.BadParameter(f"{name} has ended with status {process.returncode}")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(60)


async def ask(client: httpx.AsyncClient, address: str, prompt: str, tokens: int) -> Answer:
    """A streamed completion."""
    body = {
        "model": MODEL_NAMES[address], "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    text, times, count, started = "", [], 0, time.perf_counter()
    async with client.stream("POST", f"{address}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = json.loads(line[6:])
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
            if event["choices"] and event["choices"][0]["text"]:
                text += event["choices"][0]["text"]
                times.append(time.perf_counter() - started)
    return Answer(text, count, times or [time.perf_counter() - started])


MODEL_NAMES: dict[str, str] = {}


async def load(address: str, prompts: Sequence[str], tokens: int, width: int) -> tuple[float, list[Answer]]:
    """Seconds for all prompts over ``width`` connections, and the answers in order."""
    limits = httpx.Limits(max_connections=width)
    waiting = iter(list(enumerate(prompts)))
    answers: dict[int, Answer] = {}
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def connection() -> None:
            for number, prompt in waiting:
                answers[number] = await ask(client, address, prompt, tokens)

        started = time.perf_counter()
        await asyncio.gather(*(connection() for _ in range(width)))
        seconds = time.perf_counter() - started
    return seconds, [answers[number] for number in range(len(prompts))]


def held_out_parts(characters: int) -> Iterator[str]:
    """Consecutive parts of the library files that the model hasn't been trained on, the first of each file first."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in library_files() if is_held_out(file)]
    for begin in range(0, max(map(len, texts)), characters):
        yield from (text[begin : begin + characters] for text in texts if len(text) >= begin + characters)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main(
    widths: Annotated[str, typer.Option(help="numbers of connections")] = "1,2,4,8,16,32",
    requests: Annotated[int, typer.Option(help="requests per connection and round")] = 2,
    least: Annotated[int, typer.Option(help="requests per round at least, whatever the connections")] = 40,
    tokens: Annotated[int, typer.Option(help="new tokens of a request")] = 48,
    rounds: Annotated[int, typer.Option(help="rounds, each with all servers in turn")] = 3,
    servers: Annotated[str, typer.Option(help="of " + "; ".join(NAMES))] = ";".join(NAMES),
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Start the servers, compare their answers, and load them in turns."""
    texts = held_out_parts(300)
    names = servers.split(";")
    rows = []
    with contextlib.ExitStack() as stack:
        addresses = {name: stack.enter_context(server(name)) for name in names}
        for name, address in addresses.items():
            MODEL_NAMES[address] = "specmemo-demo" if name == "specmemo" else str(demo_model_folder())
        first = list(itertools.islice(texts, 8))
        answers = {name: asyncio.run(load(address, first, tokens, 4))[1] for name, address in addresses.items()}
        for name in names:
            same = [a.text == b.text for a, b in zip(answers[name], answers[names[0]], strict=True)]
            if not all(same):
                raise typer.BadParameter(f"{name} answers {same.count(False)} of {len(same)} prompts otherwise")
        for width in map(int, widths.split(",")):
            warm = list(itertools.islice(texts, 2 * width))
            for name in names:
                asyncio.run(load(addresses[name], warm, tokens, width))
            found: dict[str, list[tuple[float, list[Answer]]]] = {name: [] for name in names}
            for _ in range(rounds):
                count = max(least, requests * width)
                prompts = list(itertools.islice(texts, count))
                if len(prompts) < count:
                    raise typer.BadParameter("there are no parts of files left; fewer widths, requests or rounds")
                for name in names:
                    found[name].append(asyncio.run(load(addresses[name], prompts, tokens, width)))
            for name, runs in found.items():
                every = [answer for _, answers in runs for answer in answers]
                first, between = [a.times[0] for a in every], [a.per_token for a in every]
                rates = [sum(a.tokens for a in answers) / seconds for seconds, answers in runs]
                rows.append({
                    "server": name, "connections": width, "tokens_per_s": statistics.median(rates),
                    "first_ms": 1e3 * statistics.median(first), "first_p99_ms": 1e3 * percentile(first, 0.99),
                    "token_ms": 1e3 * statistics.median(between), "token_p99_ms": 1e3 * percentile(between, 0.99),
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    print_rows(rows, title="servers under load")
    if json_ is not None:
        write_result(json_, {"tokens": tokens, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
