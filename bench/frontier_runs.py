"""Conversations with the systems of bench_frontier.py: timed in turns; memory measured in separate runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from conversations import Conversation
from frontier_systems import System, Turn
from part_tracker import PartTracker
from replay import Published


@dataclass
class Timing:
    """Median seconds of every conversation, the answers of the last round, and counters of all rounds."""

    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    new_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / sum(self.seconds)

    @property
    def tokens_per_step(self) -> float:
        return self.step_tokens / max(1, self.steps)


def hold(
    system: System, talk: Conversation, new_tokens: int, published: Published | None, between: Callable[[int], None]
) -> tuple[list[list[int]], float]:
    """One conversation: the answers to its turns, and their seconds. ``between`` is called before each turn.

    A turn may reuse what earlier turns computed, but nothing from an earlier run of the conversation.
    """
    system.forget()
    ids: list[int] = []
    answers: list[list[int]] = []
    seconds = 0.0
    for turn, prompt in enumerate(talk.turns):
        ids = [*ids, *prompt]
        ranks = None if published is None else published.ranks(talk.question, turn, new_tokens + 8)
        between(turn)
        started = time.perf_counter()
        answers.append(system.answer(Turn(ids, new_tokens, ranks)))
        seconds += time.perf_counter() - started
        ids = [*ids, *answers[-1]]
    return answers, seconds


def take_turns(
    systems: Sequence[System],
    talks: Sequence[Conversation],
    new_tokens: int,
    published: Published | None,
    rounds: int,
    until: float,
) -> list[Timing]:
    """Run each conversation on every system in turn, ``rounds`` times, in alternating order.

    No round but the first starts after ``until`` (``time.perf_counter``).
    """
    timings = [Timing() for _ in systems]
    for talk in talks:
        by_system: list[list[float]] = [[] for _ in systems]
        answers: list[list[list[int]]] = [[] for _ in systems]
        for turn in range(rounds):
            if turn and time.perf_counter() > until:
                break
            for i in sorted(range(len(systems)), reverse=bool(turn % 2)):
                answers[i], seconds = hold(systems[i], talk, new_tokens, published, lambda _: None)
                by_system[i].append(seconds)
        for timing, runs, answer in zip(timings, by_system, answers, strict=True):
            timing.seconds.append(statistics.median(runs))
            timing.answers += answer
            timing.new_tokens += sum(map(len, answer))
    for timing, system in zip(timings, systems, strict=True):
        timing.steps, timing.step_tokens = system.steps, system.step_tokens
    return timings


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a conversation, their parts at the peak, and the bytes over time (:class:`PartTracker`)."""

    peak: int
    parts: dict[str, int]
    calls: list[int]
    series: dict[str, list[int]]
    marks: list[tuple[int, str]]


def weigh(system: System, talk: Conversation, new_tokens: int, published: Published | None, vocab_size: int) -> Memory:
    """Memory of one conversation, with nothing cached before. Tracking is slow, so this run isn't timed."""
    held = system.release()
    tracker = PartTracker(vocab_size)

    def between(turn: int) -> None:
        if turn:
            system.label(tracker)
        system.watch(tracker)
        tracker.mark(f"turn {turn + 1}")

    with tracker:
        hold(system, talk, new_tokens, published, between)
        system.label(tracker)
    calls, series = tracker.over_time(held)
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    peak = max(range(len(totals)), key=totals.__getitem__)
    parts = {part: values[peak] for part, values in series.items()}
    return Memory(totals[peak], parts, calls, series, tracker.marks)
