"""The server under requests that cost much, break templates, or fail inside; and at its end."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError
from server import serving
from test_cli import TEMPLATE, make_tokenizer, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.engine.decode import SpecDecoder
from specmemo_kernels.integrations.hf.generation import Generation
from specmemo_kernels.integrations.serve import fields, responses
from specmemo_kernels.integrations.serve.answers import Model
from specmemo_kernels.integrations.serve.app import ServerLimits
from specmemo_kernels.integrations.serve.connection import Server
from specmemo_kernels.integrations.serve.limits import BodyLimit
from specmemo_kernels.integrations.serve.metrics import Metrics
from specmemo_kernels.integrations.serve.protocol import ChatRequest, CompletionRequest

WAIT = 60.0
NAN_TOKEN = 200
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreTrainedModel]:
    """With a token whose embedding is NaN."""
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path_factory.mktemp("model"), TEMPLATE)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[NAN_TOKEN] = float("nan")
    with sk.patch(model, "prompt-lookup", max_batch_size=4, memory_budget="24MiB"):
        yield model


@pytest.fixture(scope="module")
def address(model: PreTrainedModel) -> Iterator[str]:
    with serving(model, make_tokenizer(TEMPLATE)) as address:
        yield address


def complete(address: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{address}/v1/completions", json=fields, timeout=WAIT)


def chat(address: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{address}/v1/chat/completions", json=fields, timeout=WAIT)


def message(response: httpx.Response) -> str:
    text: str = response.json()["error"]["message"]
    return text


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def wait_for_running(address: str, count: int) -> None:
    while httpx.get(f"{address}/stats").json()["running"] < count:
        time.sleep(0.02)


def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    step = SpecDecoder.step

    def slow(decoder: SpecDecoder) -> object:
        time.sleep(0.05)
        return step(decoder)

    monkeypatch.setattr(SpecDecoder, "step", slow)


@pytest.mark.slow
def test_texts_that_can_not_fit_are_not_encoded(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are more prompts than can be answered."""
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast._encode_plus", None)
    longest = 512 * len("<eos>")
    refused = complete(address, prompt="a" * (longest + 1))
    assert refused.status_code == 400
    assert f"a text has {longest + 1} characters" in message(refused)
    refused = chat(address, messages=[USER | {"content": "a" * longest}])
    assert refused.status_code == 400
    assert "characters, the 512 tokens of prompt and answer have at most 2560" in message(refused)
    for prompt in (["a"] * 257, [[1]] * 257, ["a"] * 500_000, [[1]] * 500_000):
        started = time.monotonic()
        refused = complete(address, prompt=prompt)
        assert refused.status_code == 400
        assert time.monotonic() - started < 10


def test_the_server_answers_while_it_encodes(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, encoded, encode = threading.Event(), threading.Event(), Model.encode

    def held(served: Model, text: str, **options: Any) -> list[int]:
        encoding.set()
        assert encoded.wait(WAIT)
        return encode(served, text, **options)

    monkeypatch.setattr(Model, "encode", held)
    with ThreadPoolExecutor(2) as threads:
        options = {"temperature": 0, "max_tokens": 3}
        answers = [threads.submit(complete, address, prompt="a", **options)]
        answers.append(threads.submit(chat, address, messages=[USER], **options))
        assert encoding.wait(WAIT)
        try:
            assert httpx.get(f"{address}/health", timeout=5).status_code == 200
        finally:
            encoded.set()
        assert [answer.result().status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize(
    ("owner", "name", "last", "says"),
    [
        (fields, "shown", "5_0", "expected a token id, got '5_0'"),
        (CompletionRequest, "sampling", "3999", "logit_bias has the token 3999, the last one is 256"),
    ],
)
def test_the_server_answers_while_it_reads_a_large_body(
    address: str, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, last: str, says: str
) -> None:
    """Until the error of its last token, and until its sampling parameters are made."""
    reading, read, original = threading.Event(), threading.Event(), getattr(owner, name)

    def held(*args: Any) -> Any:
        reading.set()
        assert read.wait(WAIT)
        return original(*args)

    monkeypatch.setattr(owner, name, held)
    bias = {str(token): 1 for token in [*range(3999), last]}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(complete, address, prompt="a", logit_bias=bias)
        assert reading.wait(WAIT)
        try:
            assert httpx.get(f"{address}/health", timeout=5).status_code == 200
        finally:
            read.set()
        refused = answer.result()
    assert refused.status_code == 400
    assert says in message(refused)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {f"a{i}": 1 for i in range(99)}},
        {"logit_bias": {str(i): 101 for i in range(99)}},
        {"metadata": {str(i): i for i in range(99)}},
        {f"a{i}": i for i in range(99)},
        {"tools": [1] * 99},
        {"messages": [1] * 99},
        {"messages": [USER | {"content": [1] * 99}]},
        {"messages": [{"role": "assistant", "tool_calls": [1] * 99}]},
    ],
    ids=["tokens", "biases", "metadata", "unknown", "tools", "messages", "parts", "calls"],
)
def test_few_errors_of_a_field_are_enough(fields: dict[str, Any]) -> None:
    """Errors of all members of a large one take seconds."""
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate({"messages": [USER]} | fields)
    assert raised.value.error_count() <= 16


