"""Sizes read from configurations, against the models that transformers makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import small_config
from family_outcomes import recorded
from meta_models import CONFIGS, meta_model
from selection import sample
from tiny_models import FAMILIES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from specmemo_kernels.integrations.hf.probe import probe
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.planner import plan_memory
from specmemo_kernels.planning.predicted_shape import page_token_bytes, predicted_shape, weight_bytes

LLAMA8 = CONFIG_MAPPING["llama"](**CONFIGS["Llama-3.1-8B"], dtype="bfloat16")


#: Families that :func:`specmemo_kernels.patch` runs.
SUPPORTED = [name for name, found in recorded()["outcomes"].items() if found.kind == "equal"]


def built(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def stored(config: PreTrainedConfig, folder: Path) -> ModelSpec:
    """Of the ``config.json``, which leaves out the defaults, without the key that ties the embeddings."""
    fields = json.loads(config.to_json_string())
    fields.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelSpec.load(folder)


def check_weights(spec: ModelSpec, model: Any) -> None:
    """Parameters, their bytes and those of embedding and lm_head are the model's, exactly."""
    tensors = list(model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert spec.parameters == sum(p.numel() for p in tensors)
    assert weight_bytes(spec) == spec.weight_bytes == spec.dtype_bytes * spec.parameters
    assert (spec.embedding_weights, spec.lm_head_weights) == (embedding.numel(), head.numel())
    assert spec.tied == (head is embedding)
    assert spec.notes == ()


@pytest.mark.parametrize("family", sample(SUPPORTED, SUPPORTED[::8]))
@pytest.mark.filterwarnings("ignore")
def test_weights_of_every_family(family: str, tmp_path: Path) -> None:
    config = small_config(family)
    spec = ModelSpec.from_config(config)
    check_weights(spec, built(config))
    config.save_pretrained(tmp_path)
    assert replace(ModelSpec.load(tmp_path), name=spec.name) == spec


@pytest.mark.parametrize(
    "family",
    sample(
        ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe", "phi3", "gemma2", "qwen2", "ernie4_5_moe", "aria_text",
         "gemma4_text", "gemma3n_text", "gemma3", "arcee", "apertus", "gptj", "gpt_bigcode", "bert", "electra", "opt",
         "starcoder2", "smollm3", "zamba2", "nemotron_h", "longcat_flash"],
        ["mixtral", "gpt_oss", "phi3", "gemma2", "gptj", "opt"],
    ),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_weights_of_published_sizes(family: str, tmp_path: Path) -> None:
    """With the families' own defaults, which are sizes of published models, and which a ``config.json`` leaves out."""
    config = CONFIG_MAPPING[family]()
    check_weights(stored(config, tmp_path), built(config))


#: Settings for the number of experts and of those that a token uses, for families that don't name them as Mixtral does.
EXPERTS = {
    "ernie4_5_moe": ("moe_num_experts", "moe_k"), "aria_text": ("moe_num_experts", "moe_topk"),
    "hunyuan_v1_moe": ("num_experts", "moe_topk"), "bailing_hybrid": ("num_experts", "num_experts_per_token"),
    "glm4_moe": ("n_routed_experts", "num_experts_per_tok"), "afmoe": ("num_experts", "num_experts_per_tok"),
    "nemotron_h": ("n_routed_experts", "num_experts_per_tok"), "jetmoe": ("num_local_experts", "num_experts_per_tok"),
    "mixtral": ("num_local_experts", "num_experts_per_tok"), "lfm2_moe": ("num_experts", "num_experts_per_tok"),
}  # fmt: skip


@pytest.mark.parametrize("family", EXPERTS)
def test_active_weights(family: str) -> None:
    """A token uses its share of the experts' tensors, which have three dimensions, and all other matrices of layers."""
    config = small_config(family)
    count, chosen = (getattr(config, key) for key in EXPERTS[family])
    matrices = {n: p for n, p in built(config).named_parameters() if p.dim() > 1 and "bias" not in n}
    layers = {n: p.numel() for n, p in matrices.items() if "embed" not in n and "lm_head" not in n}
    experts = sum(size for n, size in layers.items() if matrices[n].dim() == 3 and "conv" not in n)
    spec = ModelSpec.from_config(config)
    assert (spec.num_experts, spec.experts_per_token) == (count, chosen)
    assert spec.layer_weights == sum(layers.values())
    assert spec.active_weights == sum(layers.values()) - experts * (count - chosen) // count


def test_experts_of_dbrx() -> None:
    """Their matrices are one below the other."""
    spec = ModelSpec.from_config(small_config("dbrx"))
    assert spec.layer_weights - spec.active_weights == spec.experts_weights * 3 // 4


def test_tables_are_not_read() -> None:
    """Embeddings per layer and vision towers take memory, but passes over text don't read them."""
    spec = ModelSpec.from_config(CONFIG_MAPPING["gemma4_text"]())
    config = CONFIG_MAPPING["gemma4_text"]()
    table = config.vocab_size_per_layer_input * config.num_hidden_layers * config.hidden_size_per_layer_input
    assert spec.held_weights == table
    text, whole = (ModelSpec.from_config(CONFIG_MAPPING[name]()) for name in ("gemma3_text", "gemma3"))
    assert whole.read_bytes(1) == text.read_bytes(1)
    assert whole.held_weights > 90e6 > text.held_weights == 0


@pytest.mark.parametrize("tied", [True, False])
def test_lfm2_has_a_key_of_its_own(tied: bool) -> None:
    """LFM2-1.2B's ``tie_embedding``, and a width that isn't ``intermediate_size``."""
    fields: dict[str, Any] = {
        "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "tie_embedding": tied,
        "layer_types": (["conv", "conv", "full_attention"] * 6)[:16], "dtype": "bfloat16",
    }  # fmt: skip
    spec = ModelSpec.from_config(fields)
    check_weights(spec, built(CONFIG_MAPPING["lfm2"](**{k: v for k, v in fields.items() if k != "model_type"})))
    assert (spec.tied, spec.intermediate_size) == (tied, 8192)


def test_a_type_that_transformers_does_not_know() -> None:
    """It is planned as a Llama, with a note; experts under unknown names are refused."""
    fields = LLAMA8.to_dict() | {"model_type": "unheard"}
    spec, known = ModelSpec.from_config(fields), ModelSpec.from_config(LLAMA8)
    assert spec.notes == (
        "weights are counted as those of a Llama-like decoder, since transformers can't build unheard (ValueError: "
        "transformers doesn't know model_type 'unheard')",
    )
    assert spec.notes[0] in plan_memory(spec, "rtx-4090", None, Workload(64)).reasons
    assert replace(spec, name=known.name, notes=()) == known
    with pytest.raises(ValueError, match=r"unheard has moe_num_experts=64, .*; add num_experts, num_experts_per_tok"):
        ModelSpec.from_config(fields | {"moe_num_experts": 64, "moe_k": 6})
    with pytest.raises(ValueError, match=r"unheard has num_experts=64, but .*; add num_experts_per_tok"):
        ModelSpec.from_config(fields | {"num_experts": 64, "moe_k": 6})
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "n_shared_experts": 1}
    spec = ModelSpec.from_config(fields | mixture)
    assert spec.layer_weights == known.attention_weights + 32 * (5 * 3 * 1024 + 4) * 4096
    assert spec.layer_weights - spec.active_weights == 32 * 2 * 3 * 1024 * 4096


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_of_every_family(family: str) -> None:
    """The sizes that attention receives in a pass."""
    from tiny_models import tiny_model

    from specmemo_kernels.integrations.hf.target import attach

    model = tiny_model(family)
    attach(model)
    facts, spec = probe(model), ModelSpec.from_config(model.config)
    assert page_token_bytes(spec) == sum(layer.bytes_per_token for layer in facts.layers)
    assert spec.num_qo_heads == facts.num_qo_heads[0]


