"""Tests in Triton's interpreter, which runs the kernels on the CPU.

The interpreter must be enabled before triton is imported, so a file of such tests runs itself in another process. There
its ``TestInterpreter`` is collected. In a normal run its ``test_in_the_interpreter`` is collected and fails if any of
these tests fails. Slow tests run in another process, as a slow test.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


#: Parametrizes ``test_in_the_interpreter`` by the marks of the tests that it runs.
each_speed = pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])


def run_in_interpreter(file: str, marks: str) -> None:
    """Run the tests of a file that ``-m marks`` selects in Triton's interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, file]
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, check=False, env=os.environ | environment, capture_output=True, text=True)
    print(run.stdout[-4000:])
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
