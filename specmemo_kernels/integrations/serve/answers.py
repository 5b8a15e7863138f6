"""Answers of the engine to one HTTP request: prompts, pieces of text, and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jinja2 import TemplateError

from specmemo_kernels.arguments import shown
from specmemo_kernels.engine.scores import TokenScore
from specmemo_kernels.integrations.hf.batch import Request
from specmemo_kernels.integrations.hf.chat import longest_text
from specmemo_kernels.integrations.hf.engine import Engine, EngineClosed
from specmemo_kernels.integrations.hf.generation import Generation
from specmemo_kernels.integrations.hf.run import Piece
from specmemo_kernels.integrations.serve.errors import BadRequest
from specmemo_kernels.integrations.serve.messages import has_template, template_messages
from specmemo_kernels.integrations.serve.metrics import Metrics
from specmemo_kernels.integrations.serve.protocol import ChatRequest, CompletionRequest, sampling_defaults
from specmemo_kernels.integrations.serve.text import TextStream, text_of

Result = TypeVar("Result")
#: What templates raise for messages that they can't write; RecursionError is of deeply nested arguments or parameters.
_TEMPLATE_ERRORS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
)  # fmt: skip


class TookTooLong(RuntimeError):
    """A request whose answer wasn't complete in time; it was aborted."""


@dataclass(frozen=True)
class TextPiece:
    """New ``text`` of answer ``index``; ``finish_reason`` with the last one. ``tokens``: how many it took so far.

    ``scores``: of the tokens since the last piece. ``prompt_scores``: of the prompt's, with the first piece.
    """

    index: int
    text: str
    tokens: int
    finish_reason: str | None = None
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)

    def behind(self, text: str) -> TextPiece:
        """The piece with ``text`` before its own."""
        return replace(self, text=text + self.text)

    def without_tokens(self) -> TextPiece:
        """The piece of an answer of no tokens."""
        reason = "length" if self.finish_reason == "stop" else self.finish_reason
        return replace(self, text="", tokens=0, finish_reason=reason, scores=[])

    def joined(self, next_piece: TextPiece) -> TextPiece:
        """Both pieces of one answer as one."""
        scores = [*self.scores, *next_piece.scores]
        return replace(next_piece, text=self.text + next_piece.text, scores=scores, prompt_scores=self.prompt_scores)


