"""Invariant mode on real prompts, by the benchmark: every setting writes the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
TEXTS = (
    "import os\n\n\ndef walk(folder):\n", "class Queue:\n    def __init__(self, size):\n", "for i in range(10):\n",
    "def median(values):\n    ordered = sorted(values)\n", "try:\n    import json\nexcept ",
)  # fmt: skip


@pytest.mark.slow
def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Aborts and few pages included; the comparison of speeds has the same tokens on one side and numbers on both."""
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_invariant as bench

    lines = [json.dumps({"turns": [text * repeats]}) for repeats in (1, 5) for text in TEXTS]
    questions, result = tmp_path / "question.jsonl", tmp_path / "result.json"
    questions.write_text("\n".join(lines))
    options: dict[str, Any] = {"limit": 6, "prompt_tokens": 64, "new_tokens": 12, "pages": 0.3, "json_": result}
    bench.main(questions, "none,medusa,lookup,draft", "1,4", "16", cost=False, **options)
    rows = json.loads(result.read_text())["tokens"]
    assert len(rows) == 8
    assert all(row["identical"] == row["prompts"] == 6 for row in rows)
    assert len({row["digest"] for row in rows}) == 1
    assert sum(row["preemptions"] for row in rows) > 0
    assert all((row["tokens_per_step"] > 1) == (row["drafter"] != "none") for row in rows)
    bench.main(questions, "medusa", "4", "16", cost=True, **options)
    (row,) = json.loads(result.read_text())["cost"]
    assert row["relative"] == row["tokens_per_s"] / row["default_tokens_per_s"] > 0
