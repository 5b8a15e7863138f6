"""Checks of ``patch`` before anything is allocated."""

from __future__ import annotations

from typing import Any

from specmemo_kernels import ops
from specmemo_kernels.integrations.hf.attention import UnsupportedModel
from specmemo_kernels.integrations.hf.target import ModelFacts

#: Packages of torch's quantised modules.
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def check_modules(model: Any) -> None:
    """Refuse dynamic quantisation of ``torch.ao``: it scales the rows of a call together, so tokens depend on drafts.

    Raises:
        UnsupportedModel: with the module's name.
    """
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_QUANTISED):
            raise UnsupportedModel(
                f"{name} is a {type(module).__name__} of torch.ao quantisation, which scales all rows of a call "
                "together: its tokens would depend on the drafts beside them; patch the model as it was before "
                "quantize_dynamic, or quantise its weights alone (torchao's weight-only methods, bitsandbytes)"
            )


def check_numbers(facts: ModelFacts, backend: str, name: str = "the model") -> None:
    """
    Raises:
        ValueError: the backend doesn't support the model's device or dtype.
    """
    used = {(layer.device, layer.dtype) for layer in facts.layers}
    if facts.plain_lm_head:
        used.add((facts.device, facts.dtype))
    for device, dtype in sorted(used, key=str):
        if reason := ops.unsuited(backend, device, dtype):
            raise ValueError(f"{name} computes in {dtype} on {device}, but {reason}")
