"""Tensor parallel sessions in which a rank does something else (run by tensor_parallel_session.py)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import NEW, PLACE, TREE, load, medusa, padded, prompts
from transformers import StoppingCriteria

import specmemo_kernels


@contextmanager
def other_version(rank: int) -> Iterator[None]:
    """Rank 1 runs another transformers."""
    from specmemo_kernels.integrations.distributed import ranks

    before = ranks.version
    if rank == 1:
        ranks.version = lambda name: "4.0.0" if name == "transformers" else before(name)
    yield
    ranks.version = before


class Mishap(StoppingCriteria):
    """Something that happens on some ranks after some tokens."""

    def __init__(self, happens: dict[int, Callable[[], None]]) -> None:
        self.happens = happens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == PLACE:
            self.happens.get(dist.get_rank(), lambda: None)()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def fails(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


#: What happens at some place on which ranks.
MISHAPS: dict[str, dict[int, Callable[[], None]]] = {
    "alike": {rank: fails(KeyError("a criterion of both")) for rank in (0, 1)},
    "failed": {1: fails(KeyError("a criterion of rank 1"))},
    "apart": {0: fails(KeyError("rank 0's")), 1: fails(KeyError("rank 1's"))},
    "interrupted": {rank: fails(KeyboardInterrupt()) for rank in (0, 1)},
    "stalled": {1: lambda: time.sleep(8)},
}


def caught(do: Callable[[], Any]) -> dict[str, Any]:
    """The error of ``do``, and its seconds."""
    started = time.monotonic()
    try:
        result = do()
    except (Exception, KeyboardInterrupt) as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
    return {"error": "", "text": str(result), "seconds": time.monotonic() - started}


def faults(folder: Path, last: str) -> dict[str, Any]:
    """Outcomes of calls in which a rank does something else; the session is over after ``last``."""
    models = {path.name: path for path in sorted(folder.glob("model-*"))}
    model = load(models["model-llama-gqa"], tp_plan="auto")
    rank = dist.get_rank()
    if last == "absent":
        return {last: caught(lambda: start(model, timeout=2.0))} if rank == 0 else {}
    if last == "killed":
        with start(model):
            pieces, error = broken_batch(model, lambda: os.kill(os.getpid(), signal.SIGKILL))
            return {"pieces": pieces, last: error, f"{last}, once more": run(model)}
    # The last one is the same on both ranks.
    names = {"other-weights": rank, "other-config": rank, "three-heads": 1}
    others = {n: load(models[f"model-{n}" if own else "model-llama-gqa"], tp_plan="auto") for n, own in names.items()}
    before = groups()  # loading makes some, too
    found = differences(model, others, rank)
    with start(model):
        found |= {"too long": run(model, length=100_000), "after it": run(model)}
        found |= {"alike": run(model, "alike"), "after alike": run(model)}
        found |= {"failed": run(model, "failed"), "failed, once more": run(model)}
    for name in ("apart", "interrupted"):
        with start(model):
            found |= {name: run(model, name), f"{name}, once more": run(model)}
    with start(model):
        found["pieces"], found["consumer"] = broken_batch(model, fails(KeyError("who reads the pieces")))
        found["consumer, once more"] = run(model)
    with start(model) as handle:
        found["asked"] = caught(lambda: handle.ranks.broadcast_input(fails(KeyError("what a person types"))))
    found["unpatched"] = caught(lambda: handle.ranks.broadcast_scalar(1.0))
    with start(model, timeout=2.0):
        found |= {last: run(model, last), f"{last}, once more": run(model)}
    found["groups"] = [before, groups()]
    handle = start(model)
    dist.destroy_process_group()
    found["left"] = caught(handle.undo)
    return found


def start(model: Any, heads: Any = None, page_size: int = 16, timeout: float = 60.0) -> Any:
    heads = medusa(True, model.config.hidden_size) if heads is None else heads
    return specmemo_kernels.patch(
        model, heads, rank_timeout=timeout, tree=TREE, page_size=page_size, memory_budget="8MiB"
    )


def run(model: Any, mishap: str | None = None, length: int = NEW) -> dict[str, Any]:
    criteria = None if mishap is None else [Mishap(MISHAPS[mishap])]
    kwargs: dict[str, Any] = {"max_new_tokens": length, "do_sample": False, "stopping_criteria": criteria}
    return caught(lambda: model.generate(**padded(prompts()[1:2]), **kwargs))


def groups() -> list[float]:
    """The number of process groups, and the timeout of the model's group in seconds."""
    world = dist.distributed_c10d._world
    backend = world.default_pg._get_backend(torch.device("cpu"))
    return [len(world.pg_map), backend.options._timeout.total_seconds()]


def differences(model: Any, others: dict[str, Any], rank: int) -> dict[str, Any]:
    """Patching where rank 1 has other heads, arguments, files, versions, or one of the ``others`` as its model."""
    found, other = {}, medusa(True, model.config.hidden_size)
    if rank == 1:
        other[0][0].linear.weight.data += 0.1
    found["heads"] = caught(lambda: start(model, other))
    found["arguments"] = caught(lambda: start(model, page_size=16 + rank))
    found["file"] = caught(lambda: start(model, None if rank == 0 else "/nowhere/at/all"))
    found |= {name: caught(lambda different=different: start(different)) for name, different in others.items()}
    with other_version(rank):
        found["version"] = caught(lambda: start(model))
    return found


def broken_batch(model: Any, happens: Callable[[], None]) -> tuple[Any, dict[str, Any]]:
    """A batch with a fault on rank 1: the outcome of each request, and the error."""
    seen: list[Any] = []

    def drain() -> None:
        with specmemo_kernels.stream_batch(model, prompts(), max_new_tokens=NEW, eos_token_ids=[]) as batch:
            seen.append(batch)
            for piece in batch:
                if dist.get_rank() == 1 and piece.index == 1:
                    happens()

    error = caught(drain)
    return [[completion.finish_reason, len(completion.tokens)] for completion in seen[0].completions()], error
