"""Models that the operator can't compute are refused by ``patch``, or run their own generate with a warning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from family_models import family_model, small_settings
from selection import sample
from tiny_models import VOCAB, OracleDrafter, tiny_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import specmemo_kernels as sk

PROMPT = torch.tensor([[5, 9, 3, 17, 22, 41, 8]])


def greedy(model: PreTrainedModel, new: int = 12) -> torch.Tensor:
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=new, do_sample=False)


def refused(model: PreTrainedModel, match: str) -> None:
    """``patch`` names the reason, and the model is as before."""
    before = type(model), dict(vars(model)), greedy(model)
    with pytest.raises(sk.UnsupportedModel, match=match):
        sk.patch(model, "prompt-lookup")
    assert (type(model), vars(model)) == before[:2]
    assert not model.get_output_embeddings()._forward_pre_hooks
    assert torch.equal(greedy(model), before[2])


def with_arguments(model: PreTrainedModel, **arguments: Any) -> PreTrainedModel:
    """The same model, whose attention modules are called with additional or changed arguments."""

    def change(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs | {k: v(kwargs) if callable(v) else v for k, v in arguments.items()})

    for layer in model.model.layers:
        layer.self_attn.forward = partial(change, layer.self_attn.forward)
    return model


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"position_bias": torch.zeros(1, 4, 1, 1)}, "LlamaAttention of layer 0 passes 'position_bias'"),
        ({"head_mask": torch.ones(4)}, "'head_mask'"),
        ({"never_heard_of": False}, "'never_heard_of'"),
        ({"never_heard_of": 0}, "'never_heard_of'"),
        ({"cu_seq_lens_q": torch.tensor([0, 1])}, "'cu_seq_lens_q'"),
        ({"memory": object()}, "'memory'"),
        ({"is_causal": False}, "is_causal=False"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"softcap": torch.tensor(5.0)}, "Tensor as softcap"),
        ({"attention_mask": None}, "no attention mask"),
        ({"attention_mask": lambda given: given["attention_mask"] + 0}, "an attention mask of its own"),
        ({"attention_mask": lambda given: torch.zeros(1, 1, 1, 1)}, "an attention mask of its own"),
        ({"sliding_window": 3}, "sliding_window=3"),
    ],
)
def test_arguments_that_change_scores(arguments: dict[str, Any], match: str) -> None:
    """An attention argument that the operator ignores is an error, whatever its value."""
    refused(with_arguments(tiny_model("llama"), **arguments), match)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"attention_mask": lambda given: given["attention_mask"].to("cpu", torch.float32)},
        {"attention_mask": lambda given: given["attention_mask"][:, :, :, :1000]},
        {"output_attentions": False, "cache_position": torch.arange(3), "is_causal": None, "head_mask": None},
    ],
)
def test_arguments_that_change_nothing(change: dict[str, Any]) -> None:
    """Moved or sliced masks, and arguments without effect, are accepted."""
    model = with_arguments(tiny_model("llama"), **change)
    expected = greedy(model)
    with sk.patch(model, OracleDrafter(expected.tolist(), 0.5), tree=5) as handle:
        assert torch.equal(greedy(model), expected)
        assert handle.stats.steps > 0


def test_mask_from_data() -> None:
    refused(family_model("doge"), "DogeAttention of layer 0 passes an attention mask of its own")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_bidirectional_attention(family: str) -> None:
    """Decoders configured as encoders."""
    refused(tiny_model(family, is_causal=False), "is_causal=False|position 0 sees position 1")


@pytest.mark.parametrize("family", ["bert", "electra", "roberta"])
def test_an_encoder_is_no_decoder(family: str) -> None:
    config = family_model(family).config
    config.is_decoder = False
    torch.manual_seed(0)
    refused(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(), "position 0 sees position 1")


def test_chunked_attention() -> None:
    """A chunk far longer than the probe's prompt."""
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": VOCAB, "head_dim": 8}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "intermediate_size_mlp": 32}
    config = CONFIG_MAPPING["llama4_text"](**small, attention_chunk_size=8192, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    from specmemo_kernels.integrations.hf.draft import attach
    from specmemo_kernels.integrations.hf.probe import probe

    detach = attach(model)
    with pytest.raises(sk.UnsupportedModel, match="position 1048576 doesn't see position 1048575"):
        probe(model)
    detach()


@pytest.mark.parametrize("window", [2, 5, 4096, 2**17 + 3])
def test_window_of_the_mask_alone(window: int) -> None:
    """A model whose mask has a window that its attention function doesn't get."""
    torch.manual_seed(0)
    config = family_model("phimoe").config
    config.sliding_window = window
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    expected = greedy(model)
    with sk.patch(model, OracleDrafter(expected.tolist(), 0.5), tree=5) as handle:
        assert handle.facts.windows == (window, window)
        assert torch.equal(greedy(model), expected)
        assert handle.stats.steps > 0


def test_window_of_the_cache_alone() -> None:
    """Texts longer than what the model's cache keeps run the model's own generate, with a warning."""
    torch.manual_seed(0)
    config = family_model("moshi").config
    config.sliding_window = 14
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    short, long = greedy(model, 7), greedy(model, 20)
    with sk.patch(model, "prompt-lookup") as handle:
        assert torch.equal(greedy(model, 7), short)
        assert (steps := handle.stats.steps) > 0
        with pytest.warns(UserWarning, match="cache keeps only 14 tokens"):
            assert torch.equal(greedy(model, 20), long)
        assert handle.stats.steps == steps
        with pytest.raises(ValueError, match="cache keeps only 14 tokens"):
            sk.generate_batch(model, [PROMPT[0]], max_new_tokens=20)


def test_positions_that_generate_leaves_to_the_model() -> None:
    """They must be 0, 1, 2, ...: those of Kosmos-2.5 begin behind the padding id, if it isn't given any."""
    kind = CONFIG_MAPPING["kosmos-2.5"]
    torch.manual_seed(0)
    config = kind(**small_settings(kind()))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    refused(model, "those that it computes, with other hidden states")
    assert refusal_with_positions(tiny_model("llama"), lambda _: None) == ""


def test_positions_that_generate_changes() -> None:
    """Rotary embeddings depend on their differences alone, learned ones don't."""
    assert refusal_with_positions(tiny_model("llama"), lambda positions: positions + 1) == ""
    assert "[1, 2, 3" in refusal_with_positions(family_model("gpt2"), lambda positions: positions + 1)


def refusal_with_positions(model: PreTrainedModel, change: Callable[[Any], Any]) -> str:
    """The message of a model whose ``generate`` changes the positions; empty if the patched model writes its tokens."""
    own = type(model).prepare_inputs_for_generation

    def prepare(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = own(self, *args, **kwargs)
        return inputs | {"position_ids": change(inputs.get("position_ids"))}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(model), "prepare_inputs_for_generation", prepare)
        expected = greedy(model)
        try:
            handle = sk.patch(model, OracleDrafter(expected.tolist(), 0.5), tree=3)
        except sk.UnsupportedModel as error:
            return str(error)
        with handle:
            assert torch.equal(greedy(model), expected)
            assert handle.stats.steps > 0
    return ""


def test_tokens_that_mix_outside_of_attention() -> None:
    """Layers that read neighbouring rows would read other branches of a tree."""
    model = tiny_model("llama")
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] + args[0].roll(1, dims=1), *args[1:]))
    refused(model, "an operation besides attention mixes tokens")


@pytest.mark.parametrize("dtype", sample([torch.float32, torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    for family in ("gemma2", "gpt_oss"):
        sk.patch(tiny_model(family).to(dtype), "prompt-lookup").undo()


def test_dropout_is_no_difference() -> None:
    """A model in training mode is compared without dropout, and stays in training mode."""
    model = tiny_model("llama", attention_dropout=0.5).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    sk.patch(model, "prompt-lookup").undo()
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("family", ["xlm", "openai-gpt"])
def test_errors_of_the_model(family: str) -> None:
    """A model whose code fails on packed nodes is refused, with its error."""
    refused(family_model(family), "can't run a pass over packed nodes")
