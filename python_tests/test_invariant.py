"""Invariant mode: the tokens of 16-bit models depend on neither drafter, tree, batch, chunk nor preemption."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from selection import sample
from test_families import batch
from tiny_models import OracleDrafter, random_heads, tiny_model
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf.mask import UnsupportedModel

PROMPTS = [row[mask.bool()].tolist() for row, mask in zip(*batch((40, 1, 17, 30, 9)).values(), strict=True)]
NEW = 30


def bf16_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    return tiny_model(family, seed=4, **changes).to(torch.bfloat16)


def written(model: PreTrainedModel, drafter: Any, batch_size: int = 8, **options: Any) -> list[list[int]]:
    """The tokens of all prompts."""
    with sk.patch(model, drafter, invariant=True, max_batch_size=batch_size, page_size=4, **options):
        return [list(o.tokens) for o in sk.generate_batch(model, PROMPTS, max_new_tokens=NEW, eos_token_ids=[])]


@pytest.mark.parametrize(
    "family",
    sample(("llama", "qwen3", "gemma2", "cohere", "phi3", "olmo2", "granite", "mistral"), ["llama"]),
)
def test_tokens_depend_on_no_setting(family: str) -> None:
    model = bf16_model(family)
    expected = written(model, OracleDrafter([], 1.0), tree=1, batch_size=1, prefill_chunk=16)
    answers = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    assert len({token for tokens in expected for token in tokens}) > 12
    small = bf16_model(family, num_hidden_layers=1) if family == "llama" else "prompt-lookup"
    for drafter, options in (
        (OracleDrafter(answers, 1.0), {"tree": sk.DraftTree.chain(9)}),
        (OracleDrafter(answers, 0.6), {"tree": sk.DraftTree.chain(5), "batch_size": 3, "prefill_chunk": 7}),
        (random_heads(model), {"tree": 12, "batch_size": 2, "prefill_chunk": 256}),
        ("prompt-lookup", {"batch_size": 16}),
        (small, {"batch_size": 4, "prefill_chunk": 5}),
    ):
        assert written(model, drafter, **options) == expected, options


def test_preemptions_and_aborts_change_no_token(one_thread: None) -> None:
    """Few pages: sequences are preempted, and computed again beside other rows. The plan gives pages a quarter of the
    budget, more than these sequences need if there are many threads with workspaces."""
    model = bf16_model()
    expected = written(model, OracleDrafter([], 1.0), tree=1, batch_size=1)
    answers = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    options: dict[str, Any] = {"invariant": True, "tree": sk.DraftTree.chain(4), "page_size": 4, "prefill_chunk": 16}
    drafter = OracleDrafter(answers, 0.7)
    with sk.patch(model, drafter, **options) as handle:
        fixed = handle.plan.generation_bytes
    with sk.patch(model, drafter, memory_budget=fixed * 4 // 3 + 4096, **options) as handle:
        assert handle.plan.max_sequences == 8
        run = sk.stream_batch(model, [*PROMPTS, PROMPTS[3]], max_new_tokens=NEW, eos_token_ids=[])
        tokens: dict[int, list[int]] = {row: [] for row in range(len(PROMPTS) + 1)}
        for piece in run:
            tokens[piece.index] += piece.tokens
            if len(tokens[5]) > 8:
                run.abort(5)
        assert [tokens[row] for row in range(len(PROMPTS))] == expected
        assert tokens[5] == expected[3][: len(tokens[5])]
        assert handle.stats.preemptions > 0


def test_sampled_tokens_too() -> None:
    """Logits have the same bits, so a seed draws the same tokens with any tree."""
    model = bf16_model()
    inputs = batch((12,))
    results = []
    for tree in (1, 9):
        with sk.patch(model, random_heads(model), invariant=True, tree=tree):
            torch.manual_seed(3)
            results.append(model.generate(**inputs, max_new_tokens=NEW, do_sample=True, temperature=0.8))
    assert torch.equal(*results)


def test_float32_and_float16() -> None:
    for dtype in (torch.float32, torch.float16):
        model = tiny_model("llama", seed=4).to(dtype)
        assert written(model, OracleDrafter([], 1.0), tree=1) == written(model, random_heads(model), tree=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "reference"}, "backend 'reference' has no invariant products"),
        ({"fuse": False}, "invariant is True and fuse is False"),
        ({"kv_dtype": "int8"}, "invariant is True and kv_dtype is 'int8'"),
    ],
)
def test_refused_arguments(options: dict[str, Any], message: str) -> None:
    model = bf16_model()
    with pytest.raises(ValueError, match=message):
        sk.patch(model, "prompt-lookup", invariant=True, **options)
    assert not hasattr(model, "specmemo")


def test_a_model_with_other_products_is_refused() -> None:
    """Experts multiply the rows that are routed to them."""
    with pytest.raises(UnsupportedModel, match=r"multiplies with model.layers.0.mlp.*weight of"):
        sk.patch(bf16_model("mixtral"), "prompt-lookup", invariant=True)


def test_an_operation_that_compares_rows_is_refused() -> None:
    class Centred(type(bf16_model().model.norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - 1e-3 * x.mean(1, keepdim=True))

    model = bf16_model()
    model.model.norm.__class__ = Centred
    with pytest.raises(UnsupportedModel, match=r"computes other bits for|an operation besides attention mixes tokens"):
        sk.patch(model, "prompt-lookup", invariant=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_elementwise_operators_that_depend_on_the_place_are_refused(activation: str, dtype: torch.dtype) -> None:
    """torch's activation rounds otherwise behind the last whole vector, on this CPU or not."""
    config = GPTNeoXConfig(
        hidden_size=72, intermediate_size=50, num_hidden_layers=1, num_attention_heads=4, vocab_size=61,
        hidden_act=activation,
    )  # fmt: skip
    model: Any = GPTNeoXForCausalLM(config).to(dtype).eval()
    function, size = getattr(torch.nn.functional, activation), torch.finfo(dtype).bits // 8
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    values = (bits.short() if size == 2 else bits * 2**16 + 2**15 + 1).view(dtype)
    parts = torch.cat([function(part) for part in values.split(3)])
    if torch.equal(function(values).nan_to_num(), parts.nan_to_num()):
        assert written(model, "prompt-lookup") == written(model, OracleDrafter([], 1.0), tree=1, batch_size=1)
        return
    with pytest.raises(UnsupportedModel, match=rf"computes aten\.{activation}\.default in {str(dtype)[6:]} outside of"):
        sk.patch(model, "prompt-lookup", invariant=True)
