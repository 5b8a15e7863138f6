"""Conversations with the systems of bench_frontier.py: timed in turns, weighed apart."""

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
    """Median seconds of every conversation, the answers of the last round, and what was counted in all rounds."""

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
    """One conversation: the answers to its turns, and the seconds they took. ``between`` is called before each turn.

    What was computed in one turn may serve the next; nothing comes from the same conversation held before.
    """
    system.forget()
    ids: list[int] = []
    answers: list[list[int]] = []
    seconds = 0.0
    for turn, said in enumerate(talk.turns):
        ids = [*ids, *said]
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
    """Every system holds each conversation, in turn and in changing order, ``rounds`` times.

    A further round isn't begun after ``until`` (``time.perf_counter``); the first one is always made.
    """
    timings = [Timing() for _ in systems]
    for talk in talks:
        taken: list[list[float]] = [[] for _ in systems]
        answers: list[list[list[int]]] = [[] for _ in systems]
        for turn in range(rounds):
            if turn and time.perf_counter() > until:
                break
            for i in sorted(range(len(systems)), reverse=bool(turn % 2)):
                answers[i], seconds = hold(systems[i], talk, new_tokens, published, lambda _: None)
                taken[i].append(seconds)
        for timing, seconds_, answer in zip(timings, taken, answers, strict=True):
            timing.seconds.append(statistics.median(seconds_))
            timing.answers += answer
            timing.new_tokens += sum(map(len, answer))
    for timing, system in zip(timings, systems, strict=True):
        timing.steps, timing.step_tokens = system.steps, system.step_tokens
    return timings


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a conversation with their parts at that moment, and the way there (:class:`PartTracker`)."""

    peak: int
    parts: dict[str, int]
    calls: list[int]
    series: dict[str, list[int]]
    marks: list[tuple[int, str]]


def weigh(system: System, talk: Conversation, new_tokens: int, published: Published | None, vocab_size: int) -> Memory:
    """One conversation from a clean start, every tensor counted; slow, so apart from the timing."""
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
    place = max(range(len(totals)), key=totals.__getitem__)
    parts = {part: values[place] for part, values in series.items()}
    return Memory(totals[place], parts, calls, series, tracker.marks)
