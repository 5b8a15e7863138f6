"""Tests in Triton's interpreter, which computes the kernels on the CPU.

It is chosen before triton is imported, so a file of such tests runs itself in a process of its own: there its
``TestInterpreter`` is collected, in an ordinary test run its ``test_in_the_interpreter`` is, and fails if any of the
former does. The slow ones among them run in a process of their own, as a slow test.
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
    """Run those of a file's tests that ``-m marks`` selects, with the interpreter on."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, file]
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, check=False, env=os.environ | environment, capture_output=True, text=True)
    print(run.stdout[-4000:])
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
