"""The table of published configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from selection import sample
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from specmemo_kernels.planning.known_models import known_model, known_models
from specmemo_kernels.planning.model_spec import ModelSpec

#: Parameters in billions on the models' cards (Gemma's without the vision tower and with the tied embedding once).
PUBLISHED = {
    "Llama-3.1-8B": 8.03, "Llama-3.1-70B": 70.6, "Llama-3.3-70B-Instruct": 70.6, "Llama-3.2-1B": 1.24,
    "Llama-3.2-3B": 3.21, "Meta-Llama-3-8B": 8.03, "Llama-2-7b-hf": 6.74, "Llama-2-13b-hf": 13.0,
    "Llama-2-70b-hf": 69.0,
    "vicuna-7b-v1.3": 6.74, "vicuna-7b-v1.5": 6.74, "vicuna-13b-v1.3": 13.0, "vicuna-13b-v1.5": 13.0,
    "TinyLlama-1.1B-Chat-v1.0": 1.1, "SmolLM2-135M": 0.135, "SmolLM2-360M": 0.362, "SmolLM2-1.7B": 1.71,
    "SmolLM3-3B": 3.08, "Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.72, "Qwen3-4B": 4.02, "Qwen3-4B-Instruct-2507": 4.02,
    "Qwen3-8B": 8.19, "Qwen3-14B": 14.8, "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5, "Qwen3-30B-A3B-Instruct-2507": 30.5,
    "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.54, "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.62, "Qwen2.5-14B": 14.8,
    "Qwen2.5-32B": 32.8, "Qwen2.5-0.5B-Instruct": 0.494, "Qwen2.5-1.5B-Instruct": 1.54, "Qwen2.5-3B-Instruct": 3.09,
    "Qwen2.5-7B-Instruct": 7.62, "Qwen2.5-14B-Instruct": 14.8, "Qwen2.5-32B-Instruct": 32.8,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1.78, "DeepSeek-R1-Distill-Qwen-7B": 7.62, "gemma-3-1b-it": 1.0,
    "gemma-3-4b-it": 3.88, "gemma-3-12b-it": 11.77, "gemma-3-27b-it": 27.0, "Mistral-7B-v0.1": 7.24,
    "Mistral-7B-v0.3": 7.25, "Mixtral-8x7B-v0.1": 46.7, "Phi-3-mini-4k-instruct": 3.82,
    "Phi-3-mini-128k-instruct": 3.82, "phi-4": 14.7, "Phi-4-mini-instruct": 3.84, "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 117,
}  # fmt: skip

EVERYDAY = ("Llama-3.2-1B", "Llama-2-7b-hf", "SmolLM3-3B", "Qwen3-0.6B", "Qwen2.5-0.5B", "gemma-3-1b-it",
            "Mistral-7B-v0.1", "Mixtral-8x7B-v0.1", "Phi-4-mini-instruct", "gpt-oss-20b")  # fmt: skip


@pytest.mark.parametrize("name", sample(PUBLISHED, EVERYDAY))
def test_parameters(name: str) -> None:
    """Those of the card to 1 %, and exactly those of transformers' model."""
    config = dict(known_model(name) or {})
    spec = ModelSpec.from_config(config)
    assert spec.parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)
    config.pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config.pop("model_type")](**config))
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_every_entry_is_checked() -> None:
    """Each distinct configuration is one of :data:`PUBLISHED`."""
    configs = {id(config) for config in known_models().values()}
    assert {id(known_model(name)) for name in PUBLISHED} == configs


def test_names() -> None:
    """The hub id or its last part, in any case; nothing shorter. All names are distinct."""
    llama = known_model("meta-llama/Llama-3.1-8B")
    assert llama is not None
    assert llama is known_model("llama-3.1-8b") is known_model("META-LLAMA/LLAMA-3.1-8B")
    for name in ("llama", "llama-3.1", "other/Llama-3.1-8B", ""):
        assert known_model(name) is None
    short = [name.casefold().rpartition("/")[2] for name in known_models()]
    assert len(short) == len(set(short))


def test_a_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of that name is read instead of the table; the table needs no hub."""
    monkeypatch.chdir(tmp_path)
    assert ModelSpec.load("phi-4").num_layers == 40
    Path("phi-4").mkdir()
    with pytest.raises(FileNotFoundError, match=r"phi-4/config\.json"):
        ModelSpec.load("phi-4")
    CONFIG_MAPPING["llama"](num_hidden_layers=3).save_pretrained("phi-4")
    assert ModelSpec.load("phi-4").num_layers == 3
