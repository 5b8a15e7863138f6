"""The device steps that generations with one pool share, and how a GPU captures them in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import StaticDrafter
from specmemo_kernels.engine.device_step import DeviceStep, StepShape, StepState
from specmemo_kernels.engine.pressure import is_out_of_memory
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.target import TargetModel
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor

#: Steps kept, the last used ones. The memory plan counts them.
MAX_STEPS = 8


class CaptureFailed(RuntimeError):
    """A step can't be captured; the message says why. Nothing was computed."""


class Capture(Protocol):
    """Records what a function launches, without running it, and returns what runs it again; ``nbytes``: memory that
    all of them hold for their own tensors."""

    nbytes: int

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


class CudaCapture:
    """CUDA graphs in one memory pool: they never run at once, so the largest one's tensors are what it holds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool, self.nbytes = torch.cuda.graph_pool_handle(), 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: what they do isn't part of this capture.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device):  # also around set_stream, which changes the current device
            usual = torch.cuda.current_stream(self._device)
            try:
                with capture:
                    before = torch.cuda.memory_reserved(self._device)
                    run()
                    self.nbytes += torch.cuda.memory_reserved(self._device) - before
            except BaseException:
                torch.cuda.set_stream(usual)  # where a capture can't be ended, torch stays on its stream
                raise
        return graph.replay


@dataclass
class _Kept:
    """A step; ``runs``: how often it ran; ``replay``: its graph, once there is one."""

    step: DeviceStep
    runs: int = 0
    replay: Callable[[], None] | None = None


class StepCache:
    """Steps by shape over one state, each captured the second time that it is wanted.

    The first time it just runs, which compiles its kernels and lets libraries set themselves up. Steps are made anew
    when the pool's tensors are others.

    Args:
        sequences: the most that step together.
        make_capture: makes what captures; ``None``: steps run as they are, with the same results.

    Attributes:
        failed: why steps can't be captured, once that was seen.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: StaticDrafter,
        pool: PagedKVPool,
        sequences: int,
        backend: str | None,
        make_capture: Callable[[], Capture] | None = None,
    ) -> None:
        self.target, self.drafter, self.pool, self.sequences = target, drafter, pool, sequences
        self.backend, self.failed = backend, ""
        self._make_capture = make_capture
        self._capture: Capture | None = None
        self._state: StepState | None = None
        self._kept: dict[StepShape, _Kept] = {}
        self._version = pool.version

    @property
    def nbytes(self) -> int:
        """Bytes of the steps' tensors, and of the graphs' own."""
        own = sum(kept.step.nbytes for kept in self._kept.values())
        state = 0 if self._state is None else self._state.nbytes
        return own + state + (0 if self._capture is None else self._capture.nbytes)

    def clear(self) -> None:
        """Let go of all steps and graphs."""
        self._kept.clear()
        self._capture = None

    def load(self, sequences: Sequence[SequenceState]) -> None:
        """The next step begins with what the host knows of these."""
        if self._state is None:
            assert sequences[0].hidden is not None, "a running sequence has a state"
            self._state = StepState(self.sequences, sequences[0].hidden)
        self._state.load(sequences)

    def hidden(self, sequences: int) -> tuple[Tensor, ...]:
        """``[hidden_size]`` of each of so many sequences, as the last step left it."""
        assert self._state is not None, "no step has been made"
        return self._state.hidden[:sequences].clone().unbind(0)

    def launch(self, shape: StepShape, tree: DraftTree) -> tuple[Tensor, bool]:
        """Run the step of this shape over ``tree``.

        Returns:
            What it emits, on the device (:attr:`DeviceStep.emitted`), and whether it took a step's usual time.

        Raises:
            CaptureFailed: and ``failed`` says why from now on.
            Exception: of the target or drafter, or for want of memory, also while capturing; the state is as before.
        """
        assert self._state is not None, "the state is loaded first"
        if self._version != self.pool.version:
            self.clear()
            self._version = self.pool.version
        kept = self._kept.pop(shape, None)
        if kept is None:
            while len(self._kept) >= MAX_STEPS:
                del self._kept[next(iter(self._kept))]
            step = DeviceStep(shape, tree, self._state, self.target, self.drafter, self.pool, self.backend)
            kept = _Kept(step)
        self._kept[shape] = kept  # the newest comes last
        kept.step.use(tree)
        usual = kept.runs > (self._make_capture is not None)
        if self._make_capture is not None and kept.runs and kept.replay is None:
            kept.replay = self._captured(kept.step)
        (kept.replay or kept.step.run)()
        kept.runs += 1
        return kept.step.emitted, usual

    def _captured(self, step: DeviceStep) -> Callable[[], None]:
        assert self._make_capture is not None
        if self._capture is None:
            self._capture = self._make_capture()
        try:
            return self._capture(step.run)
        except Exception as error:
            self.clear()
            causes: list[BaseException] = [error]  # ending a capture that failed fails again, and says less
            while causes[-1].__context__ is not None:
                causes.append(causes[-1].__context__)
            for cause in causes:
                if is_out_of_memory(cause):  # says nothing about the step: it is tried again, with less
                    raise cause from None
            cause = causes[-1]
            self.failed = f"a step can't be captured ({type(cause).__name__}: {str(cause).splitlines()[0][:200]})"
            raise CaptureFailed(self.failed) from error
