"""The user's code inside of a call, and parts of the model that it replaces: the unpatched model's own results."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from selection import sample
from test_call_corners import falls_back
from test_families import answers, batch, greedy
from tiny_models import VOCAB, OracleDrafter, random_heads, tiny_model
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import specmemo_kernels as sk
from specmemo_kernels.backends import cpu
from specmemo_kernels.integrations.hf.target import current_tap

INPUTS = batch((9,))


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=31)


def right(model: PreTrainedModel, new: int = 20) -> OracleDrafter:
    """A drafter that is always right, so that steps write several tokens."""
    return OracleDrafter(answers(INPUTS, greedy(model, INPUTS, new)), 1.0)


def recorded(model: PreTrainedModel) -> None:
    """Steps that come often enough to be recorded."""
    for _ in range(4):
        greedy(model, INPUTS, 40)


# ---- processors, criteria and streamers


class Noise(LogitsProcessor):
    """Draws from torch's default generator."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.rand(scores.shape)


class Recording(LogitsProcessor):
    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores


class Counted(BaseStreamer):
    def __init__(self) -> None:
        self.count = 0

    def put(self, value: torch.Tensor) -> None:
        self.count += value.numel()

    def end(self) -> None: ...


class Until(StoppingCriteria):
    """Ends when ``condition`` holds; remembers how often it was called with a text of each length."""

    def __init__(self, condition: Callable[[torch.Tensor], bool]) -> None:
        self.condition, self.lengths = condition, list[int]()

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return torch.full((len(input_ids),), self.condition(input_ids))


def events(model: PreTrainedModel, sampled: bool) -> list[object]:
    """What the user's code sees in two calls, and torch's random state behind them."""
    torch.manual_seed(3)
    seen: list[object] = []
    for _ in range(2):
        processor, streamer = Recording(), Counted()
        end = Until(lambda _, streamer=streamer: streamer.count >= 9 + 6)  # type: ignore[misc]
        processors = LogitsProcessorList([processor, *([Noise()] if sampled else [])])
        options: dict[str, Any] = {"streamer": streamer, "stopping_criteria": [end], "logits_processor": processors}
        tokens = model.generate(**INPUTS, max_new_tokens=20, do_sample=sampled, **options)
        seen += [tokens.tolist(), processor.lengths, end.lengths, streamer.count, torch.rand(1).item()]
    return seen


@pytest.mark.parametrize("sampled", [False, True])
def test_the_users_code_sees_what_it_would_see(model: PreTrainedModel, sampled: bool) -> None:
    """In the same order, nothing behind the end, and with the same random numbers."""
    expected = events(model, sampled)
    drafter = right(model)
    if sampled:
        drafter = OracleDrafter([expected[0][0], expected[5][0]], 1.0)  # type: ignore[index]
    with sk.patch(model, drafter, tree=sk.DraftTree.chain(3)) as handle:
        assert events(model, sampled) == expected
        assert handle.stats.tokens_per_step > 1.5


def test_stop_strings(model: PreTrainedModel) -> None:
    """transformers passes the tokenizer on to the loop."""

    class Letters:
        """Token i is the i-th letter from A on."""

        def get_vocab(self) -> dict[str, int]:
            return {chr(65 + i): i for i in range(VOCAB)}

        def __call__(self, text: str, **_: object) -> Any:
            return {"input_ids": [ord(letter) - 65 for letter in text]}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [chr(65 + i) for i in ids]

        def _convert_id_to_token(self, token: int) -> str:
            return chr(65 + token)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return "".join(tokens)

    text = greedy(model, INPUTS, 20)[0].tolist()
    ends = "".join(chr(65 + token) for token in text[12:14])
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"tokenizer": Letters(), "stop_strings": [ends]}
    expected = greedy(model, INPUTS, 20, **options)
    assert expected.shape[1] < 29
    with sk.patch(model, right(model), tree=3) as handle:
        assert torch.equal(greedy(model, INPUTS, 20, **options), expected)
        assert handle.stats.steps > 0


def test_a_length_that_the_prompt_has(model: PreTrainedModel) -> None:
    options: dict[str, Any] = {"stopping_criteria": [MaxLengthCriteria(7)]}
    expected = greedy(model, INPUTS, 20, **options)
    with sk.patch(model, "prompt-lookup"):
        assert torch.equal(greedy(model, INPUTS, 20, **options), expected)


