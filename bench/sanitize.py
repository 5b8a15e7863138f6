"""Run GPU kernel tests under NVIDIA's compute-sanitizer (memcheck), to find accesses outside of tensors.

    python bench/sanitize.py --limit-s 80

Runs a small part of ``python_tests/test_gpu.py``, every kernel once or twice. torch's caching allocator is off, so each
tensor is a separate allocation. Prints a message if compute-sanitizer is missing, doesn't run, or runs out of time.
Exits with 1 only if it finds an error or a test fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "(test_attention and ragged) or (test_pages_are_written and odd_sizes) or test_verify or (test_lm_head and odd)"
SMOKE = "import torch; torch.ones(8, device='cuda').add_(1).sum().item()"
FOUND = 99


def find() -> str | None:
    """compute-sanitizer on the path or in the CUDA toolkit's folder."""
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def under(binary: str, limit: float, *command: str) -> subprocess.CompletedProcess[str]:
    """Run ``python command`` under memcheck.

    Raises:
        subprocess.TimeoutExpired: after ``limit`` seconds.
    """
    options = ["--tool", "memcheck", "--error-exitcode", str(FOUND), "--target-processes", "all"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(
        [binary, *options, sys.executable, *command],
        check=False, cwd=ROOT, env=environment, timeout=limit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=80, help="seconds for both runs together")
    parser.add_argument("--binary", default=find(), help="path of compute-sanitizer")
    args = parser.parse_args()
    if args.binary is None:
        print("no compute-sanitizer here: the kernels' reads and writes stay unchecked")
        return 0
    started = time.monotonic()
    try:
        smoke = under(args.binary, args.limit_s, "-c", SMOKE)
        if smoke.returncode:
            last = (smoke.stdout.strip().splitlines() or ["no output"])[-1]
            print(f"compute-sanitizer doesn't run here (exit status {smoke.returncode}: {last}): nothing checked")
            return 0
        tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", TESTS, "python_tests/test_gpu.py")
        run = under(args.binary, max(1.0, started + args.limit_s - time.monotonic()), *tests)
    except subprocess.TimeoutExpired:
        print(f"compute-sanitizer isn't done in {args.limit_s:g} s: nothing said")
        return 0
    print(run.stdout[-6000:])
    print("compute-sanitizer found errors" if run.returncode == FOUND else f"exit status {run.returncode}")
    return int(run.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
