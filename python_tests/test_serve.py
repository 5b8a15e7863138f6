"""The server, asked by OpenAI's client and by clients that misbehave."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection import sample
from server import serving
from test_cli import TEMPLATE, make_tokenizer, save_model
from test_cli import run as run_command
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import specmemo_kernels as sk
from specmemo_kernels.cli.serve import url_of
from specmemo_kernels.integrations.serve.app import ServerLimits
from specmemo_kernels.integrations.serve.connection import Server
from specmemo_kernels.integrations.serve.protocol import CompletionRequest, sampling_defaults
from specmemo_kernels.integrations.serve.text import TextStream, text_of

WAIT = 60.0
PROMPTS = ["def f(x):", "a", "for i in range(", "  \n", "import os, sys\n\n", "ä§€", "xyz" * 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[PreTrainedModel]:
    """Patched with heads of random weights; four rows."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with sk.patch(model, folder / "heads", tree=6, max_batch_size=4, memory_budget="24MiB"):
        yield model


@pytest.fixture(scope="module")
def address(model: PreTrainedModel) -> Iterator[str]:
    with serving(model, make_tokenizer(TEMPLATE)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
        yield client


def generated(plain: PreTrainedModel, ids: list[int], count: int, **options: Any) -> str:
    """The unpatched model's text behind a prompt."""
    row = torch.tensor([ids])
    options = {"do_sample": False} | options
    output = plain.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=count, **options)
    return make_tokenizer(None).decode(output[0, len(ids) :], skip_special_tokens=True)


def encode(text: str) -> list[int]:
    return make_tokenizer(None)(text)["input_ids"]


def post(address: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return httpx.post(f"{address}{path}", json=fields, timeout=WAIT)


def post_body(address: str, body: bytes, path: str = "/v1/completions") -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{address}{path}", content=body, headers=headers, timeout=WAIT)


def test_completions(plain: PreTrainedModel, client: openai.OpenAI) -> None:
    """Texts and token ids, several prompts and answers each, and their counts."""
    done = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=20, temperature=0, n=2)
    expected = [generated(plain, encode(prompt), 20) for prompt in PROMPTS]
    assert [choice.text for choice in done.choices] == [text for text in expected for _ in range(2)]
    assert [choice.index for choice in done.choices] == [*range(2 * len(PROMPTS))]
    assert done.usage is not None
    assert done.usage.prompt_tokens == sum(len(encode(prompt)) for prompt in PROMPTS)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    ids = [encode(prompt) for prompt in PROMPTS]
    again = client.completions.create(model="tiny", prompt=ids, max_tokens=20, temperature=0)
    assert [choice.text for choice in again.choices] == expected
    echoed = client.completions.create(model="tiny", prompt=ids[0], max_tokens=20, temperature=0, echo=True)
    assert echoed.choices[0].text == PROMPTS[0] + expected[0]
    assert len(client.completions.create(model="tiny", prompt="a", temperature=0).choices[0].text) > 0


