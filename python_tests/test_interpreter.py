"""The tests of Triton kernels in Triton's interpreter (see ``interpreter.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import INTERPRETING

pytest.importorskip("triton")

FILES = ("test_triton_interpreter.py", "test_triton_steps.py", "test_triton_layers.py", "test_nan_logits.py")


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(marks: str) -> None:
    """Every test of the files' ``TestInterpreter`` passes."""
    classes = [f"{file}::TestInterpreter" for file in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, *classes]
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        command, check=False, env=os.environ | environment, cwd=Path(__file__).parent, capture_output=True, text=True
    )
    print(run.stdout[-4000:])
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
