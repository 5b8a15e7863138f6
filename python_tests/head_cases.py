"""Weights of Medusa heads in every published layout, and the expected logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from specmemo_kernels.drafting.load_heads import load_heads
from specmemo_kernels.drafting.medusa_heads import MedusaHeads

HIDDEN, VOCAB = 8, 21
Tensors = dict[str, torch.Tensor]


def serve_hub(monkeypatch: pytest.MonkeyPatch, name: str, remote: Path, cache: Path) -> None:
    """The hub has one repository, whose files are those of ``remote``; downloaded ones go to ``cache``."""
    cache.mkdir()

    def snapshot_download(repository: str, allow_patterns: list[str]) -> str:
        assert repository == name
        for pattern in allow_patterns:
            for file in remote.glob(pattern):
                shutil.copy(file, cache)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def medusa_state(heads: int = 3, layers: int = 1, own: bool = True, seed: int = 0, hidden: int = HIDDEN) -> Tensors:
    """Random weights under Medusa's names."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for head in range(heads):
        for layer in range(layers):
            state[f"{head}.{layer}.linear.weight"] = torch.randn(hidden, hidden, generator=generator)
            state[f"{head}.{layer}.linear.bias"] = torch.randn(hidden, generator=generator)
        if own:
            state[f"{head}.{layers}.weight"] = torch.randn(VOCAB, hidden, generator=generator)
    return state


def as_vllm(state: Tensors) -> Tensors:
    """The same tensors under vLLM's names."""
    renamed = {}
    for key, tensor in state.items():
        head, layer, *rest = key.split(".")
        renamed[f"lm_heads.{head}.weight" if rest == ["weight"] else f"blocks.{head}.layers.{layer}.{rest[1]}"] = tensor
    return renamed


def with_prefix(state: Tensors, prefix: str = "medusa_head.") -> Tensors:
    """The heads within a whole model's tensors, whose sizes would be refused in heads."""
    model = {"model.embed_tokens.weight": torch.randn(50, 6), "lm_head.weight": torch.randn(50, 6)}
    model["model.layers.0.mlp.up_proj.weight"] = torch.randint(0, 9, (6, 6), dtype=torch.uint8)
    return model | {prefix + key: tensor for key, tensor in state.items()}


def expected_logits(
    state: Tensors, heads: int, layers: int, hidden: torch.Tensor, shared: torch.Tensor
) -> torch.Tensor:
    """The formula: x + silu(W x + b) per layer, then the lm_head."""
    rows = []
    for head in range(heads):
        x = hidden
        for layer in range(layers):
            y = x @ state[f"{head}.{layer}.linear.weight"].T + state[f"{head}.{layer}.linear.bias"]
            x = x + y / (1 + torch.exp(-y))
        rows.append(x @ state.get(f"{head}.{layers}.weight", shared).T)
    return torch.stack(rows)


def assert_same(loaded: MedusaHeads, state: Tensors, heads: int = 3, layers: int = 1, own: bool = True) -> None:
    assert (loaded.num_heads, loaded.num_layers, loaded.own_lm_head) == (heads, layers, own)
    assert (loaded.hidden_size, loaded.vocab_size) == (HIDDEN, VOCAB)
    hidden, shared = torch.randn(4, HIDDEN, dtype=torch.float64), torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    double = {key: tensor.double() for key, tensor in state.items()}
    with torch.no_grad():
        actual = load_heads(loaded, HIDDEN, VOCAB, dtype=torch.float64).logits(hidden, shared)
    torch.testing.assert_close(actual, expected_logits(double, heads, layers, hidden, shared), rtol=1e-12, atol=1e-12)


def write_shards(folder: Path, state: Tensors, kind: str) -> None:
    """Write the tensors to three shards with an index; the last shard has the model's own tensors only."""
    folder.mkdir(exist_ok=True)
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    shards: list[Tensors] = [{}, {}, {}]
    for place, (key, tensor) in enumerate(state.items()):
        shards[place % 2 if "medusa_head" in key or "blocks" in key else 2][key] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05}-of-00003.{suffix}"
        weight_map |= dict.fromkeys(shard, name)
        save_file(shard, folder / name) if kind == "safetensors" else torch.save(shard, folder / name)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def as_pickle(name: str) -> Callable[[Path, Tensors], Any]:
    """A function that writes a file of this name into a folder with ``torch.save``."""
    return lambda folder, state: torch.save(state, folder / name)


def as_safetensors(name: str) -> Callable[[Path, Tensors], Any]:
    """A function that writes a safetensors file of this name into a folder."""
    return lambda folder, state: save_file(state, folder / name)


def as_old_pickle(folder: Path, state: Tensors) -> None:
    torch.save(state, folder / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)


LAYOUTS: dict[str, Callable[[Path, Tensors], Any]] = {
    "medusa-1 safetensors": as_safetensors("medusa_lm_head.safetensors"),
    "medusa-1 pt": as_pickle("medusa_lm_head.pt"),
    "medusa-1 old pt": as_old_pickle,
    "medusa-2 safetensors": lambda f, s: save_file(with_prefix(s), f / "model.safetensors"),
    "medusa-2 bin": lambda f, s: torch.save(with_prefix(s), f / "pytorch_model.bin"),
    "medusa-2 deeper prefix": lambda f, s: save_file(with_prefix(s, "module.medusa_head."), f / "model.safetensors"),
    "medusa-2 safetensors shards": lambda f, s: write_shards(f, with_prefix(s), "safetensors"),
    "medusa-2 bin shards": lambda f, s: write_shards(f, with_prefix(s), "bin"),
    "vllm": lambda f, s: save_file(as_vllm(s), f / "model.safetensors"),
    "vllm prefixed": lambda f, s: save_file(with_prefix(as_vllm(s), "medusa_heads."), f / "model.safetensors"),
    "vllm bin": lambda f, s: torch.save(as_vllm(s), f / "pytorch_model.bin"),
}


def without(*keys: str) -> Callable[[Tensors], Tensors]:
    """A function that removes these keys from a state."""
    return lambda state: {key: tensor for key, tensor in state.items() if key not in keys}