class Model:
    """A served model: its engine, its tokenizer and its name.

    Args:
        max_seconds: how long an answer may take, waiting included; ``None``: no limit.

    Raises:
        ValueError: the model's generation configuration or the tokenizer's response template is wrong.
    """

    def __init__(
        self, name: str, engine: Engine, tokenizer: Any, metrics: Metrics, max_seconds: float | None = None
    ) -> None:
        self.name, self.engine, self.tokenizer, self.metrics = name, engine, tokenizer, metrics
        self.max_seconds = max_seconds
        self.created = int(time.time())
        self.defaults = sampling_defaults(engine.handle.model.generation_config)
        self.longest = longest_text(engine.handle.model)
        self.vocab_size = int(engine.handle.model.get_input_embeddings().weight.shape[0])
        self.parses_messages = has_template(engine.handle.model, tokenizer)
        self._texts = ThreadPoolExecutor(1, "specmemo-texts")  # one: each thread keeps memory of its own
        #: Most characters of a text; a longer one has too many tokens, so it isn't encoded.
        self._most_characters = self.longest * max(map(len, tokenizer.get_vocab()), default=1)

    async def prepared(self, request: CompletionRequest | ChatRequest) -> tuple[list[list[int]], list[Request]]:
        """The tokens of each prompt and the engine's :meth:`requests`, made by another thread.

        Raises:
            BadRequest: more answers than ever wait, a text that is too long or can't be encoded, or a wrong value.
        """
        given = ["chat"] if isinstance(request, ChatRequest) else request.prompts
        if (count := len(given) * request.n) > (most := self.engine.max_waiting):
            raise BadRequest(
                f"{len(given)} prompts with n = {request.n} have {count} answers, a request may have {most} (the "
                "server's --max-waiting); send several requests"
            )

        def made() -> tuple[list[list[int]], list[Request]]:
            if isinstance(request, ChatRequest):
                prompts = [self.chat_prompt(request)]
            else:
                prompts = [self.encode(text, field="prompt") if isinstance(text, str) else text for text in given]
            return prompts, self.requests(request, prompts)

        return await self.in_thread(made)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """The result of ``work`` on texts that can take a second; meanwhile other requests are answered."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    def chat_prompt(self, request: ChatRequest) -> list[int]:
        """The tokens of a conversation; without a chat template its texts, one per line.

        Raises:
            BadRequest: the template refuses these messages.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            if request.uses_tools:
                raise BadRequest("tools: the model has no chat template, so it can't be told about them", "tools")
            if any(message.of_tools for message in request.messages):
                raise BadRequest("messages: the model has no chat template to write calls and results", "messages")
            return self.encode("\n".join(message.text for message in request.messages), field="messages")
        try:
            text = self.tokenizer.apply_chat_template(
                template_messages(request), tools=request.template_tools, tokenize=False, add_generation_prompt=True
            )
        except _TEMPLATE_ERRORS as error:
            raise BadRequest(f"messages: the model's chat template refuses them: {error}", "messages") from error
        return self.encode(text, field="messages", special=False)

    def encode(self, text: str, *, field: str, special: bool = True) -> list[int]:
        """The tokens of a text of this field.

        Raises:
            BadRequest: it is longer than any prompt, or has half of a surrogate pair, which JSON allows and UTF-8
                doesn't.
        """
        if len(text) > self._most_characters:
            raise BadRequest(
                f"a text has {len(text)} characters, the {self.longest} tokens of prompt and answer have at most "
                f"{self._most_characters}; shorten it",
                field,
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"the text is no Unicode: {error}", field) from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return text_of(self.tokenizer, ids, special=special)

    def requests(self, request: CompletionRequest | ChatRequest, prompts: Sequence[list[int]]) -> list[Request]:
        """``n`` requests of the engine for each prompt, with a seed of its own each.

        Raises:
            BadRequest: a wrong value, or a prompt that leaves no room for new tokens; the message has the numbers.
        """
        if not prompts:
            raise BadRequest("prompt is an empty list; give a text or token ids", "prompt")
        try:
            sampling = request.sampling(self.defaults)
        except (TypeError, ValueError) as error:
            raise BadRequest(str(error)) from error
        last, requests = self.engine.handle.facts.vocab_size - 1, []
        if (token := max(sampling.logit_bias, default=0)) > last:
            raise BadRequest(f"logit_bias has the token {shown(token)}, the last one is {last}", "logit_bias")
        for i, prompt in enumerate(prompts):
            limit = self._new_tokens("the prompt" if len(prompts) == 1 else f"prompt[{i}]", prompt, request)
            requests += [
                Request(
                    prompt,
                    limit,
                    [] if request.ignore_eos else None,
                    sampling.with_seed(sampling.seed + k),
                    logprobs=request.top,
                    prompt_logprobs=request.scores_prompt,
                )
                for k in range(request.n)
            ]
        return requests

    def _new_tokens(self, name: str, prompt: list[int], request: CompletionRequest | ChatRequest) -> int:
        """Most new tokens behind a prompt, which is called ``name`` in messages. For a limit of 0 one, not returned.

        Raises:
            BadRequest: an empty or too long prompt, or one with an unknown token.
        """
        limit, field = request.limit, request.prompt_field
        if not prompt:
            raise BadRequest(f"{name} is empty; give at least one token", field)
        if max(prompt) >= self.vocab_size:
            raise BadRequest(f"{name} has the token {shown(max(prompt))}, the last one is {self.vocab_size - 1}", field)
        limit_name = "max_completion_tokens" if "max_completion_tokens" in request.model_fields_set else "max_tokens"
        room = self.longest - len(prompt)
        new = max(1, room if limit is None else limit)
        if new > room:
            remedy = f"; shorten the prompt or lower {limit_name}" if limit else ", one of them new; shorten the prompt"
            raise BadRequest(
                f"{name} has {len(prompt)} tokens and {limit_name} is {shown(new if limit is None else limit)}, "
                f"together they may be {self.longest}{remedy}",
                limit_name if room > 0 else field,
            )
        return new

    async def answer(
        self, requests: Sequence[Request], stop: Sequence[str], *, special: bool = False
    ) -> AsyncGenerator[TextPiece]:
        """Generate requests together; their pieces in the order of generation.

        When the iterator is closed, what still runs is aborted.

        Args:
            special: special tokens are part of the text.

        Raises:
            BadRequest, QueueFull, EngineClosed: the engine doesn't take them; nothing runs then.
            GenerationFailed: a request ended with an error; the others are aborted.
            TookTooLong: they weren't complete in time, and are aborted.
        """
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()

        def on_piece(piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed, which aborts the request
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        started = time.monotonic()
        texts = [TextStream(self.tokenizer, list(request.prompt), stop, special=special) for request in requests]
        with contextlib.ExitStack() as stack:
            generations = []
            for request in requests:
                try:
                    generation = self.engine.submit(request, on_piece=on_piece)
                except (TypeError, ValueError) as error:  # BudgetError among them
                    raise BadRequest(str(error)) from error
                except EngineClosed as error:
                    raise EngineClosed("the server is stopping; send the request again later") from error
                stack.callback(generation.abort)
                generations.append(generation)
            self.metrics.prompt_tokens.inc(sum(len(request.prompt) for request in requests))
            answers = {g.index: _Answer(i, g, texts[i], started) for i, g in enumerate(generations)}
            running = len(answers)
            while running:
                piece = await self._in_time(pieces.get(), started)
                answer = answers[piece.index]
                if answer.finished:
                    continue
                self.metrics.generation_tokens.inc(len(piece.tokens))
                text = answer.take(piece, self.metrics)
                running -= answer.finished
                if text is not None:
                    yield text

    async def _in_time(self, work: Coroutine[Any, Any, Piece], started: float) -> Piece:
        limit = self.max_seconds
        try:
            return await asyncio.wait_for(work, None if limit is None else started + limit - time.monotonic())
        except TimeoutError as error:
            raise TookTooLong(
                f"the answer took more than {limit:g} seconds, this server's limit; ask for fewer tokens"
            ) from error


class _Answer:
    """One generation, and its text."""

    def __init__(self, index: int, generation: Generation, text: TextStream, started: float) -> None:
        self._index, self._generation, self._text = index, generation, text
        self._started, self._first, self.finished = started, 0.0, False
        self._scores: list[TokenScore] = []
        self._taken = 0

    def take(self, piece: Piece, metrics: Metrics) -> TextPiece | None:
        """The text of a piece, if there is new one or the answer has finished."""
        now = time.monotonic()
        if piece.tokens and not self._first:
            self._first = now
            metrics.first_token.observe(now - self._started)
        new = self._text.feed(piece.tokens)
        self._scores += piece.scores
        if not self._text.stopped and not piece.finished:
            return self._piece(new, None) if new else None
        self.finished = True
        new += self._text.end()
        reason = "stop"
        if self._text.stopped:
            self._generation.abort()
        else:
            ended = self._generation.result(0).finish_reason
            reason = {"eos": "stop", "aborted": "abort"}.get(ended, ended)
        if self._text.tokens > 1:
            metrics.between_tokens.observe((now - self._first) / (self._text.tokens - 1))
        return self._piece(new, reason)

    def _piece(self, text: str, reason: str | None) -> TextPiece:
        """The text since the last piece, with the scores of the tokens since then."""
        first, self._taken = self._taken, self._text.tokens
        scores = self._scores[first : self._taken]
        prompt_scores = list(self._generation.sequence.prompt_scores) if not first else []
        return TextPiece(self._index, text, self._taken, reason, scores, prompt_scores)
