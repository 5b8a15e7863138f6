"""One rank of a tensor parallel session: run by test_tensor_parallel.py, a process per rank, all cases in one session.

Every case runs on a single-process model and on the ranks; differences are recorded.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from mtp_models import LAYERS
from rank_cases import DRAFTERS_OF, NEW, PLACE, SHARED, TREE, load, medusa, padded, prompts
from tensor_parallel_faults import faults
from tiny_models import OracleDrafter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StoppingCriteria

import specmemo_kernels
from specmemo_kernels.integrations.hf.target import local_part
from specmemo_kernels.ops.weight_codes import pack


class Traffic(TorchDispatchMode):
    """Counts collectives and the bytes that this rank passes to them."""

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


def outputs(model: Any) -> dict[str, Any]:
    """Greedy and sampled outputs of a patched model, of one prompt and of a ragged batch."""
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
    found["engine"] = engine_requests(model)
    found["stopped"] = model.generate(**one, **length, do_sample=False, stopping_criteria=[FirstRankStops()]).tolist()
    return found


def aborted_batch(model: Any) -> list[list[Any]]:
    """The outcome of a batch in which only rank 0 aborts a request, after its first piece."""
    with specmemo_kernels.stream_batch(model, prompts(), max_new_tokens=NEW, eos_token_ids=[]) as run:
        for piece in run:
            if piece.index == 2 and rank_here() == 0:
                run.abort(2)
        return [[completion.tokens, completion.finish_reason] for completion in run.completions()]


def engine_requests(model: Any) -> list[list[Any]]:
    """What rank 0's engine answers: requests one after the other, together, sampled, and one that is aborted."""
    found: list[Any] = [None]
    with specmemo_kernels.Engine(model) as engine:
        if engine.handle.ranks.rank == 0:
            found = [rank_0_requests(engine)]
        elif refusal(lambda: engine.submit(specmemo_kernels.Request([1], 1))) != "rank 1 can't submit requests":
            raise AssertionError("only rank 0 takes requests")
    if engine.handle.ranks.size > 1:
        torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


def refusal(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error).split(";")[0]
    return ""


def rank_0_requests(engine: specmemo_kernels.Engine) -> list[list[Any]]:
    if engine.handle.ranks.size > 1:
        request = specmemo_kernels.Request([1], 1, stop=bool)
        assert refusal(lambda: engine.submit(request)) == "stop is a function, which other ranks don't have"
    first = engine.submit(specmemo_kernels.Request(prompts()[0], NEW))
    done = [first.result(), engine.submit(specmemo_kernels.Request(prompts()[1], NEW)).result()]
    sampling = specmemo_kernels.Sampling(temperature=0.8, seed=3)
    rest = [engine.submit(specmemo_kernels.Request(prompt, NEW, sampling=sampling)) for prompt in prompts()]
    endless = engine.submit(specmemo_kernels.Request(prompts()[2], 200, []))
    next(endless)
    endless.abort()
    done += [generation.result() for generation in rest]
    assert endless.result().finish_reason == "aborted"
    return [[completion.tokens, completion.finish_reason] for completion in done]


def rank_here() -> int:
    return int(os.environ["RANK"])


@contextmanager
def as_rank_0() -> Iterator[None]:
    """Make a single-process model on every rank act like rank 0's."""
    before = os.environ["RANK"]
    os.environ["RANK"] = "0"
    yield
    os.environ["RANK"] = before


class FirstRankStops(StoppingCriteria):
    """Stops after some tokens on rank 0, and at once on other ranks."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = rank_here() > 0 or input_ids.shape[1] >= PLACE
        return torch.full((len(input_ids),), ends)


@contextmanager
def patched(model: Any, heads: Any, **kwargs: Any) -> Iterator[Any]:
    with specmemo_kernels.patch(model, heads, rank_timeout=120.0, prefill_chunk=16, **kwargs) as handle:
        yield handle


def compare(folder: Path, kinds: tuple[bool, ...]) -> dict[str, Any]:
    """The tokens of one process and of the ranks, for heads with (``True``) and without an own lm_head."""
    alone, shared = load(folder), load(folder, tp_plan="auto")
    found: dict[str, Any] = {}
    for own in kinds:
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
            assert handle.pool is not None
            handle.pool.check_integrity()
        found["own" if own else "shared"] = part
    if len(kinds) == 2:
        with patched(shared, heads) as handle:  # a tree that the device chooses, a chooser that looks at the clock
            found["chosen"] = {"actual": outputs(shared), "expected": expected, "tree": handle.plan.tree.size}
    found |= {"coded": coded(alone, shared), "wild": wild(alone, shared), "weights": weights(alone, shared)}
    return found | {"features": features(folder, alone, shared)}


def features(folder: Path, alone: Any, shared: Any) -> dict[str, Any]:
    """Of drafters that read hidden states, in dynamic and static trees: tokens, acceptance by depth, bytes."""
    found: dict[str, Any] = {}
    for files in sorted(folder.parent.glob("drafter-*")):
        if files.name.removeprefix("drafter-") not in DRAFTERS_OF.get(folder.name, ()):
            continue
        found[f"{files.name}, dynamic"] = with_drafter(alone, shared, str(files), 8)
        if files.name == "drafter-eagle3":
            found[f"{files.name}, static, 4 bits"] = with_drafter(alone, shared, str(files), TREE, head_bits=4)
    return found


def with_drafter(alone: Any, shared: Any, heads: str, tree: Any, **options: Any) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for name, model in (("expected", alone), ("actual", shared)):
        # Recorded steps would count guesses behind the last token.
        with patched(model, heads, tree=tree, page_size=4, graph=False, **options) as handle, as_rank_0():
            if name == "actual":  # one process writes the same with any drafter: the test compares them with that
                part[name] = outputs(model)
            handle.stats.reset()  # how far an aborted request came depends on the ranks
            handle.release()
            specmemo_kernels.generate_batch(model, prompts(), max_new_tokens=3 * NEW, eos_token_ids=[])
            part[f"{name} accepted"] = list(handle.stats.accepted_at_depth)
            part[f"{name} bytes"] = handle.bytes_by_part["heads"]
            assert handle.pool is not None
            handle.pool.check_integrity()
    return part


def mtp(folder: Path) -> dict[str, Any]:
    """A model's own MTP layer, which every rank reads from the checkpoint as a whole."""
    alone, shared = load(folder), load(folder, tp_plan="auto")
    for model in (alone, shared):  # transformers finds the layer's keys by this pattern, for published sizes only
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]
    with patched(alone, "prompt-lookup", tree=1), as_rank_0():
        plain = outputs(alone)
    return {"plain": plain} | with_drafter(alone, shared, "mtp", 8)


