"""Calls and models that can't speculate get the unpatched model's tokens and a warning with the reason."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from selection import sample
from test_families import answers, batch, greedy
from tiny_models import VOCAB, OracleDrafter, tiny_model
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import logits_process

import specmemo_kernels as sk
from specmemo_kernels.drafting.base import DraftInput
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENT

Change = Callable[[PreTrainedModel], object]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=31)


def patched_right(model: PreTrainedModel, expected: torch.Tensor, inputs: dict[str, torch.Tensor]) -> sk.SpecMemo:
    """A patched model with a perfect drafter, so that a wrong speculative step would show."""
    return sk.patch(model, OracleDrafter(answers(inputs, expected), 1.0), tree=sk.DraftTree.chain(3))


def falls_back(reason: str) -> AbstractContextManager[object]:
    return pytest.warns(UserWarning, match=f"specmemo: .*{reason}.*the model's own generate runs instead")


# ---- hooks and replaced functions


def _bias(output: torch.Tensor) -> torch.Tensor:
    return output + torch.linspace(-9, 9, output.shape[-1])


def _head_hook(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda _, __, output: _bias(output))


def _head_hook_on_the_last_row(model: PreTrainedModel) -> None:
    def hook(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, -1] = _bias(output[:, -1])
        return output

    model.lm_head.register_forward_hook(hook)


def _head_pre_hook(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].roll(1, -1),))


def _replaced_forward(model: PreTrainedModel) -> None:
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: object, **kwargs: object) -> object:
        output = plain(*args, **kwargs)
        output.logits = _bias(output.logits)
        return output

    model.forward = forward


def _replaced_head_forward(model: PreTrainedModel) -> None:
    plain = model.lm_head.forward
    model.lm_head.forward = functools.wraps(plain)(lambda x: _bias(plain(x)))


def _model_hook(model: PreTrainedModel) -> None:
    def hook(_: object, __: object, output: object) -> object:
        output.logits = _bias(output.logits)  # type: ignore[attr-defined]
        return output

    model.register_forward_hook(hook)


def _hook_on_the_newest_state(model: PreTrainedModel) -> None:
    def hook(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, -1] = output[:, -1].flip(-1)
        return output

    model.model.norm.register_forward_hook(hook)


HOOKS = [
    _head_hook, _head_hook_on_the_last_row, _head_pre_hook, _replaced_forward, _replaced_head_forward, _model_hook,
    _hook_on_the_newest_state,
]  # fmt: skip


@pytest.mark.parametrize("before", sample([True, False], [False]), ids=["before patching", "after patching"])
@pytest.mark.parametrize(
    "attach", sample(HOOKS, [_head_hook, _replaced_forward, _model_hook]), ids=lambda attach: attach.__name__.strip("_")
)
def test_foreign_code_acts(attach: Change, before: bool) -> None:
    twin, model = tiny_model("llama", seed=31), tiny_model("llama", seed=31)
    inputs = batch((9, 6))
    plain = greedy(twin, inputs, 20)
    attach(twin)
    expected = greedy(twin, inputs, 20)
    assert not torch.equal(plain, expected), "the change does nothing"
    if before:
        attach(model)
    with patched_right(model, plain, inputs) as handle:
        if not before:
            attach(model)
        with falls_back("hook on|replaced forward on"):
            assert torch.equal(greedy(model, inputs, 20), expected)
        assert handle.stats.steps == 0
        with pytest.raises(ValueError, match=r"hook|forward"):
            sk.generate_batch(model, [[1, 2, 3]], max_new_tokens=4)


def test_hooks_of_frameworks_do_not_count(model: PreTrainedModel) -> None:
    """Device placement, parametrisations and compiled forwards keep results; speculation goes on."""
    from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module

    inputs = batch((9, 6))
    expected = greedy(model, inputs, 20)
    add_hook_to_module(model.lm_head, AlignDevicesHook(io_same_device=True))
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    with patched_right(model, expected, inputs) as handle:
        assert torch.equal(greedy(model, inputs, 20), expected)
        assert handle.stats.steps > 0

    class Doubling(ModelHook):
        def post_forward(self, module: object, output: torch.Tensor) -> torch.Tensor:
            return -output

    remove_hook_from_module(model.lm_head)
    add_hook_to_module(model.lm_head, Doubling())
    changed = greedy(model, inputs, 20)
    with patched_right(model, expected, inputs), falls_back("hook of accelerate on lm_head"):
        assert torch.equal(greedy(model, inputs, 20), changed)


def test_speculation_returns_with_the_hook_gone(model: PreTrainedModel) -> None:
    inputs = batch((9, 6))
    expected = greedy(model, inputs, 20)
    with patched_right(model, expected, inputs) as handle:
        hook = model.lm_head.register_forward_hook(lambda _, __, output: -output)
        with falls_back("remove it"):
            greedy(model, inputs, 20)
        hook.remove()
        assert torch.equal(greedy(model, inputs, 20), expected)
        assert handle.stats.steps > 0


# ---- changes after patching


def _half(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16)


def _resize(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCAB:] = 0
        model.get_output_embeddings().weight[VOCAB:] = 0


def _new_head(model: PreTrainedModel) -> None:
    torch.manual_seed(5)
    head = torch.nn.Linear(model.config.hidden_size, VOCAB, bias=True)
    model.set_output_embeddings(head)


class Lora(torch.nn.Module):
    """A low-rank adapter as peft writes one: the wrapped layer is ``base_layer``."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.base_layer, self.weight = base_layer, base_layer.weight
        self.a = torch.nn.Parameter(torch.randn(4, base_layer.in_features))
        self.b = torch.nn.Parameter(torch.randn(base_layer.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.a.T @ self.b.T


def _lora_on_the_head(model: PreTrainedModel) -> None:
    model.lm_head = Lora(model.lm_head)


def _one_layer_in_double(model: PreTrainedModel) -> None:
    def back(x: torch.Tensor) -> torch.Tensor:
        return x.float()

    layer = model.model.layers[1].mlp
    down = layer.down_proj.double()
    layer.down_proj = torch.nn.Sequential(_Cast(torch.float64), down, _Cast(torch.float32))


class _Cast(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def _other_class(model: PreTrainedModel) -> None:
    class Backwards(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).flip(-1)

    model.lm_head.__class__ = Backwards


CHANGES = [_half, _resize, _new_head, _lora_on_the_head, _one_layer_in_double, _other_class]


@pytest.mark.parametrize(
    "change",
    sample(CHANGES, [_new_head, _lora_on_the_head, _one_layer_in_double]),
    ids=lambda change: change.__name__.strip("_"),
)
@pytest.mark.parametrize("heads", sample(("oracle", "medusa", "draft model"), ["oracle"]))
def test_changed_after_patching(change: Change, heads: str) -> None:
    """A warning names the change and the remedy, the tokens are the changed model's own, and unpatch works."""
    twin, model = tiny_model("llama", seed=31), tiny_model("llama", seed=31)
    inputs = batch((9, 6))
    drafters = {
        "oracle": OracleDrafter(answers(inputs, greedy(model, inputs, 20)), 1.0),
        "medusa": sk.MedusaHeads(model.config.hidden_size, VOCAB, 2, own_lm_head=False),
        "draft model": sk.DraftModel(tiny_model("llama", seed=4), tokens=2),
    }
    sk.patch(model, drafters[heads], tree=sk.DraftTree.chain(2))
    greedy(model, inputs, 5)
    change(model)
    change(twin)
    expected = greedy(twin, inputs, 20)
    with falls_back(r"(changed from .* to|replaced by) .*unpatch\(model\), make the change, and patch again"):
        assert torch.equal(greedy(model, inputs, 20), expected)
    with pytest.raises(ValueError, match=r"(changed from|replaced by) .* patch again"):
        sk.generate_batch(model, [[1, 2, 3]], max_new_tokens=4)
    sk.unpatch(model)
    assert torch.equal(greedy(model, inputs, 20), expected)
    with sk.patch(model, OracleDrafter(answers(inputs, expected), 1.0), tree=3) as handle:
        again = greedy(model, inputs, 20)
        assert handle.stats.steps > 0
    if change is not _half:  # in bfloat16 near ties may fall the other way
        assert torch.equal(again, expected)


def test_a_changed_draft_model() -> None:
    model, draft = tiny_model("llama", seed=31), tiny_model("llama", seed=4)
    inputs = batch((9, 6))
    expected = greedy(model, inputs, 20)
    with sk.patch(model, draft):
        draft.to(torch.bfloat16)
        with falls_back("of the draft model has changed from Linear"):
            assert torch.equal(greedy(model, inputs, 20), expected)
        draft.to(torch.float32)
        assert torch.equal(greedy(model, inputs, 20), expected)


@pytest.mark.parametrize("rows", [VOCAB + 3, VOCAB + 11])
def test_a_padded_lm_head(rows: int) -> None:
    """Drafters may guess its unused tokens, which have no embeddings."""
    model = tiny_model("llama")
    weight, size = model.lm_head.weight.detach(), model.config.hidden_size
    model.lm_head = torch.nn.Linear(size, rows)
    with torch.no_grad():
        model.lm_head.weight[:VOCAB] = weight
        model.lm_head.bias.zero_()
        model.lm_head.bias[VOCAB:] = -1e3
    inputs = batch((9, 6))
    expected = greedy(model, inputs, 20)

    class Unused(OracleDrafter):
        def propose(self, inputs: DraftInput) -> torch.Tensor:
            return torch.full_like(super().propose(inputs), rows - 1)

    for drafter in (Unused([], 1.0), sk.MedusaHeads(size, rows, 2)):
        with sk.patch(model, drafter, tree=sk.DraftTree.chain(2)) as handle:
            assert torch.equal(greedy(model, inputs, 20), expected)
            assert handle.stats.steps > 0


def test_autocast(model: PreTrainedModel) -> None:
    inputs = batch((9, 6))
    plain = greedy(model, inputs, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = greedy(model, inputs, 20)
    with patched_right(model, plain, inputs) as handle:
        with torch.autocast("cpu", dtype=torch.bfloat16), falls_back("autocast is on for cpu"):
            assert torch.equal(greedy(model, inputs, 20), expected)
        assert torch.equal(greedy(model, inputs, 20), plain)
        assert handle.stats.steps > 0


def _mixed(module: Any, enabled: bool = True) -> None:
    """Wraps ``forward`` as accelerate's mixed precision does."""
    from accelerate.utils import convert_outputs_to_fp32

    forward = module.forward
    module.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(forward) if enabled else forward)


@pytest.mark.parametrize("part", sample(["", "model", "model.layers.1", "lm_head"], ["", "model.layers.1"]))
def test_autocast_inside_of_a_forward(model: PreTrainedModel, part: str) -> None:
    """Of the model and of a module in it."""
    inputs, module = batch((9, 6)), model.get_submodule(part)
    plain = greedy(model, inputs, 20)
    _mixed(module)
    expected = greedy(model, inputs, 20)
    if part != "lm_head":
        with pytest.raises(sk.UnsupportedModel, match="LlamaForCausalLM runs under autocast for cpu"):
            patched_right(model, plain, inputs)
    del module.forward
    _mixed(module, enabled=False)
    with patched_right(model, plain, inputs) as handle:
        assert torch.equal(greedy(model, inputs, 20), plain)
        steps = handle.stats.steps
        assert steps > 0
        _mixed(module)
        with falls_back(rf"replaced forward on {part or type(model).__name__} \(torch.amp.autocast_mode\)"):
            assert torch.equal(greedy(model, inputs, 20), expected)
        assert handle.stats.steps == steps


def test_patch_under_autocast(model: PreTrainedModel) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(sk.UnsupportedModel, match="without autocast"):
        sk.patch(model, "prompt-lookup")
    sk.patch(model, "prompt-lookup")


def test_trained_weights_and_adapters_still_speculate(model: PreTrainedModel) -> None:
    """Other values, and adapters inside layers, are no reason to stop."""
    inputs = batch((9, 6))
    with sk.patch(model, OracleDrafter([], 0.0), tree=3) as handle:
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        model.model.layers[0].mlp.up_proj = Lora(model.model.layers[0].mlp.up_proj)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = greedy(model, inputs, 20)
        assert handle.stats.steps > 0
    assert torch.equal(found, greedy(model, inputs, 20))


# ---- processors and criteria


class SuppressCommon(LogitsProcessor):
    """Bans in every row the last tokens of the other rows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row in range(len(input_ids)):
            scores[row, input_ids[torch.arange(len(input_ids)) != row, -1]] = -torch.inf
        return scores


class EverySecondCall(LogitsProcessor):
    """A processor with state: every second call negates the scores."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return -scores if self.calls % 2 else scores


@pytest.mark.parametrize("kind", [SuppressCommon, EverySecondCall])
@pytest.mark.parametrize("lengths", [(9,), (9, 6)])
def test_processors_with_state_or_across_rows(
    model: PreTrainedModel, kind: type[LogitsProcessor], lengths: tuple[int, ...]
) -> None:
    inputs = batch(lengths)
    expected = greedy(model, inputs, 20, logits_processor=LogitsProcessorList([kind()]))
    with patched_right(model, expected, inputs) as handle:
        with falls_back(f"{kind.__name__} may hold state") if len(lengths) > 1 else nullcontext():
            found = greedy(model, inputs, 20, logits_processor=LogitsProcessorList([kind()]))
        assert (handle.stats.steps > 0) == (len(lengths) == 1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("lengths", [(9,), (9, 6, 7)])
def test_watermark_of_a_batch(model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    """SynthID's state belongs to rows: the same tokens as unpatched, so the same detection score."""
    config = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340, 443], ngram_len=3)
    inputs = batch(lengths)

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        return model.generate(**inputs, max_new_tokens=30, do_sample=True, watermarking_config=config)

    expected = run()
    warned = falls_back("SynthIDTextWatermarkLogitsProcessor") if len(lengths) > 1 else nullcontext()
    with patched_right(model, expected, inputs), warned:
        assert torch.equal(run(), expected)


def _allowed(row: int, ids: torch.Tensor) -> list[int]:
    return list(range(3 + 10 * row, 13 + 10 * row)) if int(ids[-1]) % 2 else list(range(40, 50 + row))


def _noting(call: Callable[..., torch.Tensor], seen: list[torch.Size]) -> Callable[..., torch.Tensor]:
    def noted(self: object, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.shape)
        return call(self, input_ids, scores)

    return noted


@pytest.mark.parametrize(
    "options",
    [{"prefix_allowed_tokens_fn": _allowed}, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}],
    ids=["per row", "built-in"],
)
def test_processors_get_one_row(
    model: PreTrainedModel, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row-wise processors run speculatively in a batch, called with one row at a time."""
    inputs = batch((9, 6, 12, 3))
    expected = greedy(model, inputs, 20, **options)
    seen: list[torch.Size] = []
    for name in (
        "PrefixConstrainedLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
    ):
        kind = getattr(logits_process, name)
        monkeypatch.setattr(kind, "__call__", _noting(kind.__call__, seen))
    with patched_right(model, expected, inputs) as handle:
        assert torch.equal(greedy(model, inputs, 20, **options), expected)
        assert handle.stats.steps > 0
    assert set(seen) == {torch.Size((1, VOCAB))}


def test_every_built_in_is_known_or_falls_back() -> None:
    """A processor of a newer version isn't assumed to be row-wise."""
    from specmemo_kernels.integrations.hf.processors import _ROW_WISE

    kinds = [kind for _, kind in inspect.getmembers(logits_process, inspect.isclass)]
    kinds = [kind for kind in kinds if issubclass(kind, LogitsProcessor) and kind is not LogitsProcessor]
    others = {kind.__name__ for kind in kinds if kind not in _ROW_WISE}
    assert {"SynthIDTextWatermarkLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor"} <= others
    assert len(kinds) - len(others) >= 20


class Unsure(StoppingCriteria):
    """Stops where the best score leads the second by less than ``lead``; needs the scores."""

    def __init__(self, lead: float) -> None:
        self.lead, self.lengths = lead, list[int]()

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, **_: object) -> torch.Tensor:
        assert scores is not None
        self.lengths.append(len(scores))
        return _lead(scores[-1]) < self.lead


def _lead(scores: torch.Tensor) -> torch.Tensor:
    first, second = scores.topk(2).values.unbind(-1)
    return first - second


def test_criteria_read_scores(model: PreTrainedModel) -> None:
    inputs = batch((9,))
    options = {"return_dict_in_generate": True, "output_scores": True}
    leads = [float(_lead(scores)) for scores in greedy(model, inputs, 60, **options).scores]
    lead = min(leads[:30]) + 1e-3
    plain, patched = Unsure(lead), Unsure(lead)
    expected = greedy(model, inputs, 60, stopping_criteria=StoppingCriteriaList([plain]), **options)
    assert 3 < expected.sequences.shape[1] - 9 <= 30, "the criterion has to stop on the way"
    with patched_right(model, greedy(model, inputs, 60), inputs) as handle:
        found = greedy(model, inputs, 60, stopping_criteria=StoppingCriteriaList([patched]), **options)
        assert handle.stats.tokens_per_step > 1
    assert torch.equal(found.sequences, expected.sequences)
    assert patched.lengths == plain.lengths
    assert len(found.scores) == len(expected.scores)


class FirstRowDecides(StoppingCriteria):
    """Row 0 stops all rows, a common mistake."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.full((len(input_ids),), int(input_ids[0, -1]) % 7 == 0)


def test_criteria_across_rows(model: PreTrainedModel) -> None:
    inputs = batch((9, 6, 7))
    options = {"eos_token_id": 2, "pad_token_id": 0}
    stop = StoppingCriteriaList([FirstRowDecides()])
    expected = greedy(model, inputs, 40, stopping_criteria=stop, **options)
    with patched_right(model, greedy(model, inputs, 40), inputs), falls_back("FirstRowDecides"):
        assert torch.equal(greedy(model, inputs, 40, stopping_criteria=stop, **options), expected)


# ---- prompts


def test_last_token_masked(model: PreTrainedModel) -> None:
    """Padding on the right, and a prompt that ends in the padding token, which transformers masks."""
    inputs = batch((9, 6))
    right = {"input_ids": inputs["input_ids"].flip(1), "attention_mask": inputs["attention_mask"].flip(1)}
    ends_in_pad = {"input_ids": torch.tensor([[5, 6, 7, 0], [0, 4, 5, 6]])}
    for case in (right, ends_in_pad):
        expected = greedy(model, case, 20, pad_token_id=0, eos_token_id=1)
        with (
            sk.patch(model, OracleDrafter([], 0.0), tree=3),
            falls_back("hides the last token of a prompt"),
        ):
            assert torch.equal(greedy(model, case, 20, pad_token_id=0, eos_token_id=1), expected)


@pytest.mark.parametrize("family", sample(["llama", "mistral", "gemma3_text", "gpt_oss"], ["llama", "gemma3_text"]))
def test_holes_in_the_mask(family: str) -> None:
    """transformers counts a sliding window in positions of the padded row, holes included."""
    generator = torch.Generator().manual_seed(0)
    model = tiny_model(family, seed=8)
    mask = torch.rand(6, 50, generator=generator) < 0.6
    mask[:, -1] = True
    ids = torch.randint(3, VOCAB, mask.shape, generator=generator)
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    expected = greedy(model, inputs, 20)
    windowed = family != "llama"
    with sk.patch(model, OracleDrafter([], 0.0), tree=3) as handle:
        with falls_back("hides tokens inside a prompt") if windowed else nullcontext():
            assert torch.equal(greedy(model, inputs, 20), expected)
        assert (handle.stats.steps == 0) == windowed


@pytest.mark.parametrize("token", sample([-1, -100, VOCAB, 2**40], [-100, VOCAB]))
def test_tokens_that_are_none(model: PreTrainedModel, token: int) -> None:
    """Token ids outside the vocabulary: the embedding's error, as unpatched; the next call works."""
    inputs = batch((9, 6))
    expected = greedy(model, inputs, 20)
    bad = {**inputs, "input_ids": inputs["input_ids"].clone()}
    bad["input_ids"][0, 4] = token
    with pytest.raises(IndexError):
        greedy(model, bad, 5)
    with patched_right(model, expected, inputs):
        with pytest.raises(IndexError), falls_back(f"the token {token}, which is not one of 0 to {VOCAB - 1}"):
            greedy(model, bad, 5)
        assert torch.equal(greedy(model, inputs, 20), expected)


def test_mask_of_another_shape(model: PreTrainedModel) -> None:
    inputs = batch((9,))
    causal = torch.ones(9, 9).tril().log()[None, None]
    expected = model(input_ids=inputs["input_ids"], attention_mask=causal).logits
    with patched_right(model, greedy(model, inputs, 20), inputs):
        assert torch.equal(model(input_ids=inputs["input_ids"], attention_mask=causal).logits, expected)


# ---- caches


def test_a_passed_cache_is_filled(model: PreTrainedModel) -> None:
    """The caller continues with the cache, so it must hold the generated tokens."""
    inputs = batch((9,))
    plain, patched = DynamicCache(), DynamicCache()
    expected = greedy(model, inputs, 20, **{CACHE_ARGUMENT: plain})
    with patched_right(model, expected, inputs), falls_back(f"{CACHE_ARGUMENT} was passed; leave it out"):
        assert torch.equal(greedy(model, inputs, 20, **{CACHE_ARGUMENT: patched}), expected)
        assert patched.get_seq_length() == plain.get_seq_length() == 28


def test_a_returned_dict_has_no_cache(model: PreTrainedModel) -> None:
    """Documented: the pages are the cache. Scores don't change that."""
    inputs = batch((9,))
    expected = greedy(model, inputs, 20)
    with patched_right(model, expected, inputs) as handle:
        found = greedy(model, inputs, 20, return_dict_in_generate=True, output_scores=True)
        assert handle.stats.steps > 0
    assert torch.equal(found.sequences, expected)
    assert found.get(CACHE_ARGUMENT) is None
