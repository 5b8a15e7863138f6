"""Models quantised by packages: run by ``make test-quantised``; without a package its tests are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantised_packages import METHODS, quantised_model
from resident_generation import make_model, setting_of
from test_families import answers
from tiny_models import OracleDrafter
from torch import Tensor, nn

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENT
from specmemo_kernels.integrations.hf.coded import coded_modules

NEW, VOCAB = 24, 1024
SIZES = {"hidden": 256, "intermediate": 512, "layers": 2, "kv_heads": 2, "vocab": VOCAB}
PACKAGES = {
    "torchao": "torchao", "quanto": "optimum.quanto", "bitsandbytes": "bitsandbytes", "hqq": "hqq.core.quantize",
    "compressed-tensors": "compressed_tensors", "gptq": "gptqmodel", "awq": "gptqmodel", "gguf": "gguf",
}  # fmt: skip
#: Inputs are rounded to 8 bits, by bitsandbytes in columns that all rows of a call decide.
CODED_INPUTS = {"bitsandbytes 8", "torchao int8 dynamic"}
#: A checkpoint whose lm_head stays as it was.
PLAIN_HEAD = {"compressed-tensors w4", "gptq 4", "awq 4"}
#: Seeds of prompts whose tokens the models don't repeat.
LENGTHS = {"one": (20,), "four": (20, 7, 33, 12)}

pytestmark = pytest.mark.slow


def small_model(dtype: torch.dtype, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = make_model(setting_of(0) | SIZES | {"dtype": str(dtype).removeprefix("torch.")}, 2)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)  # varied tokens
    return model


def inputs_of(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, VOCAB, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    output: Tensor = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return output


@torch.no_grad()
def near_tie(model: Any, text: list[int], one: int, other: int, unit: float) -> bool:
    """Whether the model's logits of two tokens behind ``text`` differ by a few roundings of ``unit``, or by no more
    than its own passes do: with the text alone, with more tokens behind it, beside other texts, and with a cache.
    """
    ids = torch.tensor([text])
    more = torch.cat([ids, ids[:, :8]], dim=1)
    others = torch.randint(3, VOCAB, (3, ids.shape[1]), generator=torch.Generator().manual_seed(0))
    cache = getattr(model(ids[:, :-1], use_cache=True), CACHE_ARGUMENT)
    rows = torch.stack([
        model(ids).logits[0, -1], model(more).logits[0, len(text) - 1],
        model(torch.cat([ids, others])).logits[0, -1], model(ids[:, -1:], **{CACHE_ARGUMENT: cache}).logits[0, -1],
    ]).float()  # fmt: skip
    gaps = rows[:, one] - rows[:, other]
    spread = (rows.amax(dim=0) - rows.amin(dim=0)).amax()
    rounding = 3 * unit * rows.abs().amax()
    return bool(gaps.abs().min() <= 2 * spread + rounding)


def check_tokens(model: Any, inputs: dict[str, Tensor], expected: Tensor, output: Tensor, unit: float) -> None:
    """Equal rows, or a near tie at the first difference by roundings of ``unit``; 0: equal rows."""
    start = inputs["input_ids"].shape[1]
    rows = answers(inputs, expected), answers(inputs, output)
    for own, ours in zip(*rows, strict=True):
        if own == ours:
            continue
        place = next(i for i, (a, b) in enumerate(zip(own, ours, strict=True)) if a != b)
        assert unit, f"other token {place} of {len(own)}"
        tie = near_tie(model, own[:place], own[place], ours[place], unit)
        assert tie, f"token {place} of {len(own)} isn't a near tie"
    assert output.shape[1] == start + NEW


MODELS = [
    (method, dtype, lm_head)
    for method in METHODS
    for dtype in ("float32", "bfloat16")
    for lm_head in (False, True)
    if not (lm_head and method in PLAIN_HEAD)
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0]} {p[1]}{' head' * p[2]}")
def quantised(request: pytest.FixtureRequest) -> tuple[str, torch.dtype, bool, Any]:
    method, name, lm_head = request.param
    package = PACKAGES[method.split()[0]]
    import transformers  # noqa: F401  (optimum needs it first)

    pytest.importorskip(package, reason=f"{method} needs {package}", exc_type=ImportError)
    dtype = getattr(torch, name)
    return method, dtype, lm_head, quantised_model(small_model(dtype), method, lm_head)


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("drafter", ["prompt-lookup", "own", "shared", "oracle"])
def test_tokens(quantised: tuple[str, torch.dtype, bool, Any], drafter: str, count: str) -> None:
    method, dtype, lm_head, model = quantised
    inputs = inputs_of(LENGTHS[count])
    if (method, dtype, lm_head, count) == ("quanto int4", torch.bfloat16, True, "four"):
        with pytest.raises(RuntimeError, match="expect A to be contiguous"):
            generated(model, inputs)
        pytest.skip("the model itself fails with a batch")
    expected = generated(model, inputs)
    assert len(expected.unique()) > 12, "the model repeats itself: nothing would be tested"
    heads: Any = {"oracle": OracleDrafter(answers(inputs, expected), 0.7, vocab=VOCAB)}.get(drafter)
    if drafter in ("own", "shared"):
        torch.manual_seed(3)
        heads = sk.MedusaHeads(SIZES["hidden"], VOCAB, 2, own_lm_head=drafter == "own")
        for parameter in heads.parameters():
            nn.init.normal_(parameter, std=0.05)
        heads = heads.to(dtype)
    with sk.patch(model, heads or drafter, memory_budget="64MiB", tree=4, max_batch_size=4) as handle:
        if method.startswith("compressed-tensors"):  # its wrapper of modules' forward is foreign code
            with pytest.warns(UserWarning, match="own generate runs instead"):
                assert torch.equal(generated(model, inputs), expected)
            return
        output = generated(model, inputs)
        assert handle.stats.steps > 0
        assert not set(coded_modules(model)) & handle.facts.leaves.modules
    unit = 2.0**-7 if method in CODED_INPUTS else torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    check_tokens(model, inputs, expected, output, unit)


@pytest.mark.parametrize("wrapped", [True, False], ids=["peft", "add_adapter"])
@pytest.mark.parametrize("method", ["", "bitsandbytes nf4"])
def test_adapters(method: str, wrapped: bool) -> None:
    """``patch`` of a PeftModel patches the model inside; ``generate`` of both writes the adapted model's tokens."""
    peft = pytest.importorskip("peft", reason="adapters need peft", exc_type=ImportError)
    model, inputs = small_model(torch.float32), inputs_of(LENGTHS["four"])
    if method:
        pytest.importorskip("bitsandbytes", exc_type=ImportError)
        model = quantised_model(model, method)
    plain = generated(model, inputs)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    if wrapped:
        outer = peft.get_peft_model(model, config).eval()
    else:
        try:
            model.add_adapter(config)
        except ValueError as error:
            pytest.skip(f"transformers refuses this PEFT: {error}")
        outer = model.eval()
    expected = generated(outer, inputs)
    assert not torch.equal(expected, plain)
    with sk.patch(outer, "prompt-lookup") as handle:
        assert handle.model is model
        assert torch.equal(generated(outer, inputs), expected)
        assert handle.stats.steps > 0
        prompts = answers(inputs, inputs["input_ids"])
        rows = [completion.tokens for completion in sk.generate_batch(outer, prompts, max_new_tokens=NEW)]
        assert rows == expected[:, -NEW:].tolist()
        if wrapped:
            with outer.disable_adapter():
                assert torch.equal(generated(outer, inputs), plain)
            assert torch.equal(generated(outer, inputs), expected)
    assert torch.equal(generated(outer, inputs), expected)
    assert "specmemo" not in vars(model)


def test_prompt_tuning() -> None:
    """Learned prompts go to generate as embeddings or as a cache, which the model's own loop reads."""
    peft = pytest.importorskip("peft", reason="adapters need peft", exc_type=ImportError)
    model, inputs = small_model(torch.float32), inputs_of(LENGTHS["one"])
    plain = generated(model, inputs)
    outer = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    expected = generated(outer, inputs)
    if torch.equal(expected, plain):
        pytest.skip("the prefix of this PEFT doesn't reach this transformers' models")
    handle = sk.patch(outer, "prompt-lookup")
    with pytest.warns(UserWarning, match="past_key_values"):
        assert torch.equal(generated(outer, inputs), expected)
    sk.unpatch(outer)
    assert handle.stats.steps == 0
    assert "specmemo" not in vars(model)
