"""Changes of a patched model that steps can't follow: the call runs the model's own code, with a warning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hybrid_models import hybrid_model
from selection import sample
from test_call_corners import falls_back
from test_families import batch, greedy
from tiny_models import tiny_model
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

import specmemo_kernels as sk

INPUTS = batch((9,))


def replaced_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])


def swapped_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def replaced_attention(model: Any) -> None:
    attention = "self_attn" if hasattr(model.model.layers[0], "self_attn") else "conv"
    setattr(model.model.layers[0], attention, copy.deepcopy(getattr(model.model.layers[0], attention)))


def replaced_config(model: Any) -> None:
    attention = next(m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "config"))
    attention.config = copy.deepcopy(model.config)


def exchanged_indices(model: Any) -> None:
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    first.layer_idx, second.layer_idx = second.layer_idx, first.layer_idx


def other_window(model: Any) -> None:
    model.model.layers[0].self_attn.sliding_window = 5


def changed_kinds(model: Any) -> None:
    model.config.layer_types[:] = ["full_attention"] * len(model.config.layer_types)


CHANGES: list[tuple[str, Callable[[Any], None]]] = [
    *(("llama", change) for change in (replaced_layer, swapped_layers, replaced_attention, replaced_config)),
    *(("lfm2", change) for change in (replaced_layer, replaced_attention)),
    ("gemma3_text", changed_kinds),
    ("llama", exchanged_indices),
    ("gemma2", other_window),
]


def built(family: str) -> PreTrainedModel:
    return hybrid_model(family) if family == "lfm2" else tiny_model(family)


def check_fallback(model: PreTrainedModel, change: Callable[[Any], None], reason: str) -> None:
    """After a change to the patched model it writes the changed model's own tokens, without speculative steps."""
    own = copy.deepcopy(model)
    with sk.patch(model, "prompt-lookup") as handle:
        greedy(model, INPUTS, 12)
        change(model)
        change(own)
        expected, steps = greedy(own, INPUTS, 12), handle.stats.steps
        with falls_back(reason):
            assert torch.equal(greedy(model, INPUTS, 12), expected)
        assert handle.stats.steps == steps


@pytest.mark.parametrize(("family", "change"), sample(CHANGES, CHANGES[::3]))
def test_layers_that_changed(family: str, change: Callable[[Any], None]) -> None:
    check_fallback(built(family), change, "since patching")


@pytest.mark.filterwarnings("ignore:.*quant")
def test_layers_that_are_quantised_with_their_rows() -> None:
    """``patch`` would refuse the model, and so does each call."""

    def change(model: PreTrainedModel) -> None:
        chosen = {f"model.layers.{i}.mlp.up_proj": torch.ao.quantization.default_dynamic_qconfig for i in range(2)}
        torch.ao.quantization.quantize_dynamic(model, chosen, inplace=True)

    model = tiny_model("llama")
    check_fallback(model, change, "up_proj is a Linear of torch.ao quantisation")
    with pytest.raises(sk.UnsupportedModel, match=r"up_proj is a Linear of torch.ao quantisation"):
        sk.patch(model, "prompt-lookup")


def test_an_attention_class_with_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    with sk.patch(model, "prompt-lookup"):
        forward = modeling_llama.LlamaAttention.forward
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lambda self, *a, **k: forward(self, *a, **k))
        with falls_back("self_attn of the model has been replaced"):
            greedy(model, INPUTS, 4)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    sample(
        [
            ("granite", "logits_scaling", 9.0),
            ("gemma2", "final_logit_softcapping", 2.0),
            ("cohere", "logit_scale", 0.01),
        ],
        [("gemma2", "final_logit_softcapping", 2.0)],
    ),
)
def test_scales_of_logits_that_changed(family: str, name: str, value: float) -> None:
    """They decide what is drawn."""
    model = tiny_model(family)
    call: dict[str, Any] = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    with sk.patch(model, "prompt-lookup"):
        setattr(model if hasattr(model, name) else model.config, name, value)
        with falls_back(f"{name}.* has changed"):
            found = model.generate(**INPUTS, **call, do_sample=False).logits[0]
    expected = model.generate(**INPUTS, **call, do_sample=False).logits[0]
    torch.testing.assert_close(found, expected)