def coded(alone: Any, shared: Any) -> dict[str, Any]:
    """Heads in 4 bits: tokens, acceptance by depth, bytes, and whether this rank's codes are those of its rows."""
    found: dict[str, Any] = {}
    whole = medusa(True, alone.config.hidden_size)
    hidden = torch.randn(4, alone.config.hidden_size, generator=torch.Generator().manual_seed(1))
    for name, model in (("expected", alone), ("actual", shared)):
        with patched(model, medusa(True, alone.config.hidden_size), tree=TREE, head_bits=4) as handle:
            tokens = model.generate(**padded(prompts()), max_new_tokens=NEW, do_sample=False).tolist()
            guesses = handle.drafter.candidates(hidden, depth=3, width=5).tolist()
            found[name] = [tokens, list(handle.stats.accepted_at_depth), guesses]
            found["bytes"] = handle.bytes_by_part["heads"]
            held = [handle.drafter.heads.own_tensors(head) for head in range(3)]
            rows = slice(*handle.ranks.rows) if name == "actual" else slice(None)
    packed = [pack(whole.own_tensors(head)[0].data) for head in range(3)]
    found["same"] = all(
        torch.equal(a, b[rows]) for h, p in zip(held, packed, strict=True) for a, b in zip(h, p, strict=True)
    )
    return found


def wild(alone: Any, shared: Any) -> dict[str, Any]:
    """A drafter with other guesses on every rank."""
    call = padded(prompts())
    expected = alone.generate(**call, max_new_tokens=NEW, do_sample=False).tolist()
    rows = [prompt + row[-NEW:] for prompt, row in zip(prompts(), expected, strict=True)]
    drafter = OracleDrafter(rows, 0.6)
    drafter.generator.manual_seed(rank_here())
    with patched(shared, drafter, tree=TREE) as handle:
        actual = shared.generate(**call, max_new_tokens=NEW, do_sample=False).tolist()
        return {"expected": expected, "actual": actual, "accepted": sum(handle.stats.accepted_at_depth)}


def weights(alone: Any, shared: Any) -> dict[str, Any]:
    """Of a patched model: bytes on this rank, tokens of its own methods, and the saved weights."""
    call: dict[str, Any] = padded(prompts()[1:2]) | {"max_new_tokens": NEW, "num_beams": 2, "do_sample": False}
    with patched(shared, medusa(False, alone.config.hidden_size), tree=TREE):
        found: dict[str, Any] = {"bytes": sum(local_part(p).nbytes for p in shared.parameters())}
        found["beams"] = [alone.generate(**call).tolist(), shared.generate(**call).tolist()]
        found["saved"] = _same_weights(alone, shared.state_dict())
        found["workers"] = torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._threads
    found["after"] = _same_weights(alone, dict(shared.named_parameters()))
    found["held after"] = all(p._local_tensor.is_contiguous() for p in shared.parameters() if hasattr(p, "placements"))
    return found


def _same_weights(alone: Any, tensors: dict[str, Any]) -> bool:
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
    return all(torch.equal(whole[name], parameter) for name, parameter in alone.named_parameters())


def step_traffic(model: Any, handle: Any) -> dict[str, Any]:
    """The collectives of a greedy call over eight prompts, and its passes: rows, verified rows, heads, head rows."""
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


def main() -> None:
    """A rank, which the environment names: ``... compare|compare-own|stalled|killed|absent FOLDER``."""
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = torch.distributed.get_rank()
    if sys.argv[1].startswith("compare"):
        both = () if sys.argv[1] == "compare-own" else SHARED
        models = sorted(folder.glob("model-*"))
        result = {path.name: compare(path, (True, False) if path.name in both else (True,)) for path in models}
        result |= {path.name: mtp(path) for path in sorted(folder.glob("mtp-*"))}
    else:
        result = faults(folder, sys.argv[1])
    (folder / f"{sys.argv[1]}-{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # an orderly end would wait for a rank that was killed


if __name__ == "__main__":
    main()
