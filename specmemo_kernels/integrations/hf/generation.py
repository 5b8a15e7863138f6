"""A submitted request, as its caller sees it."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.integrations.hf.batch import Completion, Request, completion_of
from specmemo_kernels.integrations.hf.run import Piece, PieceReader

_log = logging.getLogger(__name__)


class GenerationFailed(RuntimeError):
    """A request ended with an error, its ``__cause__``. ``tokens``: what it had generated."""

    def __init__(self, message: str, tokens: list[int]) -> None:
        super().__init__(message)
        self.tokens = tokens


class _End:
    """The end of a request, and the error that caused it.

    The sequence refers to it, not to the :class:`Generation`, which refers to the sequence: in a cycle, both would
    stay in memory until the garbage collector visits old objects.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Remember the first error before the end."""
        if self.error is None and not self.reached.is_set():
            self.error = error

    def clear_frames(self) -> None:
        """Clear the variables of finished calls in the error's tracebacks: they hold a step's tensors and the pages."""
        errors, seen = [self.error], set[int]()
        while errors:
            error = errors.pop()
            if error is None or id(error) in seen:
                continue
            seen.add(id(error))
            errors += [error.__cause__, error.__context__]
            for frame, _ in traceback.walk_tb(error.__traceback__):
                for caller, _ in traceback.walk_stack(frame):
                    with suppress(RuntimeError):  # it still runs
                        caller.clear()

    def guarded(self, stop: Callable[[list[int]], bool], tokens: list[int]) -> bool:
        """``stop``, whose exceptions end this request only."""
        try:
            return bool(stop(tokens))
        except BaseException as error:  # SystemExit and CancelledError too: the engine's thread must go on
            self.fail(error)
            return True


class Generation(Iterator[Piece]):
    """A submitted request: an iterator of :class:`Piece`, for one thread.

    Attributes:
        request: as submitted.
        index: the request's number in its engine.
        sequence: its state, which belongs to the engine's thread.
    """

    def __init__(
        self,
        request: Request,
        sequence: SequenceState,
        abort: Callable[[int], None],
        on_piece: Callable[[Piece], None] | None,
    ) -> None:
        self._end = end = _End()
        stop = None if sequence.stop is None else partial(end.guarded, sequence.stop)
        self.request, self.index = request, sequence.index
        self.sequence = replace(sequence, stop=stop, failed=end.fail)
        self._reader = PieceReader(self.sequence)
        self._abort, self._on_piece = abort, on_piece
        self._pieces: SimpleQueue[Piece | None] = SimpleQueue()
        self._read_all = False

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._end.reached.is_set()

    def __next__(self) -> Piece:
        """Wait for the next piece.

        Raises:
            GenerationFailed: the request ended with an error, after the pieces before it.
        """
        if self._read_all:
            raise StopIteration
        piece = self._pieces.get()
        self._read_all = piece is None or piece.finished
        if piece is None:
            raise self._failed() from self._end.error
        return piece

    def abort(self) -> None:
        """End the request, from any thread, and keep its tokens; its pages are free after the step in progress."""
        self._abort(self.index)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end, from any thread but the engine's.

        Raises:
            GenerationFailed: the request ended with an error.
            TimeoutError: it still runs after ``timeout`` seconds.
        """
        if not self._end.reached.wait(timeout):
            raise TimeoutError(f"request {self.index} still runs after {timeout} seconds; wait longer, or abort it")
        if self._end.error is not None:
            raise self._failed() from self._end.error
        return completion_of(self.sequence)

    def _failed(self) -> GenerationFailed:
        error = self._end.error
        return GenerationFailed(
            f"request {self.index} ended with {type(error).__name__}: {error}", self.sequence.new_tokens
        )

    # What follows belongs to the engine's thread.

    def fail(self, error: BaseException) -> None:
        """Remember the error that ends the request."""
        self._end.fail(error)

    def clear_frames(self) -> None:
        """Free what the error of a request that has ended refers to."""
        self._end.clear_frames()

    def deliver(self) -> None:
        """Pass on the tokens since the last call, and the end."""
        piece = self._reader.read()
        if piece is None:
            return
        failed = piece.finished and self._end.error is not None
        if piece.finished:
            self._end.reached.set()  # before the last piece, whose readers may ask for the result
        if piece.tokens or not failed:
            self._pieces.put(replace(piece, finished=piece.finished and not failed))
        if failed:
            self._pieces.put(None)
        self._call_back(piece)

    def _call_back(self, piece: Piece) -> None:
        if self._on_piece is None:
            return
        try:
            self._on_piece(piece)
        except BaseException as error:
            self._on_piece = None
            if self.done:
                _log.exception("on_piece failed with the last piece of request %d, which is complete", self.index)
            self.fail(error)
            self.abort()
