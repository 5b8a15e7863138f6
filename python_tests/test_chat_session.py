"""Conversations through ``ChatSession``: replies, computed tokens, and the model's input."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from selection import sample
from test_cli import TEMPLATE, make_tokenizer
from tiny_models import OracleDrafter, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextStreamer,
)

import specmemo_kernels as sk

MESSAGES = ["hello", "and then?", "why is that so", "x"]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=11, vocab_size=257)


def own(model: PreTrainedModel, ids: list[int], new: int) -> list[int]:
    """The unpatched model's continuation of these tokens."""
    row = torch.tensor([ids])
    output = copy.deepcopy(model).generate(row, attention_mask=torch.ones_like(row), max_new_tokens=new)
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("template", sample([TEMPLATE, None], [TEMPLATE]), ids=["template", "text"])
def test_each_turn_is_what_a_fresh_run_writes(model: PreTrainedModel, template: str | None) -> None:
    """The reply is the unpatched model's on the whole conversation; earlier turns aren't computed again."""
    tokenizer = make_tokenizer(template)
    with sk.patch(model, OracleDrafter([], 0.0, vocab=257), tree=3, page_size=4) as handle:
        if template is None:
            with pytest.warns(UserWarning, match="has no chat template; the model completes"):
                session = sk.ChatSession(model, tokenizer, max_new_tokens=12, do_sample=False)
        else:
            session = sk.ChatSession(model, tokenizer, max_new_tokens=12, do_sample=False)
        known, said = 0, ""
        for text in MESSAGES:
            handle.stats.reset()
            prompt = session.prompt(text)
            said += f"<user>{text}<assistant>" if template else f"\n{text}" if said else text
            assert tokenizer.decode(prompt) == said
            new = own(model, prompt, 12)
            reply = session.ask(text)
            assert reply == tokenizer.decode(new)
            assert handle.stats.reused_tokens == known
            assert handle.stats.prefill_tokens == len(prompt) - known
            known, said = len(prompt) + len(new) - 1, said + reply
        if template:
            assert session.messages[::2] == [{"role": "user", "content": text} for text in MESSAGES]
            assert [m["role"] for m in session.messages[1::2]] == ["assistant"] * len(MESSAGES)
        session.reset()
        assert session.prompt("hello") == tokenizer("<user>hello<assistant>" if template else "hello").input_ids