def test_chat(plain: PreTrainedModel, client: openai.OpenAI) -> None:
    """By the tokenizer's template; a part of text is as good as a string."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    flat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    prompt = make_tokenizer(TEMPLATE).apply_chat_template(flat, tokenize=False, add_generation_prompt=True)
    ids = make_tokenizer(None)(prompt, add_special_tokens=False)["input_ids"]
    done = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=15, temperature=0)
    assert done.choices[0].message.content == generated(plain, ids, 15)
    assert done.choices[0].message.role == "assistant"
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(ids)
    long = client.chat.completions.create(model="tiny", messages=flat, temperature=0, stop="\0never")
    assert long.usage is not None
    assert long.choices[0].finish_reason == "stop" or long.usage.total_tokens == 512


def test_streams(plain: PreTrainedModel, client: openai.OpenAI) -> None:
    """The pieces of a stream are the answer, in both endpoints, and the counts come last."""
    expected = generated(plain, encode(PROMPTS[0]), 40)
    options = {"include_usage": True}
    chunks = [*client.completions.create(
        model="tiny", prompt=PROMPTS[0], max_tokens=40, temperature=0, stream=True, stream_options=options, echo=True
    )]  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == PROMPTS[0] + expected
    assert [chunk.choices[0].finish_reason is None for chunk in chunks[:-1]] == [True] * (len(chunks) - 2) + [False]
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 40
    messages = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, temperature=0)
    stream = [
        *client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, temperature=0, stream=True)
    ]
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in stream) == whole.choices[0].message.content
    assert stream[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_events_are_one_line_each(address: str) -> None:
    """Also for clients whose lines end as those of ``str.splitlines``."""
    prompt = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj\nk"
    lines = post(address, prompt=prompt, max_tokens=1, echo=True, stream=True).text.splitlines()
    assert [line[:6] for line in lines] == ["data: ", ""] * (len(lines) // 2)
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"].startswith(prompt)


@pytest.mark.slow
def test_seeds_alone_and_under_load(plain: PreTrainedModel, address: str, model: PreTrainedModel) -> None:
    """100 mixed requests from 32 connections: greedy ones as generate, sampled ones as alone."""
    cases = []
    for i in range(100):
        sampled = {"temperature": 0.9, "top_k": 20, "seed": i % 7} if i % 2 else {"temperature": 0}
        kind = {"repetition_penalty": 1.3} if i % 5 == 3 else {}
        cases.append({"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": 5 + i % 11, "stream": False} | sampled | kind)
    alone: dict[str, str] = {}
    for case in cases:
        key = json.dumps(case)
        if key not in alone:
            options: dict[str, Any] = {}
            if case["temperature"]:
                torch.manual_seed(case["seed"])
                options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 1.0}
            if penalty := case.get("repetition_penalty"):
                options["repetition_penalty"] = penalty
            alone[key] = generated(plain, encode(case["prompt"]), case["max_tokens"], **options)

    with httpx.Client(timeout=WAIT) as session, ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda case: session.post(f"{address}/v1/completions", json=case).json(), cases))
    assert [a["choices"][0]["text"] for a in answers] == [alone[json.dumps(case)] for case in cases]


def test_stop_strings(plain: PreTrainedModel, client: openai.OpenAI) -> None:
    """The text ends before the first stop string, in streams too, and the tokens behind it aren't counted."""
    text = generated(plain, encode(PROMPTS[2]), 60)
    for stop in (text[7:9], [text[20:24], text[11:13]], "\0never"):
        strings = [stop] if isinstance(stop, str) else stop
        end = min((place for s in strings if (place := text.find(s)) >= 0), default=len(text))
        options = {"model": "tiny", "prompt": PROMPTS[2], "max_tokens": 60, "temperature": 0, "stop": stop}
        done = client.completions.create(**options)
        assert done.choices[0].text == text[:end]
        assert (done.choices[0].finish_reason == "stop") == (end < len(text))
        assert done.usage is not None
        assert (done.usage.completion_tokens < 60) == (end < len(text))
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)]
        assert "".join(pieces) == text[:end]
    for none in (None, []):
        assert client.completions.create(**options | {"stop": none}).choices[0].text == text


def test_logit_bias(client: openai.OpenAI) -> None:
    token = encode("q")[0]
    done = client.completions.create(
        model="tiny", prompt="a", max_tokens=5, temperature=0, logit_bias={str(token): 100}, frequency_penalty=0.0
    )
    assert done.choices[0].text == "qqqqq"


def test_logprobs(plain: PreTrainedModel, client: openai.OpenAI) -> None:
    """Of prompt and answer as lm-eval asks for them, of messages, and in streams: transformers' own."""
    for prompt in PROMPTS:
        ids = encode(prompt)
        options = {"model": "tiny", "prompt": ids, "max_tokens": 6, "temperature": 0, "echo": True}
        whole = client.completions.create(**options, logprobs=3).choices[0]
        assert whole.logprobs is not None
        found = whole.logprobs
        answer = client.completions.create(**options | {"echo": False}, logprobs=0).choices[0].logprobs
        assert answer is not None
        tokens = ids + encode_answer(plain, ids, 6)
        with torch.no_grad():
            expected = plain(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(1)
        values = [float(row[token]) for row, token in zip(expected, tokens[1:], strict=True)]
        assert found.token_logprobs is not None
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:] == pytest.approx(values, abs=1e-4)
        assert answer.token_logprobs == pytest.approx(values[len(ids) - 1 :], abs=1e-4)
        assert found.top_logprobs is not None
        for row, top in zip(expected, found.top_logprobs[1:], strict=True):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert len(found.tokens or []) == len(found.text_offset or []) == len(tokens)
        stream = [*client.completions.create(**options, logprobs=3, stream=True)]
        parts = [chunk.choices[0].logprobs for chunk in stream if chunk.choices]
        assert [offset for part in parts for offset in part.text_offset] == found.text_offset
        assert [v for part in parts for v in part.token_logprobs][1:] == pytest.approx(values, abs=1e-4)


