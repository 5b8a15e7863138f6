"""Generation under a cap that the system enforces; run as a program by ``test_hard_cap.py``.

Prints one JSON object per line: the plan and the cap, then the result.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, OracleDrafter, tiny_model

import specmemo_kernels as sk

MIB = 2**20
NEW = 90


def data_bytes() -> int:
    """Private writable memory of this process, which RLIMIT_DATA limits."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmData"))
    return int(line.split()[1]) * 1024


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [c.tokens for c in sk.generate_batch(model, prompts, max_new_tokens=NEW)]


def main(budget: int, slack: int) -> None:
    """``budget`` for the plan; beyond what is used after patching, ``budget + slack`` bytes may be taken."""
    torch.set_num_threads(1)
    # 16 KiB of keys and values per token, so that pages are nearly all of the budget.
    model = tiny_model("llama", num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    generator = torch.Generator().manual_seed(0)
    lengths = [int(n) for n in torch.randint(250, 400, (10,), generator=generator)]
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        row = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        expected.append(row[0, len(prompt) :].tolist())
    drafter = OracleDrafter([p + e for p, e in zip(prompts, expected, strict=True)], 0.7)
    handle = sk.patch(model, drafter, tree=8, memory_budget=budget, max_batch_size=8, prefill_chunk=64)
    short = [prompt[:20] for prompt in prompts[:2]]
    greedy(model, short)  # threads, buffers of libraries
    handle.release()
    cap = data_bytes() + budget + slack
    resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    say(budget=budget, planned=handle.plan.total_bytes, used=data_bytes(), cap=cap)
    right = greedy(model, prompts) == expected
    held = sum(handle.bytes_by_part.values())
    try:
        greedy(model, [prompts[0] * 12])
        refused = ""
    except sk.BudgetError as error:
        refused = str(error)
    try:
        torch.ones(budget + 2 * abs(slack), dtype=torch.uint8)
        enforced = False
    except RuntimeError:
        enforced = True
    again = greedy(model, prompts[:2]) == expected[:2]
    stats = handle.stats
    say(
        right=right, again=again, held=held, refused=refused, enforced=enforced, preemptions=stats.preemptions,
        shrinks=stats.shrinks,
    )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