def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Two equal letters are one token, so text doesn't determine the tokens it was written with."""
    letters = list("ab<>userit :#")
    vocabulary = {letter: i for i, letter in enumerate(dict.fromkeys(letters))} | {"aa": 20, "bb": 21}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "a"), ("b", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("#"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.chat_template = template
    return made


class Writes:
    """Stands in for a model with given replies."""

    def __init__(self, replies: list[list[int]]) -> None:
        self.replies, self.prompts = replies, []
        self.device = torch.device("cpu")
        self.config = tiny_model("llama").config

    def generate(self, ids: torch.Tensor, **_: Any) -> torch.Tensor:
        self.prompts.append(ids[0].tolist())
        return torch.cat([ids, torch.tensor([self.replies[len(self.prompts) - 1]])], dim=1)


def test_a_reply_keeps_its_own_tokens() -> None:
    """Even if the tokenizer would split its text differently, alone or with the text that follows."""
    tokenizer = merging_tokenizer("{% for m in messages %}{{ m['content'] }}#{% endfor %}")
    a, b, hash_ = (tokenizer.convert_tokens_to_ids(letter) for letter in "ab#")
    writer = Writes([[a, a, a], [b, b]])
    session = sk.ChatSession(writer, tokenizer, max_new_tokens=5)
    assert session.ask("b") == "aaa"
    assert session.ask("bb") == "bb"
    assert writer.prompts[1] == [b, hash_, a, a, a, hash_, 21, hash_]
    assert tokenizer("b#aaa#bb#").input_ids == [b, hash_, 20, a, hash_, 21, hash_]
    assert session.prompt("a") == [*writer.prompts[1], b, b, hash_, a, hash_]


def test_a_template_that_changes_a_reply_gets_its_way() -> None:
    """What the template drops or rewrites of earlier turns stays dropped or rewritten."""
    tokenizer = merging_tokenizer("{% for m in messages %}{{ m['content'] | replace('ab', '') }}#{% endfor %}")
    a, b, hash_ = (tokenizer.convert_tokens_to_ids(letter) for letter in "ab#")
    writer = Writes([[a, b, a], [b]])
    session = sk.ChatSession(writer, tokenizer, max_new_tokens=5)
    session.ask("b")
    session.ask("b")
    assert writer.prompts[1] == [b, hash_, a, hash_, b, hash_]


def test_what_ends_a_reply_is_written_by_the_template(model: PreTrainedModel) -> None:
    """The model's end-of-sequence token isn't doubled, and isn't part of the reply."""
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}")
    eos = tokenizer.eos_token_id
    writer = Writes([[70, 71, eos], [72]])
    session = sk.ChatSession(writer, tokenizer, max_new_tokens=5)
    assert session.ask("x") == tokenizer.decode([70, 71])
    session.ask("y")
    (x,), (y,) = (tokenizer(letter).input_ids for letter in "xy")
    assert writer.prompts[1] == [x, eos, 70, 71, eos, y, eos]


def test_old_turns_go_when_there_is_no_room(model: PreTrainedModel) -> None:
    """The system message stays, whole turns are left out; a message that can't fit changes nothing."""
    tokenizer = make_tokenizer(TEMPLATE)
    session = sk.ChatSession(model, tokenizer, system="be brief", max_tokens=100, max_new_tokens=10, do_sample=False)
    for turn, text in enumerate("abc"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session.ask(20 * text)
        assert [w.category for w in caught] == [sk.LeftOutWarning] * (turn > 0)
    before = list(session.messages)
    asked = [message["content"][:1] for message in before if message["role"] == "user"]
    assert asked in (["c"], ["b", "c"])
    assert before[0] == {"role": "system", "content": "be brief"}
    with pytest.raises(sk.BudgetError, match=r"the message takes 123 tokens, there is room for 90 beside max_new_tok"):
        session.ask(90 * "d")
    assert session.messages == before
    with pytest.raises(ValueError, match="max_new_tokens is 100, it must be from 1 to 99"):
        sk.ChatSession(model, tokenizer, max_tokens=100, max_new_tokens=100)


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "text"])
def test_what_is_left_out_is_counted(template: str | None) -> None:
    """Once per turn, in tokens (here: bytes) and messages; the model reads the end of the conversation."""
    tokenizer = make_tokenizer(template)
    reply = tokenizer("r" * 10).input_ids
    writer = Writes([reply] * 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no chat template
        session = sk.ChatSession(writer, tokenizer, max_tokens=100, max_new_tokens=10)
    turns: list[str] = []
    left_out = 0
    for number, letter in enumerate("abcdef"):
        message = letter * 15
        turns.append(f"<user>{message}<assistant>" if template else f"\n{message}" if turns else message)
        whole = "".join(turns)
        kept, messages = turns, 0
        while template and len("".join(kept)) > 90:  # whole turns
            kept, messages = kept[1:], messages + 2
        expected = "".join(kept)[-90:]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prompt = session.prompt(message)
            assert not caught, "nothing is noted"
            session.ask(message)
        assert tokenizer.decode(writer.prompts[number]) == tokenizer.decode(prompt) == expected
        missing = len(whole) - len(expected)
        assert session.left_out == left_out + missing
        said = [str(w.message) for w in caught]
        if missing:
            left_out += missing
            what = f" ({messages} messages)" if template else ""
            assert said == [
                f"specmemo: the conversation no longer fits; its oldest {missing} tokens{what} are left out from this "
                f"turn on, {left_out} since it began"
            ]
            assert caught[0].category is sk.LeftOutWarning
        else:
            assert said == []
        turns = kept if template else [expected]
        turns[-1] += "r" * 10
    assert left_out > 50
    session.reset()
    assert session.left_out == 0


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "text"])
def test_a_message_is_never_cut(template: str | None) -> None:
    """A message that doesn't fit alone is an error, at any turn, and changes nothing."""
    tokenizer = make_tokenizer(template)
    writer = Writes([tokenizer("reply").input_ids] * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = sk.ChatSession(writer, tokenizer, max_tokens=100, max_new_tokens=10)
    extra = len("<user><assistant>") if template else 0
    for said in (0, 1):
        separator = 0 if template else said
        prompt, messages = session._ids, list(session.messages)
        for length in (91 - extra - separator, 36000):
            takes = rf"the message takes {length + extra + separator} tokens, there is room for 90 beside"
            with pytest.raises(sk.BudgetError, match=takes):
                session.ask("x" * length)
        assert (session._ids, session.messages, session.left_out) == (prompt, messages, 0)
        with pytest.raises(sk.BudgetError, match="room for 20 beside max_new_tokens=80"):
            session.ask("x" * 21, max_new_tokens=80)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert session.ask("x" * (90 - extra - separator)) == "reply"
        session.reset()
        session.ask("hello") if not said else None


@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_message_after_a_dropped_reply(model: PreTrainedModel, system: str | None) -> None:
    """Two messages of the user in a row: the older one is left out, the new one never."""
    session = sk.ChatSession(model, make_tokenizer(TEMPLATE), system=system, max_tokens=60, max_new_tokens=8)
    session.ask("hello there")
    session.messages.pop()
    text = "x" * (60 - 8 - len(session.tokenizer("<user><assistant>").input_ids) - (18 if system else 2))
    with pytest.warns(sk.LeftOutWarning, match="oldest .* tokens"):
        session.ask(text)
    assert [m["content"] for m in session.messages[:-1]] == [*([system] if system else []), text]
    assert session.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize("new", [None, 0, 60, 2.5])
def test_new_tokens_that_leave_no_room(model: PreTrainedModel, new: Any) -> None:
    session = sk.ChatSession(model, make_tokenizer(TEMPLATE), max_tokens=60, max_new_tokens=8)
    with pytest.raises(ValueError, match=f"max_new_tokens is {new}, it must be from 1 to 59"):
        session.ask("hello", max_new_tokens=new)


def test_streams_and_stops(model: PreTrainedModel) -> None:
    """Pieces add up to the reply. A stream that isn't read to its end stops; errors are raised to the reader."""
    tokenizer = make_tokenizer(TEMPLATE)
    with sk.patch(model, OracleDrafter([], 0.0, vocab=257), tree=3) as handle:
        session = sk.ChatSession(model, tokenizer, max_new_tokens=40, do_sample=False)
        whole = sk.ChatSession(model, tokenizer, max_new_tokens=40, do_sample=False).ask("hello")
        pieces = list(session.stream("hello"))
        assert "".join(pieces) == whole == session.messages[-1]["content"]
        session.reset()
        stream = session.stream("hello", max_new_tokens=900)
        next(stream)
        stream.close()
        cut = session.messages[-1]["content"]
        assert len(cut) < 900
        assert handle.pool is not None
        handle.pool.check_integrity()
        assert handle.pool.free_pages == handle.pool.num_pages
        before = list(session.messages)
        with pytest.raises(ValueError, match="temperature"):
            list(session.stream("more", do_sample=True, temperature=-1.0))
        assert session.messages == before
        session.ask("more", streamer=TextStreamer(tokenizer, skip_prompt=True))


def test_an_interrupted_turn_was_never_there(model: PreTrainedModel) -> None:
    class Interrupts(TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            if value.ndim == 1:
                raise KeyboardInterrupt

    tokenizer = make_tokenizer(TEMPLATE)
    with sk.patch(model, OracleDrafter([], 0.0, vocab=257), tree=3) as handle:
        session = sk.ChatSession(model, tokenizer, max_new_tokens=12, do_sample=False)
        first = session.ask("hello")
        messages, prompt = list(session.messages), session.prompt("again")
        with pytest.raises(KeyboardInterrupt):
            session.ask("again", streamer=Interrupts(tokenizer))
        assert (session.messages, session.prompt("again")) == (messages, prompt)
        assert session.ask("again") == tokenizer.decode(own(model, prompt, 12))
        assert first == messages[-1]["content"]
        assert handle.pool is not None
        handle.pool.check_integrity()


class _AfterThree(StoppingCriteria):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 3)


@pytest.mark.parametrize("of_session", [True, False])
def test_criteria_end_whole_replies_and_streams(model: PreTrainedModel, of_session: bool) -> None:
    replies = []
    for streams in (False, True):
        options: dict[str, Any] = {"stopping_criteria": [_AfterThree()]}
        chat = sk.ChatSession(
            model, make_tokenizer(TEMPLATE), max_new_tokens=20, do_sample=False, **(options if of_session else {})
        )
        own = {} if of_session else options
        replies.append("".join(chat.stream("a", **own)) if streams else chat.ask("a", **own))
        assert options["stopping_criteria"][0].calls == 3
    assert replies[0] == replies[1]


def test_the_length_of_a_configuration(model: PreTrainedModel) -> None:
    """A session's, a turn's, and ``max_new_tokens`` of a turn above both."""
    config, short = GenerationConfig(max_new_tokens=4, do_sample=False), GenerationConfig(max_new_tokens=2)
    chat = sk.ChatSession(model, make_tokenizer(TEMPLATE), generation_config=config, eos_token_id=None)
    lengths = []
    for options in ({}, {"generation_config": short}, {"max_new_tokens": 3}):
        before = len(chat.prompt("a"))
        chat.ask("a", **options)
        lengths.append(len(chat._ids) - before)
    assert lengths == [4, 2, 3]


def test_stop_strings_of_a_session(model: PreTrainedModel) -> None:
    chat = sk.ChatSession(model, make_tokenizer(TEMPLATE), max_new_tokens=12, do_sample=False)
    reply = chat.ask("a")
    again = sk.ChatSession(model, make_tokenizer(TEMPLATE), max_new_tokens=12, do_sample=False, stop_strings=[reply[3]])
    assert again.ask("a") == reply[: reply.index(reply[3]) + 1]