def test_offsets_of_characters_of_several_tokens(client: openai.OpenAI) -> None:
    prompt = "# h\u00e9llo \u2192 \U0001f40d!"
    options = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 0}
    choice = client.completions.create(**options).choices[0]
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert sum("\ufffd" in token for token in tokens) > 4
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if "\ufffd" not in token:
            assert choice.text[offset : offset + len(token)] == token
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True) if chunk.choices]
    assert [offset for part in parts for offset in part.text_offset] == offsets


def test_echoes_of_special_tokens(model: PreTrainedModel) -> None:
    """Those that the text has, but not those that the tokenizer adds, or among token ids."""
    tokenizer = make_tokenizer(None)
    adding = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    tokenizer.backend_tokenizer.post_processor = adding
    with serving(model, tokenizer) as address:
        for prompt, text, offsets in (
            ("ab", "ab", [0, 0, 1, 2]),
            ([0, *encode("a"), 0], "a", [0, 0, 1, 1]),
            ("a<eos>b", "a<eos>b", [0, 0, 1, 6, 7]),
        ):
            # A text of its own, as a random model may write a part of a character.
            options = {"max_tokens": 1, "logit_bias": {encode("c")[0]: 100}, "echo": True, "logprobs": 0}
            choice = post(address, prompt=prompt, **options).json()["choices"][0]
            assert choice["text"].startswith(text)
            assert choice["logprobs"]["text_offset"] == offsets
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def encode_answer(plain: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    row = torch.tensor([ids])
    output = plain.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=count, do_sample=False)
    return output[0, len(ids) :].tolist()


def test_logprobs_of_messages(client: openai.OpenAI, address: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    done = client.chat.completions.create(**options, logprobs=True, top_logprobs=2).choices[0]
    assert done.logprobs is not None
    content = done.logprobs.content or []
    assert len(content) == 8 or done.finish_reason == "stop"
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token, "greedy"
        assert len(entry.top_logprobs) == 2
        assert bytes(entry.bytes or []).decode(errors="replace") == entry.token
    text = b"".join(bytes(entry.bytes or []) for entry in content).decode(errors="replace")
    assert text == done.message.content
    assert client.chat.completions.create(**options).choices[0].logprobs is None
    refused = post(address, "/v1/chat/completions", messages=messages, top_logprobs=2)
    assert refused.status_code == 400
    assert "top_logprobs needs logprobs" in refused.json()["error"]["message"]


def test_async_and_aborted_streams(address: str, model: PreTrainedModel) -> None:
    """Streams that the client closes on the way free their pages; others go on."""

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=WAIT) as client:
            options = {"model": "tiny", "prompt": "a", "max_tokens": 300, "temperature": 0, "stream": True}
            options["extra_body"] = {"ignore_eos": True}
            kept = await client.completions.create(**options)
            for _ in range(6):
                closed = await client.completions.create(**options)
                async for _ in closed:
                    break
                await closed.close()
            return "".join([chunk.choices[0].text async for chunk in kept])

    assert len(asyncio.run(ask())) > 100
    wait_until_idle(address, model)


