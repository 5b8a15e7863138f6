"""The lock that serialises the generations of a patched model."""

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


class LockOwner:
    """The owner of a generation lock.

    Attributes:
        thread: the thread that acquires the lock.
        run: the batch that holds the lock; any thread may close a batch.
        released: whether the owner has released the lock.
    """

    def __init__(self, run: BatchRun | None = None) -> None:
        self.thread = threading.get_ident()
        self.run = None if run is None else weakref.ref(run)
        self.released = False


class GenerationLock:
    """A mutex with an owner.

    A signal handler can raise ``KeyboardInterrupt`` between two bytecodes. So a block of code uses ``with lock.mutex(),
    lock.owned():``: CPython runs no handler between acquiring a mutex and entering the block. Other callers create the
    owner before :meth:`acquire`, and call :meth:`release` in ``finally`` or ``except``.

    Attributes:
        closed: the lock can't be acquired any more.
    """

    def __init__(self) -> None:
        self.closed = False
        self._mutex = threading.Lock()
        self._owner: LockOwner | None = None

    @property
    def owner(self) -> LockOwner | None:
        """The owner, if this thread holds the lock."""
        owner = self._owner
        if owner is None or owner.released or owner.thread != threading.get_ident() or not self._mutex.locked():
            return None
        return owner

    @property
    def nested(self) -> bool:
        """Whether this code runs inside of this thread's call of generate."""
        return (owner := self.owner) is not None and owner.run is None

    def mutex(self) -> threading.Lock:
        """The mutex, for a ``with`` statement that calls :meth:`owned` next.

        Raises:
            RuntimeError: this thread holds the lock.
        """
        if self.owner is not None:
            raise RuntimeError(
                "this thread's generation with the same model isn't over; finish it first, or close the batch "
                "(BatchRun.close)"
            )
        return self._mutex

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Ownership of the acquired mutex for a block of code.

        Raises:
            Unpatched: the lock is closed.
        """
        owner = LockOwner()
        try:
            self._set_owner(owner)
            yield
        finally:
            owner.released = True

    def acquire(self, owner: LockOwner, timeout: float = -1.0) -> bool:
        """Wait for another thread's generation, then lock until :meth:`release`.

        Args:
            timeout: maximum seconds to wait; -1: without a limit.

        Returns:
            Whether the lock is held now.

        Raises:
            RuntimeError: this thread holds the lock.
            Unpatched: the lock is closed.
        """
        if not self.mutex().acquire(timeout=timeout):
            return False
        try:
            self._set_owner(owner)
        except Unpatched:
            self._mutex.release()
            raise
        return True

    def release(self, owner: LockOwner) -> None:
        """Release the lock, if ``owner`` holds it."""
        if self._owner is owner and not owner.released:
            self._mutex.release()
            owner.released = True

    def _set_owner(self, owner: LockOwner) -> None:
        if self.closed:
            raise Unpatched("the model was unpatched before this call could start; patch it again")
        self._owner = owner
