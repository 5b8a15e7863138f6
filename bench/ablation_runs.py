"""Measured ablation: Medusa as published with parts of its memory switched off, then this package, switch by switch."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from conversations import Conversation
from frontier_runs import Timing, hold, take_turns, weigh
from frontier_systems import MedusaSystem, OurSystem
from medusa_published import Savings
from replay import Published
from shapes import twin

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf.draft import Setup
from specmemo_kernels.integrations.hf.plan import make_chooser
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY
from specmemo_kernels.tree.draft_tree import DraftTree

Row = dict[str, Any]
System = MedusaSystem | OurSystem


@dataclass(frozen=True)
class Switches:
    """What ``patch`` can switch, in the order in which it is switched on.

    Attributes:
        fuse: linear layers, MLPs and norms by our operators.
        chunks: the prompt in passes of :attr:`Work.chunk` rows.
        pruned: the nodes that ``patch`` plans, else Medusa's 64.
        fewer_heads: the heads that ``patch`` plans, else five.
        coded_heads: heads in 4 bits.
        adaptive: each step verifies the part of the tree that the chooser selects.
        prefix: a turn starts from the pages of the turns before.
        int8_pages: not lossless.
    """

    fuse: bool = False
    chunks: bool = False
    pruned: bool = False
    fewer_heads: bool = False
    coded_heads: bool = False
    adaptive: bool = False
    prefix: bool = False
    int8_pages: bool = False


NAMES = {
    "fuse": "our linear layers and norms",
    "chunks": "chunked prefill",
    "pruned": "pruned tree",
    "fewer_heads": "fewer heads",
    "coded_heads": "heads in 4 bits",
    "adaptive": "adaptive tree",
    "prefix": "prefix reuse",
    "int8_pages": "int8 pages (not lossless)",
}
LOSSLESS = Switches(**{name: name != "int8_pages" for name in NAMES})
MEDUSA = {
    "Medusa as published": Savings(),
    "+ cache for tokens that exist": Savings(cache=True),
    "+ prompt logits: last row": Savings(cache=True, last_row=True),
    "+ step logits streamed": Savings(cache=True, last_row=True, streamed=True),
}


@dataclass(frozen=True)
class Work:
    """The model, five heads with their own vocabulary matrices, acceptance and conversations.

    ``chunk``: rows of a pass of chunked prefill. ``planned``: the tree of a plan, ``None`` before there is one.
    """

    model: Any
    heads: sk.MedusaHeads
    published: Published
    talks: Sequence[Conversation]
    new_tokens: int
    chunk: int
    planned: DraftTree | None = None

    @property
    def context(self) -> int:
        size: int = self.model.config.max_position_embeddings
        return size

    def with_planned_tree(self) -> Work:
        """A copy with the tree that ``patch`` plans for these heads, timed on this machine."""
        with sk.patch(twin(self.model), self.heads, max_batch_size=1) as handle:
            return self.with_tree(handle.plan.tree)

    def with_tree(self, tree: DraftTree) -> Work:
        """A copy with this tree as the plan's."""
        return replace(self, planned=tree)

    @property
    def tree(self) -> DraftTree:
        """The plan's tree.

        Raises:
            ValueError: there is no plan.
        """
        if self.planned is None:
            raise ValueError("the work has no planned tree; call with_planned_tree or with_tree")
        return self.planned


