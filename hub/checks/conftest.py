"""The built kernel, loaded by ``kernels`` where ``specmemo_kernels`` isn't installed; ``make test-hub`` runs this."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "hub-kernel"
REPO = "specmemo/specmemo"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LOCAL_KERNELS"] = f"{REPO}={TREE}"


@pytest.fixture(scope="session")
def kernel() -> ModuleType:
    """The variant that ``kernels`` chooses: on Linux the one with the C++ module."""
    from kernels import get_local_kernel

    return get_local_kernel(TREE)


@pytest.fixture(scope="session")
def plain_kernel() -> ModuleType:
    """The variant without the C++ module."""
    from kernels import get_local_kernel

    return get_local_kernel(TREE / "build" / "torch-cpu")


def run(code: str, **environment: str) -> str:
    """The output of a program in a new process, in a folder where only this environment's packages are found."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=TREE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def build(out: Path, *options: str) -> dict[str, str]:
    """Build another tree; the id of each variant."""
    command: list[Any] = [sys.executable, ROOT / "hub" / "build_kernel.py", "--out", out, *options]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(line.split(": ") for line in lines)
