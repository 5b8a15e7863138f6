"""Plans of quantised models: what is dequantised and when, what can't be read, ``weight_bits``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from selection import sample

from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.cost import Pass, pass_seconds
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.known_devices import known_device
from specmemo_kernels.planning.known_models import known_model
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.planner import plan_memory
from specmemo_kernels.planning.quantisation_methods import REFUSED
from specmemo_kernels.planning.search import on_device

LLAMA = dict(known_model("llama-3.2-3b") or {}) | {"dtype": "float16"}
PLAIN = ModelSpec.from_config(LLAMA)
WORK = Workload(512)
FP8, NF4 = {"quant_method": "fp8"}, {"load_in_4bit": True}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}},
}  # fmt: skip
MXFP4 = dict(known_model("gpt-oss-20b") or {})


def quantised(config: dict[str, Any], base: dict[str, Any] = LLAMA) -> ModelSpec:
    return ModelSpec.from_config(base | {"quantization_config": config})


@pytest.mark.parametrize(
    ("config", "device", "loaded", "each_pass"),
    [(FP8, "rtx-3060", True, False), (FP8, "rtx-4060", False, False), (FP8, "cpu", True, False),
     (COMPRESSED, "rtx-4060", True, False), (NF4, "rtx-4060", False, True), (NF4, "raspberry-pi-5-8gb", False, True),
     ({"quant_method": "gptq", "bits": 4}, "rtx-2060", False, False),
     ({"quant_method": "gptq", "bits": 4}, "raspberry-pi-5-16gb", False, True),
     ({"quant_method": "metal", "bits": 4}, "m2-16gb", False, False),
     ({"quant_method": "metal", "bits": 4}, "cpu", True, False)],
)  # fmt: skip
def test_when_weights_are_dequantised(config: dict[str, Any], device: str, loaded: bool, each_pass: bool) -> None:
    """At load: the model's own bytes, and a note. In each pass: the largest matrix in the model's dtype. Else none."""
    spec, profile = quantised(config), known_device(device)
    used, plain = on_device(spec, profile), on_device(PLAIN, profile)
    assert (used.weight_bytes == plain.weight_bytes) == loaded
    assert any("dequantises all of them once" in note for note in used.quantised.notes) == loaded
    largest = 3072 * 8192 * plain.dtype_bytes
    assert used.unpacked_matrix_bytes == (largest if each_pass else 0)


def test_memory_and_time_of_dequantisation() -> None:
    """Activations hold the largest matrix; a pass writes and reads all matrices but lm_head and embedding."""
    work, profile = Workload(2048, prompt=512), replace(known_device("rtx-4060"), memory=1 << 40, launch_seconds=1e-12)
    spec = quantised(NF4)
    bits = ModelSpec.from_config(LLAMA, weight_bits=8 * spec.bytes_per_weight)
    plans = [plan_memory(s, profile, None, work, heads=HeadsSpec(0)) for s in (spec, bits)]
    assert plans[0].parts["activations"] - plans[1].parts["activations"] == 3072 * 8192 * 2
    assert plans[0].parts["weights"] == pytest.approx(plans[1].parts["weights"], rel=1e-6)
    run = Pass(8, 1, 32, 8)
    extra = pass_seconds(spec, profile, run, HeadsSpec(0)) - pass_seconds(bits, profile, run, HeadsSpec(0))
    assert extra == pytest.approx(2 * 2 * spec.layer_weights / profile.read_rate, rel=1e-6)


def test_copies_of_a_dequantised_matrix() -> None:
    """torchao's float8 goes through float32: 5.9 matrices were measured; its int8 converts once."""
    kinds = {"Float8WeightOnlyConfig": 5.9, "Int8WeightOnlyConfig": 1.2, "Float8DynamicActivationFloat8WeightConfig": 0}
    for kind, copies in kinds.items():
        spec = quantised({"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}})
        used = on_device(spec, known_device("rtx-4060"))
        assert used.unpacked_matrix_bytes == int(copies * 2 * 3072 * 8192)


def test_lm_head_in_codes() -> None:
    """A step reads fewer bytes of it, and drafts that share it as well."""
    config = {"quant_method": "gptq", "bits": 4}
    base = LLAMA | {"tie_word_embeddings": False}
    device = replace(known_device("rtx-4060"), launch_seconds=1e-12)
    coded, plain = (on_device(quantised(config | {"lm_head": lm_head}, base), device) for lm_head in (True, False))
    assert plain.lm_head_bytes == 2 * 128256 * 3072
    assert coded.lm_head_bytes < 0.27 * plain.lm_head_bytes
    shared = HeadsSpec(3, own_lm_head=False)
    seconds = [pass_seconds(s, device, Pass(1, 1, 32, 1, 3, 1), shared) for s in (coded, plain)]
    saved = 2 * (plain.lm_head_bytes - coded.lm_head_bytes) / device.read_rate
    assert seconds[1] - seconds[0] == pytest.approx(saved, rel=0.01)


def test_experts_of_gpt_oss() -> None:
    """Packed on a GPU with its kernels, bfloat16 on a CPU; one token reads a few experts' codes."""
    spec = ModelSpec.from_config(MXFP4)
    assert spec.weight_bytes / 2**30 == pytest.approx(12.8, rel=0.02)
    gpu, cpu = on_device(spec, known_device("rtx-4090")), on_device(spec, known_device("m4-max-64gb"))
    assert gpu.weight_bytes == cpu.weight_bytes == spec.weight_bytes
    loaded = on_device(spec, replace(known_device("cpu"), matmul_rate={"bfloat16": 1e12}))
    assert loaded.weight_bytes == 2 * spec.parameters
    experts = 24 * 4 * 3 * 2880**2
    assert spec.read_bytes(1) == pytest.approx(experts * 4.25 / 8 + 2 * (spec.active_weights - experts))


def test_names_that_match_nothing() -> None:
    """They are named in the plan, except those of vision towers and norms."""
    config = NF4 | {"llm_int8_skip_modules": ["lm_head", "vision_tower", "model.norm", "model.layers.99.mlp", "typo"]}
    spec = quantised(config)
    (note,) = spec.quantised.notes
    assert note == "names in llm_int8_skip_modules match no matrix of the decoder: model.layers.99.mlp, typo"
    assert note in plan_memory(spec, "rtx-4060", None, WORK).reasons


def test_a_language_model_inside_another() -> None:
    """Names of a multimodal model's decoder are those of the text model."""
    config = NF4 | {"llm_int8_skip_modules": ["language_model.lm_head", "model.language_model.layers.0.self_attn"]}
    inner = ModelSpec.from_config({"text_config": LLAMA, "quantization_config": config})
    same = quantised(NF4 | {"llm_int8_skip_modules": ["lm_head", "model.layers.0.self_attn"]})
    assert inner == replace(same, name=inner.name)


@pytest.mark.parametrize("method", sample([*REFUSED, "magic", ""], ["vptq", "magic", ""]))
def test_refused(method: str) -> None:
    """In one sentence that names the method and the remedy, which works."""
    config = LLAMA | {"quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(ValueError, match=rf"quant_method='{method}'; .*; --weight-bits plans for a number of bits"):
        ModelSpec.from_config(config)
    assert ModelSpec.from_config(config, weight_bits=4.5) == PLAIN.with_weights(4.5)


@pytest.mark.parametrize(
    "config",
    [{"quant_method": "gptq", "bits": "four"}, {"quant_method": "quanto", "weights": "int7"},
     {"quant_method": "aqlm", "nbits_per_codebook": 10**9}, {"quant_method": "aqlm", "nbits_per_codebook": 0},
     {"quant_method": "higgs", "bits": 10**9}, {"quant_method": "torchao"},
     {"quant_method": "torchao", "quant_type": {"default": {"_type": "Magic"}}},
     {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"strategy": "block"}}}},
     {"quant_method": "fp8", "weight_block_size": [128]}, {"quant_method": "modelopt", "quant_algo": "W4A8"}],
)  # fmt: skip
def test_settings_that_make_no_sense(config: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=rf"quantization_config of {config['quant_method']} can't be read .*weight-bits"
    ):
        quantised(config)


def test_weight_bits() -> None:
    """They replace any quantisation; only the layers' matrices have them, and kernels read them."""
    spec = ModelSpec.from_config(LLAMA | {"quantization_config": NF4}, weight_bits=3)
    assert spec.weight_bytes == pytest.approx(
        2 * (PLAIN.parameters - PLAIN.layer_weights) + PLAIN.layer_weights * 3 / 8
    )
    assert spec.bytes_per_weight == pytest.approx(3 / 8)
    assert on_device(spec, known_device("raspberry-pi-5-8gb")).unpacked_matrix_bytes == 0
