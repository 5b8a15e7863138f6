"""Tool calls: what the chat template is told, and what is read from the model's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server import serving
from test_cli import TEMPLATE, make_tokenizer, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.integrations.serve.messages import MessageParser
from specmemo_kernels.integrations.serve.protocol import ChatRequest

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]
#: Writes the tools' names and each call's arguments as JSON.
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{{ m.tool_call_id or '' }};{% endfor %}"
)
#: As Qwen writes them.
RESPONSES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder: Path = save_model(tmp_path_factory.mktemp("model"), TEMPLATE)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def tokenizer_with(responses: dict[str, Any]) -> Any:
    tokenizer = make_tokenizer(TOOL_TEMPLATE)
    tokenizer.response_template = responses
    return tokenizer


def test_the_template_and_the_answer(model: PreTrainedModel) -> None:
    """The prompt has tools, calls and results; a call in the text is a ``tool_calls`` of the message and of streams."""
    prompt = '[add]user:1 + 1?;assistant:add({"a": 1});tool:2c1;'
    ids = make_tokenizer(None)(prompt, add_special_tokens=False)["input_ids"]
    row = torch.tensor([ids])
    output = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=40, do_sample=False)
    text = make_tokenizer(None).decode(output[0, len(ids) :])
    responses = RESPONSES | {"fields": dict(RESPONSES["fields"])}
    call = {"type": "function", "function": {"name": "add", "arguments": "{content}"}}
    responses["fields"]["tool_calls"] = {
        "open": text[10:14], "close": text[20:24], "content": "text", "repeats": True, "transform": call
    }  # fmt: skip
    assert text.index(text[10:14]) == 10
    with sk.patch(model, "prompt-lookup"), serving(model, tokenizer_with(responses)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        options: dict[str, Any] = {
            "model": "tiny", "messages": MESSAGES, "tools": [TOOL], "temperature": 0, "max_tokens": 40,
            "stop": text[30:34],
        }  # fmt: skip
        choice = client.chat.completions.create(**options).choices[0]
        stream = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
        other = client.chat.completions.create(**options | {"tool_choice": "none"})
    assert choice.finish_reason == stream[-1].finish_reason == "tool_calls"
    assert [c.function.arguments for c in choice.message.tool_calls or []] == [text[14:20]]
    assert choice.message.content == text[:10] + text[24:30]
    calls = [call for part in stream for call in part.delta.tool_calls or []]
    assert [(c.index, c.function and c.function.name, c.function and c.function.arguments) for c in calls] == [
        (0, "add", text[14:20])
    ]
    assert "".join(part.delta.content or "" for part in stream) == choice.message.content
    assert other.usage is not None
    assert other.usage.prompt_tokens == len(ids) - len("[add]")


def test_tools_without_a_template(model: PreTrainedModel) -> None:
    """Neither calls nor results are dropped."""
    with sk.patch(model, "prompt-lookup"), serving(model, make_tokenizer(None)) as address:
        for messages in (MESSAGES, MESSAGES[1:2], MESSAGES[2:]):
            refused = httpx.post(f"{address}/v1/chat/completions", json={"messages": messages})
            assert refused.status_code == 400
            assert "no chat template to write calls and results" in refused.json()["error"]["message"]
        fields = {"messages": [MESSAGES[0], {"role": "assistant", "content": "2", "tool_calls": []}], "max_tokens": 1}
        assert httpx.post(f"{address}/v1/chat/completions", json=fields).status_code == 200


PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("content"), st.text("abc ", min_size=1, max_size=6)),
        st.tuples(st.just("reasoning_content"), st.text("xyz", min_size=1, max_size=6)),
        st.tuples(st.just("tool_calls"), st.integers(0, 99)),
    ),
    max_size=5,
)


@settings(deadline=None)
@given(PARTS, st.data())
def test_messages_in_pieces(parts: list[tuple[str, Any]], data: st.DataObject) -> None:
    """Whatever the pieces, their sum is the message."""
    marks = {"content": "{}", "reasoning_content": "<think>{}</think>", "tool_calls": "<tool_call>{}</tool_call>"}
    calls = [json.dumps({"name": "add", "arguments": {"a": value}}) for name, value in parts if name == "tool_calls"]
    texts, rest = [], iter(calls)
    for name, value in parts:
        texts.append(marks[name].format(next(rest) if name == "tool_calls" else value))
    text = "".join(texts) + "<end>"
    request = ChatRequest(messages=[{"role": "user", "content": "?"}], tools=[TOOL])
    parser = MessageParser.of(None, tokenizer_with(RESPONSES), [], request)
    deltas, at = [], 0
    while at < len(text):
        end = at + data.draw(st.integers(1, 7))
        deltas.append(parser.feed(text[at:end], last=end >= len(text)))
        at = end
    expected = {kind: "".join(v for k, v in parts if k == kind) for kind in ("content", "reasoning_content")}
    for kind, whole in expected.items():
        assert "".join(delta.get(kind) or "" for delta in deltas) == whole == (parser.message.get(kind) or "")
    found = parser.message.get("tool_calls", [])
    assert [json.loads(c["function"]["arguments"]) for c in found] == [{"a": v} for k, v in parts if k == "tool_calls"]
    assert len({c["id"] for c in found}) == len(found)
    assert parser.calls_tools == bool(calls)


@pytest.mark.parametrize("size", [1, 5, 14, 100])
@pytest.mark.parametrize(
    "text", ['Sure. <tool_call>{"name": "add", "argum', "Sure.<tool_call>no JSON</tool_call> and more"]
)
def test_broken_calls_are_text(text: str, size: int) -> None:
    """A call that was cut off or isn't JSON is the message's content; nothing is lost, whatever the pieces."""
    request = ChatRequest(messages=[{"role": "user", "content": "?"}], tools=[TOOL])
    parser = MessageParser.of(None, tokenizer_with(RESPONSES), [], request)
    for begin in range(0, len(text), size):
        parser.feed(text[begin : begin + size], last=begin + size >= len(text))
    assert parser.message == {"content": text}


def answer_of(text: str, prompt: str = "", **fields: Any) -> dict[str, Any]:
    """The message of an answer that comes in pieces of seven characters."""
    tokenizer = tokenizer_with(RESPONSES)
    request = ChatRequest(messages=[{"role": "user", "content": "?"}], **{"tools": [TOOL]} | fields)
    parser = MessageParser.of(None, tokenizer, tokenizer(prompt)["input_ids"], request)
    for begin in range(0, len(text), 7):
        parser.feed(text[begin : begin + 7], last=begin + 7 >= len(text))
    return parser.message


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
def test_calls_that_the_request_forbids_are_text(fields: dict[str, Any]) -> None:
    text = f"<think>x</think>A\n{CALL}B{CALL}"
    assert answer_of(text, **fields) == {"content": f"A\n{CALL}B{CALL}", "reasoning_content": "x"}


@pytest.mark.parametrize("end", ["", "</tool_call> and more"])
@pytest.mark.parametrize(
    "call", ['{"name": 5, "arguments": {}}', '{"name": null, "arguments": {}}', '{"name": "\\ud83d", "arguments": {}}',
             '{"name": "add", "arguments": {"a": ' + "[" * 2000, "[" * 2000 + "]" * 2000],
)  # fmt: skip
def test_calls_that_json_allows_only(call: str, end: str) -> None:
    """Names that aren't text, and JSON that is too deep for Python's parser."""
    text = f"A<tool_call>{call}{end}"
    message = answer_of(text)
    assert message == {"content": text}
    json.dumps(message, ensure_ascii=False).encode()


def test_a_prompt_that_is_no_answer() -> None:
    """Without the template's anchor transformers parses the whole prompt."""
    assert answer_of("hi", "<tool_call>no JSON</tool_call>") == {"content": "hi"}
