"""Pages of 64 tokens where a GPU's kernels gain by them: the figure behind the rule, the planner, and ``patch``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from selection import sample
from test_predicted_memory import small_model

import specmemo_kernels as sk
from specmemo_kernels.backends.kernel_config import preferred_page_size
from specmemo_kernels.backends.kernel_target import TARGETS
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.integrations.hf import plan
from specmemo_kernels.planning import search
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.known_devices import known_device
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.planner import plan_request
from specmemo_kernels.planning.search import WIDE_PAGE_SHARE, candidates, parts_of

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
SPEC = ModelSpec.from_config(
    {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8,
     "num_key_value_heads": 2, "vocab_size": 32000, "max_position_embeddings": 16384, "dtype": "bfloat16"},
    name="small",
)  # fmt: skip


@pytest.mark.parametrize("file", ["aot.json", "aot_triton36.json"])
def test_the_rule_is_what_compiled_kernels_predict(file: str) -> None:
    """Of trees of 25 nodes: at least 3 % more on the targets with pages of 64, less on all others."""
    rows = json.loads((RESULTS / file).read_text())["rows"]
    shape = {"head_dim": 128, "gqa": 4, "nodes": 25}
    found = {
        (row["target"], row["page_size"]): row["predicted_fraction"]
        for row in rows
        if row["kernel"] in ("tree_attention", "tree_attention_pages_of_64") and shape.items() <= row.items()
    }
    targets = [name for name in TARGETS if (name, 16) in found]
    assert len(targets) == 8
    for name in targets:
        gains = found[name, 64] >= 1.03 * found[name, 16]
        assert preferred_page_size(name) == (64 if gains else 16), name


@pytest.mark.parametrize(("tokens", "batch"), sample([(8192, 1), (100, 64)], [(8192, 1)]))
def test_the_planner_takes_wide_pages_where_they_cost_little(
    tokens: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = replace(known_device("mi300x"), kernel_target="gfx942")
    work = Workload(tokens, prompt=tokens // 2, batch=batch)
    chosen = candidates(plan_request(SPEC, gpu, work))
    monkeypatch.setattr(search, "preferred_page_size", lambda _: 16)
    smallest = candidates(plan_request(SPEC, gpu, work))
    for mine, least in zip(chosen, smallest, strict=True):
        assert mine.page_size in (16, 64)
        assert mine.total_bytes <= (1 + WIDE_PAGE_SHARE) * least.total_bytes
        assert sum(parts_of(plan_request(SPEC, gpu, work), mine).values()) == mine.total_bytes
    sizes = {candidate.page_size for candidate in chosen}
    assert sizes == ({64} if batch == 1 else {16, 64}), "short sequences of a large batch would lose more than 1 %"


@pytest.mark.parametrize(
    ("backend", "device", "target", "budget", "expected"),
    [
        ("triton", "cuda", "gfx942", None, 64),
        ("triton", "cuda", "gfx942", 8 * 64 * 2048 * 100, 64),
        ("triton", "cuda", "gfx942", 8 * 64 * 2048 * 100 - 1, 16),
        ("triton", "cuda", "sm_90", None, 16),
        ("triton", "cuda", None, None, 16),
        ("reference", "cuda", "gfx942", None, 16),
        ("cpu", "cpu", "gfx942", None, 16),
    ],
)
def test_patch_without_a_page_size(
    backend: str, device: str, target: str | None, budget: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget, one page for each of 8 sequences (2 KiB a token) is at most 1 % of it."""
    monkeypatch.setattr(plan, "kernel_target", lambda _: target)
    layers = [LayerKV(2, 128, 128, torch.bfloat16, torch.device(device))] * 2
    assert sum(layer.page_bytes_per_token(None) for layer in layers) == 2048
    setup: Any = SimpleNamespace(backend=backend, facts=SimpleNamespace(device=torch.device(device), layers=layers))
    limits = plan.PlanLimits(budget, page_size=None, prefill_chunk=256, max_sequences=8, kv_dtype=None)
    assert plan._page_size(setup, limits) == expected


def test_a_given_page_size_is_kept() -> None:
    for given, expected in ((None, 16), (32, 32)):
        with sk.patch(small_model(), "prompt-lookup", page_size=given) as handle:
            assert handle.plan.page_size == expected
