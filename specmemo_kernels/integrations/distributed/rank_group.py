"""Messages between the ranks of one model, over the host, so that all ranks take the same decisions.

Every rank runs the same program and reaches the same points in the same order. Each exchange starts with one kind of
message, four numbers from every rank to every rank (:meth:`RankGroup._meet`). So a failed rank can report its failure
at any point, and a difference between ranks is detected before it has an effect.
"""

from __future__ import annotations

import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import AnyDrafter
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.prompt_lookup import PromptLookupDrafter
from specmemo_kernels.engine.pressure import is_out_of_memory
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.integrations.distributed.gloo import use_one_worker
from specmemo_kernels.integrations.distributed.ranks import RankError, SingleRank, Stop
from specmemo_kernels.planning.cost import CHECKSUM_BYTES
from specmemo_kernels.planning.footprint import GenerationShape
from specmemo_kernels.planning.pass_bytes import PassBytes, ProductBytes

#: Kinds of messages.
_STEP, _DONE, _VALUE, _TALK, _GUESS, _FAILED = range(6)
_WORDS = CHECKSUM_BYTES // 8
#: Newest tokens of a sequence that are compared in each step. Before the first step all tokens are compared.
_COMPARED = 64
#: Messages of backends that raise a plain RuntimeError when a peer exits or times out.
_LOST = re.compile(r"gloo|connection (was )?(closed|reset)|time(d |)out|broken pipe|pair closure", re.IGNORECASE)


