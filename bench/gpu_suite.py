"""Everything to measure on a GPU, in stages of falling value that lose no results (``make gpu``).

    python bench/gpu_suite.py --results bench/results/gpu --limit-s 480
    python bench/gpu_suite.py --results /tmp/rehearsal --stages rehearsal      # tiny sizes, on the CPU

Each stage is a process with a limit. JSON objects that it prints become rows of ``RESULTS/suite.jsonl`` at once, and
its end a line with its status. A stage that fails or hangs doesn't stop the next; a stage for which no time is left is
not started. A suite that was interrupted goes on with the stages that have no end; ``--stages`` is ``gpu``,
``rehearsal`` or a JSON file of stages.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
_SIGNAL_OF_A_DEAD_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Stage:
    """A process: stopped after ``limit_s`` seconds, not started with fewer than ``least_s`` left.

    ``command``: arguments of this Python. ``environment``: additional variables.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    least_s: float = 5.0
    environment: dict[str, str] = field(default_factory=dict)


def gpu_stages(results: Path) -> list[Stage]:
    """The stages on a GPU, most valuable first: 480 seconds are enough for all but the last ones."""
    ops, sweep, step = (str(BENCH / f"{name}.py") for name in ("bench_ops", "gpu_sweep", "bench_step"))
    llama = (ops, "--device", "cuda", "--model", "llama3-8b", "--dtype", "bf16")
    parallel = ("-n", "8") if importlib.util.find_spec("xdist") else ()
    tests = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *parallel)
    return [
        Stage("rates", ("-m", "specmemo_kernels.cli", "probe", "--device", "cuda", "--output",
                        str(results / "device.json")), 40),
        Stage("compile", (sweep, "--compile"), 60),
        Stage("headline", (*llama, "--context", "8192", "--batch", "8,1", "--tree", "1,25,64", "--peers",
                           "sdpa,sdpa_folded,flex,flashinfer,xqa", "--limit-s", "60"), 75),
        Stage("linear", (ops, "--device", "cuda", "--op", "linear", "--model", "llama2-7b,llama3-8b", "--rows",
                         "1,8,25,32,64", "--json", str(results / "linear.json")), 45),
        Stage("sweep", (sweep, "--table", str(results / "kernel_table.json")), 90),
        Stage("counters", (sweep, "--counters"), 45),
        Stage("step", (step, "--device", "cuda", "--shape", "vicuna-7b", "--dtype", "bf16", "--tree", "25", "--seconds",
                       "3", "--json", str(results / "step.json")), 45, 20),
        Stage("eager step", (step, "--device", "cuda", "--shape", "vicuna-7b", "--dtype", "bf16", "--tree", "25",
                             "--seconds", "3", "--no-graph", "--json", str(results / "eager_step.json")), 40, 20),
        Stage("sampled step", (step, "--device", "cuda", "--shape", "vicuna-7b", "--dtype", "bf16", "--tree", "25",
                               "--temperature", "0.8", "--seconds", "3", "--json",
                               str(results / "sampled_step.json")), 40, 20),
        Stage("frontier", (str(BENCH / "bench_frontier.py"), "--device", "cuda", "--model", "vicuna-7b", "--budgets",
                           "0.35,0.2,0.1", "--limit", "2", "--seconds", "30", "--json",
                           str(results / "frontier.json"), "--pictures", str(results / "frontier")), 110, 60),
        Stage("tests", (*tests, "python_tests/test_gpu.py", "python_tests/test_gpu_memory.py"), 150, 40),
        Stage("sanitizer", (str(BENCH / "sanitize.py"), "--limit-s", "60"), 70, 40),
    ]  # fmt: skip


