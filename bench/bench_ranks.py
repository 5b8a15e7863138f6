"""The cost of tensor parallel messages: their share of a step, measured and by the planner's formula.

    torchrun --nproc-per-node 2 bench/bench_ranks.py --model 125m --json bench/results/ranks_cpu.json

Every rank runs one thread. Measured: steps of a fixed tree, a rank's seconds inside collectives (waiting for other
ranks included), and collectives alone at several sizes. Predicted by the planner's formulas: Llama-2-70B on MI250s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shapes import SHAPES, random_heads, random_model
from timing import write_result

import specmemo_kernels
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.cost import Message, decode_pass, pass_seconds, step_messages
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.known_devices import known_device
from specmemo_kernels.planning.model_spec import ModelSpec

PROMPT, HEADS = 128, 3
SIZES = (64, 1024, 16384, 262144, 1048576)
#: meta-llama/Llama-2-70b-chat-hf, as published.
LLAMA_70B = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000, "max_position_embeddings": 4096,
    "dtype": "float16",
}  # fmt: skip


class Inside(TorchDispatchMode):
    """Seconds inside collectives of torch.distributed and of DTensors, waiting for other ranks included."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.calls = 0.0, 0
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> Inside:
        for name in ("all_reduce", "all_gather", "broadcast"):
            self._originals[name] = getattr(dist, name)
            setattr(dist, name, partial(self._timed, self._originals[name], True))
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        for name, function in self._originals.items():
            setattr(dist, name, function)

    def _timed(self, function: Any, counts: bool, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds += time.perf_counter() - started
        self.calls += counts
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        if not name.startswith("_c10d_functional::"):
            return func(*args, **(kwargs or {}))
        return self._timed(func, not name.endswith("wait_tensor"), *args, **(kwargs or {}))


def collective_seconds(runs: int) -> list[dict[str, float]]:
    """Median seconds of an all-reduce and an all-gather, by the bytes of one rank."""
    rows = []
    for size in SIZES:
        local = torch.ones(size // 4)
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        row: dict[str, float] = {"bytes": size}
        for name, call in (
            ("all_reduce", lambda local=local: dist.all_reduce(local)),
            ("all_gather", lambda local=local, gathered=gathered: dist.all_gather(gathered, local)),
        ):
            call()
            taken = []
            for _ in range(runs):
                local.fill_(1)
                started = time.perf_counter()
                call()
                taken.append(time.perf_counter() - started)
            row[name] = statistics.median(taken)
        rows.append(row)
    return rows


def measure(model: Any, heads: Any, nodes: int, batch: int, new: int) -> dict[str, float]:
    """Seconds of a step of ``batch`` sequences, and the share inside collectives."""
    ids = torch.randint(3, 1000, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
    with specmemo_kernels.patch(model, heads, tree=nodes, max_batch_size=batch, reuse_prefix=False) as handle:

        def generate(tokens: int) -> tuple[float, int]:
            before, started = handle.stats.steps, time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
            return time.perf_counter() - started, handle.stats.steps - before

        generate(2)
        few, many = generate(1), generate(new)
        with Inside() as inside_few:
            generate(1)
        with Inside() as inside_many:
            generate(new)
        steps = many[1] - few[1]
        step = (many[0] - few[0]) / steps
        inside = (inside_many.seconds - inside_few.seconds) / steps
        return {
            "batch": batch, "nodes": nodes, "steps": steps, "step_seconds": step, "collective_seconds": inside,
            "share": inside / step, "collectives": (inside_many.calls - inside_few.calls) / steps,
        }  # fmt: skip


def formula(spec: ModelSpec, batch: int, nodes: int, measured: list[dict[str, float]]) -> dict[str, float]:
    """The step's messages by the formula, each at the measured time of a collective alone."""
    messages = step_messages(spec, decode_pass(Workload(2 * PROMPT), batch, nodes, HEADS), HeadsSpec(HEADS))
    return {
        "messages": sum(m.count for m in messages),
        "bytes": sum(m.count * m.nbytes for m in messages),
        "alone_seconds": sum(m.count * _between(measured, m) for m in messages),
    }


def _between(measured: list[dict[str, float]], message: Message) -> float:
    """Seconds of a message, by linear interpolation between the measured sizes."""
    name = "all_gather" if message.gathered else "all_reduce"
    lower, upper = measured[0], measured[1]
    for first, second in pairwise(measured):
        if message.nbytes >= first["bytes"]:
            lower, upper = first, second
    slope = (upper[name] - lower[name]) / (upper["bytes"] - lower["bytes"])
    return max(lower[name] + slope * (message.nbytes - lower["bytes"]), 0.0)


def predicted() -> list[dict[str, Any]]:
    """Llama-2-70B on MI250s (64 GB each), 19 nodes a sequence, 512 tokens in pages."""
    from transformers import CONFIG_MAPPING

    spec = ModelSpec.from_config(CONFIG_MAPPING["llama"](**{k: v for k, v in LLAMA_70B.items() if k != "model_type"}))
    device, heads, rows = known_device("mi250"), HeadsSpec(HEADS), []
    for tp in (4, 8):
        for batch in (1, 10):
            run = decode_pass(Workload(1024), batch, 19, HEADS)
            inside = sum(m.seconds(device, tp) for m in step_messages(spec, run, heads))
            step = pass_seconds(spec, device, run, heads, tp)
            rows.append({"tp": tp, "batch": batch, "step_seconds": step, "collective_seconds": inside})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="125m", choices=SHAPES)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(tempfile.gettempdir()) / f"specmemo-ranks-{args.model}"
    if rank == 0:
        random_model(SHAPES[args.model], torch.float32, "cpu").save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto" if size > 1 else None)
    model.generation_config.eos_token_id = None
    heads = random_heads(model, HEADS, own_lm_head=True)
    collectives = collective_seconds(50)
    spec = ModelSpec.from_config(model.config).with_dtype("float32")
    rows = []
    for batch in map(int, args.batch.split(",")):
        row = measure(model.eval(), heads, args.nodes, batch, args.new_tokens)
        rows.append(row | formula(spec, batch, args.nodes, collectives))
    if rank:
        return
    for row in rows:
        print({name: round(value, 6) for name, value in row.items()})
    result = {"ranks": size, "model": args.model, "steps": rows, "collectives": collectives, "predicted": predicted()}
    write_result(args.json, result)


if __name__ == "__main__":
    main()
