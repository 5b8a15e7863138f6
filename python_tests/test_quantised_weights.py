"""Bytes of quantised weights, against tensors of the documented layouts over transformers' own modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from selection import sample
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from specmemo_kernels.planning.known_models import known_model
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.quantisation_methods import READERS, REFUSED

Bytes = Callable[[int, int], float]


@cache
def meta(name: str) -> PreTrainedModel:
    """transformers' model of a published configuration, without weights."""
    config = dict(known_model(name) or {})
    config.pop("quantization_config", None)
    made = CONFIG_MAPPING[config.pop("model_type")](**config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)


def blocks(size: int, group: int) -> int:
    return math.ceil(size / group)


def gptq(bits: int, group: int) -> Bytes:
    """``qweight``, ``qzeros``, ``scales``, ``g_idx`` of gptqmodel."""
    return lambda out, into: (
        4 * (into * bits // 32) * out
        + 4 * blocks(into, group) * (out * bits // 32)
        + 2 * blocks(into, group) * out
        + 4 * into
    )


def awq(out: int, into: int) -> float:
    """``qweight``, ``qzeros``, ``scales`` of AutoAWQ's GEMM in 4 bits, groups of 128."""
    return 4 * into * (out // 8) + 4 * (into // 128) * (out // 8) + 2 * (into // 128) * out


def fp8_blocks(out: int, into: int) -> float:
    return out * into + 4 * blocks(out, 128) * blocks(into, 128)


@dataclass(frozen=True)
class Case:
    """A ``quantization_config``, and which modules it quantises in which bytes."""

    config: dict[str, Any]
    stored: Bytes
    kept: tuple[str, ...] = ("lm_head",)
    model: str = "llama-3.1-8b"
    others: dict[str, Bytes] = field(default_factory=dict)
    experts: Bytes | None = None
    embedding: Bytes | None = None

    def nbytes(self) -> float:
        """Bytes of the model's tensors; ``kept`` and ``others`` by parts of names."""
        model, total = meta(self.model), 0.0
        linear = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
        for name, parameter in model.named_parameters():  # a tied matrix once
            stored = None
            if name in linear and not any(part in name for part in self.kept):
                stored = next((own for part, own in self.others.items() if part in name), self.stored)
            if ".experts." in name and parameter.dim() == 3:
                stored = self.experts
            if "embed_tokens" in name:
                stored = self.embedding
            if stored is None:
                total += parameter.nbytes
            else:
                *count, out, into = parameter.shape
                total += math.prod(count) * stored(out, into)
        return total


TORCHAO = {"quant_method": "torchao"}
INT4 = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": 128}}
INT8 = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"group_size": None}}
INTX = {
    "_type": "IntxWeightOnlyConfig",
    "_version": 2,
    "_data": {"granularity": {"_type": "PerAxis", "_data": {"axis": 0}}},
}


def compressed(form: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "type": "int"} | weights, "format": form}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return config | {"ignore": list(ignore), "format": form}


def hqq(bits: int, group: int | None) -> dict[str, Any]:
    params = {"weight_quant_params": {"nbits": bits, "group_size": group, "axis": 1}, "scale_quant_params": None}
    return {"quant_method": "hqq", "quant_config": params, "skip_modules": ["lm_head"]}


