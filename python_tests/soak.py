"""Random requests through one model, each checked: shared by test_soak.py and the long run in bench/."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import specmemo_kernels as sk
from specmemo_kernels.drafting.base import StaticDrafter


@dataclass(frozen=True)
class SoakReport:
    """What a soak did.

    Attributes:
        requests, aborted, preempted: how many there were, were aborted, and lost their pages at least once.
        tokens: new tokens of all of them.
        tensor_bytes: of all tensors alive after each round, pages released.
    """

    requests: int
    aborted: int
    preempted: int
    tokens: int
    tensor_bytes: tuple[int, ...]


def live_tensor_bytes() -> int:
    """Bytes of the storages of all tensors that Python's garbage collector tracks."""
    gc.collect()
    tensors = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def greedy_answers(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The unpatched model's tokens, one prompt at a time."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def soak(
    model: Any,
    drafters: list[Callable[[], Any]],
    prompts: list[list[int]],
    *,
    new_tokens: int,
    requests: int,
    seed: int,
    backend: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> SoakReport:
    """Run rounds of 10 to 60 requests, each with a random drafter, batch size and budget, up to ``requests``.

    Raises:
        AssertionError: a wrong token, a page that wasn't freed, or a request that didn't finish.
    """
    rng = random.Random(seed)
    answers = greedy_answers(model, prompts, new_tokens)
    done = aborted = preempted = tokens = 0
    held: list[int] = []
    while done < requests:
        wanted = [
            (i, rng.randint(1, new_tokens), rng.random() < 0.15)
            for i in rng.choices(range(len(prompts)), k=min(rng.randint(10, 60), requests - done))
        ]
        completions = _round(model, rng, rng.choice(drafters)(), prompts, wanted, backend)
        for (prompt, limit, _), completion in zip(wanted, completions, strict=True):
            expected = answers[prompt][:limit]
            assert completion.tokens == expected[: len(completion.tokens)], f"prompt {prompt}, {limit} tokens"
            if completion.finish_reason == "aborted":
                aborted += 1
            else:
                assert len(completion.tokens) == limit, f"prompt {prompt} ended early: {completion}"
            preempted += completion.preemptions > 0
            tokens += len(completion.tokens)
        done += len(wanted)
        held.append(live_tensor_bytes())
        progress(done)
    return SoakReport(done, aborted, preempted, tokens, tuple(held))


def _verified_by_the_host(rng: random.Random) -> dict[str, Any]:
    """Of some requests: parameters that change no token, but are decided on the host."""
    return rng.choice([{}, {}, {}, {"sampling": sk.Sampling(temperature=0.0)}, {"logprobs": 1}])


def _round(
    model: Any,
    rng: random.Random,
    heads: Any,
    prompts: list[list[int]],
    wanted: list[tuple[int, int, bool]],
    backend: str | None,
) -> list[sk.Completion]:
    """One batch under a budget that holds at least the longest request."""
    options: dict[str, Any] = {
        "page_size": rng.choice([1, 4, 16]),
        "max_batch_size": rng.randint(1, 6),
        "prefill_chunk": 32,
        "tree": 6,
    }
    options["backend"] = backend
    options["graph"] = True if isinstance(heads, StaticDrafter | sk.MedusaHeads) and rng.random() < 0.7 else None
    with sk.patch(model, heads, **options) as handle:
        workspace = handle.plan.parts["workspace"]
        fixed = sum(size for part, size in handle.plan.parts.items() if not part.endswith("_pages")) - workspace
        slot = sum(layer.bytes_per_token for layer in handle.facts.layers)
        slot += getattr(handle.drafter, "kv_bytes_per_token", 0) + 64 * handle.plan.max_sequences
    longest = max(len(prompts[i]) + limit for i, limit, _ in wanted) + 24
    # The plan reduces the batch size if less than a quarter is left for pages. Slightly more makes pages scarce.
    budget = workspace + int(max(fixed + 1.3 * longest * slot, fixed * (1.35 + rng.random())))
    requests = [sk.Request(prompts[i], limit, [], **_verified_by_the_host(rng)) for i, limit, _ in wanted]
    with sk.patch(model, heads, memory_budget=budget, **options) as handle:
        with sk.stream_batch(model, requests) as run:
            for piece in run:
                if not piece.finished and wanted[piece.index][2] and rng.random() < 0.3:
                    run.abort(piece.index)
                if rng.random() < 0.02:  # a queued, running or finished request
                    run.abort(rng.choice([i for i, (_, _, aborts) in enumerate(wanted) if aborts] or [piece.index]))
            completions = run.completions()
        pool = handle.pool
        assert pool is not None
        pool.check_integrity()
        assert pool.free_pages == pool.num_pages, "pages didn't come back"
        drafter_pool = getattr(handle.drafter, "_pool", None)
        if drafter_pool is not None:
            drafter_pool.check_integrity()
            assert drafter_pool.free_pages == drafter_pool.num_pages, "the drafter's pages didn't come back"
    return completions
