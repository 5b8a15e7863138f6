"""A short soak: random requests, aborts, budgets and drafters. The long one is bench/soak.py."""

from __future__ import annotations

import random

import pytest
from hidden_oracle import HiddenOracle
from soak import greedy_answers, soak
from tiny_models import VOCAB, OracleDrafter, tiny_model

import specmemo_kernels as sk


@pytest.mark.slow
def test_a_short_soak() -> None:
    model, small = tiny_model("llama", seed=11), tiny_model("llama", seed=11)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 90))] for _ in range(12)]
    oracle = [prompt + answer for prompt, answer in zip(prompts, greedy_answers(model, prompts, 40), strict=True)]
    drafters = [
        lambda: OracleDrafter(oracle, 0.7),
        lambda: "prompt-lookup",
        lambda: sk.DraftModel(small, tokens=3),
        lambda: sk.MedusaHeads(32, VOCAB, 3),
        lambda: HiddenOracle(model, oracle, 0.7),
    ]
    report = soak(model, drafters, prompts, new_tokens=40, requests=160, seed=1, backend="reference")
    assert report.requests == 160
    assert report.aborted > 10
    assert report.preempted > 2
    settled = report.tensor_bytes[len(report.tensor_bytes) // 2 :]
    assert max(settled) - min(settled) < 100_000, f"tensors pile up: {report.tensor_bytes}"
