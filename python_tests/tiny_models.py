"""Tiny random models of every supported family, and drafters that know (or don't know) the answer."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from specmemo_kernels.drafting import DraftInput
from specmemo_kernels.drafting.medusa_heads import MedusaHeads

VOCAB = 61
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.4,
}
_MOE = {"num_experts_per_tok": 2, "num_local_experts": 4}
_MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {},
    "phi3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "olmo2": {},
    "cohere": {"logit_scale": 0.25},
    "smollm3": {"no_rope_layers": [1, 0]},
    "mixtral": _MOE,
    "gpt_oss": _MOE | {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "stablelm": {},
    "deepseek_v3": _MLA,
}


def tiny_model(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random float32 model in which every part of the attention matters."""
    torch.manual_seed(seed)
    settings = copy.deepcopy(_BASE | FAMILIES.get(family, {}) | changes)  # tests change lists of configurations
    config = CONFIG_MAPPING[family](**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases, norms and sinks start at constants; move them so that they count
            parameter.data += 0.1 * torch.randn_like(parameter)
        assert not parameter.isnan().any(), name
    model.generation_config.eos_token_id = None
    return model.eval()


def random_heads(model: PreTrainedModel) -> MedusaHeads:
    """Three random heads of two layers."""
    torch.manual_seed(0)
    heads = MedusaHeads(model.config.hidden_size, VOCAB, 3, num_layers=2)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.to(model.device)


class OracleDrafter:
    """Knows what each row will be and guesses right with probability ``share`` (else something wrong).

    Args:
        answers: the full token rows, prompt (without padding) and output, that greedy decoding writes.
    """

    nbytes = 0

    def __init__(self, answers: Sequence[Sequence[int]], share: float, max_depth: int = 63, vocab: int = VOCAB) -> None:
        self.answers, self.share, self.max_depth, self.vocab = [list(a) for a in answers], share, max_depth, vocab
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        rows = []
        for tokens in inputs.token_ids:
            answer = next((a for a in self.answers if a[: len(tokens)] == list(tokens)), list(tokens))
            row = []
            for depth in inputs.tree.depths:
                place = len(tokens) - 1 + depth
                right = answer[place] if place < len(answer) else -1
                lucky = float(torch.rand((), generator=self.generator)) < self.share
                row.append(right if lucky else (right + 1) % self.vocab)
            rows.append(row)
        return torch.tensor(rows)