def wait_until_idle(address: str, model: PreTrainedModel) -> None:
    """All requests have ended soon, and all pages are free."""
    deadline = time.monotonic() + WAIT
    while metric(address, "vllm:num_requests_running") or metric(address, "vllm:num_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pool = model.specmemo.pool
    assert pool.free_pages == pool.num_pages


def metric(address: str, name: str) -> float:
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    (value,) = [line.split()[-1] for line in lines if line.split(" ")[0] == name]
    return float(value)


def test_clients_that_vanish(address: str, model: PreTrainedModel) -> None:
    """Sockets closed before, during and after a request, whole or streamed: nothing leaks, the server answers on."""
    host, port = address.removeprefix("http://").split(":")
    files = len(os.listdir("/proc/self/fd"))
    for i in range(60):
        body = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": i % 3 > 0}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        sent = f"{head}\r\n\r\n".encode() + body
        with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
            connection.sendall(sent[: [len(sent) // 2, len(sent), len(sent)][i % 3]])
            if i % 3 == 2:
                assert connection.recv(64).startswith(b"HTTP/1.1 200")
    wait_until_idle(address, model)
    assert post(address, prompt="a", max_tokens=3).status_code == 200
    deadline = time.monotonic() + WAIT
    while len(os.listdir("/proc/self/fd")) > files + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= files + 2


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        (
            {"prompt": "a", "max_tokens": 600},
            400,
            "the prompt has 1 tokens and max_tokens is 600, together they may be 512",
        ),
        ({"prompt": "a" * 600}, 400, "the prompt has 600 tokens"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": []}, 400, "prompt is an empty list"),
        ({"prompt": [[]]}, 400, "the prompt is empty"),
        ({"prompt": ["a", ""]}, 400, "prompt[1] is empty"),
        ({"prompt": [[1], [999]]}, 400, "prompt[1] has the token 999, the last one is 256"),
        (
            {"prompt": 3},
            400,
            "prompt: expected a text, token ids, or a list of at most 10000 texts or",
        ),
        (
            {"prompt": "a", "stop": 5},
            400,
            "stop: expected a text or at most 16 texts, of 1 to 1000 characters",
        ),
        ({}, 400, "prompt: Field required"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature: Input should be greater than or equal to 0, got -1"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs: "),
        ({"prompt": "a", "best_of": 3}, 400, "best_of: Input should be 1, got 3"),
        ({"prompt": "a", "best_of": True}, 400, "best_of: expected a number, got True"),
        ({"prompt": "a", "suffix": "b"}, 400, "unknown field 'suffix'"),
        ({"prompt": "a", "stop": "x" * 1001}, 400, "of 1 to 1000 characters each, got 'xxxx"),
        ({"prompt": "a", "stop": ""}, 400, "of 1 to 1000 characters each, got ''"),
        ({"prompt": "a", "stop": ["b", ""]}, 400, "of 1 to 1000 characters each, got ['b', '']"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0, which needs echo"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias has the token 999, the last one is 256"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, 400, "expected a token id, got '-1'"),
        ({"prompt": "a", "n": 0}, 400, "n: "),
        ({"prompt": "a", "max_tokens": True}, 400, "max_tokens: expected a number, got True"),
        ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens: Input should be a valid integer, got 1.5"),
        ({"prompt": "a", "temperature": "0.5"}, 400, "temperature: expected a number, got '0.5'"),
        ({"prompt": "a", "logprobs": True}, 400, "logprobs: expected a number, got True"),
        ({"prompt": "a", "echo": "yes"}, 400, "echo: Input should be a valid boolean"),
        ({"prompt": [True, False]}, 400, "prompt: expected a text, token ids"),
        ({"prompt": "a", "logit_bias": {" 5 ": 1}}, 400, "expected a token id, got ' 5 '"),
        ({"prompt": "a", "logit_bias": {"5": "1"}}, 400, "logit_bias.5: expected a number, got '1'"),
        ({"prompt": "a", "seed": 2**63}, 400, "less than or equal to 9223372036854775807, got 9223372036854775808"),
        ({"prompt": "a", "min_p": 2}, 400, "min_p: Input should be less than or equal to 1, got 2"),
        ({"prompt": "a", "logit_bias": {"5": 200}}, 400, "5: Input should be less than or equal to 100, got 200"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "the model 'gpt-4' isn't served, 'tiny' is"),
    ],
)
@pytest.mark.parametrize("stream", sample([False, True], [False]))
def test_wrong_requests(address: str, fields: dict[str, Any], status: int, says: str, stream: bool) -> None:
    response = post(address, **fields, stream=stream)
    assert response.status_code == status, response.text
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": [10**4000]}, "prompt"),
        ({"prompt": "a" * 513}, "prompt"),
        ({"prompt": "a", "max_tokens": 600}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**4000}, "max_tokens"),
        ({"prompt": "a", "n": 10**4000}, "n"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"9" * 4000: 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias.999999999999...9999999999999.[key]"),
        ({"prompt": "a", "x" * 5000: 1}, "xxxxxxxxxxxx...xxxxxxxxxxxxx"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "stream_options": {}}, "stream_options"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "max_completion_tokens": 2}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 600}, "max_completion_tokens"),
    ],
)
def test_fields_of_errors(address: str, fields: dict[str, Any], param: str) -> None:
    """Errors name the field, and show long values and names shortened."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    response = post_body(address, json.dumps(fields).encode(), path)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert len(error["message"]) < 250


def test_long_names_of_models(address: str) -> None:
    name = "x" * 100_000
    for response in (post(address, prompt="a", model=name), httpx.get(f"{address}/v1/models/{name[:5000]}")):
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert error["message"] == "the model 'xxxxxxxxxxxx...xxxxxxxxxxxxx' isn't served, 'tiny' is"


def test_wrong_messages(address: str) -> None:
    path = "/v1/chat/completions"
    user = {"role": "user", "content": "hi"}
    for fields, says in (
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [user], "response_format": {"type": "json_object"}}, "structured output isn't supported"),
        ({"messages": [user], "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens and max_completion_tokens are"),
        ({"messages": [user], "tool_choice": "required"}, "tool_choice: Input should be 'none' or 'auto', got 'req"),
        ({"messages": [user], "tools": [{"type": "function"}]}, "tools.0.function: Field required"),
        (
            {"messages": [user], "tools": [{"type": "function", "function": {"name": "f", "strict": 0}}]},
            "strict: expected true or false, got 0",
        ),
        (
            {"messages": [user], "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "strict: Input should be False, got True",
        ),
        ({"messages": [user], "parallel_tool_calls": 1}, "parallel_tool_calls: expected true or false, got 1"),
        ({"messages": [{"role": "tool", "content": "2"}]}, "messages.0: tool_call_id is missing"),
        (
            {"messages": [user | {"tool_call_id": "c"}]},
            "messages.0: tool_call_id belongs to messages of the role 'tool'",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0: content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "images, audio and"),
    ):
        response = post(address, path, **fields)
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"{", b'{"prompt": "a",', b"", b"\xff\xfe", b'{"prompt": "\xc3\x28"}', b'{"prompt": "\\ud800"}', b"[]", b"NaN"],
)
def test_bodies_of_nonsense(address: str, body: bytes) -> None:
    response = post_body(address, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "prompt" if b"ud800" in body else None)
    if body == b'{"prompt": "a",':
        assert "the body isn't JSON (at character 15)" in error["message"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": "\xc3\x28"}', "'utf-8' codec can't decode byte 0xc3 in position 12: invalid continuation byte"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "integer string conversion: value has 5000 digits"),
        (b"[" * 100_000, "recursion"),
    ],
    ids=["utf-8", "digits", "depth"],
)
def test_bodies_that_can_not_be_parsed(address: str, body: bytes, reason: str) -> None:
    response = post_body(address, body)
    assert response.status_code == 400
    assert "There was an error parsing the body: " in response.json()["error"]["message"]
    assert reason in response.json()["error"]["message"]
    assert "sys." not in response.json()["error"]["message"]


def test_values_that_sampling_refuses_are_a_400(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TypeError("seed is wrong")

    monkeypatch.setattr(CompletionRequest, "sampling", refuse)
    response = post(address, prompt="a")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "seed is wrong")


@pytest.mark.parametrize(("kind", "says"), [("text/plain", "text/plain"), (None, "missing")], ids=["text", "none"])
def test_a_body_of_another_type(address: str, kind: str | None, says: str) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = httpx.post(f"{address}/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 400
    expected = f"the header content-type is {says}, it must be application/json"
    assert response.json()["error"]["message"] == expected


def test_a_prompt_without_room_for_a_token(address: str) -> None:
    response = post(address, prompt="a" * 512, max_tokens=0, echo=True)
    expected = "the prompt has 512 tokens and max_tokens is 0, together they may be 512, one of them new"
    assert expected in response.json()["error"]["message"]


def test_defaults_of_the_model(plain: PreTrainedModel, model: PreTrainedModel) -> None:
    """Fields that a request leaves out have the values of the model's generation configuration."""
    own = copy.deepcopy(model.generation_config)
    model.generation_config.update(repetition_penalty=1.7, top_k=3, temperature=0.5)
    try:
        with serving(model, make_tokenizer(None)) as address:
            text = post(address, prompt="a", max_tokens=12, temperature=0).json()["choices"][0]["text"]
            other = post(address, prompt="a", max_tokens=12, temperature=0, repetition_penalty=1.0)
    finally:
        model.generation_config = own
    ids = encode("a")
    assert text == generated(plain, ids, 12, repetition_penalty=1.7)
    assert other.json()["choices"][0]["text"] == generated(plain, ids, 12) != text
    left_out = CompletionRequest(prompt="a").sampling({"top_k": 3, "temperature": 0.5})
    assert (left_out.top_k, left_out.temperature, left_out.top_p) == (3, 0.5, 1.0)
    given = CompletionRequest(prompt="a", top_k=0, temperature=1.0).sampling({"top_k": 3, "temperature": 0.5})
    assert (given.top_k, given.temperature) == (0, 1.0)


