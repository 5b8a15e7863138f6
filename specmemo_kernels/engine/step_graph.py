"""The device steps that generations with one pool share, and their capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import AnyDrafter, Drafter, FeatureDrafter, drafts_on_device
from specmemo_kernels.engine.device_step import DeviceStep, StepShape, StepState
from specmemo_kernels.engine.fusion import FUSED_OPERATORS
from specmemo_kernels.engine.host_capture import record
from specmemo_kernels.engine.pressure import is_out_of_memory
from specmemo_kernels.engine.program import compiled, rehearse
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.target import TargetModel
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor

#: Maximum number of cached steps (LRU), for one sequence on a GPU (:func:`max_steps`).
MAX_STEPS = 8


def max_steps(device: torch.device, sequences: int) -> int:
    """Maximum number of cached steps of up to ``sequences`` sequences.

    Four more on a GPU for each further size of padded steps: a CUDA graph takes a quarter of a second, the time of 50
    steps (Vicuna-7B's shape on an H200).
    """
    return MAX_STEPS + (4 * (sequences - 1).bit_length() if device.type == "cuda" else 0)


def may_pad(drafter: AnyDrafter) -> bool:
    """Whether steps with this drafter may be padded: a drafter that reads features may read a vacant row's pages."""
    return not isinstance(drafter, FeatureDrafter)


def padded_sequences(sequences: int, most: int) -> int:
    """Sequences of a padded step that runs ``sequences``: a power of two, at most ``most``."""
    return min(1 << (sequences - 1).bit_length(), most)


class CaptureFailed(RuntimeError):
    """A step can't be captured; the message says why. Nothing was computed."""


class Capture(Protocol):
    """Records a function's launches without running them and returns a function that replays them.

    ``after``: eager runs of a step before its capture. ``pads``: captures cost so much that steps have room for more
    sequences than run, so that few steps serve all batches. ``nbytes``: memory that all recordings hold for their
    tensors while other passes run. ``trim()`` frees what they hold besides, until the next replay.
    """

    after: int
    pads: bool

    @property
    def nbytes(self) -> int: ...

    def trim(self) -> None: ...

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


class CudaCapture:
    """CUDA graphs in one memory pool. They never run at once, so the pool is as large as the largest graph.

    A graph has a step's recorded program, with fused operators. A step that can't be recorded is captured as it is.
    """

    after = 1  # the first run compiles kernels and initialises libraries
    pads = True

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]
        self._pool, self.nbytes = torch.cuda.graph_pool_handle(), 0

    def trim(self) -> None: ...

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            program = self._program(run)
        graph = torch.cuda.CUDAGraph()
        # thread_local: allocations of other threads aren't part of this capture.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device):  # also around set_stream, which changes the current device
            stream = torch.cuda.current_stream(self._device)
            try:
                with capture:
                    before = torch.cuda.memory_reserved(self._device)
                    program()
                    self.nbytes += torch.cuda.memory_reserved(self._device) - before
            except BaseException:
                torch.cuda.set_stream(stream)  # torch stays on the capture's stream if the capture can't be ended
                raise
        return graph.replay

    def _program(self, run: Callable[[], None]) -> Callable[[], None]:
        """The recorded program of a step; its kernels are compiled, because a capture can't load them.

        That writes to scratch slots, which hold nothing between steps.
        """
        try:
            calls, _ = record(run)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return run
        for call in calls:
            if getattr(call.function, "__name__", "") in FUSED_OPERATORS:
                rehearse(call, self._device)
        return compiled(calls)


@dataclass
class _CachedStep:
    """A step, the number of its runs, and its graph once captured."""

    step: DeviceStep
    runs: int = 0
    replay: Callable[[], None] | None = None


