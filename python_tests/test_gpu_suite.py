"""``bench/gpu_suite.py``: limits, statuses and rows of stages, and a suite that is killed again and again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "gpu_suite.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stages end with a killed suite on Linux only")


def stage(name: str, code: str, limit_s: float = 30.0, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": ["-c", code], "limit_s": limit_s, "least_s": 0.0, **more}


def start(folder: Path, stages: list[dict[str, Any]] | str, *more: str) -> subprocess.Popen[str]:
    """The suite in a process group of its own."""
    name = stages if isinstance(stages, str) else str(folder / "stages.json")
    if not isinstance(stages, str):
        Path(name).write_text(json.dumps(stages))
    command = [sys.executable, str(SCRIPT), "--results", str(folder), "--stages", name, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "suite.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def ends(folder: Path) -> dict[str, dict[str, Any]]:
    return {record["stage"]: record for record in records(folder) if "status" in record}


def rows(folder: Path, name: str) -> list[Any]:
    return [record["row"] for record in records(folder) if record.get("stage") == name and "row" in record]


@pytest.mark.slow
def test_stages_that_fail_or_hang_stop_nothing(tmp_path: Path) -> None:
    stages = [
        stage("fails", "print('{\"a\": 1}', flush=True); print('why'); raise SystemExit(3)"),
        stage("hangs", "print('{\"b\": 2}', flush=True); import time; time.sleep(60)", limit_s=1.5),
        stage("works", "import os; print('{not json'); print('{\"c\": \"' + os.environ['WORD'] + '\"}')",
              environment={"WORD": "x"}),
    ]  # fmt: skip
    process = start(tmp_path, stages)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.splitlines() == ["fails: failed", "hangs: stopped", "works: ok"]
    assert {name: end["status"] for name, end in ends(tmp_path).items()} == {
        "fails": "failed", "hangs": "stopped", "works": "ok",
    }  # fmt: skip
    assert [rows(tmp_path, name) for name in ("fails", "hangs", "works")] == [[{"a": 1}], [{"b": 2}], [{"c": "x"}]]
    assert ends(tmp_path)["fails"]["last_lines"] == ["why"]
    assert ends(tmp_path)["fails"]["exit_status"] == 3
    assert 1.4 < ends(tmp_path)["hangs"]["seconds"] < 20
    assert {"date", "commit"} <= set(records(tmp_path)[0]["environment"])


@pytest.mark.slow
def test_the_last_stages_are_dropped(tmp_path: Path) -> None:
    stages = [stage("first", "import time; time.sleep(1.2)"), stage("second", "print(1)") | {"least_s": 29.5}]
    output, _ = start(tmp_path, stages, "--limit-s", "30").communicate(timeout=60)
    assert output.splitlines()[0] == "first: ok"
    assert output.splitlines()[1].startswith("second: not started, 2")
    assert set(ends(tmp_path)) == {"first"}


@pytest.mark.slow
def test_twenty_kills_lose_no_finished_stage(tmp_path: Path) -> None:
    """Killed at random moments, with the line that is being written cut off; each stage's end is kept, none runs twice
    to its end, and no stage outlives the suite."""
    source = random.Random(0)
    line = 'print(\'{{"i": %d, "pid": %d}}\' % (i, os.getpid()), flush=True)'
    code = f"import os, time\nfor i in range(3):\n    {line}\n    time.sleep({{}})"
    stages = [stage(f"stage {i}", code.format(source.uniform(0.02, 0.2))) for i in range(12)]
    path, kept, kills = tmp_path / "suite.jsonl", {}, 0
    while kills < 20:
        process = start(tmp_path, stages)
        time.sleep(source.uniform(0.3, 1.2) if path.exists() else 6.0)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
        found = ends(tmp_path)
        assert {name: found[name] for name in kept} == kept
        kept = found
        if path.exists() and source.random() < 0.5:  # as if the machine had lost the end of the last write
            with path.open("ab") as file:
                file.write(b'{"stage": "stage 11", "sta')
    process = start(tmp_path, stages)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert {name: ends(tmp_path)[name] for name in kept} == kept
    assert [end["status"] for end in ends(tmp_path).values()] == ["ok"] * 12
    counts = [record["stage"] for record in records(tmp_path) if "status" in record]
    assert len(counts) == len(set(counts)) == 12
    for i in range(12):
        written = rows(tmp_path, f"stage {i}")
        assert [row["i"] for row in written[-3:]] == [0, 1, 2], "behind the rows of interrupted runs"
        for pid in {row["pid"] for row in written}:
            assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_the_rehearsal(tmp_path: Path) -> None:
    """Benchmarks of tiny sizes, a stage that fails and one that hangs."""
    process = start(tmp_path, "rehearsal")
    process.communicate(timeout=400)
    found = {name: end["status"] for name, end in ends(tmp_path).items()}
    assert found == {"headline": "ok", "fails": "failed", "sweep": "ok", "hangs": "stopped", "step": "ok"}
    assert rows(tmp_path, "headline")[-1]["op"] == "commit_paged_kv"
    sweep = rows(tmp_path, "sweep")
    assert len(sweep) >= 3
    assert not [row for row in sweep if "error" in row]
    assert rows(tmp_path, "step")[0]["step_ms"] > 0
