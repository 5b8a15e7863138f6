"""Resident memory of one generation in a fresh process; run as a program by ``test_resident_memory.py``.

Takes a seed, which determines the setting, and changes to the setting as JSON. Prints one JSON object.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import specmemo_kernels as sk

MIB = 2**20


def setting_of(seed: int) -> dict[str, Any]:
    """A model of 10 to 60 MB, a budget and a call."""
    draw = random.Random(seed)
    hidden = draw.choice([256, 512, 1024])
    return {
        "hidden": hidden,
        "intermediate": draw.choice([1, 2, 3]) * hidden,
        "layers": draw.choice([2, 3]),
        "kv_heads": draw.choice([hidden // 128, hidden // 64, hidden // 64]),
        "vocab": draw.choice([2000, 8000]),
        "dtype": draw.choice(["float32", "float32", "bfloat16"]),
        "batch": draw.choice([1, 4, 8, 16]),
        "budget": draw.choice([8, 16, 24, 32, 48, 64, 100]),
        "drafter": draw.choice(["heads", "lookup", "model"]),
        "graph": draw.choice([None, True]),
        "kv_dtype": draw.choice([None, None, "int8"]),
        "page_size": draw.choice([8, 16, 32]),
        "tree": draw.choice([1, 4, 8]),
        "prefill_chunk": draw.choice([64, 256]),
        "plain_first": draw.choice([False, True]),
        "new": 6,
        "method": None,
        "coded_head": False,
        "experts": 0,  # of a mixture (Mixtral); 0: Llama
        "fuse": True,
        "batches": None,  # sizes of calls one after the other, instead of one call
    }


def resident() -> dict[str, int]:
    """Resident bytes, anonymous and of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("Rss", "VmHWM"))}
    return {"own": sizes["RssAnon"] + sizes["RssShmem"], "file": sizes["RssFile"], "peak": sizes["VmHWM"]}


def peak_of(call: Callable[[], object]) -> int:
    """Peak anonymous memory of this process during ``call``: the larger of a polled value and the kernel's own peak
    without files. Mapped files only grow.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset the kernel's peak
        reset = True
    except OSError:
        reset = False
    polled_peak, done = 0, threading.Event()

    def poll() -> None:
        nonlocal polled_peak
        while not done.is_set():
            polled_peak = max(polled_peak, resident()["own"])
            time.sleep(0.004)

    poller = threading.Thread(target=poll)
    poller.start()
    call()
    done.set()
    poller.join()
    end = resident()
    return max(polled_peak, end["peak"] - end["file"] if reset else 0)


def make_model(setting: dict[str, Any], layers: int) -> Any:
    hidden = setting["hidden"]
    kind: Any = MixtralConfig if setting["experts"] else LlamaConfig
    experts = {"num_local_experts": setting["experts"], "num_experts_per_tok": 2} if setting["experts"] else {}
    config = kind(
        vocab_size=setting["vocab"], hidden_size=hidden, intermediate_size=setting["intermediate"],
        num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=setting["kv_heads"],
        max_position_embeddings=8192, pad_token_id=0, bos_token_id=1, eos_token_id=None, **experts,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config).to(getattr(torch, setting["dtype"])).eval()
    model.generation_config.eos_token_id = None
    return model


def quantised(model: Any, setting: dict[str, Any]) -> Any:
    """The model with the setting's quantised layers."""
    if setting["method"] is None:
        return model
    from quantised_packages import quantised_model

    return quantised_model(model, setting["method"], setting["coded_head"])


def profiled_peak_of(call: Callable[[], object]) -> int:
    """Peak bytes that torch's profiler sees, temporaries inside of operators included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    held = peak = 0
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    for event in results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def prompts_of(setting: dict[str, Any], tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Ragged, left-padded prompts of ``tokens`` tokens in total."""
    generator = torch.Generator().manual_seed(seed)
    share = 0.3 + torch.rand(setting["batch"], generator=torch.Generator().manual_seed(0))
    lengths = [max(1, int(tokens * part)) for part in (share / share.sum()).tolist()]
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, setting["vocab"], (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def eagle3(setting: dict[str, Any]) -> str:
    """A folder with a random EAGLE-3 drafter for the setting's model."""
    from drafter_oracles import write_eagle3

    folder, hidden = tempfile.mkdtemp(), setting["hidden"]
    sizes = {"hidden": hidden, "heads": hidden // 64, "kv_heads": setting["kv_heads"], "head_dim": 64}
    write_eagle3(folder, vocab=setting["vocab"], intermediate=setting["intermediate"], **sizes)
    return folder


def main(seed: int, setting: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = quantised(make_model(setting, setting["layers"]), setting)
    dtype, drafter, graph = getattr(torch, setting["dtype"]), setting["drafter"], setting["graph"]
    heads: Any = "prompt-lookup"
    if drafter == "heads":
        heads = sk.MedusaHeads(setting["hidden"], setting["vocab"], 2, own_lm_head=False).to(dtype)
    elif drafter == "model":
        heads = quantised(make_model(setting, 1), setting)
    elif drafter == "own heads":
        heads = sk.MedusaHeads(setting["hidden"], setting["vocab"], 2).to(dtype)
    elif drafter == "eagle3":
        heads = eagle3(setting)
    options = {"max_new_tokens": setting["new"], "do_sample": False}
    if setting["plain_first"]:
        model.generate(**prompts_of(setting, 20 * setting["batch"], seed), **options)
    gc.collect()
    unpatched = resident()
    try:
        handle = sk.patch(
            model, heads, memory_budget=setting["budget"] * MIB, tree=setting["tree"], max_batch_size=setting["batch"],
            page_size=setting["page_size"], prefill_chunk=setting["prefill_chunk"], kv_dtype=setting["kv_dtype"],
            graph=graph if drafter == "heads" and not setting["method"] else None, fuse=setting["fuse"],
        )  # fmt: skip
    except sk.BudgetError as error:
        return {"refused": str(error)}
    plan, patched = handle.plan, resident()
    assert plan.max_tokens is not None
    behind = setting["new"] + 2 * plan.tree.max_depth + 1 + plan.page_size
    # Seconds rather than minutes: so many multiplications, and not too long rows.
    layers = sum(p.numel() for p in model.model.layers.parameters())
    most = min(20_000_000_000 // layers, (100 if setting["batches"] else 1500) * setting["batch"])
    tokens = min(most, plan.max_tokens - setting["batch"] * behind)
    inputs: dict[str, torch.Tensor] = {}

    def generate(call: int) -> None:
        for batch in setting["batches"] or [setting["batch"]]:
            inputs.update(prompts_of(setting | {"batch": batch}, tokens * batch // setting["batch"], seed + call))
            model.generate(**inputs, **options)

    peaks = [peak_of(partial(generate, call)) for call in range(2)]
    handle.release()
    gc.collect()
    rest, profiled = resident(), 0
    if setting["method"]:
        profiled = profiled_peak_of(partial(model.generate, **inputs, **options))
    return {
        "parts": plan.parts,
        # Heads were there before, and pages that no token came to are never touched.
        "allowed": plan.budget - plan.parts["heads"],
        "filled": tokens / plan.max_tokens,
        "first": peaks[0] - patched["own"],
        "repeated": peaks[1] - patched["own"],
        "recorded": handle.stats.graph_steps,
        "profiled": profiled,
        "patch": patched["own"] - unpatched["own"],
        "files": rest["file"] - unpatched["file"],
        "released": rest["own"] - patched["own"],
    }


if __name__ == "__main__":
    number = int(sys.argv[1])
    print(json.dumps(main(number, setting_of(number) | json.loads(sys.argv[2]))))
