"""Models, heads and prompts of every rank of a tensor parallel session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB
from transformers import AutoModelForCausalLM, PreTrainedModel

from specmemo_kernels.drafting.medusa_heads import MedusaHeads

NEW = 12
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
LENGTHS = (3, 17, 9, 1, 12, 5, 21, 8)
#: Length at which mishaps happen: of the prompt of 17 tokens, after some steps.
PLACE = 17 + 5
#: Drafters that read hidden states, on each model.
DRAFTERS_OF = {
    "model-llama-gqa": ("clover2", "eagle3"),
    "model-llama-mha": ("eagle",),
    "model-qwen3": ("dflash",),
    "model-qwen3-mqa": ("eagle", "eagle3"),
}
#: Models that also have heads without an own lm_head, and a tree that the device chooses.
SHARED = ("model-llama-gqa", "model-llama-two-heads", "model-qwen3-mqa")


def load(folder: Path, **kwargs: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **kwargs
    )
    return model.eval()


def medusa(own: bool, width: int) -> MedusaHeads:
    """Random heads; with a small vocabulary they are often right."""
    torch.manual_seed(5)
    heads = MedusaHeads(width, VOCAB, 3, own_lm_head=own)
    for parameter in heads.parameters():
        parameter.data.normal_(std=0.3)
    return heads


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