class StepCache:
    """LRU cache of device steps by shape, which share one state; captures each step after some eager runs.

    The steps are dropped when the pool reallocates its tensors.

    Args:
        sequences: most sequences per step. kept: most cached steps.
        make_capture: makes the capture; ``None``: steps run eagerly, with the same results.

    Attributes:
        host_drafter: the drafter, if it fills trees before the step.
        failed: why steps can't be captured, or an empty string.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: AnyDrafter,
        pool: PagedKVPool,
        sequences: int,
        kept: int,
        backend: str | None,
        make_capture: Callable[[], Capture] | None = None,
    ) -> None:
        self.target, self.drafter, self.pool, self.sequences, self.kept = target, drafter, pool, sequences, kept
        self.backend, self.failed = backend, ""
        self.host_drafter = None if drafts_on_device(drafter) else cast(Drafter, drafter)
        self._may_pad = may_pad(drafter)
        self._make_capture = make_capture
        self._capture: Capture | None = None
        self._state: StepState | None = None
        self._rows: list[_Row] = []  # of ``_state``, as the last step left it
        self._nodes: Tensor | None = None  # hidden states of a pass that the host verifies
        self._steps: dict[StepShape, _CachedStep] = {}
        self._version = pool.version

    @property
    def pads(self) -> bool:
        """Whether steps have room for more sequences than run (:class:`Capture`)."""
        return self._captures and self._may_pad and self._recorder().pads

    def padded(self, sequences: int, nodes: int) -> int:
        """Sequences of the step that runs ``sequences``, with trees of ``nodes`` nodes."""
        if not self.pads:
            return sequences
        return max(sequences, padded_sequences(sequences, min(self.sequences, self.pool.max_nodes // nodes)))

    @property
    def nbytes(self) -> int:
        """Bytes of the steps' tensors, and of the graphs' own."""
        steps = sum(cached.step.nbytes for cached in self._steps.values())
        state = 0 if self._state is None else self._state.nbytes
        state += 0 if self._nodes is None else self._nodes.nbytes
        return steps + state + (0 if self._capture is None else self._capture.nbytes)

    def clear(self) -> None:
        """Free all steps and graphs."""
        self._steps.clear()
        self._capture = self._nodes = None

    def trim(self) -> None:
        """Free what captured steps hold while nothing else runs; to be called before any other pass."""
        if self._capture is not None:
            self._capture.trim()

    def load(self, sequences: Sequence[SequenceState]) -> None:
        """Start the next step from the host's state of ``sequences``, unless it is the last step's."""
        if self._state is None:
            assert sequences[0].hidden is not None, "a running sequence has a state"
            self._state = StepState(self.sequences, sequences[0].hidden)
        if self._rows != _rows(sequences):
            self._state.load(sequences)

    def mark_current(self, sequences: Sequence[SequenceState]) -> None:
        """Note that ``sequences`` are now as the last step left them; none: unknown."""
        self._rows = _rows(sequences)

    def roots(self, sequences: int) -> Tensor:
        """``[sequences]`` int64: a copy of the newest tokens, from which the next step starts."""
        assert self._state is not None, "the state is loaded first"
        return self._state.roots[:sequences].clone()

    def hidden(self, sequences: int) -> tuple[Tensor, ...]:
        """Copies of the first ``sequences`` hidden states ``[hidden_size]`` after the last step."""
        assert self._state is not None, "no step has been made"
        return self._state.hidden[:sequences].clone().unbind(0)

    def launch(self, shape: StepShape, tree: Trees, drafts: Tensor | None = None) -> tuple[DeviceStep, bool]:
        """Run the step of this shape over ``tree``; ``drafts``: as in :meth:`DeviceStep.use`.

        Returns:
            The step, whose results are valid until its next launch; and whether the run was like later ones: neither
            before nor with a capture.

        Raises:
            CaptureFailed: the step can't be captured; ``failed`` has the reason from now on.
            Exception: of the target or drafter, or a failed allocation, also while capturing; the state is unchanged.
        """
        assert self._state is not None, "the state is loaded first"
        if self._version != self.pool.version:
            self.clear()
            self._version = self.pool.version
        cached = self._steps.pop(shape, None)
        if cached is None:
            while len(self._steps) >= self.kept:
                del self._steps[next(iter(self._steps))]
            cached = _CachedStep(self._step(shape, tree, self._state))
        self._steps[shape] = cached  # reinserted at the end: the first key is the least recently used
        cached.step.use(tree, drafts)
        timed = cached.replay is not None if self._captures else cached.runs > 0
        if self._captures and cached.replay is None and cached.runs >= (capture := self._recorder()).after:
            cached.replay = self._captured(cached.step, capture)
        if cached.replay is None:
            self.trim()
        (cached.replay or cached.step.run)()
        cached.runs += 1
        return cached.step, timed

    @property
    def _captures(self) -> bool:
        return self._make_capture is not None

    def _recorder(self) -> Capture:
        if self._capture is None:
            assert self._make_capture is not None, "steps are captured"
            self._capture = self._make_capture()
        return self._capture

    def _step(self, shape: StepShape, tree: Trees, state: StepState) -> DeviceStep:
        drafter, pads = self.drafter if self.host_drafter is None else None, self.pads
        if shape.verified:
            return DeviceStep(shape, tree, state, self.target, drafter, self.pool, self.backend, padded=pads)
        if self._nodes is None:
            with torch.inference_mode(False):
                self._nodes = state.hidden.new_zeros(self.pool.max_nodes, state.hidden.shape[1])
        nodes = self._nodes[: shape.sequences * shape.nodes]
        return DeviceStep(shape, tree, state, self.target, drafter, self.pool, self.backend, nodes, pads)

    def _captured(self, step: DeviceStep, capture: Capture) -> Callable[[], None]:
        self.trim()
        try:
            return capture(step.run)
        except Exception as error:
            self.clear()
            causes: list[BaseException] = [error]  # ending a failed capture fails again, with a vaguer message
            while causes[-1].__context__ is not None:
                causes.append(causes[-1].__context__)
            for cause in causes:
                if is_out_of_memory(cause):  # the step can be captured once memory is free
                    raise cause from None
            cause = causes[-1]
            message = str(cause).partition("\n")[0]
            self.failed = f"a step can't be captured ({type(cause).__name__}: {message[:200]})"
            raise CaptureFailed(self.failed) from error


#: What distinguishes the states of a sequence: itself, its slot, its newest token and its length.
_Row = tuple[SequenceState, int, int, int]


def _rows(sequences: Sequence[SequenceState]) -> list[_Row]:
    return [(s, s.slot, s.tokens[-1], len(s.tokens)) for s in sequences]
