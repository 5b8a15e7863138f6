"""Budgets of quantised models over random settings; run by ``make test-quantised``, prints one line per setting.

    python python_tests/quantised_budgets.py [SETTINGS]

Each setting runs in a fresh process (``resident_generation.py``). Exits with 1 if one exceeds its budget by more than
5 % and 4 MiB, in resident memory or in the events of torch's profiler.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from test_resident_memory import returned_bytes

MIB = 2**20
#: Sizes in MiB. resident, again: the first and the second call, beyond the process before ``patch`` where ``patch``
#: made that smaller.
COLUMNS = ("method", "dtype", "lm_head", "drafter", "batch", "budget", "allowed", "resident", "again", "profiler",
           "products", "held")  # fmt: skip
PROGRAM = Path(__file__).with_name("resident_generation.py")
METHODS = (
    "torchao int8", "torchao intx4", "torchao float8", "quanto int8", "quanto int4", "bitsandbytes 8",
    "bitsandbytes nf4", "hqq 4", "gguf q4_0",
)  # fmt: skip


def setting_of(seed: int) -> dict[str, Any]:
    """Every method in turn; everything else is random."""
    draw = random.Random(1000 + seed)
    method = METHODS[seed % len(METHODS)]
    dtype = draw.choice(["float32", "bfloat16"])
    # Quanto's int4 kernel for bfloat16 refuses the inputs of a batch's quantised lm_head.
    hidden = draw.choice([256, 512, 1024])
    coded_head = draw.choice([False, True]) and not (method == "quanto int4" and dtype == "bfloat16")
    return {
        "method": method,
        "dtype": dtype,
        "coded_head": coded_head,
        "drafter": draw.choice(["heads", "own heads", "lookup", "model"]),
        "budget": draw.choice([16, 24, 32, 48, 64, 100]),
        "hidden": hidden,
        "intermediate": draw.choice([1, 2, 3]) * hidden,
        "kv_heads": draw.choice([hidden // 128, hidden // 64]),
        "vocab": draw.choice([2048, 8192]),
        "batch": draw.choice([1, 4, 8]),
        "plain_first": True,  # packages load modules in their first products
    }


def measured(seed: int) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The setting, the figures, and what the first budget was refused with; refused budgets are doubled."""
    setting, refusal = setting_of(seed), ""
    for _ in range(5):
        program = [sys.executable, str(PROGRAM), str(seed), json.dumps(setting)]
        run = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if run.returncode:
            lines = [line for line in run.stderr.strip().splitlines() if "%|" not in line]
            return setting, {"error": lines[-1]}, refusal
        lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
        found: dict[str, Any] = json.loads(lines[-1])
        if "refused" not in found:
            return setting, found, refusal
        refusal = refusal or found["refused"]
        setting["budget"] *= 2
    return setting, {"error": f"no budget was enough: {refusal}"}, refusal


def main(count: int) -> int:
    wrong = 0
    print(*COLUMNS, sep=" | ")
    for seed in range(count):
        setting, found, refusal = measured(seed)
        head = "quantised" if setting["coded_head"] else "plain"
        row = [setting[name] for name in ("method", "dtype", "drafter", "batch", "budget")]
        row.insert(2, head)
        if "error" in found:
            wrong += 1
            print(*row, found["error"], sep=" | ", flush=True)
            continue
        resident = [found[call] - returned_bytes(found) for call in ("first", "repeated")]
        peaks = [*resident, found["profiled"]]
        held = max(peaks) <= found["allowed"] + max(found["allowed"] // 20, 4 * MIB)
        wrong += not held
        sizes = [found["allowed"], *peaks, found["parts"].get("products", 0)]
        figures = [f"{size / MIB:.1f}" for size in sizes]
        print(*row, *figures, "yes" if held else "NO", *(["after a refusal"] if refusal else []), sep=" | ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30))
