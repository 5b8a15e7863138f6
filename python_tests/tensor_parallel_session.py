"""One rank of a tensor parallel session: run by test_tensor_parallel.py, a process per rank, all cases in one session.

Every case is done twice, by one process's model and by the ranks' together, and what differs is written down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria

import specmemo_kernels
from specmemo_kernels.drafting.medusa_heads import MedusaHeads

NEW = 12
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
LENGTHS = (3, 17, 9, 1, 12, 5, 21, 8)
#: Length at which mishaps happen: of the prompt of 17 tokens, after some steps.
PLACE = 17 + 5


class Traffic(TorchDispatchMode):
    """Counts collectives and the bytes that this rank hands to them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        if name in _COLLECTIVES:
            kind, place = _COLLECTIVES[name]
            tensors = args[place] if isinstance(args[place], list | tuple) else [args[place]]
            self.found.setdefault(kind, []).append(sum(tensor.nbytes for tensor in tensors))
        elif name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(("wait_tensor", "_autograd")):
            self.found.setdefault(name, []).append(-1)
        return func(*args, **(kwargs or {}))


#: Operator -> what it does, and which argument this rank hands to it.
_COLLECTIVES = {
    "c10d::allreduce_": ("reduce", 0),
    "_c10d_functional::all_reduce": ("reduce", 0),
    "c10d::allgather_": ("gather", 1),
    "_c10d_functional::all_gather_into_tensor": ("gather", 0),
}


def load(folder: Path, **kwargs: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **kwargs
    )
    return model.eval()


def medusa(own: bool, width: int) -> MedusaHeads:
    """Random heads: over so few tokens they are right often enough."""
    torch.manual_seed(5)
    heads = MedusaHeads(width, VOCAB, 3, own_lm_head=own)
    for parameter in heads.parameters():
        parameter.data.normal_(std=0.3)
    return heads


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def outputs(model: Any) -> dict[str, Any]:
    """Greedily and drawn, one prompt and a ragged batch, of a patched model."""
    one, all_rows = padded(prompts()[1:2]), padded(prompts())
    length: dict[str, Any] = {"max_new_tokens": NEW}
    found = {"greedy": model.generate(**one, **length, do_sample=False).tolist()}
    found["greedy batch"] = model.generate(**all_rows, **length, do_sample=False).tolist()
    torch.manual_seed(11)
    found["sampled"] = model.generate(**one, **length, do_sample=True, temperature=0.7, top_k=20).tolist()
    sampling = specmemo_kernels.Sampling(temperature=0.8, seed=7)
    done = specmemo_kernels.generate_batch(model, prompts(), max_new_tokens=NEW, sampling=sampling)
    found["sampled batch"] = [completion.tokens for completion in done]
    found["aborted"] = aborted_batch(model)
    found["stopped"] = model.generate(**one, **length, do_sample=False, stopping_criteria=[FirstRankStops()]).tolist()
    return found


def aborted_batch(model: Any) -> list[list[Any]]:
    """What becomes of a batch of which rank 0 alone aborts a request after its first piece."""
    with specmemo_kernels.stream_batch(model, prompts(), max_new_tokens=NEW, eos_token_ids=[]) as run:
        for piece in run:
            if piece.index == 2 and rank_here() == 0:
                run.abort(2)
        return [[completion.tokens, completion.finish_reason] for completion in run.completions()]


def rank_here() -> int:
    return int(os.environ["RANK"])


@contextmanager
def as_rank_0() -> Iterator[None]:
    """One process's model on every rank does what that of rank 0 does."""
    before = os.environ["RANK"]
    os.environ["RANK"] = "0"
    yield
    os.environ["RANK"] = before


