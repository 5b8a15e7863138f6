"""The budget is a hard cap: generation under a limit that the system enforces, watched by another process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

MIB = 2**20
PROGRAM = Path(__file__).with_name("capped_generation.py")
#: What Python, malloc and the interpreter's caches may take beside the plan.
SLACK = 12 * MIB

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is watched through /proc")


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by name from ``/proc/PID/status``; empty once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmData", "RssAnon"))}


def run_capped(budget: int, slack: int) -> tuple[dict[str, Any], dict[str, int]]:
    """The program's output, and its peak memory as seen from this process."""
    program = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(budget), str(slack)], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    said = json.loads(program.stdout.readline())
    before, most, looks = memory_of(program.pid), {"VmData": 0, "RssAnon": 0}, 0
    while program.poll() is None:
        for name, size in memory_of(program.pid).items():
            most[name] = max(most[name], size)
        looks += 1
        time.sleep(0.005)
    said |= json.loads(program.stdout.readline())
    assert program.returncode == 0
    assert looks > 20
    assert most["VmData"] <= said["cap"]
    return said, {name: size - before[name] for name, size in most.items()}


@pytest.mark.slow
def test_generation_under_a_cap() -> None:
    """RLIMIT_DATA is the use after patching, the budget, and 12 MiB. Ten prompts, some preempted, are continued
    correctly; the watcher sees no excess; requests that can't fit raise BudgetError, not a failed allocation.
    """
    budget = 48 * MIB
    said, rise = run_capped(budget, SLACK)
    assert said["planned"] <= budget
    assert said["right"]
    assert said["again"]
    assert said["preemptions"] > 0
    assert said["shrinks"] == 0, "the plan fits without giving anything up"
    assert said["enforced"], "the system would have given more than the cap"
    assert "slots, the plan holds" in said["refused"]
    assert rise["RssAnon"] <= budget + SLACK
    # Nearly all of the budget is pages, so a run that took no memory would show here.
    assert rise["RssAnon"] > 0.7 * said["held"] > 0.5 * budget


@pytest.mark.slow
def test_a_cap_below_the_plan() -> None:
    """The limit is little more than half of the budget: allocations fail, the tokens are right."""
    budget = 48 * MIB
    said, rise = run_capped(budget, -20 * MIB)
    assert said["right"]
    assert said["again"]
    assert said["shrinks"] > 0
    assert said["held"] < budget - 20 * MIB
    # Memory that was the process's before, but not touched yet, isn't under the cap.
    assert rise["RssAnon"] <= budget - 20 * MIB + SLACK < budget
