"""Models with an MTP layer, and checkpoints in the published layout that hold it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

LAYERS = 6
_MTP = {"num_nextn_predict_layers": 1, "num_mtp_layers": 1, "num_hidden_layers": LAYERS}
FAMILIES: dict[str, dict[str, object]] = {
    "deepseek_v3": _MTP,
    "glm4_moe": _MTP
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16},
}


def random_mtp(model: PreTrainedModel) -> MtpModel:
    torch.manual_seed(3)
    mtp = MtpModel(model, 1).eval()
    for parameter in mtp.layers.parameters():
        parameter.data = (
            1 + 0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 0.3 * torch.randn_like(parameter)
        )
    return mtp


def save_with_mtp(model: PreTrainedModel, mtp: MtpModel, folder: Path, *, qwen: bool = False) -> None:
    """Write the MTP layer beside the model's own tensors, one matrix per expert.

    As ``model.layers.{LAYERS}.*``, or as Qwen3-Next's checkpoints have it, in ``mtp.*``.
    """
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    experts, layer = "mtp_block.mlp.experts.", "mtp.layers.0" if qwen else f"model.layers.{LAYERS}"
    outside = {"post_norm.weight": "mtp.norm.weight", "eh_proj.weight": "mtp.fc.weight"}
    outside |= {"enorm.weight": "mtp.pre_fc_norm_embedding.weight", "hnorm.weight": "mtp.pre_fc_norm_hidden.weight"}
    for key, value in mtp.layers[0].state_dict().items():
        name = key.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if "mtp_block" not in key and "post_norm" not in key:
            name = key
        if qwen and key in outside:
            tensors[outside[key]] = value.contiguous()
            continue
        if key.startswith(experts):
            for expert, matrix in enumerate(value):
                parts = (
                    {"gate_proj": matrix.chunk(2)[0], "up_proj": matrix.chunk(2)[1]}
                    if "gate_up" in key
                    else {"down_proj": matrix}
                )
                for part, weight in parts.items():
                    tensors[f"{layer}.mlp.experts.{expert}.{part}.weight"] = weight.contiguous()
            continue
        tensors[f"{layer}.{name}"] = value.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
