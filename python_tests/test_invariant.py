"""Invariant mode: the tokens of 16-bit models depend on neither drafter, tree, batch, chunk nor preemption."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import family_model
from selection import sample
from test_families import batch
from tiny_models import OracleDrafter, random_heads, tiny_model
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.row_functions import in_whole_vectors

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


@pytest.mark.parametrize(
    "family", sample(("mixtral", "deepseek_v3", "gpt_oss", "gpt_neox", "roberta"), ["mixtral", "gpt_neox"])
)
def test_functions_outside_of_replaced_modules(family: str) -> None:
    """Routers call functional.linear; torch's GELU and sigmoid round an element by its place on some CPUs."""
    model = family_model(family).bfloat16()
    with sk.patch(model, "prompt-lookup", invariant=True) as handle:
        functions = handle.facts.leaves.functions
    assert functions.linear == (family not in ("gpt_neox", "roberta"))
    expected = written(model, OracleDrafter([], 1.0), tree=1, batch_size=1, prefill_chunk=16)
    answers = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    options: dict[str, Any] = {"tree": sk.DraftTree.chain(5), "batch_size": 3, "prefill_chunk": 7}
    for graph in (False, None):
        assert written(model, OracleDrafter(answers, 0.6), graph=graph, **options) == expected


@pytest.mark.parametrize("product", [torch.matmul, lambda x, weight: torch.einsum("bi,io->bo", x, weight)])
def test_a_model_with_other_products_is_refused(product: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bf16_model("mixtral")
    router = type(model.model.layers[0].mlp.gate)

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        logits = product(hidden.reshape(-1, hidden.shape[-1]), 2 * self.weight.T)
        scores, experts = logits.float().softmax(-1).topk(2)
        return logits, scores.to(hidden.dtype), experts

    monkeypatch.setattr(router, "forward", forward)
    with pytest.raises(UnsupportedModel, match=r"computes aten.[a-z.]* with model.layers.0.mlp.gate.weight outside of"):
        sk.patch(model, "prompt-lookup", invariant=True)
    assert not hasattr(model, "specmemo")


def test_operators_of_other_libraries_are_refused() -> None:
    """Their matrices needn't be tensors of the model."""

    @torch.library.custom_op("specmemo_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    class Doubled(type(bf16_model().model.norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(double(x))

    model = bf16_model()
    model.model.norm.__class__ = Doubled
    with pytest.raises(UnsupportedModel, match=r"computes specmemo_test.double.default outside of linear layers"):
        sk.patch(model, "prompt-lookup", invariant=True)


def test_computed_matrices_of_linear_layers() -> None:
    """Each is freed before the next is computed."""

    class Rounded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight.round(decimals=2))

    model = bf16_model()
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Rounded
    expected = written(model, OracleDrafter([], 1.0), tree=1, batch_size=1, prefill_chunk=16)
    assert written(model, random_heads(model), tree=9) == expected


def test_recurrent_layers_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="MiniMaxForCausalLM has recurrent layers"):
        sk.patch(family_model("minimax").bfloat16(), "prompt-lookup", invariant=True)


def test_an_operation_that_compares_rows_is_refused() -> None:
    class Centred(type(bf16_model().model.norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - 1e-3 * x.mean(1, keepdim=True))

    model = bf16_model()
    model.model.norm.__class__ = Centred
    with pytest.raises(UnsupportedModel, match=r"computes other bits for|an operation besides attention mixes tokens"):
        sk.patch(model, "prompt-lookup", invariant=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
def test_elementwise_functions(name: str, dtype: torch.dtype) -> None:
    """torch's activation rounds otherwise behind the last whole vector, on this CPU or not; a model's doesn't."""
    function = getattr(torch.nn.functional, name)
    model = neox(name, dtype)
    with sk.patch(model, "prompt-lookup", invariant=True) as handle:
        assert (function in handle.facts.leaves.functions.elementwise) == depends_on_place(function, dtype)
    assert written(model, "prompt-lookup") == written(model, OracleDrafter([], 1.0), tree=1, batch_size=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_activation_in_place_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it depends on the place: its result isn't a tensor of its own."""
    model = neox("silu", dtype)

    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(x, inplace=True)

    for layer in model.gpt_neox.layers:
        layer.mlp.act = InPlace()
    if not depends_on_place(torch.nn.functional.silu, dtype):
        with sk.patch(model, "prompt-lookup", invariant=True) as handle:
            assert not handle.facts.leaves.functions.elementwise
        return
    with pytest.raises(UnsupportedModel, match=rf"computes aten\.silu_\.default in {str(dtype)[6:]} outside of"):
        sk.patch(model, "prompt-lookup", invariant=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_in_whole_vectors(dtype: torch.dtype, threads: int) -> None:
    """More elements than one thread computes, odd numbers of them, strided tensors; each has its own bits."""
    values = torch.randn(9, 8191, dtype=torch.float64).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for function, options in ((torch.nn.functional.gelu, {}), (torch.tanh, {}), (torch.pow, {"exponent": 3.0})):
            whole = in_whole_vectors(function, values, **options)
            exact = function(values.double(), **options)
            tolerance = 4 * torch.finfo(dtype).eps
            # AVX512's GELU misses the tolerance by itself, with an error of 8e-7 in float32.
            own = (function(values, **options).double() - exact).abs() - tolerance * exact.abs()
            torch.testing.assert_close(
                whole.double(), exact, rtol=tolerance, atol=max(tolerance, 1.01 * own.max().item())
            )
            for rows in (1, 2, 5):
                assert torch.equal(in_whole_vectors(function, values[:rows], **options), whole[:rows])
            assert torch.equal(in_whole_vectors(function, values[:, 1::7], **options), whole[:, 1::7])
            assert torch.equal(in_whole_vectors(function, values.mT, **options), whole.mT)
    finally:
        torch.set_num_threads(before)


def neox(activation: str, dtype: torch.dtype) -> Any:
    config = GPTNeoXConfig(
        hidden_size=72, intermediate_size=50, num_hidden_layers=1, num_attention_heads=4, vocab_size=61,
        hidden_act=activation,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).to(dtype).eval()


def depends_on_place(function: Any, dtype: torch.dtype) -> bool:
    """Whether an element's result differs between a large tensor and one of less than a vector."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    values = (bits.short() if torch.finfo(dtype).bits == 16 else bits * 2**16 + 2**15 + 1).view(dtype)
    parts = torch.cat([function(part) for part in values.split(3)])
    return not torch.equal(function(values).nan_to_num(), parts.nan_to_num())
