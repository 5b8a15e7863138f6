"""transformers models on the meta device (real code, shapes without weights), and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from specmemo_kernels.integrations.hf.probe import like_attention
from specmemo_kernels.integrations.hf.target import attach, run_packed, tapped
from specmemo_kernels.planning.memory_tracker import MemoryTracker

LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
#: As published on the hub (meta-llama/Llama-2-7b-hf, Llama-3.1-8B, Llama-2-70b-hf).
CONFIGS: dict[str, dict[str, object]] = {
    "Llama-2-7B": LLAMA | {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096},
    "Llama-3.1-8B": LLAMA
    | {"intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "Llama-2-70B": {
        "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672, "vocab_size": 32000, "max_position_embeddings": 4096,
    },
}  # fmt: skip


@cache
def meta_model(name: str, dtype: torch.dtype = torch.float16, layers: int | None = None) -> PreTrainedModel:
    """The model, with all or a given number of layers."""
    sizes = CONFIGS[name] | ({} if layers is None else {"num_hidden_layers": layers})
    config = CONFIG_MAPPING["llama"](**sizes, dtype=dtype)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


@torch.no_grad()
def pass_bytes(model: PreTrainedModel, rows: int, device: str = "meta") -> int:
    """Peak bytes of our forward pass over packed rows, up to the lm_head, the operator's result included."""
    detach = attach(model)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    try:
        with MemoryTracker() as tracker, tapped(cut=True):
            run_packed(model, tokens, tokens, like_attention, None)
    finally:
        detach()
    return tracker.peak


@contextmanager
def fused_attention(model: PreTrainedModel) -> Iterator[None]:
    """Attention that allocates its result only, like fused kernels; on meta tensors SDPA allocates scores."""

    def attend(module, query, key, value, mask, **_):  # type: ignore[no-untyped-def]
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("result_only", attend)
    AttentionMaskInterface.register("result_only", lambda *_, **__: None)
    before = model.config._attn_implementation
    model.set_attn_implementation("result_only")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