def rehearsal_stages() -> list[Stage]:
    """Tiny stages on the CPU: kernels in the interpreter, a step, a stage that fails, and one that hangs."""
    interpreter = {"TRITON_INTERPRET": "1"}
    ops = ("--op", "commit_paged_kv", "--context", "64", "--tree", "1", "--seconds", "0.02")
    return [
        Stage("headline", (str(BENCH / "bench_ops.py"), *ops), 60, environment={"OMP_NUM_THREADS": "1"}),
        Stage("fails", ("-c", "print('{\"row\": 1}'); raise SystemExit(3)"), 20),
        Stage("sweep", (str(BENCH / "gpu_sweep.py"), "--device", "cpu"), 90, environment=interpreter),
        Stage("hangs", ("-c", "import time; time.sleep(600)"), 1),
        Stage("step", (str(BENCH / "bench_step.py"), "--shape", "bundled", "--dtype", "fp32", "--tree", "4",
                       "--context", "32", "--seconds", "0.2"), 120),
    ]  # fmt: skip


class Log:
    """``suite.jsonl``: a record per line, written to the disk at once. A line that was cut off is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, record: dict[str, Any]) -> None:
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> Iterator[dict[str, Any]]:
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record

    def ended(self) -> dict[str, float]:
        """The stages that have ended, and their seconds."""
        return {record["stage"]: record["seconds"] for record in self.records() if "status" in record}


def run_stage(stage: Stage, limit_s: float, log: Log) -> str:
    """Run a stage, log its rows and its end, and return its status: ``ok``, ``failed`` or ``stopped``."""
    started, stopped = time.monotonic(), threading.Event()
    process = subprocess.Popen(
        [sys.executable, *stage.command], cwd=ROOT, env=os.environ | stage.environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", preexec_fn=_end_with_parent,
    )  # fmt: skip

    def stop() -> None:
        stopped.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, stop)
    timer.start()
    last: deque[str] = deque(maxlen=40)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            row = _row(line)
            if row is None:
                last.append(line.rstrip())
            else:
                log.append({"stage": stage.name, "row": row})
        process.wait()
    finally:
        timer.cancel()
    status = "stopped" if stopped.is_set() else "ok" if process.returncode == 0 else "failed"
    end = {"stage": stage.name, "status": status, "seconds": round(time.monotonic() - started, 2)}
    log.append(end | {"exit_status": process.returncode, "last_lines": [] if status == "ok" else list(last)})
    return status


def _end_with_parent() -> None:
    """Linux: a stage ends with a suite that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_OF_A_DEAD_PARENT, signal.SIGKILL)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def run_suite(stages: list[Stage], log: Log, limit_s: float) -> dict[str, str]:
    """Run the stages that haven't ended, while there is time; returns their status."""
    started, statuses = time.monotonic(), {}
    ended = log.ended()
    spent = sum(ended.values())
    for stage in stages:
        if stage.name in ended:
            continue
        left = limit_s - spent - (time.monotonic() - started)
        if left < stage.least_s:
            statuses[stage.name] = f"not started, {max(0.0, left):.0f} s are left"
        else:
            statuses[stage.name] = run_stage(stage, min(stage.limit_s, left), log)
        print(f"{stage.name}: {statuses[stage.name]}", flush=True)
    return statuses


def load_stages(name: str, results: Path) -> list[Stage]:
    if name == "gpu":
        return gpu_stages(results)
    if name == "rehearsal":
        return rehearsal_stages()
    return [Stage(**stage | {"command": tuple(stage["command"])}) for stage in json.loads(Path(name).read_text())]


def main(
    results: Annotated[Path, typer.Option(help="folder for suite.jsonl and the stages' files")],
    stages: Annotated[str, typer.Option(help="gpu, rehearsal, or a JSON file of stages")] = "gpu",
    limit_s: Annotated[float, typer.Option(help="seconds for all stages, of earlier runs too")] = 480,
) -> None:
    """Run the stages that haven't ended; exits with 1 if one failed."""
    results.mkdir(parents=True, exist_ok=True)
    log, chosen = Log(results / "suite.jsonl"), load_stages(stages, results)
    if not any("environment" in record for record in log.records()):
        from timing import environment  # torch takes seconds to import

        log.append({"environment": environment(), "stages": [stage.name for stage in chosen]})
    statuses = run_suite(chosen, log, limit_s)
    raise typer.Exit(int("failed" in statuses.values()))


if __name__ == "__main__":
    typer.run(main)
