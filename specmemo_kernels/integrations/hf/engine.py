"""``Engine``: requests from any thread, generated together by one thread of its own."""

from __future__ import annotations

import atexit
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from specmemo_kernels.arguments import integer, wrong_type
from specmemo_kernels.engine.page_demand import slots_to_end
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import SampledVerifier
from specmemo_kernels.integrations.distributed.ranks import RankError
from specmemo_kernels.integrations.hf.batch import Request, patched_handle, sequence_of
from specmemo_kernels.integrations.hf.generation import Generation
from specmemo_kernels.integrations.hf.generation_lock import LockOwner, Unpatched
from specmemo_kernels.integrations.hf.run import Piece, SequenceRun
from specmemo_kernels.ops.dispatch import release_threads

#: Between two looks at arrived and aborted requests, while another generation holds the model.
_LOCK_SECONDS = 0.05


class QueueFull(RuntimeError):
    """As many requests wait as the engine's ``max_waiting``; submit again later."""


class EngineClosed(RuntimeError):
    """The engine takes no more requests."""


class Engine:
    """Generates requests of any thread together; new ones join the running ones between two steps.

    The engine's thread locks the patched model while it has requests, and unlocks it when it has none: another
    thread's ``generate`` waits until then. Requests start in the order of submission, as many at once as the plan
    holds. While it has requests, the engine holds all of the plan's pages.

    Of a tensor parallel model every rank makes an engine; rank 0's takes the requests, the others follow it until it
    is closed, or until ``rank_timeout`` without a message.

    Args:
        model: patched by :func:`specmemo_kernels.patch`.
        max_waiting: most requests that wait for rows or pages; :meth:`submit` refuses more.

    Attributes:
        handle: the patched model's handle.

    Raises:
        ValueError: the model isn't patched.
    """

    def __init__(self, model: Any, *, max_waiting: int = 1024) -> None:
        self.handle = patched_handle(model)
        self.max_waiting = integer("max_waiting", max_waiting, 1)
        self._changed = threading.Condition()
        self._arrived: deque[Generation] = deque()
        self._aborts: deque[int] = deque()
        self._numbers = itertools.count()
        self._closed, self._deadline = False, float("inf")
        # Of the engine's thread.
        self._open: dict[int, Generation] = {}
        self._running: SequenceRun | None = None
        # This thread has usually patched the model; from now on the engine's thread computes.
        release_threads(self.handle.backend)
        self._thread = threading.Thread(target=self._run, name="specmemo-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close, 0.0)

    def submit(self, request: Request, *, on_piece: Callable[[Piece], None] | None = None) -> Generation:
        """Queue a request, from any thread; of a tensor parallel model on rank 0.

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
        if handle.ranks.rank:
            raise ValueError(f"rank {handle.ranks.rank} can't submit requests; submit them on rank 0")
        if handle.ranks.size > 1 and request.stop is not None:
            raise ValueError("stop is a function, which other ranks don't have; leave it out and abort the request")
        generation = self._generation(next(self._numbers), request, on_piece)
        sequence = generation.sequence
        handle.pages_for([slots_to_end(sequence, handle.slots_ahead, growing=False)])
        if reason := handle.generator.unsupported_model(len(sequence.prompt) + sequence.max_new_tokens):
            raise ValueError(f"the request can't be generated: {reason}")
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine is closed; make a new one")
            if self.waiting >= self.max_waiting:
                raise QueueFull(f"{self.waiting} requests wait, max_waiting is {self.max_waiting}; submit again later")
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
        running = self._running
        return 0 if running is None else len(running.scheduler.active)

    @property
    def alive(self) -> bool:
        """Whether the thread runs that generates."""
        return self._thread.is_alive()

    def close(self, timeout: float = 30.0) -> None:
        """Take no more requests, finish the others within ``timeout`` seconds, and abort what runs then.

        From a callback of this engine it doesn't wait. On other ranks than 0 it waits for rank 0's.
        """
        with self._changed:
            self._closed, self._deadline = True, min(self._deadline, time.monotonic() + timeout)
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def join(self) -> None:
        """Wait until the engine is closed and its requests have ended; on other ranks than 0 until rank 0's is."""
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close; after an exception, at once."""
        self.close(*([] if kind is None else [0.0]))

    def _abort(self, index: int) -> None:
        with self._changed:
            self._aborts.append(index)
            self._changed.notify()

    # What follows belongs to the engine's thread, on every rank.

    def _run(self) -> None:
        """Wait for requests, then generate until there are none."""
        try:
            while self.handle.ranks.broadcast_input(self._wait):
                try:
                    self._generate()
                except RankError:
                    raise
                except BaseException as error:
                    self._fail(error)
        except BaseException as error:  # of a rank; or requests couldn't be ended, as without memory
            with self._changed:
                self._closed = True  # so that later requests are refused; nobody would generate them
                self._open |= {generation.index: generation for generation in self._arrived}
            self._fail(error)

    def _wait(self) -> bool:
        """Wait for a request; ``False``: there will be none. On rank 0."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._closed)
            return bool(self._arrived)

    def _fail(self, error: BaseException) -> None:
        """End the open requests with an error."""
        for generation in self._open.values():
            generation.fail(error)
            generation.sequence.finish()
        self._deliver()

    def _generation(self, index: int, request: Request, on_piece: Callable[[Piece], None] | None = None) -> Generation:
        return Generation(request, sequence_of(self.handle, index, request), self._abort, on_piece)

    def _drain(self) -> tuple[list[Generation], list[int]]:
        """The requests since the last call, which are open now, and the indices of those to abort. On rank 0."""
        with self._changed:
            arrived = list(self._arrived)
            self._arrived.clear()
            self._open |= {generation.index: generation for generation in arrived}
            late = time.monotonic() >= self._deadline
            aborts = list(self._open) if late else list(self._aborts)
            self._aborts.clear()
        return arrived, aborts

    def _take_arrived(self) -> list[Generation]:
        """The requests that have arrived, which are open now, on every rank; ends those to abort."""
        ranks = self.handle.ranks
        arrived: list[Generation] = []

        def drained() -> tuple[list[tuple[int, Request]], list[int]]:
            new, aborts = self._drain()
            arrived.extend(new)
            return [(generation.index, generation.request) for generation in new], aborts

        requests, aborts = ranks.broadcast_result(drained)
        if ranks.rank:
            arrived = [self._generation(index, request) for index, request in requests]
            self._open |= {generation.index: generation for generation in arrived}
        for index in aborts:
            generation = self._open.get(index)
            if generation is None or generation.done:
                continue
            if self._running is not None and generation not in arrived:
                self._running.scheduler.abort(generation.sequence)
            else:
                generation.sequence.abort()
        return arrived

    @torch.no_grad()
    def _generate(self) -> None:
        """Lock the model and generate the requests that have arrived, and those that arrive meanwhile."""
        handle, ranks = self.handle, self.handle.ranks
        self._take_arrived()
        self._deliver()  # those aborted before they began
        if not self._open:
            return
        owner = LockOwner()
        try:
            if not self._lock(owner):
                return
            with ranks.guarded():
                verifier = SampledVerifier(handle.target, handle.backend)
                running = self._running = SequenceRun(handle, self._sequences(), verifier, admitting=True)
                try:
                    self._submit(running, list(self._open.values()))
                    while not running.scheduler.idle:
                        running.step(self._sequences())
                        self._deliver()
                        self._submit(running, self._take_arrived())
                        self._deliver()
                finally:
                    self._running = None
                    running.close()
                    del running  # tracebacks of callbacks' errors may keep this call's variables
        finally:
            handle.generation_lock.release(owner)

    def _lock(self, owner: LockOwner) -> bool:
        """Lock the model on every rank; requests arrive and end meanwhile. ``False``: all have ended."""
        handle, lock = self.handle, self.handle.generation_lock

        def attempt() -> bool:
            try:
                return lock.acquire(owner, _LOCK_SECONDS)
            except Unpatched:  # on every rank: raised below
                return True

        while not handle.ranks.broadcast_input(attempt):
            self._take_arrived()
            self._deliver()
            if not self._open:
                return False
        if lock.owner is None:
            lock.acquire(owner)
        return True

    def _sequences(self) -> list[SequenceState]:
        return [generation.sequence for generation in self._open.values()]

    def _submit(self, running: SequenceRun, arrived: list[Generation]) -> None:
        """Queue requests; one that is refused fails, the others don't."""
        for generation in arrived:
            if generation.sequence.finished:
                continue
            try:
                running.scheduler.submit(generation.sequence)
            except (RuntimeError, ValueError) as error:
                generation.fail(error)
                generation.sequence.finish()

    def _deliver(self) -> None:
        """Deliver new tokens; requests that have ended are no longer open."""
        for generation in self._open.values():
            generation.deliver()
            if generation.done:
                generation.clear_frames()
        self._open = {index: generation for index, generation in self._open.items() if not generation.done}