def test_wrong_defaults_of_the_model() -> None:
    """They have the limits of a request's fields, and its forms: 20.0 is an integer, -1 all tokens."""
    for config, says in (
        ({"top_p": 3.0}, "top_p: Input should be less than or equal to 1, got 3.0"),
        ({"temperature": "hot"}, "temperature: expected a number, got 'hot'"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0, got -1"),
        ({"repetition_penalty": 0}, "repetition_penalty: Input should be greater than 0, got 0"),
        ({"top_k": -5}, "top_k: Input should be greater than or equal to -1, got -5"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"generation_config.json: {says}")):
            sampling_defaults(SimpleNamespace(**config))
    defaults = sampling_defaults(SimpleNamespace(top_k=20.0, top_p=None, do_sample=True))
    assert defaults == {"top_k": 20}
    assert CompletionRequest(prompt="a").sampling(sampling_defaults(SimpleNamespace(top_k=-1))).top_k == 0


@pytest.mark.slow
def test_limits(model: PreTrainedModel) -> None:
    """A key, the size of a body, and requests that wait: each with its status; then the server answers again."""
    limits = ServerLimits(api_key="sesame", max_body=2000, shutdown_seconds=5)
    with serving(model, make_tokenizer(None), limits, max_waiting=3) as address:
        assert post(address, prompt="a").status_code == 401
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
        headers = {"authorization": "Bearer sesame", "x-request-id": "mine"}
        with httpx.Client(base_url=f"{address}/v1", headers=headers, timeout=WAIT) as session:
            assert session.get("/models").json()["data"][0]["id"] == "tiny"
            assert session.get("/models/tiny").headers["x-request-id"] == "mine"
            assert session.get("/models/other").json()["error"]["code"] == "model_not_found"
            unknown = session.get("/nothing")
            assert unknown.status_code == 404
            assert unknown.json()["error"]["code"] is None
            assert unknown.json()["error"]["message"] == "GET /v1/nothing: Not Found"
            assert session.post("/completions", json={"prompt": "a" * 3000}).status_code == 413
            long = {"prompt": ["a"] * 3, "max_tokens": 400, "ignore_eos": True}
            with ThreadPoolExecutor(6) as threads:
                answers = [*threads.map(lambda _: session.post("/completions", json=long), range(6))]
            assert {answer.status_code for answer in answers} == {200, 429}
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert refused.headers["retry-after"] == "1"
            assert "max_waiting is 3" in refused.json()["error"]["message"]
            never = session.post("/completions", json=long | {"n": 2})
            assert never.status_code == 400
            assert "3 prompts with n = 2 have 6 answers, a request may have 3" in never.json()["error"]["message"]
            wait_until_idle(address, model)
            assert session.post("/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.slow
def test_answers_that_take_too_long(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with a 504, or an error in the stream behind the text so far; their pages are free."""
    from specmemo_kernels.engine.decode import SpecDecoder

    step = SpecDecoder.step

    def slow(decoder: SpecDecoder) -> object:
        time.sleep(0.05)
        return step(decoder)

    with serving(model, make_tokenizer(None), max_seconds=1.5) as address:
        case = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}
        with monkeypatch.context() as patched:
            patched.setattr(SpecDecoder, "step", slow)
            response = post(address, **case)
            assert response.status_code == 504
            assert "more than 1.5 seconds" in response.json()["error"]["message"]
            lines = post(address, **case, stream=True).text.split("\n\n")
        assert "choices" in lines[0]
        assert "more than 1.5 seconds" in lines[-3]
        assert lines[-2] == "data: [DONE]"
        wait_until_idle(address, model)
        assert post(address, prompt="a", max_tokens=1).status_code == 200


def test_a_failed_step_is_a_500(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from specmemo_kernels.engine.decode import SpecDecoder

    def failing(decoder: SpecDecoder) -> object:
        raise ArithmeticError("on purpose")

    with serving(model, make_tokenizer(None)) as address:
        with monkeypatch.context() as patched:
            patched.setattr(SpecDecoder, "step", failing)
            response = post(address, prompt="a")
            assert response.status_code == 500
            assert "on purpose" in response.json()["error"]["message"]
        assert post(address, prompt="a").status_code == 200


def test_metrics(address: str, model: PreTrainedModel) -> None:
    before = metric(address, "vllm:generation_tokens_total")
    post(address, prompt=["a", "b"], max_tokens=7, ignore_eos=True, temperature=0)
    assert metric(address, "vllm:generation_tokens_total") == before + 14
    assert metric(address, "specmemo:budget_bytes") == 24 << 20
    assert metric(address, "vllm:time_to_first_token_seconds_count") >= 2
    assert 0 <= metric(address, "vllm:kv_cache_usage_perc") <= 1


def test_the_page(address: str) -> None:
    """Its files name no other place, and what it shows is there. (Looked at in a browser by hand.)"""
    page = httpx.get(address)
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for path in ("/", "/page.css", "/page.js"):
        file = httpx.get(address + path)
        assert file.status_code == 200
        assert "http://" not in file.text
        assert "https://" not in file.text
    script, state = httpx.get(f"{address}/page.js").text, httpx.get(f"{address}/stats").json()
    assert set(re.findall(r"state\.(\w+)", script)) == set(state)
    ids = set(re.findall(r'id="([\w-]+)"', page.text))
    assert set(re.findall(r'(?:\$|rows)\("([\w-]+)"', script)) <= ids
    assert state["budget"] == 24 << 20
    assert set(state["held"]) >= {"kv_pages", "heads"}


@pytest.mark.parametrize("path", [".", "model", "../root/model/"])
def test_the_name_and_the_address(folder: Path, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has its folder's name, however the folder is called, and a link's; addresses of IPv6 are in brackets."""

    def run_server(server: Server, sockets: list[socket.socket]) -> None:
        server._close(0.0)
        sockets[0].close()

    root = tmp_path / "root"
    root.mkdir()
    (root / "model").symlink_to(folder)
    monkeypatch.setattr(Server, "run", run_server)
    monkeypatch.chdir(folder if path == "." else root)
    done = run_command("serve", "--model", path, "--heads", "prompt-lookup", "--tree", "2", "--port", "0")
    name = folder.name if path == "." else "model"
    assert f"served as {name} on http://127.0.0.1:" in done.output
    assert url_of("::1", 80) == "http://[::1]:80"


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_the_command(folder: Path, end: signal.Signals) -> None:
    """From the command line to the last answer: a signal under load finishes what runs first."""
    arguments = ["--model", str(folder), "--heads", str(folder / "heads"), "--port", "0", "--shutdown-seconds", "20"]
    command = [sys.executable, "-m", "specmemo_kernels.cli", "serve", *arguments, "--memory-budget", "24MiB"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as server:  # fmt: skip
        assert server.stdout is not None
        address = server.stdout.readline().split(" on ")[1].removesuffix("/v1\n")
        case = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        with httpx.Client(timeout=WAIT) as session, ThreadPoolExecutor(6) as threads:
            while httpx.get(f"{address}/health").status_code != 200:
                time.sleep(0.05)
            answers = [threads.submit(session.post, f"{address}/v1/completions", json=case) for _ in range(6)]
            while metric(address, "vllm:num_requests_running") < 3:
                time.sleep(0.02)
            server.send_signal(end)
            texts = {answer.result().json()["choices"][0]["text"] for answer in answers}
        assert len(texts) == 1
        assert server.wait(WAIT) == (130 if end == signal.SIGINT else -end)


@given(st.lists(st.integers(0, 256), min_size=1, max_size=40), st.lists(st.text(max_size=3), max_size=3), st.data())
def test_text_streams(ids: list[int], stop: list[str], data: st.DataObject) -> None:
    """Pieces of any sizes make the whole text up to the first stop string; bytes of one character stay together."""
    tokenizer = make_tokenizer(None)
    cut = data.draw(st.integers(0, len(ids) - 1))
    prompt, new = ids[:cut], ids[cut:]
    context = prompt[-6:]
    whole = tokenizer.decode(context + new, skip_special_tokens=True)
    whole = whole[len(tokenizer.decode(context, skip_special_tokens=True)) :]
    strings = [s for s in stop if s] + ([whole[2:4]] if len(whole) > 4 and data.draw(st.booleans()) else [])
    stream, text, at = TextStream(tokenizer, prompt, strings), "", 0
    while at < len(new):
        size = data.draw(st.integers(1, 5))
        text += stream.feed(new[at : at + size])
        at += size
        assert all(s not in text for s in strings)
    text += stream.end()
    if "\ufffd" not in whole:  # broken characters may be decoded otherwise in parts
        assert text == whole[: min((p for s in strings if (p := whole.find(s)) >= 0), default=len(whole))]


def test_long_stop_strings_are_cheap() -> None:
    """The time of a piece depends on the text that is held back, not on the stop strings' lengths."""
    tokenizer, token = make_tokenizer(None), encode("a")[0]
    stream = TextStream(tokenizer, [], ["b" * 100_000 + str(i) for i in range(16)])
    started = time.monotonic()
    assert "".join(stream.feed([token]) for _ in range(100)) == "a" * 100
    assert time.monotonic() - started < 5


def test_half_characters_are_cheap() -> None:
    """A text that never ends at a whole character isn't decoded again from its beginning, and comes on the way."""
    tokenizer, half = make_tokenizer(None), encode("ä")[0]
    decoded: list[int] = []

    class Counting:
        def decode(self, ids: list[int], **options: Any) -> str:
            decoded.append(len(ids))
            return tokenizer.decode(ids, **options)

    stream = TextStream(Counting(), [])
    parts = [stream.feed([half]) for _ in range(1000)]
    assert sum(map(bool, parts)) > 10
    assert "".join(parts) + stream.end() == tokenizer.decode([half] * 1000)
    assert sum(decoded) < 1000 * 200


def test_a_stop_string_at_the_very_end(address: str, model: PreTrainedModel) -> None:
    """In text that only the end completes: half a character."""
    half = encode("ä")[0]
    fields = {"prompt": "a", "max_tokens": 1, "logit_bias": {str(half): 100}, "temperature": 0}
    choice = post(address, **fields).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("\ufffd", "length")
    choice = post(address, **fields, stop="\ufffd").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_texts_are_not_cleaned_up() -> None:
    """A tokenizer that would join "do" and "n't" in whole texts; streams have the pieces as they are."""
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("do ", -1.0), ("n't", -1.0)], unk_id=0))
    unigram.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=unigram, clean_up_tokenization_spaces=True)
    assert tokenizer.decode([1, 2]) == "don't"
    stream = TextStream(tokenizer, [])
    assert stream.feed([1]) + stream.feed([2]) + stream.end() == text_of(tokenizer, [1, 2]) == "do n't"
