"""Requests of OpenAI's completions and chat completions, and the token counts of their responses.

Field names, defaults and limits are those of OpenAI's API reference; ``top_k``, ``min_p``, ``repetition_penalty`` and
``ignore_eos`` those of vLLM. Fields that aren't implemented are refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from specmemo_kernels.engine.sampling import Sampling
from specmemo_kernels.integrations.serve.errors import BadRequest, field_error
from specmemo_kernels.integrations.serve.fields import (
    FewErrors,
    Fields,
    FirstError,
    Flag,
    Integer,
    One,
    OnlyFalse,
    OnlyTrue,
    Real,
    Several,
    StopString,
    TokenId,
    TokenIds,
    expecting,
)


class StreamOptions(Fields):
    include_usage: Flag = False


class ResponseFormat(Fields):
    """Only text; structured output isn't implemented."""

    type: Literal["text"]


class _Generation(Fields):
    """What both kinds of request have. ``user`` and ``metadata`` have no effect on the tokens.

    ``prompt_field``: the field that has the prompt.
    """

    prompt_field: ClassVar[str]
    model: str | None = None
    n: Integer = Field(1, ge=1, le=128)
    stop: Annotated[
        StopString | Annotated[list[StopString], Field(max_length=16)] | None,
        expecting("a text or at most 16 texts, of 1 to 1000 characters each"),
    ] = None
    seed: Integer | None = Field(None, ge=-(2**63), le=2**63 - 1)
    temperature: Real | None = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: Real | None = Field(1.0, gt=0, le=1)
    top_k: Integer | None = Field(0, ge=-1)
    min_p: Real | None = Field(0.0, ge=0, le=1)
    repetition_penalty: Real | None = Field(1.0, gt=0, allow_inf_nan=False)
    presence_penalty: Real | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: Real | None = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenId, Annotated[Real, Field(ge=-100, le=100)]], FewErrors] | None = None
    max_tokens: Integer | None = Field(None, ge=0)
    ignore_eos: Flag = False
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], FewErrors] | None = None

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream to be true", "stream_options")
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """Most new tokens; ``None``: as many as fit."""
        return self.max_tokens

    def sampling(self, model_defaults: Mapping[str, Any]) -> Sampling:
        """The sampling of the first of ``n`` answers; without ``seed``, of a random one.

        ``model_defaults``: of fields that the request leaves out (:func:`sampling_defaults`).
        """
        defaults = {name: field.default for name, field in type(self).model_fields.items()} | dict(model_defaults)

        def value(name: str) -> Any:
            given = getattr(self, name) if name in self.model_fields_set else None
            return defaults[name] if given is None else given

        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        seed = secrets.randbits(62) if self.seed is None else self.seed
        return Sampling(
            seed=seed, top_k=max(0, value("top_k")), logit_bias=self.logit_bias or {},
            **{name: value(name) for name in names},
        )  # fmt: skip


#: Settings of a model's generation configuration that are fields of a request.
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(config: Any) -> dict[str, Any]:
    """The values of a model's generation configuration for fields that a request leaves out.

    Raises:
        ValueError: a value that a request can't have.
    """
    try:
        checked = _Generation.model_validate({name: getattr(config, name, None) for name in _SETTINGS})
    except ValidationError as error:
        raise ValueError(f"generation_config.json: {field_error(error.errors()[0])[0]}") from error
    return checked.model_dump(exclude_unset=True)


class CompletionRequest(_Generation):
    """``POST /v1/completions``."""

    prompt_field = "prompt"
    prompt: Annotated[
        str | TokenIds | Annotated[list[str], Several] | Annotated[list[TokenIds], Several],
        expecting("a text, token ids, or a list of at most 10000 texts or token ids"),
    ]
    echo: Flag | None = False
    logprobs: Integer | None = Field(None, ge=0, le=20)
    best_of: One | None = None

    @model_validator(mode="after")
    def _returns_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens is 0, which needs echo to be true; give at least 1", "max_tokens")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each prompt; a single one too."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's tokens are scored."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def top(self) -> int | None:
        """How many of the best tokens each token's score lists; ``None``: no scores."""
        return self.logprobs

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens


class TextPart(Fields):
    type: Literal["text"]
    text: str


class FunctionCall(Fields):
    """``arguments``: a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Fields):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(Fields):
    """``strict`` would need structured output, which isn't implemented."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: OnlyFalse | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class Message(Fields):
    """A message of a conversation: text, and tool calls of the assistant."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[TextPart], FirstError] | None,
        expecting("a text or text parts (images, audio and files aren't supported)"),
    ] = None
    name: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], FirstError] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing; only an assistant's message with tool_calls may have none")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is missing; it names the call that the message answers")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"tool_call_id belongs to messages of the role 'tool', this one is '{self.role}'")
        return self

    @property
    def of_tools(self) -> bool:
        """Whether it calls tools, or has a result."""
        return self.role == "tool" or bool(self.tool_calls)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class ChatRequest(_Generation):
    """``POST /v1/chat/completions``."""

    prompt_field = "messages"
    messages: Annotated[list[Message], Field(min_length=1), FirstError]
    max_tokens: Integer | None = Field(None, ge=1)
    max_completion_tokens: Integer | None = Field(None, ge=1)
    response_format: Annotated[
        ResponseFormat | None, expecting('{"type": "text"} (structured output isn\'t supported)')
    ] = None
    logprobs: Flag | None = False
    top_logprobs: Integer | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], FirstError] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: OnlyTrue | None = None

    @property
    def uses_tools(self) -> bool:
        """Whether the prompt has tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools in the prompt."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()] if self.uses_tools else None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise BadRequest("max_tokens and max_completion_tokens are the same limit; give one of them", "max_tokens")
        return self

    @property
    def scores_prompt(self) -> bool:
        return False

    @property
    def top(self) -> int | None:
        """As in :class:`CompletionRequest`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Token counts of a response."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
