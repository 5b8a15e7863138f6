"""What the ranks of one model tell each other through the host, so that all of them decide the same.

Every rank runs the same program and reaches the same points in the same order. Every message during generation has one
shape, four numbers of every rank for every rank (:meth:`RankGroup._meet`). So a failed rank can report its failure
wherever the others are, and a difference between ranks is detected before it is used.
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
from typing import Any

import torch
import torch.distributed as dist

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import Drafter
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.prompt_lookup import PromptLookupDrafter
from specmemo_kernels.engine.pressure import is_out_of_memory
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.integrations.distributed.ranks import RankError, SingleRank, Stop
from specmemo_kernels.planning.cost import CHECKSUM_BYTES
from specmemo_kernels.planning.footprint import GenerationShape, PassBytes

#: What ranks meet for.
_STEP, _DONE, _VALUE, _TALK, _GUESS, _FAILED = range(6)
_WORDS = CHECKSUM_BYTES // 8
#: Newest tokens of a sequence that are compared in each step; before the first one all of them are.
_COMPARED = 64
#: How backends that have no exception of their own for it say that a peer is gone or silent.
_LOST = re.compile(r"gloo|connection (was )?(closed|reset)|time(d |)out|broken pipe|pair closure", re.IGNORECASE)


class RankGroup(SingleRank):
    """Several processes that make the same calls.

    A collective that fails, or takes longer than the timeout, is a :class:`RankError` on the others; so is every later
    call, as nobody knows then what the others have heard.

    Args:
        group: the process group of the model's own collectives, of all ranks there are.
        timeout: seconds after which a collective that isn't over is an error, here and in ``group``.

    Attributes:
        bytes_sent: payload that this rank handed to collectives of its own (the model's apart), objects that are
            compared or decided on before and after tokens are made left out.
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
                # What the host decides goes over the host's network, whatever devices the model is on.
                self._host = dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend="gloo")
        except BaseException:
            self.close()
            raise

    # -- before and around generation --------------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        self._meet(_TALK)
        found: list[Any] = [None] * self.size
        with self.guarded():
            dist.all_gather_object(found, value, group=self._host)
        return found

    def decide(self, choose: Callable[[], Any]) -> Any:
        if self.rank:
            self._meet(_TALK)
            box = [None]
        else:
            with self.guarded():
                box = [choose()]
            self._meet(_TALK)
        with self.guarded():
            dist.broadcast_object_list(box, group_src=0, group=self._host)
        return box[0]

    def ask(self, choose: Callable[[], Any]) -> Any:
        if self.rank:
            while not self.broadcast_scalar(0.0):
                pass
            return self.decide(choose)
        over = threading.Event()

        def keep_waiting() -> None:
            with suppress(RankError):  # said again below
                while not over.wait(min(1.0, self.timeout / 4)):
                    self.broadcast_scalar(0.0)

        thread = threading.Thread(target=keep_waiting)
        with self.guarded():
            thread.start()
            try:
                answer = choose()
            finally:
                over.set()
                thread.join()
        self.broadcast_scalar(1.0)
        return self.decide(lambda: answer)

    def run_on_all(self, what: str, do: Callable[[], Any]) -> Any:
        error: Exception | None = None
        result = None
        try:
            result = do()
        except Exception as failure:
            error = failure
        said = self.exchange("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            self._broken = said[self.rank]  # and everybody knows
            raise error
        if failed := next(((rank, text) for rank, text in enumerate(said) if text), None):
            raise RankError(f"{what} failed on rank {failed[0]}: {failed[1]}")
        return result

    def assert_same(self, facts: Mapping[str, object]) -> None:
        mine = {name: str(value) for name, value in facts.items()}
        everybody = self.exchange(mine)
        for rank, theirs in enumerate(everybody):
            for name in sorted({*theirs, *everybody[0]}):
                here, there = everybody[0].get(name, "nothing"), theirs.get(name, "nothing")
                if here != there:
                    raise RankError(
                        f"rank 0 and rank {rank} don't run the same: {name} is {here[:200]} and {there[:200]}; give "
                        "all ranks the same versions, files and arguments"
                    )

    def max_over_ranks(self, shape: GenerationShape) -> GenerationShape:
        everybody = self.exchange(shape)
        found: dict[str, Any] = {}
        for field in fields(GenerationShape):
            values = [getattr(one, field.name) for one in everybody]
            if isinstance(values[0], PassBytes):
                found[field.name] = PassBytes(max(v.fixed for v in values), max(v.per_row for v in values))
            elif values[0] is None:
                found[field.name] = None
            else:  # the smaller the splits, the more of them
                found[field.name] = min(values) if field.name == "split_size" else max(values)
        return GenerationShape(**found)

    def agree_on_random_state(self, device: torch.device) -> None:
        get, put = (
            (torch.get_rng_state, torch.set_rng_state)
            if device.type == "cpu"
            else (lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device))
        )
        self._meet(_TALK)
        state = get()
        self._broadcast(state)
        put(state)

    def close(self) -> None:
        host, self._host = self._host, None
        self._broken = "the model was unpatched"
        if not dist.is_initialized():  # the program has left all its groups before
            return
        _set_timeout(self._group, self._old_timeout)
        if host is not None:
            with suppress(RuntimeError):  # a broken one may refuse
                dist.destroy_process_group(host)

    # -- while tokens are made ---------------------------------------------------------------------------------------

    def step(self, sequences: Sequence[SequenceState], pool: PagedKVPool, aborted: Sequence[int] = ()) -> list[int]:
        pages = pool.num_pages, pool.free_pages, pool.cached_pages
        first = self._meet(_STEP, len(sequences), _checksum(sequences, pages), told=len(aborted))
        if not first[-1]:
            return []
        chosen = torch.tensor(aborted) if self.rank == 0 else torch.empty(first[-1], dtype=torch.int64)
        self._broadcast(chosen)
        found: list[int] = chosen.tolist()
        return found

    def agree_on_guesses(self, drafter: Drafter) -> Callable[[torch.Tensor], torch.Tensor] | None:
        # Heads choose from everybody's candidates, prompt lookup from the text; others compute what they like.
        return None if isinstance(drafter, MedusaDrafter | PromptLookupDrafter) else self._first_guesses

    def _first_guesses(self, draft: torch.Tensor) -> torch.Tensor:
        self._meet(_GUESS, draft.numel())
        chosen = draft.cpu().contiguous()
        self._broadcast(chosen)
        return chosen.to(draft.device)

    def finish(self, sequences: Sequence[SequenceState]) -> None:
        self._meet(_DONE, len(sequences), _checksum(sequences))

    def broadcast_scalar(self, value: float) -> float:
        bits = struct.unpack("q", struct.pack("d", value))[0]
        number: float = struct.unpack("d", struct.pack("q", self._meet(_VALUE, told=bits)[-1]))[0]
        return number

    def stop(self, own: Stop) -> Stop:
        return lambda tokens: bool(self.broadcast_scalar(float(own(tokens))))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's content of a tensor in host memory, whose size all know."""
        self.bytes_sent += tensor.nbytes if self.rank == 0 else 0
        with self.guarded():
            dist.broadcast(tensor, group_src=0, group=self._host)

    def _meet(self, kind: int, count: int = 0, checksum: int = 0, *, told: int = 0) -> list[int]:
        """All ranks come here for the same ``kind`` with the same numbers; returns rank 0's, of which ``told`` counts.

        Raises:
            RankError: one failed, is gone or silent, or isn't at the same place.
        """
        mine = torch.tensor([kind, count, checksum, told])
        said = torch.empty(self.size, _WORDS, dtype=torch.int64)
        self.bytes_sent += mine.nbytes
        with self.guarded():
            dist.all_gather(list(said.unbind(0)), mine, group=self._host)
            rows: list[list[int]] = said.tolist()
            if failed := [rank for rank, row in enumerate(rows) if row[0] == _FAILED]:
                raise RankError(f"rank {failed[0]} failed (its own error says why), so rank {self.rank} stops")
            if other := [rank for rank, row in enumerate(rows) if row[:-1] != rows[0][:-1]]:
                raise RankError(
                    f"rank {other[0]} and rank 0 are no longer at the same step (kind, sequences, checksum: "
                    f"{rows[other[0]][:-1]} and {rows[0][:-1]}); every rank must make the same calls with the same "
                    "prompts"
                )
        return rows[0]

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
        """Tell the others, where they next meet, that this rank leaves a call with ``error``.

        If all failed alike, as all do with a call that can't be, nobody is lost: they are at the same place. Not so
        where something outside of the call decided when (Ctrl-C, memory that ran out): the model's own collectives may
        be under way on some ranks and not on others.
        """
        if self._broken:
            return
        text = f"{type(error).__name__}: {error}"
        self._broken = f"rank {self.rank} failed before: {text}"
        if self._host is None:
            return
        alike = isinstance(error, Exception) and not is_out_of_memory(error)
        mine = torch.tensor([_FAILED, int(alike), zlib.crc32(text.encode()), 0])
        said = torch.empty(self.size, _WORDS, dtype=torch.int64)
        self.bytes_sent += mine.nbytes
        with suppress(RuntimeError):  # else they find out by themselves
            dist.all_gather(list(said.unbind(0)), mine, group=self._host)
            if alike and bool((said == mine).all()):
                self._broken = ""


def _checksum(sequences: Sequence[SequenceState], *more: object) -> int:
    """Of what a call has come to: all prompts before the first token, then the newest tokens."""
    facts = [
        (s.finished, len(s.tokens), s.tokens[-_COMPARED:] if s.emitted else s.tokens, s.max_new_tokens, s.computed)
        for s in sequences
    ]
    return zlib.crc32(repr((more, facts)).encode())


def _set_timeout(group: Any, timeout: timedelta) -> timedelta:
    """Give the group's backends this timeout; returns the one before."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    backend = group._get_backend(group._device_types[0])
    before: timedelta = backend.options._timeout
    _set_pg_timeout(timeout, group)
    return before