def test_generate_inside_of_generate(model: PreTrainedModel) -> None:
    """The inner one runs the model's own code."""
    other = batch((5,))
    expected, inner = greedy(model, INPUTS, 12), greedy(model, other, 4)

    class Nested(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert torch.equal(greedy(model, other, 4), inner)
            return scores

    with sk.patch(model, right(model), tree=3) as handle:
        with falls_back("of this model's generation"):
            assert torch.equal(greedy(model, INPUTS, 12, logits_processor=[Nested()]), expected)
        assert handle.stats.tokens_per_step > 1


@pytest.mark.parametrize(
    "mask", sample([[2] * 9, [1, 1, 1, 2, 2, 2, 3, 3, 3], [0.5] * 9, [-1] * 9], [str([0.5] * 9)], str), ids=str
)
def test_masks_of_other_values(model: PreTrainedModel, mask: list[float]) -> None:
    inputs = INPUTS | {"attention_mask": torch.tensor([mask])}
    expected = greedy(model, inputs, 12)
    with sk.patch(model, right(model)), falls_back("other values than 0 and 1"):
        assert torch.equal(greedy(model, inputs, 12), expected)


# ---- replaced parts


def _decorated_hook(model: PreTrainedModel) -> None:
    @torch.no_grad()
    def hook(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        return output + torch.linspace(-9, 9, VOCAB)

    model.lm_head.register_forward_hook(hook)


def _decorated_forward(model: PreTrainedModel) -> None:
    plain = model.lm_head.forward
    model.lm_head.forward = torch.inference_mode()(lambda x: plain(x).flip(-1))


def _partial_hook(model: PreTrainedModel) -> None:
    def hook(scale: float, _: object, __: object, output: torch.Tensor) -> torch.Tensor:
        return output * torch.linspace(-scale, scale, VOCAB)

    model.lm_head.register_forward_hook(functools.partial(torch.no_grad()(hook), 3.0))


def _inputs_method(model: PreTrainedModel) -> None:
    plain = model.prepare_inputs_for_generation

    def prepare(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain((input_ids + 1) % VOCAB, *args, **kwargs)

    model.prepare_inputs_for_generation = prepare


@pytest.mark.parametrize("before", sample([True, False], [True]), ids=["before patching", "after patching"])
@pytest.mark.parametrize(
    "change",
    sample([_decorated_hook, _decorated_forward, _partial_hook, _inputs_method], [_decorated_forward, _inputs_method]),
)
def test_foreign_code_of_all_kinds(change: Callable[[PreTrainedModel], None], before: bool) -> None:
    twin, model = tiny_model("llama", seed=31), tiny_model("llama", seed=31)
    change(twin)
    expected, drafter = greedy(twin, INPUTS, 20), right(model)
    assert not torch.equal(expected, greedy(model, INPUTS, 20))
    if before:
        change(model)
    with sk.patch(model, drafter, tree=3):
        if not before:
            recorded(model)
            change(model)
        with falls_back("remove it"):
            assert torch.equal(greedy(model, INPUTS, 20), expected)


def _mlp_forward(model: PreTrainedModel) -> None:
    plain = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: -plain(x)


def _part_forward(model: PreTrainedModel) -> None:
    plain = model.model.layers[1].mlp.up_proj.forward
    model.model.layers[1].mlp.up_proj.forward = lambda x: plain(x).flip(-1)


def _norm_epsilon(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 30.0


def _norm_class(model: PreTrainedModel) -> None:
    kind = type(model.model.norm)
    model.model.norm.__class__ = type("Flipped", (kind,), {"forward": lambda self, x: kind.forward(self, x).flip(-1)})


def _weight_norm(model: PreTrainedModel) -> None:
    layer = torch.nn.utils.weight_norm(model.model.layers[0].self_attn.o_proj)  # type: ignore[no-untyped-call]
    layer.weight_g.data *= 3


class _LayerNorm(nn.LayerNorm):
    """A norm of other values than the model's own."""


def _scripted_norm(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.input_layernorm = torch.jit.script(_LayerNorm(model.config.hidden_size).eval())


def _traced_norm(model: PreTrainedModel) -> None:
    size = model.config.hidden_size
    for layer in model.model.layers:
        layer.input_layernorm = torch.jit.trace(_LayerNorm(size).eval(), torch.randn(1, 3, size))


INNER = [_mlp_forward, _part_forward, _norm_epsilon, _norm_class, _weight_norm, _scripted_norm, _traced_norm]
uses_torchscript = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@uses_torchscript
@pytest.mark.parametrize("change", sample(INNER, [_norm_epsilon, _scripted_norm]), ids=lambda f: f.__name__.strip("_"))
def test_inner_modules_changed_after_steps_were_recorded(change: Callable[[PreTrainedModel], None]) -> None:
    """They run inside the speculative step, and stay in the model."""
    twin, model = tiny_model("llama", seed=31), tiny_model("llama", seed=31)
    drafter = random_heads(model)
    with sk.patch(model, drafter, tree=6) as handle:
        recorded(model)
        assert handle.stats.graph_steps > 0
        change(twin)
        change(model)
        expected = greedy(twin, INPUTS, 40)
        steps = handle.stats.steps
        for _ in range(4):
            assert torch.equal(greedy(model, INPUTS, 40), expected)
        assert handle.stats.steps > steps
    assert torch.equal(greedy(model, INPUTS, 40), expected)


@uses_torchscript
@pytest.mark.parametrize("change", [_scripted_norm, _traced_norm], ids=lambda f: f.__name__.strip("_"))
def test_parts_in_torchscript(model: PreTrainedModel, change: Callable[[PreTrainedModel], None]) -> None:
    """Before patching; new values of their weights count in the next call."""
    change(model)
    with sk.patch(model, right(model, 40), tree=3) as handle:
        recorded(model)
        assert handle.stats.tokens_per_step > 2
        with torch.no_grad():
            model.model.layers[0].input_layernorm.weight.mul_(-2)
        found = greedy(model, INPUTS, 40)
    assert torch.equal(found, greedy(model, INPUTS, 40))


@uses_torchscript
def test_an_lm_head_in_torchscript(model: PreTrainedModel) -> None:
    model.lm_head = torch.jit.script(model.lm_head)
    with pytest.raises(sk.UnsupportedModel, match=r"the lm_head is a RecursiveScriptModule .*patch the model with"):
        sk.patch(model, "prompt-lookup")


@contextmanager
def other_forward(kind: type[nn.Module]) -> Iterator[None]:
    own = kind.forward
    kind.forward = lambda self, x: own(self, x).flip(-1)  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.forward = own  # type: ignore[method-assign]


@pytest.mark.parametrize("part", sample(["mlp", "input_layernorm"], ["input_layernorm"]))
def test_a_class_changed_after_steps_were_recorded(model: PreTrainedModel, part: str) -> None:
    kind = type(getattr(model.model.layers[0], part))
    with other_forward(kind):
        expected = greedy(model, INPUTS, 40)
    plain = greedy(model, INPUTS, 40)
    with sk.patch(model, random_heads(model), tree=6):
        recorded(model)
        with other_forward(kind):
            assert torch.equal(greedy(model, INPUTS, 40), expected)
        assert torch.equal(greedy(model, INPUTS, 40), plain)


def test_settings_changed_after_steps_were_recorded() -> None:
    """Of the whole model: its own code runs. Others are read again."""
    twin, model = tiny_model("mistral", seed=31), tiny_model("mistral", seed=31)
    with sk.patch(model, random_heads(model), tree=6):
        recorded(model)
        for name, value in (("sliding_window", 5), ("num_hidden_layers", 1)):
            for each in (model, twin):
                setattr(each.config, name, value)
            with falls_back(f"{name} of the configuration"):
                assert torch.equal(greedy(model, INPUTS, 20), greedy(twin, INPUTS, 20))


def test_weights_that_move_between_steps(model: PreTrainedModel) -> None:
    """Recorded steps read no freed memory: the weights' old storage lives as long as they do."""
    prompts = INPUTS["input_ids"].tolist()
    with sk.patch(model, random_heads(model), tree=6):
        recorded(model)
        expected = [c.tokens for c in sk.generate_batch(model, prompts, max_new_tokens=30, eos_token_ids=[])]
        run = sk.stream_batch(model, prompts, max_new_tokens=30, eos_token_ids=[])
        for _ in range(3):
            next(run)
        for parameter in model.parameters():
            old, parameter.data = parameter.data, parameter.data.clone()
            del old
        list(run)
        assert [c.tokens for c in run.completions()] == expected


def test_the_routers_logits() -> None:
    model = tiny_model("mixtral", seed=3)
    expected = greedy(model, INPUTS, 12)
    model.config.output_router_logits = True
    with sk.patch(model, "prompt-lookup", tree=3) as handle:
        assert torch.equal(greedy(model, INPUTS, 12), expected)
        assert handle.stats.steps > 0


def test_what_generate_does_besides(model: PreTrainedModel) -> None:
    class OwnLoop(type(model)):  # type: ignore[misc]
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return super()._sample(*args, **kwargs)

    model.__class__ = OwnLoop
    with pytest.raises(sk.UnsupportedModel, match="OwnLoop has a _sample of its own"):
        sk.patch(model, "prompt-lookup")


def test_adapters_that_learn_a_prompt(model: PreTrainedModel) -> None:
    """PEFT adds the prompt in its own ``generate``."""
    learns = SimpleNamespace(is_prompt_learning=True)
    names = {"__module__": "peft.peft_model", "active_peft_config": learns, "get_base_model": lambda _: model}
    wrapper = type("PeftModel", (), names)()
    with pytest.raises(sk.UnsupportedModel, match="the active adapter learns a prompt"):
        sk.patch(wrapper, "prompt-lookup")
    learns.is_prompt_learning = False
    sk.patch(wrapper, "prompt-lookup")
    sk.unpatch(wrapper)


class Wrapper(nn.Module):
    """Passes attributes on to the model inside, as those of PEFT do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


@pytest.mark.parametrize("wrap", [Wrapper, functools.partial(torch.compile, backend="eager")])
def test_wrappers_of_a_patched_model(model: PreTrainedModel, wrap: Callable[[nn.Module], Any]) -> None:
    sk.patch(model, "prompt-lookup")
    wrapper = wrap(model)
    found, expected = (sk.generate_batch(each, [[3, 4, 5]], max_new_tokens=3) for each in (wrapper, model))
    assert found[0].tokens == expected[0].tokens
    sk.unpatch(wrapper)
    assert "specmemo" not in vars(model)
    sk.unpatch(wrapper)
    with pytest.raises(ValueError, match="the model isn't patched"):
        sk.generate_batch(wrapper, [[3, 4, 5]])


# ---- interrupts and copies


@contextmanager
def interrupted_at(file: str, line: str) -> Iterator[None]:
    """``KeyboardInterrupt`` before the first line of ``file`` that contains ``line`` runs."""
    sources: dict[str, list[str]] = {}

    def trace(frame: Any, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if not name.endswith(file):
            return None
        if name not in sources:
            sources[name] = Path(name).read_text().splitlines()
        if event == "line" and line in sources[name][frame.f_lineno - 1]:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(None)


INTERRUPTS = {
    "replaced forwards": ("hf/replaced.py", 'attributes["forward"] = forward'),
    "closed pages": ("cache/paged_kv.py", "self._index.label(pages, labels)"),
    "freed pages": ("cache/paged_kv.py", "self._free_pages.append(page)"),
    "new pages": ("cache/paged_kv.py", "self._users.update(pages)"),
    "a device step": ("engine/device_step.py", "buffer.copy_(part)"),
}


@pytest.mark.parametrize("place", sample(INTERRUPTS, ["freed pages"]))
def test_interrupts(model: PreTrainedModel, place: str) -> None:
    """The interrupt itself leaves generate; the next call has all pages, the module's own forwards and its tokens."""
    drafter, expected = random_heads(model), greedy(model, INPUTS, 40)
    with sk.patch(model, drafter) as handle:
        with interrupted_at(*INTERRUPTS[place]):
            for _ in range(20):
                greedy(model, INPUTS, 40)
        assert current_tap() is None
        assert not any("forward" in vars(module) for module in model.modules())
        for _ in range(3):
            assert torch.equal(greedy(model, INPUTS, 40), expected)
        assert handle.pool is not None
        handle.pool.check_integrity()
        assert handle.pool.free_pages == handle.pool.num_pages


@pytest.mark.parametrize("error", [StopIteration("used up"), RuntimeError("mine"), KeyError(3)], ids=repr)
def test_errors_of_the_users_code(model: PreTrainedModel, error: Exception) -> None:
    """They arrive as they are, from each call, and the next one writes the model's tokens."""
    calls = Counter[str]()

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        calls["left"] -= 1
        if calls["left"] < 0:
            raise error
        return list(range(3, 40))

    expected = greedy(model, INPUTS, 12)
    with sk.patch(model, random_heads(model)):
        for calls["left"] in (0, 1, 5):
            with pytest.raises(type(error)) as caught:
                model.generate(**INPUTS, max_new_tokens=12, do_sample=False, prefix_allowed_tokens_fn=allowed)
            assert caught.value is error
        assert torch.equal(greedy(model, INPUTS, 12), expected)


def test_copies_that_are_made_inside_of_a_step(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread: they are plain models, whose modules are fused when they are patched."""
    copies: list[Any] = []
    own = cpu.gated_mlp

    def copying(*args: Any) -> Any:
        if len(copies) < 2:
            copies.append(copy.deepcopy(model) if copies else pickle.loads(pickle.dumps(model)))
        return own(*args)

    drafter, expected = random_heads(model), greedy(model, INPUTS, 12)
    with sk.patch(model, drafter, tree=6) as handle:
        fused = handle.fused
        with monkeypatch.context() as patched:
            patched.setattr(cpu, "gated_mlp", copying)
            greedy(model, INPUTS, 4)
    assert len(copies) == 2
    for plain in copies:
        assert torch.equal(greedy(plain, INPUTS, 12), expected)
        pickle.dumps(plain)
        with sk.patch(plain, drafter, tree=6) as handle:
            assert handle.fused == fused
            assert torch.equal(greedy(plain, INPUTS, 12), expected)


@pytest.mark.slow
def test_a_saved_model_needs_no_package(model: PreTrainedModel, tmp_path: Path) -> None:
    file, expected = tmp_path / "model.pt", greedy(model, INPUTS, 5)
    with sk.patch(model, "prompt-lookup"):
        torch.save(model, file)
    program = (
        "import sys; sys.modules['specmemo_kernels'] = None; import torch; "
        f"model = torch.load({str(file)!r}, weights_only=False); "
        f"ids = torch.tensor({INPUTS['input_ids'].tolist()}); mask = torch.ones_like(ids); "
        "print(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(expected.tolist()), done.stderr


# ---- the end of a table of positions


@pytest.mark.parametrize("drafter", sample(["heads", "prompt-lookup", "oracle", "draft model"], ["heads"]))
@pytest.mark.parametrize("family", sample(["gpt2", "opt", "gptj"], ["gpt2"]))
def test_texts_up_to_the_last_position(family: str, drafter: str) -> None:
    """Candidates beyond the table are never accepted, nor looked up; longer texts are the model's own business."""
    sizes = {"max_position_embeddings": 48, "ffn_dim": 48, "word_embed_proj_dim": 32, "rotary_dim": 4}
    model = tiny_model(family, seed=2, **sizes)
    assert model.config.max_position_embeddings == 48
    prompts = [[5, 6, 7] * 3, [9, 8] * 10, [4, 4, 5]]
    texts = [model.generate(torch.tensor([p]), max_length=49, do_sample=False)[0].tolist() for p in prompts]
    drafters: dict[str, Any] = {
        "heads": random_heads(model),
        "oracle": OracleDrafter(texts, 1.0),
        "draft model": sk.DraftModel(tiny_model(family, seed=2, **sizes), tokens=3),
    }
    with sk.patch(model, drafters.get(drafter, drafter), tree=sk.DraftTree.chain(3)) as handle:
        for _ in range(3):
            for prompt, text in zip(prompts, texts, strict=True):
                ids = torch.tensor([prompt])
                assert model.generate(ids, max_length=49, do_sample=False)[0].tolist() == text
        requests = [sk.Request(p, 49 - len(p) - shorter, []) for shorter, p in enumerate(prompts)]
        done = sk.generate_batch(model, requests)
        for prompt, text, completion in zip(prompts, texts, done, strict=True):
            assert completion.tokens == text[len(prompt) : len(prompt) + len(completion.tokens)]
        assert handle.stats.steps > 0
        with pytest.raises(ValueError, match="has embeddings of 48 positions, 50 tokens need more"):
            sk.generate_batch(model, [prompts[0]], max_new_tokens=50 - 9)
        with falls_back("has embeddings of 48 positions"), pytest.raises(IndexError):
            model.generate(torch.tensor([prompts[0]]), max_length=50, do_sample=False)