def test_objects_that_are_checked_in_parts() -> None:
    bias, metadata = {i: float(i) for i in range(99)}, {str(i): "a" for i in range(99)}
    read = ChatRequest.model_validate({"messages": [USER], "logit_bias": bias, "metadata": metadata})
    assert (read.logit_bias, read.metadata) == (bias, metadata)


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_answers_while_it_writes_logprobs(
    address: str, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    writing, written, write = threading.Event(), threading.Event(), responses.completion_logprobs

    def held(*args: Any) -> Any:
        writing.set()
        assert written.wait(WAIT)
        return write(*args)

    monkeypatch.setattr(responses, "completion_logprobs", held)
    with ThreadPoolExecutor(1) as threads:
        options = {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0, "stream": stream}
        answer = threads.submit(complete, address, **options)
        assert writing.wait(WAIT)
        try:
            assert httpx.get(f"{address}/health", timeout=5).status_code == 200
        finally:
            written.set()
        assert answer.result().status_code == 200


@pytest.mark.slow
def test_nan_of_one_request(address: str) -> None:
    """A greedy one's log-probabilities are JSON; a sampled one fails alone."""
    bad = {"prompt": [NAN_TOKEN], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    logprobs = complete(address, **bad, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0] * 2
    assert set(logprobs["top_logprobs"][0].values()) == {-9999.0}
    for chunk in events(complete(address, **bad, logprobs=2, echo=True, stream=True)):
        assert -9999.0 in chunk["choices"][0]["logprobs"]["token_logprobs"]
    good = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "seed": 4, "logit_bias": {NAN_TOKEN: -100}}
    alone = complete(address, **good).json()["choices"]
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(complete, address, **good)
        for _ in range(5):
            failed = complete(address, prompt=[NAN_TOKEN])
            assert failed.status_code == 500
            assert "logits of token 1 are NaN" in message(failed)
        assert other.result().json()["choices"] == alone


def deep(levels: int, inner: str = "1") -> str:
    return '{"a":' * levels + inner + "}" * levels


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_deeply_nested_tools(model: PreTrainedModel, template: str | None) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": deep(100_000)}}
    history = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "1"}]
    tool = '{"type": "function", "function": {"name": "f", "parameters": ' + deep(900) + "}}"
    tools = json.dumps({"messages": [USER], "temperature": 0, "tools": ["tool"]}).replace('"tool"', tool)
    template = template and template + "{{ tools | tojson }}{{ messages | tojson }}"
    with serving(model, make_tokenizer(template)) as address:
        for body in (json.dumps({"messages": history, "temperature": 0}), tools):
            headers = {"content-type": "application/json"}
            response = httpx.post(f"{address}/v1/chat/completions", content=body, headers=headers, timeout=WAIT)
            assert response.status_code in (200, 400)
            assert template is None or response.status_code == 400
            refusals = ["the model's chat template refuses them"]
            if sys.version_info >= (3, 13):  # which writes deeper JSON: the text is too long then
                refusals.append("a text has")
            assert template is None or any(refusal in message(response) for refusal in refusals)


@pytest.mark.parametrize("wrong", ["1 // 0", "'%c' % 0x110000", "2.0 ** 10000", "messages[9].role.x"])
def test_templates_that_fail(model: PreTrainedModel, wrong: str) -> None:
    with serving(model, make_tokenizer("{{ " + wrong + " }}")) as address:
        refused = chat(address, messages=[USER])
    assert refused.status_code == 400
    assert "the model's chat template refuses them" in message(refused)