EARLY = "model.layers.0.mlp.down_proj"
CASES = {
    "gptq": Case({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, gptq(4, 128)),
    "gptq 8 bits per column, lm_head": Case({"quant_method": "gptq", "bits": 8, "group_size": -1, "lm_head": True},
                                            lambda o, i: gptq(8, i)(o, i), kept=()),
    "gptq dynamic": Case({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {
        r"-:.*self_attn\.": {}, r"+:model\.layers\.1\.": {"bits": 8, "group_size": 64}}},
        gptq(4, 128), kept=("lm_head", "self_attn"), others={"layers.1.": gptq(8, 64)}),
    "gptq some modules": Case({"quant_method": "gptq", "bits": 4, "group_size": 64, "modules_in_block_to_quantize":
                               [["mlp.up_proj", "mlp.gate_proj"], ["mlp.down_proj"]]},
                              gptq(4, 64), ("lm_head", "self_attn")),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}, awq),
    "awq skips": Case({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn.o_proj"]},
                      awq, ("lm_head", "o_proj")),
    "auto-round": Case({"quant_method": "auto-round", "bits": 4, "group_size": 128,
                        "extra_config": {EARLY: {"bits": 16}, r".*layers\.2\..*": {"bits": 8}}},
                       awq, ("lm_head", EARLY), others={"layers.2.": lambda o, i: o * i + 3 * blocks(i, 128) * o}),
    "bnb nf4": Case({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
                    lambda o, i: o * i / 2 + 4 * o * i / 64 + 4 * 16),
    "bnb nf4 double, a layer's matrix left out, lm_head not": Case(
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": [EARLY]},
        lambda o, i: o * i / 2 + o * i / 64 + 4 * o * i / 16384 + 4 * (16 + 256 + 1), (EARLY,)),
    "bnb int8": Case({"quant_method": "bitsandbytes", "load_in_8bit": True}, lambda o, i: o * i + 4 * o),
    "bnb nf4 of a mixture: experts as they are": Case({"load_in_4bit": True}, lambda o, i: o * i * 4.5 / 8,
                                                      model="Qwen3-30B-A3B"),
    "fp8": Case({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks),
    "fp8 of a mixture": Case({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
                             fp8_blocks, model="Qwen3-30B-A3B", experts=fp8_blocks),
    "fp8 ue8m0, a row of layers left out": Case(
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "ignored_layers": ["lm_head", r"model.layers.1\d"]},
        lambda o, i: o * i + blocks(o, 128) * blocks(i, 128), ("lm_head", *(f"layers.{n}." for n in range(10, 20)))),
    "mxfp8": Case({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, lambda o, i: o * i + o * i / 32),
    "fbgemm_fp8": Case({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head", "model.layers.31"]},
                       lambda o, i: o * i + 4 * o, ("lm_head", "layers.31.")),
    "mxfp4": Case(dict((known_model("gpt-oss-20b") or {})["quantization_config"]), lambda o, i: 2 * o * i,
                  model="gpt-oss-20b", experts=lambda o, i: o * i / 2 + o * i / 32),
    "quanto int8": Case({"quant_method": "quanto", "weights": "int8"}, lambda o, i: o * i + 2 * o),
    "quanto int4": Case({"quant_method": "quanto", "weights": "int4",
                         "modules_to_not_convert": ["model.layers.*.self_attn"]},
                        lambda o, i: o * i / 2 + 4 * o * i / 128, ("self_attn",)),
    "quanto int2": Case({"quant_method": "quanto", "weights": "int2"}, lambda o, i: o * i / 4 + 4 * o * i / 128),
    "eetq": Case({"quant_method": "eetq", "weights": "int8"}, lambda o, i: o * i + 2 * o),
    "hqq": Case(hqq(4, 64), lambda o, i: o * i / 2 + 4 * o * i / 64),
    "hqq 3 bits": Case(hqq(3, 64), lambda o, i: 4 * math.ceil(o * i / 64 / 10) * 64 + 4 * o * i / 64),
    "hqq by layer": Case({"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {
        "mlp.down_proj": {"weight_quant_params": {"nbits": 2, "group_size": 16}},
        "mlp.up_proj": {"weight_quant_params": {"nbits": 8, "group_size": 128}}}},
        lambda o, i: o * i / 4 + 4 * o * i / 16, ("lm_head", "self_attn", "gate_proj"),
        others={"up_proj": lambda o, i: o * i + 4 * o * i / 128}),
    "torchao int4": Case(TORCHAO | {"quant_type": {"default": INT4}}, lambda o, i: o * i / 2 + 4 * o * i / 128),
    "torchao int8, embeddings": Case(
        TORCHAO | {"quant_type": {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {
            "model.embed_tokens": INTX, "_default": INT8}}}}, "include_input_output_embeddings": True},
        lambda o, i: o * i + 5 * o, kept=(), embedding=lambda o, i: o * i + 3 * o),
    "torchao by name": Case(TORCHAO | {"quant_type": {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {
        r"re:.*self_attn\..*": None, EARLY: INT8, "_default": INT4}}}}},
        lambda o, i: o * i / 2 + 4 * o * i / 128, ("lm_head", "self_attn"), others={EARLY: lambda o, i: o * i + 5 * o}),
    "compressed int4": Case(compressed("pack-quantized", num_bits=4, strategy="group", group_size=128),
                            lambda o, i: 4 * o * blocks(i, 8) + 2 * o * (i // 128) + 16),
    "compressed int4 asymmetric": Case(
        compressed("pack-quantized", ("lm_head", "re:.*down_proj"), num_bits=4, strategy="group", group_size=64,
                   symmetric=False),
        lambda o, i: o * i / 2 + (2 + 0.5) * o * i / 64 + 16, ("lm_head", "down_proj")),
    "compressed fp8": Case(compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
                           lambda o, i: o * i + 2 * o),
    "compressed nvfp4": Case(compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group",
                                        group_size=16), lambda o, i: o * i / 2 + o * i / 16 + 4),
    "modelopt nvfp4": Case({"quant_method": "modelopt", "quant_algo": "NVFP4",
                            "ignore": ["lm_head", "model.layers.0*"]},
                           lambda o, i: o * i / 2 + o * i / 16 + 8, ("lm_head", "layers.0.")),
    "nvfp4": Case({"quant_method": "nvfp4"}, lambda o, i: o * i / 2 + 2 * o * i / 16 + 4),
    "fp_quant": Case({"quant_method": "fp_quant", "forward_dtype": "mxfp4"}, lambda o, i: o * i / 2 + o * i / 32),
    "fouroversix": Case({"quant_method": "fouroversix", "dtype": "nvfp4"}, lambda o, i: o * i / 2 + o * i / 16 + 4),
    "bitnet": Case({"quant_method": "bitnet", "linear_class": "bitlinear"}, lambda o, i: o * i / 4 + 2),
    "aqlm": Case({"quant_method": "aqlm", "in_group_size": 8, "num_codebooks": 1, "nbits_per_codebook": 16,
                  "linear_weights_not_to_quantize": ["lm_head.weight"]},
                 lambda o, i: 2 * o * i / 8 + 2 * 65536 * 8 + 2 * o),
    "higgs": Case({"quant_method": "higgs", "bits": 4, "group_size": 256},
                  lambda o, i: o * i / 2 + 2 * o * i / 256 + 2 * 528),
    "metal": Case({"quant_method": "metal", "bits": 4, "group_size": 64}, lambda o, i: o * i / 2 + 4 * o * i / 64),
    "gemma": Case({"quant_method": "gemma", "num_bits": 4, "quantize_embeddings": True,
                   "module_quant_configs": {r"down_proj$": {"num_bits": 8}}},
                  lambda o, i: o * i / 2 + 4 * o + 8, model="llama-3.1-8b", embedding=lambda o, i: o * i / 2 + 4 * o,
                  others={"down_proj": lambda o, i: o * i + 4 * o + 8}),
}  # fmt: skip