class Doubled(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs | {"position_ids": 2 * inputs["position_ids"]}


def test_classes_with_steps_of_their_own() -> None:
    """``generate`` would call methods that a speculative call doesn't."""
    model = Doubled(tiny_model("llama").config)
    with pytest.raises(sk.UnsupportedModel, match="Doubled has a prepare_inputs_for_generation of its own"):
        sk.patch(model, "prompt-lookup")


@pytest.mark.slow
def test_compiled_models() -> None:
    """Refused with the reason; compiling a patched model changes nothing."""
    model = tiny_model("llama")
    expected = greedy(model, INPUTS, 8)
    model.model.compile(backend="eager")
    with pytest.raises(sk.UnsupportedModel, match=r"LlamaModel is compiled \(torch.compile\); patch first"):
        sk.patch(model, "prompt-lookup")
    model.model._compiled_call_impl = None
    with pytest.raises(sk.UnsupportedModel, match="OptimizedModule is compiled"):
        sk.patch(torch.compile(model, backend="eager"), "prompt-lookup")
    with sk.patch(model, "prompt-lookup"):
        model.model.compile(backend="eager")
        assert torch.equal(greedy(model, INPUTS, 8), expected)


@pytest.mark.parametrize("family", sample(["lfm2", "jamba"], ["lfm2"]))
def test_masked_tokens_between_states(family: str) -> None:
    """transformers keeps zeros of masked tokens in a state; a speculative call leaves these tokens out."""
    model = hybrid_model(family)
    ids, mask = torch.arange(3, 15)[None], torch.ones(1, 12, dtype=torch.int64)
    mask[0, 5] = 0
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, **call)
    with sk.patch(model, "prompt-lookup"), falls_back("recurrent layers count them"):
        assert torch.equal(model.generate(ids, **call), expected)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_window_of_one_token(family: str) -> None:
    """transformers' cache of one token keeps all of them, so ``generate`` differs from a pass without a cache."""
    model = tiny_model(family, sliding_window=1)
    expected = greedy(model, INPUTS, 16)
    with sk.patch(model, "prompt-lookup"):
        assert torch.equal(greedy(model, INPUTS, 16), expected)


def transposed(values: torch.Tensor) -> torch.Tensor:
    return values.mT.contiguous().mT


def columns(values: torch.Tensor) -> torch.Tensor:
    """Every second number of a tensor twice as wide."""
    wide = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 7.0)
    wide[..., ::2] = values
    return wide[..., ::2]


LAYOUTS = [
    ("llama", "lm_head.weight", transposed), ("llama", "lm_head.weight", columns), ("llama", "q_proj.weight", columns),
    ("llama", "down_proj.weight", transposed), ("llama", "norm.weight", columns), ("qwen2", "q_proj.bias", columns),
    ("mixtral", "experts", transposed), ("gpt_oss", "sinks", columns),
]  # fmt: skip


def relaid(model: Any, part: str, layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = [p for name, p in model.named_parameters() if part in name]
    assert found
    for parameter in found:
        parameter.data = layout(parameter.data)


each_layout = pytest.mark.parametrize(("family", "part", "layout"), sample(LAYOUTS, LAYOUTS[:3]))


@each_layout
def test_weights_of_any_strides(family: str, part: str, layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = tiny_model(family)
    expected = greedy(model, INPUTS, 12)
    relaid(model, part, layout)
    with sk.patch(model, "prompt-lookup", tree=4) as handle:
        assert torch.equal(greedy(model, INPUTS, 12), expected)
        assert handle.stats.steps


@each_layout
def test_strides_that_change(family: str, part: str, layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = tiny_model(family)
    with sk.patch(model, "prompt-lookup", tree=4) as handle:
        expected, steps = greedy(model, INPUTS, 12), handle.stats.steps
        relaid(model, part, layout)
        with falls_back("of strides"):
            assert torch.equal(greedy(model, INPUTS, 12), expected)
        assert handle.stats.steps == steps
