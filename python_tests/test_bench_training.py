"""The scripts that train models from scratch run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import greedy
from torch import nn

import specmemo_kernels as sk
from specmemo_kernels.cli.common import load_model, load_tokenizer

BENCH = Path(__file__).resolve().parents[1] / "bench"


def test_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)
    import train_small

    # The optimiser orthogonalises every matrix: minutes for a single step of the real sizes.
    small = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
    monkeypatch.setattr(train_small, "SIZES", train_small.SIZES | small | {"num_key_value_heads": 1})
    lines = [json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * 3}) for i in range(40)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    train_small.main(tmp_path / "texts.jsonl", tmp_path / "model", steps=1, batch=2, length=16, seed=0)
    model: Any = load_model(tmp_path / "model", torch.float32, torch.device("cpu"))
    ids = load_tokenizer(tmp_path / "model")("def f1(", return_tensors="pt").input_ids
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = greedy(model, inputs, 8)
    with sk.patch(model, "prompt-lookup"):
        assert torch.equal(greedy(model, inputs, 8), expected)