class FirstRankStops(StoppingCriteria):
    """On rank 0 after some tokens, on the others at once."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = rank_here() > 0 or input_ids.shape[1] >= PLACE
        return torch.full((len(input_ids),), ends)


@contextmanager
def patched(model: Any, heads: Any, **kwargs: Any) -> Iterator[Any]:
    with specmemo_kernels.patch(model, heads, rank_timeout=120.0, prefill_chunk=16, **kwargs) as handle:
        yield handle


def compare(folder: Path) -> dict[str, Any]:
    """What one process writes and what the ranks write."""
    alone, shared = load(folder), load(folder, tp_plan="auto")
    found: dict[str, Any] = {}
    for own in (True, False):
        heads = medusa(own, alone.config.hidden_size)
        with patched(alone, heads, tree=TREE) as handle, as_rank_0():
            expected = outputs(alone)
            part: dict[str, Any] = {"expected": expected, "head_bytes": [handle.bytes_by_part["heads"]]}
            part["kv_heads"] = [layer.num_kv_heads for layer in handle.facts.layers]
        expected["plain"] = alone.generate(**padded(prompts()[1:2]), max_new_tokens=NEW, do_sample=False).tolist()
        with patched(shared, medusa(own, alone.config.hidden_size), tree=TREE) as handle:
            actual = outputs(shared)
            actual["plain"] = actual["greedy"]
            part |= {"actual": actual, "accepted": sum(handle.stats.accepted_at_depth)}
            part["head_bytes"].append(handle.bytes_by_part["heads"])
            part["local_kv_heads"] = [layer.num_kv_heads for layer in handle.facts.layers]
            part["traffic"] = step_traffic(shared, handle)
            assert handle._pool is not None
            handle._pool.check_integrity()
        found["own" if own else "shared"] = part
    with patched(shared, heads) as handle:  # a tree that the device chooses, a chooser that looks at the clock
        found["chosen"] = {"actual": outputs(shared), "expected": expected, "tree": handle.plan.tree.size}
    return found


def step_traffic(model: Any, handle: Any) -> dict[str, Any]:
    """The collectives of a greedy call over eight prompts, and its passes: rows, rows verified, heads, their rows."""
    target, drafter, passes, proposed = handle.target, handle.drafter, [], []
    forward, argmax, propose = target.forward, target.argmax, drafter.propose

    def counted_forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append([len(batch.tokens), 0, *(proposed.pop() if proposed else (0, 0, 0))])
        return forward(batch, *args, **kwargs)

    def counted_argmax(output: Any) -> Any:
        passes[-1][1] = len(output.hidden)
        return argmax(output)

    def counted_propose(inputs: Any) -> Any:
        if inputs.tree.max_depth:
            proposed.append((inputs.tree.max_depth, len(inputs.root_tokens), inputs.tree.width))
        return propose(inputs)

    handle.release()
    before = handle.ranks.bytes_sent
    target.forward, target.argmax, drafter.propose = counted_forward, counted_argmax, counted_propose
    try:
        with Traffic() as traffic:
            model.generate(**padded(prompts()), max_new_tokens=NEW, do_sample=False)
    finally:
        del target.forward, target.argmax, drafter.propose
    return {"found": traffic.found, "own": handle.ranks.bytes_sent - before, "passes": passes}


@contextmanager
def other_version(rank: int) -> Iterator[None]:
    """Rank 1 runs another transformers."""
    from specmemo_kernels.integrations import ranks

    before = ranks.version
    if rank == 1:
        ranks.version = lambda name: "4.0.0" if name == "transformers" else before(name)
    yield
    ranks.version = before


class Mishap(StoppingCriteria):
    """On one rank, when some tokens have been written, something happens."""

    def __init__(self, rank: int, happens: Callable[[], None]) -> None:
        self.rank, self.happens = rank, happens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if torch.distributed.get_rank() == self.rank and input_ids.shape[1] == PLACE:
            self.happens()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _fail() -> None:
    raise KeyError("a criterion of rank 1")


MISHAPS: dict[str, Callable[[], None]] = {
    "failed": _fail,
    "stalled": lambda: time.sleep(8),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def caught(do: Callable[[], Any]) -> dict[str, Any]:
    """How ``do`` ended, and after how many seconds."""
    started = time.monotonic()
    try:
        result = do()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
    return {"error": "", "text": str(result), "seconds": time.monotonic() - started}


def faults(folder: Path, last: str) -> dict[str, Any]:
    """What becomes of a session in which a rank does something else; after ``last`` of :data:`MISHAPS` it is over."""
    models = {path.name: path for path in sorted(folder.glob("model-*"))}
    model = load(models["model-llama-gqa"], tp_plan="auto")
    rank, width = torch.distributed.get_rank(), model.config.hidden_size
    one = padded(prompts()[1:2])

    def start(heads: MedusaHeads, page_size: int = 16, of: Any = model, timeout: float = 60.0) -> Any:
        kwargs: dict[str, Any] = {"tree": TREE, "page_size": page_size, "memory_budget": "1MiB"}
        return specmemo_kernels.patch(of, heads, rank_timeout=timeout, **kwargs)

    def run(criteria: Any = None, length: int = NEW) -> dict[str, Any]:
        kwargs = {"max_new_tokens": length, "do_sample": False, "stopping_criteria": criteria}
        return caught(lambda: model.generate(**one, **kwargs))

    found = {}
    if last == "stalled":
        other = medusa(True, width)
        if rank == 1:
            other[0][0].linear.weight.data += 0.1
        missing: Any = medusa(True, width) if rank == 0 else "/nowhere/at/all"
        found["heads"] = caught(lambda: start(other))
        found["arguments"] = caught(lambda: start(medusa(True, width), 16 + rank))
        found["file"] = caught(lambda: start(missing))
        for name in ("other-weights", "other-config", "one-head"):  # the last one is the same on both ranks
            path = models["model-llama-gqa" if rank == 0 and name != "one-head" else f"model-{name}"]
            different = load(path, tp_plan="auto")
            found[name] = caught(lambda different=different: start(medusa(True, width), of=different))
        with other_version(rank):
            found["version"] = caught(lambda: start(medusa(True, width)))
        with start(medusa(True, width)):
            found |= {"too long": run(length=10_000), "after it": run()}
            found |= {"failed": run([Mishap(1, MISHAPS["failed"])]), "failed, once more": run()}
    if last == "absent":
        if rank == 0:
            found[last] = caught(lambda: start(medusa(True, width), timeout=2.0))
        return found
    with start(medusa(True, width), timeout=2.0 if last == "stalled" else 60.0):
        if last == "killed":
            found["pieces"], found["killed"] = killed_batch(model, rank)
        else:
            found[last] = run([Mishap(1, MISHAPS[last])])
        found[f"{last}, once more"] = run()
    return found


def killed_batch(model: Any, rank: int) -> tuple[Any, dict[str, Any]]:
    """A batch during which rank 1 is killed: what became of each request, and the error."""
    run = specmemo_kernels.stream_batch(model, prompts(), max_new_tokens=NEW, eos_token_ids=[])

    def drain() -> None:
        for piece in run:
            if rank == 1 and piece.index == 1:
                MISHAPS["killed"]()

    error = caught(drain)
    return [[completion.finish_reason, len(completion.tokens)] for completion in run.completions()], error


def main() -> None:
    """``python tensor_parallel_session.py compare|stalled|killed|absent FOLDER``, a rank that the environment names."""
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = torch.distributed.get_rank()
    if sys.argv[1] == "compare":
        result = {path.name: compare(path) for path in sorted(folder.glob("model-*"))}
    else:
        result = faults(folder, sys.argv[1])
    (folder / f"{sys.argv[1]}-{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # an orderly end would wait for a rank that was killed


if __name__ == "__main__":
    main()
