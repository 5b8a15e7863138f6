"""Generations of one patched model take turns."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specmemo_kernels.integrations.hf.batch import BatchRun


class Unpatched(RuntimeError):
    """The model was unpatched before the call could start."""


class Turn:
    """The turn of one generation.

    Attributes:
        thread: generates.
        run: the batch that generates, which any thread may close.
        over: whether the turn has ended.
    """

    def __init__(self, run: BatchRun | None = None) -> None:
        self.thread = threading.get_ident()
        self.run = None if run is None else weakref.ref(run)
        self.over = False


class Turns:
    """One generation at a time; others wait.

    A ``KeyboardInterrupt`` can come between any two bytecodes. So a call of generate takes its turn as ``with
    turns.free(), turns.turn():``, where none comes between taking the lock and the block, and others try to end the
    turn that they made before they took it.

    Attributes:
        closed: no turn begins any more.
    """

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.Lock()
        self._turn: Turn | None = None

    @property
    def own(self) -> Turn | None:
        """This thread's turn, if it has one now."""
        turn = self._turn
        if turn is None or turn.over or turn.thread != threading.get_ident() or not self._lock.locked():
            return None
        return turn

    @property
    def nested(self) -> bool:
        """Whether this code runs inside of this thread's call of generate."""
        return (turn := self.own) is not None and turn.run is None

    def free(self) -> threading.Lock:
        """The lock that a generation holds.

        Raises:
            RuntimeError: this thread holds it already.
        """
        if self.own is not None:
            raise RuntimeError(
                "this thread's generation with the same model isn't over; finish it first, or close the batch "
                "(BatchRun.close)"
            )
        return self._lock

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A turn for a block that holds the lock.

        Raises:
            Unpatched: no turn begins any more.
        """
        turn = Turn()
        try:
            self._begin(turn)
            yield
        finally:
            turn.over = True

    def take(self, turn: Turn, timeout: float = -1.0) -> bool:
        """Wait for another thread's generation, then begin ``turn``.

        Args:
            timeout: most seconds to wait; -1: without a limit.

        Returns:
            Whether it has begun.

        Raises:
            RuntimeError: this thread's generation isn't over.
            Unpatched: no turn begins any more.
        """
        if not self.free().acquire(timeout=timeout):
            return False
        try:
            self._begin(turn)
        except Unpatched:
            self._lock.release()
            raise
        return True

    def end(self, turn: Turn) -> None:
        """End a turn, if it has begun and isn't over."""
        if self._turn is turn and not turn.over:
            self._lock.release()
            turn.over = True

    def _begin(self, turn: Turn) -> None:
        if self.closed:
            raise Unpatched("the model was unpatched before this call could start; patch it again")
        self._turn = turn
