"""The engines of bench_engines.py write the same tokens, each in its own process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"
ENGINES = ["transformers", "specmemo, no drafts", "specmemo, prompt lookup", "specmemo, heads"]
LLAMA_CPP = ["llama.cpp", "llama.cpp, prompt lookup"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_engines

    return bench_engines


def test_common_prefix(bench: Any) -> None:
    assert bench.common_prefix([1, 2, 3, 4], [1, 2, 4, 4]) == 0.5
    assert bench.common_prefix([1, 2], [1, 2]) == 1


@pytest.mark.slow
def test_all_write_the_same(bench: Any, tmp_path: Path) -> None:
    installed = all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))
    folder, texts = bench.make_model("bundled", torch.float32, tmp_path, 40, 2, installed)
    setup = bench.Setup(str(folder), "float32", 1, 60, 1, replay=False)
    weights = (folder / "model.safetensors").stat().st_size
    written = []
    for engine in [*ENGINES, *(LLAMA_CPP if installed else [])]:
        worker = bench.Worker(engine, setup, sys.executable)
        results = [worker.run([text], 20, watch=True) for text in texts]
        worker.close()
        written.append([result["tokens"] for result in results])
        assert all(0 < result["first_token_seconds"] < result["seconds"] for result in results)
        assert all(result["bytes"] > 0 for result in results)
        assert results[0]["model_bytes"] == pytest.approx(weights, rel=0.02)
        assert ((results[0]["tokens_per_step"] or 1) > 1) == (engine in ENGINES[2:])
    assert all(tokens == written[0] for tokens in written)