def conversations(published: Published, count: int, prompt: int, vocab_size: int) -> list[Conversation]:
    """``count`` conversations of two turns of ``prompt`` random tokens, numbered as questions of the published run."""
    questions = sorted({question for question, _ in published.tokens_per_step}) or list(range(count))
    chosen = questions[:: max(1, len(questions) // count)][:count]
    talks = []
    for question in chosen:
        source = random.Random(question)
        turns = tuple(tuple(source.randrange(vocab_size) for _ in range(prompt)) for _ in range(2))
        talks.append(Conversation(question, turns))
    return talks


def ours(name: str, work: Work, on: Switches) -> OurSystem:
    """This package with these switches."""
    tree, heads, planned = work.published.tree, work.heads, work.tree
    if on.fewer_heads:
        tree = planned if on.pruned else tree.truncated(planned.max_depth)
        heads = heads.truncated(planned.max_depth)
    elif on.pruned:
        tree = tree.pruned(planned.size)
    system = OurSystem(
        name, twin(work.model), heads, None, True, tree=tree, fuse=on.fuse, graph=False, reuse_prefix=on.prefix,
        prefill_chunk=work.chunk if on.chunks else work.context, head_bits=4 if on.coded_heads else None,
        kv_dtype="int8" if on.int8_pages else None,
    )  # fmt: skip
    if on.adaptive:
        handle = system.handle
        accuracy = DEFAULT_ACCURACY[: heads.num_heads]
        setup = Setup(handle.model, handle.facts, handle.drafter, accuracy, handle.backend, handle.ranks)
        handle.chooser = make_chooser(setup, handle.plan, handle.graphs)
    return system


def cumulative(work: Work) -> list[System]:
    """Medusa as published, its savings, this package without switches, then one more switch each."""
    systems: list[System] = [
        MedusaSystem(name, work.model, work.heads, work.published.tree, without) for name, without in MEDUSA.items()
    ]
    on = Switches()
    systems.append(ours("this package: pages, scratch, tree attention", work, on))
    for name, title in NAMES.items():
        on = replace(on, **{name: True})
        systems.append(ours(f"+ {title}", work, on))
    return systems


def left_out(work: Work) -> list[System]:
    """All lossless switches, without one each."""
    return [
        ours(f"without {NAMES[f.name]}", work, replace(LOSSLESS, **{f.name: False}))
        for f in fields(Switches)
        if f.name != "int8_pages"
    ]


def lossless(system: System) -> bool:
    return isinstance(system, MedusaSystem) or system.handle.plan.kv_dtype is None


def check_tokens(systems: Sequence[System], talk: Conversation, new_tokens: int) -> None:
    """Raise ``AssertionError`` if a lossless system writes other tokens than the first one, with real acceptance.

    In float32; other dtypes round differently in other orders.
    """
    expected = None
    for system in filter(lossless, systems):
        answers, _ = hold(system, talk, new_tokens, None, lambda _: None)
        expected = expected or answers
        if answers != expected:
            raise AssertionError(f"{system.name} writes other tokens than {systems[0].name}")


def check_steps(systems: Sequence[System], timings: Sequence[Timing]) -> None:
    """Raise ``AssertionError`` if systems with the same fixed tree took another number of steps."""
    steps: dict[Any, tuple[str, int]] = {}
    for system, timing in zip(systems, timings, strict=True):
        if isinstance(system, OurSystem) and system.handle.chooser is not None:
            continue
        tree = system.handle.plan.tree if isinstance(system, OurSystem) else system.tree
        name, expected = steps.setdefault(tree, (system.name, timing.steps))
        if timing.steps != expected:
            raise AssertionError(f"{system.name} took {timing.steps} steps, {name} {expected} with the same tree")


def check_all(systems: Sequence[System], work: Work) -> None:
    """:func:`check_tokens` over the ends of a conversation's turns; in float32 only."""
    if work.model.dtype == torch.float32:
        turns = tuple(turn[-16:] for turn in work.talks[0].turns)
        check_tokens(systems, Conversation(0, turns), 6)


def measure_memory(work: Work) -> list[Row]:
    """Each system's memory in the first conversation.

    Raises:
        AssertionError: :func:`check_tokens`.
    """
    steps, systems = _systems(work)
    check_all(systems, work)
    rows = []
    for system in systems:
        memory = weigh(system, work.talks[0], work.new_tokens, work.published, work.model.config.vocab_size)
        print(f"{system.name}: {memory.peak / 2**20:.1f} MiB", flush=True)
        sizes = {"peak_generation_bytes": memory.peak, "bytes_by_part": memory.parts}
        rows.append(_row(system, system in steps) | sizes)
    for system in systems:
        system.close()
    return rows


def measure_speed(work: Work, rounds: int, seconds: float) -> list[Row]:
    """Each system's speed over all conversations, in turns.

    Args:
        rounds: of each conversation and system, at most. seconds: no later round starts after these.

    Raises:
        AssertionError: :func:`check_tokens`, :func:`check_steps`.
    """
    steps, systems = _systems(work)
    check_all(systems, work)
    for system in systems:
        system.reset()
    until = time.perf_counter() + seconds
    timings = take_turns(systems, work.talks, work.new_tokens, work.published, rounds, until)
    check_steps(systems, timings)
    rows = []
    for system, timing in zip(systems, timings, strict=True):
        speed = {"tokens_per_s": timing.tokens_per_s, "tokens_per_step": timing.tokens_per_step}
        rows.append(_row(system, system in steps) | speed | {"seconds": timing.seconds})
    for system in systems:
        system.close()
    return rows


def _systems(work: Work) -> tuple[list[System], list[System]]:
    """The cumulative systems, and all of them."""
    steps = cumulative(work)
    return steps, [*steps, *left_out(work)]


def _row(system: System, cumulated: bool) -> Row:
    heads = int(system.heads.split(",")[0])
    table = "cumulative" if cumulated else "left out"
    return {"table": table, "system": system.name, "nodes": system.nodes, "heads": heads}
