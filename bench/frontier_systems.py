"""The systems that bench_frontier.py compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import batch_runs
import torch
from medusa_published import AS_PUBLISHED, MedusaPublished, Savings, greedy_accept
from part_tracker import LabelledCache, PartTracker
from replay import Ranks, ReplayedAccept, ReplayedTarget

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENT
from specmemo_kernels.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class Turn:
    """All tokens so far, the number of tokens to write, and the ranks to replay (``None``: real acceptance)."""

    ids: list[int]
    new_tokens: int
    ranks: list[Ranks] | None


class System(Protocol):
    """A way to generate answers.

    Attributes:
        name: in tables.
        budget: bytes, or ``None``.
        nodes: size of the tree.
        steps, step_tokens: verification steps since :meth:`reset`, and their tokens.
    """

    name: str
    heads: str
    budget: int | None
    nodes: int
    steps: int
    step_tokens: int

    def answer(self, turn: Turn) -> list[int]: ...

    def reset(self) -> None: ...

    def forget(self) -> None:
        """Drop everything cached from earlier conversations."""

    def release(self) -> dict[str, int]:
        """Free everything that calls cached; returns the remaining bytes by part, without the model's weights."""

    def watch(self, tracker: PartTracker) -> None:
        """Prepare the tracking of the next answer."""

    def label(self, tracker: PartTracker) -> None:
        """Label the tensors that stay after an answer."""

    def close(self) -> None: ...


class PlainSystem:
    """transformers' own greedy ``generate``."""

    def __init__(self, model: Any) -> None:
        self.name, self.heads, self.budget, self.nodes = "plain generate", "none", None, 1
        self._plain = batch_runs.Plain(batch_runs.Work(model, None, [], 0), 1)
        self.reset()

    def answer(self, turn: Turn) -> list[int]:
        new = self._plain.answer([turn.ids], turn.new_tokens)[0]
        self._plain.options = {}
        self.steps += len(new) - 1
        self.step_tokens += len(new) - 1
        return new

    def forget(self) -> None:
        """No cache between answers."""

    def reset(self) -> None:
        self.steps = self.step_tokens = 0

    def release(self) -> dict[str, int]:
        return {}

    def watch(self, tracker: PartTracker) -> None:
        self._plain.options = {CACHE_ARGUMENT: LabelledCache(tracker)}

    def label(self, tracker: PartTracker) -> None:
        """The cache is labelled while it grows."""

    def close(self) -> None:
        """Nothing to undo."""


class MedusaSystem:
    """Medusa as published, with its own tree or another."""

    budget = None

    def __init__(
        self, name: str, model: Any, heads: sk.MedusaHeads, tree: DraftTree, without: Savings = AS_PUBLISHED
    ) -> None:
        self.name, self.nodes, self.heads = name, tree.size, heads_name(heads)
        self.tree = tree
        self._medusa = MedusaPublished(model, heads, tree, without)
        self._replay = ReplayedAccept(tree, self._medusa.buffers.paths, greedy_accept)
        self.reset()

    def answer(self, turn: Turn) -> list[int]:
        if turn.ranks is not None:
            self._replay.begin(turn.ranks)
        new = self._medusa.generate(turn.ids, turn.new_tokens, greedy_accept if turn.ranks is None else self._replay)
        self.steps += self._medusa.steps
        self.step_tokens += len(new) - 1
        return new

    def forget(self) -> None:
        """No cache between answers."""

    def reset(self) -> None:
        self.steps = self.step_tokens = 0

    def release(self) -> dict[str, int]:
        self._medusa.cache = None
        return {"heads": sum(p.nbytes for p in self._medusa.heads.parameters())}

    @contextmanager
    def stepping(self, turn: Turn) -> Iterator[Callable[[], object]]:
        """A function that runs the next decode step after the turn's prompt."""
        self._medusa.start(turn.ids)
        if turn.ranks is not None:
            self._replay.begin(turn.ranks)
        yield partial(self._medusa.step, greedy_accept if turn.ranks is None else self._replay)

    def watch(self, tracker: PartTracker) -> None:
        """The cache is labelled after the answer."""

    def label(self, tracker: PartTracker) -> None:
        assert self._medusa.cache is not None
        tracker.label(self._medusa.cache.data, "KV cache")

    def close(self) -> None:
        self.release()


class OurSystem:
    """This package: a patched twin of the model, its tree chosen by ``patch``."""

    def __init__(
        self, name: str, model: Any, heads: sk.MedusaHeads, budget: int | None, replayed: bool, **options: Any
    ) -> None:
        self.name, self.heads, self.budget = name, heads_name(heads), budget
        self._model = model
        self.handle = sk.patch(model, heads, memory_budget=budget, max_batch_size=1, **options)
        self.nodes = self.handle.plan.tree.size
        self._target: ReplayedTarget | None = None
        if replayed:
            self._target = ReplayedTarget(self.handle.target)
            self.handle.target = self._target  # type: ignore[assignment]

    def answer(self, turn: Turn) -> list[int]:
        if self._target is not None and turn.ranks is not None:
            self._target.begin([turn.ranks])
            self.handle.target = self._target  # type: ignore[assignment]
        elif self._target is not None:
            self.handle.target = self._target.target  # type: ignore[assignment]
        ids = torch.tensor([turn.ids], device=self._model.device)
        options: dict[str, Any] = {"max_new_tokens": turn.new_tokens, "do_sample": False, "pad_token_id": 0}
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return output[0, len(turn.ids) :].tolist()

    def forget(self) -> None:
        if self.handle.pool is not None:
            self.handle.pool.clear_cache()

    def reset(self) -> None:
        self.handle.stats.reset()

    @property
    def steps(self) -> int:
        return self.handle.stats.steps

    @property
    def step_tokens(self) -> int:
        return self.handle.stats.tokens

    def release(self) -> dict[str, int]:
        self.handle.release()
        return {"heads": self.handle.drafter.nbytes, "activations": self.handle.plan.parts["workspace"]}

    @contextmanager
    def stepping(self, turn: Turn) -> Iterator[Callable[[], object]]:
        """A function that runs the next decode step after the turn's prompt."""
        if self._target is not None:
            assert turn.ranks is not None, "a system that replays needs ranks"
            self._target.begin([turn.ranks])
        with sk.stream_batch(self._model, [turn.ids], max_new_tokens=turn.new_tokens, eos_token_ids=[]) as run:
            next(run)  # the prompt
            yield partial(next, run)

    def watch(self, tracker: PartTracker) -> None:
        """The pages are labelled after the answer."""

    def label(self, tracker: PartTracker) -> None:
        pool = self.handle.pool  # requesting a pool would be another call
        assert pool is not None
        for group in pool.groups:
            tracker.label(group.k_pages, "KV cache")
            tracker.label(group.v_pages, "KV cache")
            tracker.label(group.k_scratch, "candidates' KV")
            tracker.label(group.v_scratch, "candidates' KV")

    def close(self) -> None:
        sk.unpatch(self._model)


def heads_name(heads: sk.MedusaHeads) -> str:
    return f"{heads.num_heads}, {'own' if heads.own_lm_head else 'shared'} lm_head"
