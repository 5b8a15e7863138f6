"""Small models as packages quantise them: by the package's own functions, or loaded from a checkpoint in its layout."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from coded_layers import KINDS, quantise
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

GROUP = 64
#: Order of the eight codes in a word of AWQ.
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def quantised_model(model: Any, method: str, lm_head: bool = False) -> Any:
    """``model`` with the weights of its linear layers quantised; the lm_head too with ``lm_head``.

    Raises:
        ImportError: a package is missing.
    """
    if method in KINDS:
        return quantise(model, method, lm_head)
    loaded = _METHODS[method](model, lm_head)
    loaded.generation_config.eos_token_id = None
    return loaded.eval()


def _torchao(make: str, **options: Any) -> Callable[[Any, bool], Any]:
    def convert(model: Any, lm_head: bool) -> Any:
        import torchao.quantization as ao

        values = {key: value() if callable(value) else value for key, value in options.items()}
        ao.quantize_(
            model,
            getattr(ao, make)(**values),
            filter_fn=lambda module, name: isinstance(module, nn.Linear) and (lm_head or name != "lm_head"),
        )
        return model

    return convert


def _groups() -> Any:
    from torchao.quantization.granularity import PerGroup

    return PerGroup(GROUP)


def _quanto(weights: str) -> Callable[[Any, bool], Any]:
    def convert(model: Any, lm_head: bool) -> Any:
        import transformers  # noqa: F401  (optimum needs it first)
        from optimum import quanto

        quanto.quantize(model, weights=getattr(quanto, weights), exclude=None if lm_head else "lm_head")
        quanto.freeze(model)
        return model

    return convert


def _bitsandbytes(bits: int, **options: Any) -> Callable[[Any, bool], Any]:
    def convert(model: Any, lm_head: bool) -> Any:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig

        skipped = {"llm_int8_skip_modules": ["none"] if lm_head else ["lm_head"]}
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": model.dtype}
        config = BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}), **skipped, **options)
        return _reloaded(model, {}, None, quantization_config=config, device_map="cpu")

    return convert


def _hqq(model: Any, lm_head: bool) -> Any:
    from hqq.core.quantize import BaseQuantizeConfig, HQQBackend, HQQLinear

    HQQLinear.set_backend(HQQBackend.PYTORCH)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (lm_head or name != "lm_head"):
                config = BaseQuantizeConfig(nbits=4, group_size=GROUP)
                setattr(module, name, HQQLinear(child, config, compute_dtype=model.dtype, device="cpu"))
    return model


def _reloaded(model: Any, changes: dict[str, Any], convert: Callable[[Tensor], dict[str, Tensor]] | None, **options: Any
              ) -> Any:  # fmt: skip
    """The model from a checkpoint whose linear layers' matrices ``convert`` has turned into other tensors."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file, config = Path(folder, "model.safetensors"), Path(folder, "config.json")
        if convert is not None:
            tensors: dict[str, Tensor] = {}
            for name, tensor in load_file(file).items():
                if "proj" in name or (changes.pop("lm_head", False) and "lm_head" in name):
                    base = name.removesuffix("weight")
                    tensors |= {base + key: part.contiguous() for key, part in convert(tensor).items()}
                else:
                    tensors[name] = tensor
            save_file(tensors, file, {"format": "pt"})
            config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": changes}))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, **options)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15 ``[out, in]`` with the zero point 8, and scales ``[out, groups]``."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(dim=2, keepdim=True) / 7).clamp(min=1e-6)
    codes = ((groups / scales).round() + 8).clamp(0, 15).to(torch.int32)
    return codes.flatten(1), scales[..., 0]


def _packed(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes per int32 along ``dim``."""
    parts = codes.unflatten(dim, (-1, 8)).to(torch.int64)
    words = sum(parts.select(dim + 1, source) << (4 * place) for place, source in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _gptq(model: Any, lm_head: bool) -> Any:
    import gptqmodel  # noqa: F401

    def convert(weight: Tensor) -> dict[str, Tensor]:
        codes, scales = _rounded(weight)
        zeros = torch.full_like(scales.t(), 7).to(torch.int32)  # the layout stores one less
        return {
            "qweight": _packed(codes.t().contiguous(), 0), "qzeros": _packed(zeros, 1),
            "scales": scales.t().to(torch.float16), "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
        }  # fmt: skip

    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    return _reloaded(model, config | {"checkpoint_format": "gptq", "lm_head": lm_head}, convert, device_map="cpu")


def _awq(model: Any, lm_head: bool) -> Any:
    import gptqmodel  # noqa: F401

    def convert(weight: Tensor) -> dict[str, Tensor]:
        codes, scales = _rounded(weight)
        zeros = torch.full_like(scales.t(), 8).to(torch.int32)
        return {
            "qweight": _packed(codes.t().contiguous(), 1, _AWQ), "qzeros": _packed(zeros, 1, _AWQ),
            "scales": scales.t().to(torch.float16),
        }  # fmt: skip

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return _reloaded(model, config, convert, device_map="cpu")


def _compressed(model: Any, lm_head: bool) -> Any:
    import compressed_tensors  # noqa: F401

    def convert(weight: Tensor) -> dict[str, Tensor]:
        codes, scales = _rounded(weight)
        shape = torch.tensor(weight.shape)
        return {"weight_packed": _packed(codes, 1), "weight_scale": scales.to(weight.dtype), "weight_shape": shape}

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
    }  # fmt: skip
    return _reloaded(model, config, convert)


def _gguf(kind: str) -> Callable[[Any, bool], Any]:
    def convert(model: Any, lm_head: bool) -> Any:
        import gguf
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            _write_gguf(gguf, Path(folder, "model.gguf"), model, getattr(gguf.GGMLQuantizationType, kind), lm_head)
            return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=model.dtype)

    return convert


def _write_gguf(gguf: Any, path: Path, model: Any, kind: Any, lm_head: bool) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        rows = tensor.float()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in name:  # llama.cpp interleaves the two halves of a head
                rows = rows.view(count, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        target = names.get_name(name, try_suffixes=(".weight",))
        if "proj" in name or (lm_head and "lm_head" in name):
            writer.add_tensor(target, gguf.quants.quantize(rows.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, rows.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_METHODS: dict[str, Callable[[Any, bool], Any]] = {
    "torchao int8": _torchao("Int8WeightOnlyConfig"),
    "torchao intx4": _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=_groups),
    "torchao float8": _torchao("Float8WeightOnlyConfig"),
    "torchao int8 dynamic": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "quanto int8": _quanto("qint8"),
    "quanto int4": _quanto("qint4"),
    "quanto float8": _quanto("qfloat8"),
    "bitsandbytes 8": _bitsandbytes(8),
    "bitsandbytes 8, no threshold": _bitsandbytes(8, llm_int8_threshold=0.0),
    "bitsandbytes nf4": _bitsandbytes(4),
    "hqq 4": _hqq,
    "compressed-tensors w4": _compressed,
    "gptq 4": _gptq,
    "awq 4": _awq,
    "gguf q4_0": _gguf("Q4_0"),
    "gguf q8_0": _gguf("Q8_0"),
}
METHODS = tuple(_METHODS)
