"""Sizes read from configurations, against the models that transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from meta_models import CONFIGS, meta_model
from tiny_models import _BASE, FAMILIES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from specmemo_kernels.integrations.hf.probe import probe
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.footprint import predicted_shape
from specmemo_kernels.planning.model_spec import ModelSpec

LLAMA8 = CONFIG_MAPPING["llama"](**CONFIGS["Llama-3.1-8B"], dtype="bfloat16")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_every_family(family: str, tied: bool) -> None:
    """The model's own count, to 0.3 % (sinks, biases of experts and some norms of single heads are left out)."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1000}
    config = CONFIG_MAPPING[family](**(_BASE | FAMILIES[family] | sizes | {"tie_word_embeddings": tied}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec = ModelSpec.from_config(config)
    assert spec.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=3e-3)
    assert spec == ModelSpec.from_config(json.loads(config.to_json_string()), name=spec.name)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe", "phi3", "gemma2", "qwen2"])
def test_parameters_of_published_sizes(family: str) -> None:
    """With the families' own defaults, which are sizes of published models."""
    config = CONFIG_MAPPING[family]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert ModelSpec.from_config(config).parameters == pytest.approx(
        sum(p.numel() for p in model.parameters()), rel=1e-3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_of_every_family(family: str) -> None:
    """The sizes that attention receives in a pass."""
    from tiny_models import tiny_model

    from specmemo_kernels.integrations.hf.target import attach

    model = tiny_model(family)
    attach(model)
    facts, spec = probe(model), ModelSpec.from_config(model.config)
    assert spec.kv_bytes_per_token == sum(layer.bytes_per_token for layer in facts.layers)
    assert spec.num_qo_heads == facts.num_qo_heads[0]


def test_llama_by_hand() -> None:
    """Llama-3.1-8B: 8.03e9 parameters, 128 KiB of keys and values per token."""
    spec = ModelSpec.from_config(LLAMA8)
    assert spec.parameters == 8_030_261_248
    assert spec.weight_bytes == 2 * spec.parameters
    assert spec.kv_bytes_per_token == 128 * 1024
    assert spec.max_context == 131072
    assert spec.read_weights(1) == spec.read_weights(500) == spec.active_weights == spec.layer_weights


def test_experts_that_are_read() -> None:
    """Two of eight per token: one row reads two, many rows all, a few rows the expected number."""
    spec = ModelSpec.from_config(CONFIG_MAPPING["mixtral"]())
    alone = spec.layer_weights - spec.num_layers * spec.num_experts * spec.expert_weights
    met = [(spec.read_weights(rows) - alone) / spec.num_layers / spec.expert_weights for rows in (1, 2, 3, 1000)]
    assert met == pytest.approx([2, 8 * (1 - 0.75**2), 8 * (1 - 0.75**3), 8])
    assert spec.active_weights == pytest.approx(spec.read_weights(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"hidden_size": None}, "hidden_size=None"), ({"vocab_size": 0}, "vocab_size=0"),
     ({"num_hidden_layers": "many"}, "num_hidden_layers='many'"), ({"dtype": "int3"}, "dtype='int3'")],
)  # fmt: skip
def test_configurations_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_config(LLAMA8.to_dict() | changes)


def test_sources(tmp_path: Path) -> None:
    """A folder, a file in it; a file that is missing or isn't JSON is named."""
    LLAMA8.save_pretrained(tmp_path)
    spec = ModelSpec.load(tmp_path)
    assert spec == ModelSpec.from_config(LLAMA8, name=str(tmp_path))
    assert ModelSpec.load(tmp_path / "config.json").parameters == spec.parameters
    with pytest.raises(FileNotFoundError, match=r"nothing/config.json"):
        ModelSpec.load(tmp_path / "nothing" / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        ModelSpec.load(tmp_path)


def test_heads() -> None:
    """The bytes of the modules."""
    from specmemo_kernels import MedusaHeads

    spec = ModelSpec.from_config(meta_model("Llama-2-7B").config)
    for heads, layers, own, bits in ((5, 1, True, None), (3, 2, False, None), (2, 1, True, 4), (4, 3, False, 4)):
        with torch.device("meta"):
            module = MedusaHeads(4096, 32000, heads, layers, own_lm_head=own, head_bits=bits).half()
        sizes = HeadsSpec(5, layers, own, bits)
        assert predicted_shape(spec, sizes, heads).head_bytes == sum(t.nbytes for t in module.state_dict().values())
