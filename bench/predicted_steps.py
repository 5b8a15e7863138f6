"""Predicted and measured times on this machine's CPU: the bundled model's steps and prompt, plain and with trees.

    python bench/predicted_steps.py --threads 1 --dtype float32 --json out.json

The profile is measured first, as by ``specmemo probe``. Times are the best of several runs, as in the profile, to leave
out other load on the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing import write_result

import specmemo_kernels
from specmemo_kernels.cli.common import demo_model_folder
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.cost import decode_pass, pass_seconds, plain_speed, prefill_seconds
from specmemo_kernels.planning.device import DeviceProfile
from specmemo_kernels.planning.device_probe import probe
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.model_spec import ModelSpec

PROMPT, NEW, CHUNK = 512, 96, 256


def best(call: Callable[[], Any], runs: int) -> float:
    """Seconds of the fastest run, after a warm-up."""
    call()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(model: Any, runs: int, steps: Callable[[], int] | None = None) -> tuple[float, float]:
    """Seconds of the prompt and of a step; ``steps`` returns the number of steps since its last call."""
    ids = torch.randint(3, 4000, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def generate(new: int) -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)

    seconds, counts = [], []
    for new in (1, NEW):
        seconds.append(best(lambda new=new: generate(new), runs))
        if steps is not None:
            steps()
        generate(new)
        counts.append(new - 1 if steps is None else steps())
    return seconds[0], (seconds[1] - seconds[0]) / (counts[1] - counts[0])


def compare(profile: DeviceProfile, spec: ModelSpec, model: Any, trees: list[int], runs: int) -> list[dict[str, Any]]:
    """A row for plain generate and each tree, in milliseconds."""
    work, folder = Workload(PROMPT + NEW, 1, PROMPT), demo_model_folder()
    prompt, step = measure(model, runs)
    plain = plain_speed(spec, profile, work).step_seconds
    rows = [row("plain", prefill_seconds(spec, profile, work, 1, PROMPT), prompt, plain, step)]
    for nodes in trees:
        with specmemo_kernels.patch(
            model, folder / "heads", tree=nodes, prefill_chunk=CHUNK, max_batch_size=1, reuse_prefix=False
        ) as handle:
            drafter = handle.drafter.heads
            heads = HeadsSpec(drafter.num_heads, drafter.num_layers, drafter.own_lm_head)
            stats = handle.stats

            def steps(stats: Any = stats) -> int:
                count = stats.steps
                stats.reset()
                return int(count)

            prompt, step = measure(model, runs, steps)
        run, operators = decode_pass(work, 1, nodes, heads.num_heads, recorded=True), profile.of_operators
        predicted = pass_seconds(spec, operators, run, heads)
        rows.append(row(f"{nodes} nodes", prefill_seconds(spec, operators, work, 1, CHUNK), prompt, predicted, step))
    return rows


def row(name: str, prompt: float, prompt_measured: float, step: float, step_measured: float) -> dict[str, Any]:
    figures = {"prompt_predicted": prompt, "prompt": prompt_measured, "step_predicted": step, "step": step_measured}
    return {"way": name} | {f"{key}_ms": round(1e3 * seconds, 2) for key, seconds in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--trees", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4, 8, 16, 32])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    profile = probe("cpu")
    model = AutoModelForCausalLM.from_pretrained(demo_model_folder(), dtype=getattr(torch, args.dtype)).eval()
    model.generation_config.eos_token_id = None
    spec = ModelSpec.load(demo_model_folder()).with_dtype(args.dtype)
    rows = compare(profile, spec, model, args.trees, args.runs)
    print(f"{'ms':>9}  {'prompt, predicted':>17} {'measured':>9}  {'step, predicted':>15} {'measured':>9}")
    for way, prompt_predicted, prompt, step_predicted, step in (entry.values() for entry in rows):
        print(f"{way:>9}  {prompt_predicted:17.1f} {prompt:9.1f}  {step_predicted:15.2f} {step:9.2f}")
    setup = {"threads": args.threads, "dtype": args.dtype, "prompt_tokens": PROMPT, "new_tokens": NEW}
    write_result(args.json, {**setup, "rows": rows})


if __name__ == "__main__":
    main()
