"""``Engine``: requests from any thread, generated together by one thread of its own."""

from __future__ import annotations

import atexit
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from specmemo_kernels.arguments import integer, wrong_type
from specmemo_kernels.engine.page_demand import slots_to_end
from specmemo_kernels.engine.scheduler import Scheduler
from specmemo_kernels.engine.verify import SampledVerifier
from specmemo_kernels.integrations.hf.batch import (
    Piece,
    Request,
    patched_handle,
    sequence_of,
)
from specmemo_kernels.integrations.hf.generation import Generation


class QueueFull(RuntimeError):
    """As many requests wait as the engine's ``max_waiting``; submit again later."""


class EngineClosed(RuntimeError):
    """The engine takes no more requests."""


class Engine:
    """Generates requests of any thread together; new ones join the running ones between two steps.

    The engine's thread locks the patched model while it has requests, and unlocks it when it has none: another
    thread's ``generate`` waits until then. Requests start in the order of submission, as many at once as the plan
    holds. While it has requests, the engine holds all of the plan's pages.

    Args:
        model: patched by :func:`specmemo_kernels.patch`, not tensor parallel.
        max_waiting: most requests that wait for rows or pages; :meth:`submit` refuses more.

    Attributes:
        handle: the patched model's handle.

    Raises:
        ValueError: the model isn't patched, or is tensor parallel.
    """

    def __init__(self, model: Any, *, max_waiting: int = 1024) -> None:
        self.handle = handle = patched_handle(model)
        if handle.ranks.size > 1:
            raise ValueError(
                f"the model is divided among {handle.ranks.size} processes; an engine needs a model in one process, "
                "generate_batch takes both"
            )
        self.max_waiting = integer("max_waiting", max_waiting, 1)
        self._changed = threading.Condition()
        self._arrived: deque[Generation] = deque()
        self._aborts: deque[Generation] = deque()
        self._count, self._closed, self._deadline = 0, False, float("inf")
        # Of the engine's thread.
        self._open: list[Generation] = []
        self._scheduler: Scheduler | None = None
        self._thread = threading.Thread(target=self._run, name="specmemo-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close, 0.0)

    def submit(self, request: Request, *, on_piece: Callable[[Piece], None] | None = None) -> Generation:
        """Queue a request, from any thread.

        Args:
            on_piece: called with each :class:`Piece` by the engine's thread, so it must return at once; the last one is
                ``finished``, also after an error. An exception ends the request.

        Raises:
            BudgetError: the request can never fit the plan.
            EngineClosed, QueueFull: the engine takes no requests, or none now.
            TypeError, ValueError: a wrong argument, with its value, or the model can't speculate any more.
        """
        if not isinstance(request, Request):
            raise wrong_type("request", request, "a Request")
        if on_piece is not None and not callable(on_piece):
            raise wrong_type("on_piece", on_piece, "a function of a Piece, or None")
        handle = self.handle
        sequence = sequence_of(handle, self._count, request)
        handle.pages_for([slots_to_end(sequence, handle.slots_ahead, growing=False)])
        if reason := handle.generator.unsupported_model(len(sequence.prompt) + sequence.max_new_tokens):
            raise ValueError(f"the request can't be generated: {reason}")
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine is closed; make a new one")
            if self.waiting >= self.max_waiting:
                raise QueueFull(f"{self.waiting} requests wait, max_waiting is {self.max_waiting}; submit again later")
            generation = Generation(replace(sequence, index=self._count), self._abort, on_piece)
            self._count += 1
            self._arrived.append(generation)
            self._changed.notify()
        return generation

    @property
    def waiting(self) -> int:
        """Requests without pages."""
        return max(0, len(self._arrived) + len(self._open) - self.running)

    @property
    def running(self) -> int:
        """Requests with pages."""
        scheduler = self._scheduler
        return 0 if scheduler is None else len(scheduler.active)

    def close(self, timeout: float = 30.0) -> None:
        """Take no more requests, finish the others within ``timeout`` seconds, and abort what runs then.

        From a callback of this engine it doesn't wait.
        """
        with self._changed:
            self._closed, self._deadline = True, min(self._deadline, time.monotonic() + timeout)
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close; after an exception, at once."""
        self.close(*([] if kind is None else [0.0]))

    def _abort(self, generation: Generation) -> None:
        with self._changed:
            self._aborts.append(generation)
            self._changed.notify()

    def _run(self) -> None:
        """The engine's thread: wait for requests, then generate until there are none."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._arrived or self._closed)
                if not self._arrived:
                    return
            self._take_arrived()
            try:
                self._generate()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they hold the failed pass's tensors
                for generation in self._open:
                    generation.fail(error)
                    generation.sequence.finish()
                self._collect()

    def _take_arrived(self) -> list[Generation]:
        """The requests that have arrived, which are open now; ends those that were aborted."""
        with self._changed:
            arrived = list(self._arrived)
            self._arrived.clear()
            self._open += arrived
            aborts = list(self._aborts) if time.monotonic() < self._deadline else list(self._open)
            self._aborts.clear()
        for generation in aborts:
            if self._scheduler is not None and generation not in arrived:
                self._scheduler.abort(generation.sequence)
            elif not generation.done:
                generation.sequence.abort()
        return arrived

    @torch.no_grad()
    def _generate(self) -> None:
        """Lock the model and generate the open requests, and those that arrive meanwhile."""
        handle = self.handle
        self._collect()  # those aborted before they began
        if not self._open:
            return
        with handle.locked():
            try:
                verifier = SampledVerifier(handle.target, handle.backend)
                sequences = [generation.sequence for generation in self._open]
                scheduler = handle.scheduler(sequences, verifier, admitting=True)
                self._scheduler = scheduler
                self._submit(scheduler, self._open)
                while not scheduler.idle:
                    scheduler.step()
                    self._collect()
                    self._submit(scheduler, self._take_arrived())
                    self._collect()
            finally:
                last, self._scheduler = self._scheduler, None
                if last is not None:
                    last.close()
                handle.record_bytes()

    def _submit(self, scheduler: Scheduler, arrived: list[Generation]) -> None:
        """Queue requests; one that is refused fails, the others don't."""
        for generation in arrived:
            if generation.sequence.finished:
                continue
            try:
                scheduler.submit(generation.sequence)
            except (RuntimeError, ValueError) as error:
                generation.fail(error)
                generation.sequence.finish()

    def _collect(self) -> None:
        """Deliver new tokens; requests that have ended are no longer open."""
        for generation in self._open:
            generation.deliver()
        self._open = [generation for generation in self._open if not generation.done]