def test_llama_by_hand() -> None:
    """Llama-3.1-8B: 8.03e9 parameters, 128 KiB of keys and values per token."""
    spec = ModelSpec.from_config(LLAMA8)
    assert spec.parameters == 8_030_261_248
    assert spec.weight_bytes == 2 * spec.parameters
    assert page_token_bytes(spec) == 128 * 1024
    assert spec.max_context == 131072
    assert spec.read_weights(1) == spec.read_weights(500) == spec.active_weights == spec.layer_weights


def test_experts_that_are_read() -> None:
    """Two of eight per token: one row reads two, many rows all, a few rows the expected number."""
    spec = ModelSpec.from_config(CONFIG_MAPPING["mixtral"]())
    alone, expert = spec.layer_weights - spec.experts_weights, spec.experts_weights / spec.num_experts
    met = [(spec.read_weights(rows) - alone) / expert for rows in (1, 2, 3, 1000)]
    assert met == pytest.approx([2, 8 * (1 - 0.75**2), 8 * (1 - 0.75**3), 8])
    assert spec.active_weights == pytest.approx(spec.read_weights(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"hidden_size": None}, "hidden_size=None"), ({"vocab_size": 0}, "vocab_size=0"),
     ({"num_hidden_layers": "many"}, "num_hidden_layers='many'"), ({"dtype": "int3"}, "dtype='int3'"),
     ({"num_key_value_heads": 12}, "num_key_value_heads=12, expected a divisor of num_attention_heads=32"),
     ({"num_key_value_heads": 64}, "num_key_value_heads=64, expected a divisor of num_attention_heads=32"),
     ({"num_hidden_layers": 1001}, "num_hidden_layers=1001, the limit is 1000"),
     ({"n_layer": 10**9}, "n_layer=1000000000, the limit is 1000"),
     ({"vision_config": {"depth": 10**9}}, "depth=1000000000, the limit is 1000"),
     ({"num_experts": 10**9}, "num_experts=1000000000, the limit is 8192"),
     ({"num_hidden_layers": 10**400}, r"num_hidden_layers=10+\.\.\.0+, the limit is 1000"),
     ({"vocab_size": 2**40 + 1}, "vocab_size=1099511627777, a size from 1 to 1099511627776 is needed"),
     ({"head_dim": 2**40 + 1}, "head_dim=1099511627777, expected a number from 0 to 1099511627776")],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)  # fmt: skip
@pytest.mark.parametrize("known", [True, False], ids=["built", "like-llama"])
def test_configurations_that_make_no_sense(changes: dict[str, Any], message: str, known: bool) -> None:
    """Refused by one line with the field, its value and the limit, before a module is built."""
    fields = LLAMA8.to_dict() | ({} if known else {"model_type": "unheard"})
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_config(fields | changes)


@pytest.mark.parametrize(("chosen", "experts"), [(5, 4), (0, 4), (-1, 4)])
@pytest.mark.parametrize("family", ["mixtral", "unheard"])
def test_experts_per_token_are_some_of_the_experts(family: str, chosen: int, experts: int) -> None:
    fields = LLAMA8.to_dict() | {"model_type": family, "num_local_experts": experts, "num_experts_per_tok": chosen}
    expected = f"num_experts_per_tok={chosen}"
    if chosen >= 0:
        expected += rf" and num_local_experts={experts}.*, a token needs from 1 to {experts} experts"
    with pytest.raises(ValueError, match=expected):
        ModelSpec.from_config(fields)
    assert ModelSpec.from_config(fields | {"num_experts_per_tok": experts}).experts_per_token == experts


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
