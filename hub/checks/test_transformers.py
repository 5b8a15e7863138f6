"""Generation with ``attn_implementation="<repo>:tree_attention_forward"``: real models, random weights, no network."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from conftest import REPO
from transformers import AutoModelForCausalLM

OURS = f"{REPO}:tree_attention_forward"
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
#: Configuration, and the attention that it is compared with: the others drop the softcap, or have no sinks.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {}, "sdpa"),
    "mha": ("LlamaConfig", {"num_key_value_heads": 4}, "eager"),
    "mistral": ("MistralConfig", {"sliding_window": 5}, "sdpa"),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}, "sdpa"),
    "qwen3": ("Qwen3Config", {}, "sdpa"),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 6, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 9},
        "eager",
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 6}, "sdpa"),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 6, **EXPERTS}, "eager"),
}


def make(name: str, folder: Path) -> tuple[Any, Any]:
    """The model with its own attention and with ours, of the same weights, through ``from_pretrained``."""
    kind, options, reference = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SMALL | options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" not in key:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=reference, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=OURS, dtype=torch.float32)
    return own.eval(), ours.eval()


def batch() -> dict[str, torch.Tensor]:
    """Three prompts of 9, 5 and 1 tokens, padded on the left."""
    tokens = torch.randint(2, 97, (3, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[1, :4] = mask[2, :8] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


@pytest.mark.parametrize("name", MODELS)
def test_generation(name: str, tmp_path: Path, kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, and the logits of every step; the kernel computes all layers of all steps."""
    own, ours = make(name, tmp_path)
    calls: list[int] = []
    function = transformers.AttentionInterface()[OURS]
    assert function is kernel.tree_attention_forward
    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping, OURS, lambda *a, **k: calls.append(1) or function(*a, **k)
    )
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for inputs in ({"input_ids": batch()["input_ids"][:1]}, batch()):
        expected, found = (model.generate(**inputs, **options) for model in (own, ours))
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=2e-4)
    assert len(calls) == 2 * 12 * SMALL["num_hidden_layers"]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_static_caches(name: str, tmp_path: Path, kernel: ModuleType) -> None:
    """Caches that allocate all slots at once, of sliding windows too: a mask has the number of tokens.

    Without padding transformers passes no mask, so the number is unknown.
    """
    own, ours = make(name, tmp_path)
    options = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    assert torch.equal(ours.generate(**batch(), **options), own.generate(**batch(), **options))
    with pytest.raises(ValueError, match="use the default cache instead of a static one"):
        ours.generate(batch()["input_ids"][:1, :4], **options)


def test_a_pass_without_a_cache(tmp_path: Path, kernel: ModuleType) -> None:
    own, ours = make("llama", tmp_path)
    inputs = batch()
    with torch.no_grad():
        expected, found = (model(**inputs, use_cache=False).logits for model in (own, ours))
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


def test_training_is_refused(tmp_path: Path, kernel: ModuleType) -> None:
    _, ours = make("llama", tmp_path)
    with pytest.raises(ValueError, match="requires a gradient"):
        ours(**batch())


def test_packed_sequences_are_refused(tmp_path: Path, kernel: ModuleType) -> None:
    _, ours = make("llama", tmp_path)
    with torch.no_grad(), pytest.raises(ValueError, match="packed sequences"):
        ours(input_ids=batch()["input_ids"][:1], position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))
