"""Layers of the kernel in the place of a model's own, by ``kernelize``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import TREE
from kernels import (
    KernelizeFallback,
    LocalLayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12,
}  # fmt: skip
TOKENS = torch.arange(12).view(2, 6) * 7
# As a user does for layers that transformers doesn't name itself; RMSNorm of Llama is named.
replace_kernel_forward_from_hub(LlamaMLP, "MLP")
replace_kernel_forward_from_hub(Gemma2RMSNorm, "GemmaRMSNorm")


def mapping(*layers: tuple[str, str]) -> dict[str, Any]:
    return {
        name: {"cpu": {Mode.INFERENCE | Mode.TORCH_COMPILE: LocalLayerRepository(TREE, layer_name=layer)}}
        for name, layer in layers
    }


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def replaced(model: Any, layers: dict[str, Any]) -> Any:
    with use_kernel_mapping(layers, inherit_mapping=False):
        mode = Mode.INFERENCE | Mode.TORCH_COMPILE
        return kernelize(model, mode=mode, device="cpu", use_fallback=KernelizeFallback.NO_LAYER)


def counted(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators that the layers call from now on."""
    names: list[str] = []
    for name in ("rms_norm", "gated_mlp"):
        operator = getattr(kernel.layers, name)

        def call(*args: Any, name: str = name, operator: Any = operator, **options: Any) -> Any:
            names.append(name)
            return operator(*args, **options)

        monkeypatch.setattr(kernel.layers, name, call)
    return names


@torch.no_grad()
def test_llama(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(LlamaConfig(**SMALL))
    expected = model(TOKENS).logits
    calls = counted(kernel, monkeypatch)
    replaced(model, mapping(("RMSNorm", "LlamaRMSNorm"), ("MLP", "LlamaMLP")))
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert (calls.count("rms_norm"), calls.count("gated_mlp")) == (5, 2)


@torch.no_grad()
def test_gemma2(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(Gemma2Config(**SMALL))
    expected = model(TOKENS).logits
    calls = counted(kernel, monkeypatch)
    replaced(model, mapping(("GemmaRMSNorm", "GemmaRMSNorm")))
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert calls.count("rms_norm") == 9


@torch.no_grad()
@pytest.mark.parametrize("other", ["activation", "layer"])
def test_an_mlp_of_other_parts_runs_them(other: str, kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    config = LlamaConfig(**SMALL, hidden_act="silu" if other == "layer" else "gelu")
    mlp = LlamaMLP(config)
    if other == "layer":
        mlp.up_proj = Doubled(48, 64, bias=False)
    x = torch.randn(3, 48)
    expected = mlp(x)
    calls = counted(kernel, monkeypatch)
    replaced(mlp, mapping(("MLP", "LlamaMLP")))
    assert torch.equal(mlp(x), expected)
    assert calls == []


@torch.no_grad()
def test_compiled_in_one_graph(kernel: ModuleType) -> None:
    model = model_of(LlamaConfig(**SMALL)).model.layers[0]
    part = nn.Sequential(model.input_layernorm, model.mlp)
    x = torch.randn(2, 3, 48)
    expected = part(x)
    replaced(part, mapping(("RMSNorm", "LlamaRMSNorm"), ("MLP", "LlamaMLP")))
    compiled = torch.compile(part, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)


def test_training_keeps_the_models_own_layer() -> None:
    """The layers say that they have no gradients."""
    model = model_of(LlamaConfig(**SMALL))
    own = type(model.model.norm).forward
    with use_kernel_mapping({"RMSNorm": {"cpu": LocalLayerRepository(TREE, layer_name="LlamaRMSNorm")}}):
        kernelize(model.train(), mode=Mode.TRAINING, device="cpu")
    assert model.model.norm.forward.__func__ is own
