"""``bench/sanitize.py`` with a compute-sanitizer that is missing, can't run, finds an error, or finds none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "sanitize.py"
#: A stand-in: the smoke run is ``python -c ...``, the tests are ``python -m pytest ...``.
FAKE = '#!/bin/sh\ncase "$*" in *pytest*) echo tests; {tests} ;; *) echo smoke; {smoke} ;; esac\n'


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("smoke", "tests", "status", "says"),
    [
        ("exit 0", "exit 0", 0, "tests\n\nexit status 0"),
        ("exit 0", "exit 99", 1, "compute-sanitizer found errors"),
        ("exit 0", "exit 1", 1, "exit status 1"),
        ("exit 3", "exit 99", 0, "doesn't run here (exit status 3: smoke): nothing checked"),
        ("exit 0", "exec sleep 30", 0, "isn't done in 1 s: nothing said"),
    ],
)
def test_verdicts(smoke: str, tests: str, status: int, says: str, tmp_path: Path) -> None:
    binary = tmp_path / "compute-sanitizer"
    binary.write_text(FAKE.format(smoke=smoke, tests=tests))
    binary.chmod(0o755)
    done = run("--binary", binary, "--limit-s", 1 if "sleep" in tests else 20)
    assert done.returncode == status, done.stderr
    assert says in done.stdout


@pytest.mark.slow
def test_its_tests_exist() -> None:
    """Each part of its selection matches tests of test_gpu.py."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import sanitize
    finally:
        sys.path.remove(str(SCRIPT.parent))
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "test_gpu.py"]
    done = subprocess.run(
        [*collect, "-k", sanitize.TESTS], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    for part in sanitize.TESTS.split(" or "):
        words = part.strip("()").split(" and ")
        assert any(all(word in line for word in words) for line in done.stdout.splitlines()), part