@pytest.mark.parametrize("name", sample(CASES, [*CASES][::4]))
def test_published_shapes(name: str) -> None:
    """Llama-3.1-8B, Qwen3-30B-A3B and gpt-oss-20b: within 0.1 %."""
    case = CASES[name]
    config = dict(known_model(case.model) or {}) | {"quantization_config": case.config}
    spec = ModelSpec.from_config(config)
    assert spec.weight_bytes == pytest.approx(case.nbytes(), rel=1e-3)
    assert not any("match no matrix" in note for note in spec.quantised.notes)


def test_every_method_of_transformers() -> None:
    """Each has a reader or a reason, and each reader a case."""
    methods = {method.value.replace("_", "-") for method in QuantizationMethod}
    assert methods <= READERS.keys() | REFUSED.keys()
    tried = {str(case.config.get("quant_method", "bitsandbytes")).replace("_", "-") for case in CASES.values()}
    assert tried == READERS.keys() - {"autoround"}


#: The model whose bytes :data:`MEASURED` has.
TINY = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "dtype": "bfloat16",
}  # fmt: skip
AO_INT8 = {
    "_type": "Int8DynamicActivationInt8WeightConfig",
    "_version": 2,
    "_data": {"granularity": {"_type": "PerRow"}},
}
AO_FLOAT8 = {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": {"granularity": {"_type": "PerRow"}}}
PER_GROUP = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}}
AO_INTX = {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": {"granularity": PER_GROUP}}
AO_DYNAMIC_INTX = {"_type": "Int8DynamicActivationIntxWeightConfig", "_data": {"weight_granularity": PER_GROUP}}
#: Bytes of all tensors of :data:`TINY` after ``from_pretrained`` with transformers 5.24 on a CPU: bitsandbytes 0.50.2,
#: optimum-quanto 0.2.7 (less 112 of activation scales), torchao 0.18.
MEASURED = [
    ({"load_in_4bit": True}, 1875328),
    ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 1819432),
    ({"load_in_8bit": True}, 2553344),
    ({"quant_method": "quanto", "weights": "int8"}, 2543728 - 112),
    ({"quant_method": "quanto", "weights": "float8"}, 2543728 - 112),
    ({"quant_method": "quanto", "weights": "int4"}, 1827440 - 112),
    ({"quant_method": "quanto", "weights": "int2"}, 1450608 - 112),
    (TORCHAO | {"quant_type": {"default": INT8}}, 2558208),
    (TORCHAO | {"quant_type": {"default": AO_INT8}}, 2558208),
    (TORCHAO | {"quant_type": {"default": AO_FLOAT8}}, 2553344),
    (TORCHAO | {"quant_type": {"default": INTX}}, 2548480),
    (TORCHAO | {"quant_type": {"default": AO_INTX}}, 2675200),
    (TORCHAO | {"quant_type": {"default": AO_DYNAMIC_INTX}}, 2675200),
    (TORCHAO | {"quant_type": {"default": INTX}, "include_input_output_embeddings": True}, 2295480),
]
#: The same of compressed-tensors 0.20 for a smaller model, in files.
SMALLER = TINY | {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip
COMPRESSED = [
    (compressed("pack-quantized", num_bits=4, strategy="group", group_size=128), 415712),
    (compressed("pack-quantized", num_bits=4, strategy="group", group_size=128, symmetric=False), 416864),
    (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), 562432),
    (compressed("int-quantized", num_bits=8, strategy="channel"), 562432),
    (compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]), 558376),
    (compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16), 429368),
    (compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), 420096),
]


@pytest.mark.parametrize(
    ("model", "config", "nbytes"), [*((TINY, *row) for row in MEASURED), *((SMALLER, *row) for row in COMPRESSED)]
)
def test_measured_bytes(model: dict[str, Any], config: dict[str, Any], nbytes: int) -> None:
    """The bytes that the packages made of a small model, to 0.1 %."""
    assert ModelSpec.from_config(model | {"quantization_config": config}).weight_bytes == pytest.approx(
        nbytes, rel=1e-3
    )