class RankGroup(SingleRank):
    """Several processes that make the same calls, one rank each.

    A collective that fails or times out raises :class:`RankError` on the other ranks. So does every later call, since
    the ranks' states are unknown then.

    Args:
        group: the process group of the model's own collectives, with all ranks.
        timeout: seconds until a collective fails, also in ``group``.

    Attributes:
        bytes_sent: payload that this rank sent during generation, without the model's own collectives.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self._group = group
        ranks = dist.get_process_group_ranks(group)
        self.rank, self.size, self.timeout = dist.get_rank(group), len(ranks), timeout
        self.bytes_sent, self._broken = 0, ""
        self._host: Any = None
        self._old_timeout = _set_timeout(group, timedelta(seconds=timeout))
        try:
            with self.guarded():
                # Host decisions use the host's network, whatever devices the model is on.
                self._host = dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend="gloo")
                use_one_worker(group, self._host.group_name)
        except BaseException:
            self.close()
            raise

    # -- before and around generation --------------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        self._meet(_TALK)
        values: list[Any] = [None] * self.size
        with self.guarded():
            dist.all_gather_object(values, value, group=self._host)
        return values

    def broadcast_result(self, compute: Callable[[], Any]) -> Any:
        box = [None]
        if self.rank == 0:
            with self.guarded():
                box = [compute()]
        self._meet(_TALK)
        with self.guarded():
            dist.broadcast_object_list(box, group_src=0, group=self._host)
        return box[0]

    def broadcast_input(self, read: Callable[[], Any]) -> Any:
        if self.rank:
            while not self.broadcast_scalar(0.0):
                pass
            return self.broadcast_result(read)
        done = threading.Event()

        def keep_alive() -> None:
            with suppress(RankError):  # raised again below
                while not done.wait(min(1.0, self.timeout / 4)):
                    self.broadcast_scalar(0.0)

        thread = threading.Thread(target=keep_alive)
        with self.guarded():
            thread.start()
            try:
                answer = read()
            finally:
                done.set()
                thread.join()
        self.broadcast_scalar(1.0)
        return self.broadcast_result(lambda: answer)

    def run_on_all(self, name: str, do: Callable[[], Any]) -> Any:
        result, error = None, None
        try:
            result = do()
        except Exception as failure:
            error = failure
        messages = self.exchange("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            self._broken = messages[self.rank]  # the other ranks have this message already
            raise error
        for rank, message in enumerate(messages):
            if message:
                raise RankError(f"{name} failed on rank {rank}: {message}")
        return result

    def assert_same(self, facts: Mapping[str, object]) -> None:
        first, *others = self.exchange({name: str(value) for name, value in facts.items()})
        for rank, other in enumerate(others, start=1):
            for name in sorted({*other, *first}):
                expected, got = first.get(name, "nothing"), other.get(name, "nothing")
                if expected != got:
                    raise RankError(
                        f"rank 0 and rank {rank} don't run the same: {name} is {expected[:200]} and {got[:200]}; give "
                        "all ranks the same versions, files and arguments"
                    )

    def max_over_ranks(self, shape: GenerationShape) -> GenerationShape:
        shapes = self.exchange(shape)
        maxima: dict[str, Any] = {}
        for name in (field.name for field in fields(GenerationShape)):
            values = [getattr(other, name) for other in shapes]
            if isinstance(values[0], PassBytes | ProductBytes):
                maxima[name] = reduce(type(values[0]).elementwise_max, values)
            elif values[0] is None:
                maxima[name] = None
            else:  # smaller splits mean more of them
                maxima[name] = min(values) if name == "split_size" else max(values)
        return GenerationShape(**maxima)

    def agree_on_random_state(self, device: torch.device) -> None:
        self._meet(_TALK)
        state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
        self._broadcast(state)
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)

    def close(self) -> None:
        host, self._host = self._host, None
        self._broken = "the model was unpatched"
        if not dist.is_initialized():  # the program has destroyed all groups
            return
        _set_timeout(self._group, self._old_timeout)
        if host is not None:
            with suppress(RuntimeError):  # a broken group may refuse
                dist.destroy_process_group(host)

    # -- during generation -------------------------------------------------------------------------------------------

    def step(self, sequences: Sequence[SequenceState], pool: PagedKVPool, aborted: Sequence[int] = ()) -> list[int]:
        pages = pool.num_pages, pool.free_pages, pool.cached_pages
        count = self._meet(_STEP, len(sequences), _checksum(sequences, pages), value=len(aborted))
        if not count:
            return []
        indices = torch.tensor(aborted) if self.rank == 0 else torch.empty(count, dtype=torch.int64)
        self._broadcast(indices)
        aborted = indices.tolist()
        return aborted

    def agree_on_guesses(self, drafter: AnyDrafter) -> Callable[[torch.Tensor], torch.Tensor] | None:
        # Heads select from gathered candidates, prompt lookup from the text; other drafters' guesses may differ.
        return None if isinstance(drafter, MedusaDrafter | PromptLookupDrafter) else self._first_guesses

    def _first_guesses(self, draft: torch.Tensor) -> torch.Tensor:
        self._meet(_GUESS, draft.numel())
        guesses = draft.cpu().contiguous()
        self._broadcast(guesses)
        return guesses.to(draft.device)

    def finish(self, sequences: Sequence[SequenceState]) -> None:
        self._meet(_DONE, len(sequences), _checksum(sequences))

    def broadcast_scalar(self, value: float) -> float:
        bits = struct.unpack("q", struct.pack("d", value))[0]
        number: float = struct.unpack("d", struct.pack("q", self._meet(_VALUE, value=bits)))[0]
        return number

    def stop(self, stop: Stop) -> Stop:
        return lambda tokens: bool(self.broadcast_scalar(float(stop(tokens))))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a host tensor, of the same size on all ranks, with rank 0's content."""
        self.bytes_sent += tensor.nbytes if self.rank == 0 else 0
        with self.guarded():
            dist.broadcast(tensor, group_src=0, group=self._host)

    def _all_gather(self, *numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's numbers ``[4]`` and all ranks' numbers ``[size, 4]``, int64."""
        local, gathered = torch.tensor(numbers), torch.empty(self.size, _WORDS, dtype=torch.int64)
        self.bytes_sent += local.nbytes
        dist.all_gather(list(gathered.unbind(0)), local, group=self._host)
        return local, gathered

    def _meet(self, kind: int, count: int = 0, checksum: int = 0, *, value: int = 0) -> int:
        """Check that all ranks are at the same point with the same numbers; returns rank 0's ``value``.

        Raises:
            RankError: a rank failed, exited, timed out, or is at another point.
        """
        with self.guarded():
            rows: list[list[int]] = self._all_gather(kind, count, checksum, value)[1].tolist()
            for rank, row in enumerate(rows):
                if row[0] == _FAILED:
                    raise RankError(f"rank {rank} failed (its own error says why), so rank {self.rank} stops")
            for rank, row in enumerate(rows):
                if row[:-1] != rows[0][:-1]:
                    raise RankError(
                        f"rank {rank} and rank 0 are no longer at the same step (kind, sequences, checksum: "
                        f"{row[:-1]} and {rows[0][:-1]}); every rank must make the same calls with the same prompts"
                    )
        return rows[0][-1]

    # -- faults ------------------------------------------------------------------------------------------------------

    @contextmanager
    def guarded(self) -> Iterator[None]:
        if self._broken:
            raise RankError(f"{self._broken}; start all ranks anew")
        try:
            yield
        except BaseException as error:
            lost = isinstance(error, RuntimeError) and (
                isinstance(error, dist.DistError) or _LOST.search(str(error)) is not None
            )
            if isinstance(error, RankError):
                self._broken = self._broken or str(error)
                raise
            if not lost:
                self.fail(error)
                raise
            self._broken = (
                f"rank {self.rank} of {self.size} lost touch with another rank, which died, failed, or was silent for "
                f"more than {self.timeout:g} s (rank_timeout)"
            )
            raise RankError(f"{self._broken}: {str(error).splitlines()[0][:300]}") from error

    def fail(self, error: BaseException) -> None:
        """Notify the other ranks, at their next message, that this rank leaves a call with ``error``.

        If all ranks fail alike, as with an invalid call, they are at the same point, and the group stays usable. After
        Ctrl-C or a failed allocation it is broken: the model's own collectives may be in flight on some ranks.
        """
        if self._broken:
            return
        text = f"{type(error).__name__}: {error}"
        self._broken = f"rank {self.rank} failed before: {text}"
        if self._host is None:
            return
        alike = isinstance(error, Exception) and not is_out_of_memory(error)
        with suppress(RuntimeError):  # the other ranks detect the lost connection
            local, gathered = self._all_gather(_FAILED, int(alike), zlib.crc32(text.encode()), 0)
            if alike and bool((gathered == local).all()):
                self._broken = ""


def _checksum(sequences: Sequence[SequenceState], *more: object) -> int:
    """Checksum of a call's state: all prompts before the first token, then the newest tokens."""
    facts = [
        (s.finished, len(s.tokens), s.tokens[-_COMPARED:] if s.emitted else s.tokens, s.max_new_tokens, s.computed)
        for s in sequences
    ]
    return zlib.crc32(repr((more, facts)).encode())


def _set_timeout(group: Any, timeout: timedelta) -> timedelta:
    """Set the timeout of the group's backends; returns the previous timeout."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    backend = group._get_backend(group._device_types[0])
    before: timedelta = backend.options._timeout
    _set_pg_timeout(timeout, group)
    return before
