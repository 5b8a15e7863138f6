"""One decode step, its matrix products timed alone in the same run, and its parts.

    python bench/bench_step.py --shape 125m,bundled --dtype bf16,fp32 --tree 8 --context 1024 --json out.json
    python bench/bench_step.py --shape vicuna-7b --dtype bf16 --tree 25 --device cuda

The step is the patched model's own loop (draft, forward, verify, commit). The products have the same weights and rows,
in sequence: seven per layer and the lm_head over all nodes, the heads' blocks and the lm_head over one row per head and
sequence. All take turns, and each reads all weights, so none finds them in a cache. Columns:

- ``torch_products_ms``: torch's linears, on a GPU in a graph. ``ratio``: the median step over their median.
- On a GPU ``ahead_ms``: a step that runs ahead of the host. ``floor_ms``: reading the products' weights at the speed of
  a copy. ``vs_floor``: ``ahead_ms`` over it, with sampling ``step_ms``.
- On a CPU ``products_ms``: the operator ``linear``. ``rest_ms``: the step without them. In bf16 ``compressed_ms``: a
  step of another copy of the model, with compressed weights.
- ``floor_ms``: max(bytes of the weights / read bandwidth, flops / GEMM rate), both measured in the same turns.
  ``vs_floor``: the step over it.
- ``llama_cpp_ms`` (``--llama-cpp``; needs ``pip install llama-cpp-python gguf``): a pass of llama.cpp over as many
  tokens of one sequence, with the same weights.

The step's parts come from torch's profiler (``bench/step_profile.py``), in separate steps.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from engine_worker import LlamaCpp, Setup
from gpu_timing import captured, copy_bandwidth
from shapes import SHAPES, random_heads, random_model
from step_profile import breakdown
from timing import Yardstick, print_rows, take_turns, write_result
from torch import nn

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.cli.common import demo_model_folder, hide_loading_bars, load_model
from specmemo_kernels.engine.host_capture import HostCapture

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Row = dict[str, Any]
BUNDLED = "bundled"
#: The ``steps`` of :func:`step_profile.breakdown`.
PROFILED = 12
#: Steps under one synchronisation, as generation runs them on a GPU.
AHEAD = 8


def random_prompt(model: Any, tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    prompt: list[int] = torch.randint(model.config.vocab_size, (tokens,), generator=generator).tolist()
    return prompt


class Steps:
    """Decode steps of ``batch`` sequences, one per call; they start again after ``span`` tokens."""

    def __init__(
        self, model: Any, context: int, span: int, sampling: sk.Sampling | None = None, batch: int = 1
    ) -> None:
        seeded = [None if sampling is None else sampling.with_seed(i) for i in range(batch)]
        self._requests = [sk.Request(random_prompt(model, context, i), span, [], seeded[i]) for i in range(batch)]
        self._model = model
        self._run: sk.BatchRun | None = None

    def __call__(self) -> list[sk.Piece]:
        if self._run is None:
            self._run = sk.stream_batch(self._model, self._requests)
            self._next(self._run)  # the prompts
        return self._next(self._run)

    def _next(self, run: sk.BatchRun) -> list[sk.Piece]:
        """Pieces until every sequence has one: those of a step, or of the prompts and the steps beside them."""
        pieces = [next(run)]
        while len({piece.index for piece in pieces}) < len(self._requests):
            pieces.append(next(run))
        if any(piece.finished for piece in pieces):
            run.close()
            self._run = None
        return pieces


@dataclass(frozen=True)
class Products:
    """All matrix products of a step: ``(weight, rows)`` each, in sequence."""

    jobs: list[tuple[torch.Tensor, int]]

    @classmethod
    def of_step(cls, model: Any, heads: sk.MedusaHeads, depth: int, nodes: int, batch: int) -> Products:
        """Over ``batch`` trees of ``nodes`` nodes and this ``depth``."""
        lm_head = model.get_output_embeddings().weight
        jobs: list[tuple[torch.Tensor, int]] = []
        for layer in model.model.layers:
            jobs += [(m.weight, batch * nodes) for m in layer.modules() if isinstance(m, nn.Linear)]
        jobs.append((lm_head, batch * nodes))
        for head in range(depth):
            jobs += [(heads.linear(head, layer).weight, batch) for layer in range(heads.num_layers)]
            if heads.own_lm_head:
                jobs.append((heads.lm_head_weight(head, lm_head), batch))
        if depth and not heads.own_lm_head:
            jobs.append((lm_head, batch * depth))
        return cls(jobs)

    @property
    def nbytes(self) -> int:
        """Of the weights, each read once."""
        return sum(weight.nbytes for weight, _ in self.jobs)

    @property
    def flops(self) -> float:
        return sum(2.0 * weight.numel() * rows for weight, rows in self.jobs)

    def by(self, linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        """A call of all products."""
        rows = {(w.shape[1], n): torch.randn(n, w.shape[1]).to(device=w.device, dtype=w.dtype) for w, n in self.jobs}

        @torch.inference_mode()
        def run() -> None:
            for weight, count in self.jobs:
                linear(rows[weight.shape[1], count], weight)

        return run


def synchronised(job: Callable[[], object], device: str) -> Callable[[], object]:
    """``job``, followed by a synchronisation on a GPU."""
    if device == "cpu":
        return job

    def wait() -> None:
        job()
        torch.cuda.synchronize(device)

    return wait


def load(shape: str, dtype: torch.dtype, device: str, own: bool) -> tuple[Any, sk.MedusaHeads]:
    """A model and four heads: bundled, or random weights."""
    if shape != BUNDLED:
        model = random_model(SHAPES[shape], dtype, device)
        return model, random_heads(model, 4, own)
    hide_loading_bars()
    folder = demo_model_folder()
    heads = sk.MedusaHeads.from_pretrained(folder / "heads", dtype=dtype, device=torch.device(device))
    return load_model(folder, dtype, torch.device(device)), heads


def llama_cpp_pass(model: Any, context: int, rows: int) -> Callable[[], None]:
    """A pass of llama.cpp over ``rows`` tokens behind ``context`` tokens, with this model's weights."""
    import gguf_file  # needs a package that other measurements don't

    dtype = str(model.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:  # the file stays mapped
        gguf_file.write(model, Path(folder) / "model.gguf")
        engine = LlamaCpp(Setup(folder, dtype, 1, context + rows, torch.get_num_threads(), replay=False))
    engine.start()
    return engine.passes(random_prompt(model, context), rows)


def measure(
    shape: str, dtype: str, tree: int | None, context: int, own: bool, seconds: float, device: str, graph: bool | None,
    llama_cpp: bool, sampling: sk.Sampling | None, batch: int,
) -> Row:  # fmt: skip
    """One row: the step of this shape, its products, and its parts."""
    model, heads = load(shape, DTYPES[dtype], device, own)
    context = min(context, model.config.max_position_embeddings // 2)

    def steps_of(patched: Any) -> Steps:
        step = Steps(patched, context, span=128, sampling=sampling, batch=batch)
        for _ in range(HostCapture.after + 2):  # on a CPU a step is recorded in its fifth run, on a GPU in its second
            step()
        return step

    with ExitStack() as patches:
        handle = patches.enter_context(sk.patch(model, heads, tree=tree, max_batch_size=batch, graph=graph))
        plan, depth = handle.plan, handle.plan.tree.max_depth
        step = steps_of(model)
        products = Products.of_step(model, heads, depth, plan.tree.size, batch)
        jobs: dict[str, Callable[[], object]] = {"step": synchronised(step, device)}
        if device == "cuda" and sampling is None:  # steps that run ahead of the host
            jobs["ahead"] = synchronised(lambda: [step() for _ in range(AHEAD)], device)
        torch_products = products.by(nn.functional.linear)
        jobs["torch"] = synchronised(captured(torch_products) if device == "cuda" else torch_products, device)
        if device == "cpu":
            operator = ops.kernels("cpu", torch.device("cpu")).linear
            jobs["products"] = products.by(lambda x, weight: operator(x, weight, None, None, False))
            jobs |= (yard := Yardstick(DTYPES[dtype])).functions
        if device == "cpu" and dtype == "bf16":
            other, own_heads = load(shape, DTYPES[dtype], device, own)
            options: dict[str, Any] = {"tree": plan.tree, "max_batch_size": batch, "graph": graph}
            patches.enter_context(sk.patch(other, own_heads, **options, compress=True))
            jobs["compressed"] = steps_of(other)
        if llama_cpp:
            jobs["llama.cpp"] = llama_cpp_pass(model, context, plan.tree.size)
        times = take_turns(jobs, seconds=seconds, rounds=(5, 400))
        if device == "cpu":
            floor = yard.floor(times, products.nbytes, products.flops)
        else:
            floor = products.nbytes / copy_bandwidth()
        parts = breakdown(step, PROFILED, torch.device(device))
        return {
            "shape": shape, "dtype": dtype, "context": context, "batch": batch, "nodes": plan.tree.size, "depth": depth,
            "heads": "own lm_head" if heads.own_lm_head else "shared lm_head", "graph": handle.stats.graph_steps > 0,
            "temperature": 0.0 if sampling is None else sampling.temperature,
            "top_p": 1.0 if sampling is None else sampling.top_p,
            "step_ms": times["step"] * 1e3, "torch_products_ms": times["torch"] * 1e3,
            "ratio": times["step"] / times["torch"],
        } | _device_columns(times, floor) | {"parts_ms": parts}  # fmt: skip


def _device_columns(times: dict[str, float], floor: float) -> Row:
    """On a GPU: a step that runs ahead of the host, and the floor. On a CPU: the products by our operator, the rest of
    the step, the floor, and llama.cpp if it ran."""
    if "products" not in times:
        ahead = {"ahead_ms": times["ahead"] / AHEAD * 1e3} if "ahead" in times else {}
        step = times["ahead"] / AHEAD if ahead else times["step"]
        return ahead | {"floor_ms": floor * 1e3, "vs_floor": step / floor}
    others = {"compressed": "compressed_ms", "llama.cpp": "llama_cpp_ms"}
    return {
        "products_ms": times["products"] * 1e3,
        "rest_ms": (times["step"] - times["products"]) * 1e3,
        "floor_ms": floor * 1e3,
        "vs_floor": times["step"] / floor,
    } | {column: times[job] * 1e3 for job, column in others.items() if job in times}


def main(
    shape: Annotated[str, typer.Option(help="of " + ", ".join((BUNDLED, *SHAPES)))] = "125m",
    dtype: Annotated[str, typer.Option(help="of " + ", ".join(DTYPES))] = "bf16,fp32",
    tree: Annotated[str, typer.Option(help="nodes, or 'plan': patch chooses the tree")] = "plan,8",
    context: Annotated[int, typer.Option(help="tokens of a prompt")] = 1024,
    batch: Annotated[int, typer.Option(help="sequences", min=1)] = 1,
    own: Annotated[bool, typer.Option("--own-lm-head", help="heads with a vocabulary matrix each")] = False,
    seconds: Annotated[float, typer.Option(help="for each row")] = 6.0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    graph: Annotated[bool | None, typer.Option("--graph/--no-graph", help="default: as patch chooses")] = None,
    temperature: Annotated[float, typer.Option(help="of sampling; 0: greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="of sampling")] = 1.0,
    llama_cpp: Annotated[bool, typer.Option("--llama-cpp", help="a pass of it beside each step; CPU only")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure, print a table and write JSON."""
    if llama_cpp and device != "cpu":
        raise typer.BadParameter(f"llama.cpp runs on the CPU here, got --device {device}")
    if llama_cpp and batch > 1:
        raise typer.BadParameter(f"llama.cpp's pass is over one sequence, got --batch {batch}")
    if top_p < 1 and not temperature:
        raise typer.BadParameter(f"--top-p is {top_p}, which needs --temperature above 0; greedy steps draw nothing")
    if llama_cpp and not all(importlib.util.find_spec(name) for name in ("llama_cpp", "gguf")):
        print("llama.cpp: llama_cpp or gguf isn't installed")
        llama_cpp = False
    rows = []
    for name, kind, size in itertools.product(shape.split(","), dtype.split(","), tree.split(",")):
        nodes = None if size == "plan" else int(size)
        sampling = sk.Sampling(temperature, top_p=top_p) if temperature else None
        rows.append(measure(name, kind, nodes, context, own, seconds, device, graph, llama_cpp, sampling, batch))
        print(json.dumps(rows[-1]), flush=True)
    times = [{name: cell for name, cell in row.items() if name != "parts_ms"} for row in rows]
    print_rows(times, title="a step and its products")
    setup = ("shape", "dtype", "batch", "nodes")
    print_rows([{name: row[name] for name in setup} | row["parts_ms"] for row in rows], title="ms by part")
    write_result(json_, {"rows": rows})


if __name__ == "__main__":
    typer.run(main)