def test_unexpected_errors_are_json(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise KeyError("secret text")

    monkeypatch.setattr(Model, "requests", failing)
    response = complete(address, prompt="a")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert message(response) == "the server failed with KeyError; its log has the details"
    assert response.headers["x-request-id"] in caplog.text
    assert "Traceback" in caplog.text


def test_a_number_that_is_cut_at_a_space(address: str) -> None:
    """A header can't end with a space, so the response couldn't be sent."""
    response = httpx.get(f"{address}/health", headers={"x-request-id": "a" * 63 + " b"})
    assert response.headers["x-request-id"] == "a" * 63


def test_streams_that_fail_inside(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error behind the first piece is an event, and the stream ends properly."""
    add, added = responses._Answers.add, itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(added):
            raise KeyError("secret text")
        return add(*arguments)

    monkeypatch.setattr(responses._Answers, "add", failing)
    *_, last = events(complete(address, prompt="a", max_tokens=40, ignore_eos=True, temperature=0, stream=True))
    assert last["error"]["message"] == "the server failed with KeyError; its log has the details"


def test_requests_behind_a_dead_engine(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory even for the end of a request: both that request and later ones are answered."""
    deliver, delivered = Generation.deliver, itertools.count()

    def failing(generation: Generation) -> None:
        if generation.request.max_new_tokens == 3 and next(delivered) < 2:
            raise MemoryError
        deliver(generation)

    monkeypatch.setattr(Generation, "deliver", failing)
    with serving(model, make_tokenizer(None)) as address:
        assert complete(address, prompt="a", max_tokens=3).status_code == 500
        assert complete(address, prompt="a").status_code == 503
        assert httpx.get(f"{address}/health").status_code == 503


def test_fields_that_are_null(address: str) -> None:
    """They are as if left out, known or not; a single best answer is what there is."""
    plain = {"prompt": "a", "max_tokens": 4, "temperature": 0}
    expected = complete(address, **plain).json()["choices"]
    names = ("n", "ignore_eos", "suffix", "stream", "echo", "service_tier", "logit_bias", "stream_options")
    assert complete(address, **plain, **dict.fromkeys(names), best_of=1).json()["choices"] == expected
    streamed = events(complete(address, **plain, stream=True, stream_options={"include_usage": None}))
    assert all(chunk["choices"] for chunk in streamed)
    extra = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    history = [USER, {"role": "assistant", "content": "x"} | extra, USER]
    assert chat(address, messages=history, max_tokens=2).status_code == 200
    refused = complete(address, prompt="a", stream_options={"include_usage": True})
    assert refused.status_code == 400
    assert message(refused) == "stream_options needs stream to be true"


@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_prompts_alone(address: str, stream: bool) -> None:
    """``max_tokens`` 0 with ``echo``."""
    fields = {"prompt": "abcd", "echo": True, "logprobs": 1, "temperature": 0}
    response = complete(address, **fields, max_tokens=0, stream=stream)
    choice = (events(response)[0] if stream else response.json())["choices"][0]
    wanted = complete(address, **fields, max_tokens=1).json()["choices"][0]["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
    assert choice["logprobs"] == {name: values[:-1] for name, values in wanted.items()}
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 0


def test_the_end_of_a_busy_server(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Past its seconds, whole answers are a 503, streams end with "abort", and the log has no traceback."""
    slow_steps(monkeypatch)
    case = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(2) as threads:
        with serving(model, make_tokenizer(None), ServerLimits(shutdown_seconds=0.5)) as address:
            whole = threads.submit(complete, address, **case)
            stream = threads.submit(complete, address, **case, stream=True)
            wait_for_running(address, 2)
        assert whole.result().status_code == 503
        assert "the server stopped" in message(whole.result())
        assert events(stream.result())[-1]["choices"][0]["finish_reason"] == "abort"
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_a_second_signal(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends answers as the seconds' end does."""
    slow_steps(monkeypatch)
    servers = []

    def made(*arguments: Any) -> Server:
        servers.append(Server(*arguments))
        return servers[0]

    monkeypatch.setattr("server.Server", made)
    case = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "temperature": 0, "stream": True}
    with (
        ThreadPoolExecutor(1) as threads,
        serving(model, make_tokenizer(None), ServerLimits(shutdown_seconds=WAIT)) as address,
    ):
        stream = threads.submit(complete, address, **case)
        wait_for_running(address, 1)
        for _ in range(2):
            servers[0].handle_exit(signal.SIGINT, None)
        assert events(stream.result())[-1]["choices"][0]["finish_reason"] == "abort"
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_pieces_behind_the_end_of_the_loop(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow_steps(monkeypatch)
    with sk.Engine(model) as engine:
        served = Model("tiny", engine, make_tokenizer(None), Metrics(engine))
        body = CompletionRequest(prompt="a", max_tokens=2, ignore_eos=True, logit_bias={70: 100})

        async def first() -> None:
            await anext(served.answer(served.requests(body, [[5]]), []))

        asyncio.run(first())  # the second piece, which is the last one, comes behind it
    assert not caplog.records


def test_half_a_request_does_not_delay_the_end(model: PreTrainedModel) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{"
    with serving(model, make_tokenizer(None), ServerLimits(shutdown_seconds=WAIT)) as address:
        client = socket.create_connection((httpx.URL(address).host, httpx.URL(address).port))
        client.settimeout(WAIT)
        client.sendall(head)
        assert httpx.get(f"{address}/health").status_code == 200
    assert client.recv(1) == b""
    client.close()


@pytest.mark.slow
def test_a_step_that_outlasts_the_end(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn cancels the requests then."""
    step, stepping, going_on = SpecDecoder.step, threading.Event(), threading.Event()

    def held(decoder: SpecDecoder) -> object:
        stepping.set()
        assert going_on.wait(WAIT)
        return step(decoder)

    monkeypatch.setattr(SpecDecoder, "step", held)
    monkeypatch.setattr("specmemo_kernels.integrations.serve.connection._GRACE_SECONDS", 1)
    with ThreadPoolExecutor(2) as threads:
        with serving(model, make_tokenizer(None), ServerLimits(shutdown_seconds=0)) as address:
            whole = threads.submit(complete, address, prompt="a")
            assert stepping.wait(WAIT)
            whole.add_done_callback(lambda _: going_on.set())
        assert whole.result().status_code == 503
        assert "the server stopped" in message(whole.result())
    assert not [record for record in caplog.records if record.exc_info]


def test_keys(model: PreTrainedModel) -> None:
    key = "schlüssel"
    with serving(model, make_tokenizer(None), ServerLimits(api_key=key)) as address:
        for scheme, sent, status in (
            ("Bearer", key, 200), ("bearer", key, 200), ("BEARER ", key, 200), ("Basic", key, 401), ("Bearer", "x", 401)
        ):  # fmt: skip
            headers = {"authorization": f"{scheme} {sent}".encode()}
            response = httpx.get(f"{address}/v1/models", headers=headers)  # type: ignore[arg-type]
            assert response.status_code == status
        assert response.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{address}/v1/models", headers={"authorization": "sesame"}).status_code == 401


def test_methods_and_pages(address: str) -> None:
    refused = httpx.get(f"{address}/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert httpx.head(f"{address}/health").status_code == 200
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert httpx.get(address + path).status_code == 404


def through_the_limit(pieces: list[bytes], *headers: tuple[bytes, bytes]) -> list[Any]:
    """The body that the application gets, or the status of the refusal; and how many pieces were left unread."""
    left, results = list(pieces), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        results.extend([message["status"]] if message["type"] == "http.response.start" else [])

    async def application(_: Any, receive: Any, __: Any) -> None:
        results.append((await receive())["body"])

    scope = {"type": "http", "method": "POST", "headers": headers}
    asyncio.run(BodyLimit(application, max_body=100)(scope, receive, send))
    return [*results, len(left)]


def test_bodies_in_many_pieces() -> None:
    """What has come isn't copied for every piece; a body whose header declares too much isn't read."""

    class Piece(bytes):
        def __radd__(self, _: object) -> bytes:
            raise AssertionError("a copy of what has come")

    assert through_the_limit([Piece(b"ab")] * 50) == [b"ab" * 50, 0]
    assert through_the_limit([Piece(b"ab")] * 60) == [413, 9]
    assert through_the_limit([b"a"] * 2, (b"content-length", b"100")) == [b"aa", 0]
    assert through_the_limit([b"a"] * 2, (b"content-length", b"101")) == [413, 2]


def test_compressed_bodies(address: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    refused = httpx.post(f"{address}/v1/completions", content=b"\x1f\x8b", headers=headers)
    assert refused.status_code == 415
    assert message(refused).startswith("the header content-encoding is 'gzip'; send the body as it is")
    headers["content-encoding"] = "identity"
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert httpx.post(f"{address}/v1/completions", content=body, headers=headers).status_code == 200
