"""``KeyboardInterrupt`` where torch's modes begin or end in a recording, and where a call takes the lock."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from test_families import batch, greedy
from tiny_models import random_heads, tiny_model
from torch.utils import _python_dispatch

import specmemo_kernels as sk

INPUTS = batch((9,))
#: A file and its line, the event there, and the line of the caller.
Place = tuple[str, int, str, int]
FILES = ("torch/utils/_python_dispatch.py", "torch/overrides.py")
FUNCTIONS = ("__enter__", "__exit__", "_push_mode", "_pop_mode")
CALLER = "engine/unwind.py"


class Interrupter:
    """Traces the beginnings and ends of torch's modes that ``run_under`` calls.

    Attributes:
        places: seen so far. at: raise there.
    """

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}
        self.at: Place | None = None

    @contextmanager
    def tracing(self, at: Place | None = None) -> Iterator[None]:
        self.at = at
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        code, caller = frame.f_code, frame.f_back
        ours = caller is not None and caller.f_code.co_filename.endswith(CALLER)
        if ours and code.co_filename.endswith(CALLER):
            return self._trace_lines
        if ours and code.co_name in FUNCTIONS and code.co_filename.endswith(FILES):
            return self._trace_lines
        return None

    def _trace_lines(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        assert frame.f_back is not None
        place = frame.f_code.co_filename, frame.f_lineno, event, frame.f_back.f_lineno
        self.places[place] = None
        if place == self.at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._trace_lines


#: CPython runs a signal's handler at the end of these instructions.
CHECKED = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD")


@functools.cache
def behind_checks(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which a signal's handler may run."""
    return frozenset(
        later.offset for one, later in itertools.pairwise(dis.get_instructions(code)) if one.opname in CHECKED
    )


class LockInterrupter(Interrupter):
    """Traces the instructions of a call of generate that acquire and release the lock."""

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        code, caller = frame.f_code, frame.f_back
        called = caller is not None and caller.f_code.co_name == "sample" and code.co_filename.endswith("contextlib.py")
        if called or code.co_filename.endswith("hf/generation_lock.py") or code.co_name == "sample":
            frame.f_trace_opcodes = True
            return self._trace_instructions
        return None

    def _trace_instructions(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event != "opcode" or frame.f_lasti not in behind_checks(frame.f_code):
            return self._trace_instructions
        place = frame.f_code.co_filename, frame.f_lasti, frame.f_code.co_name, getattr(frame.f_back, "f_lineno", 0)
        self.places[place] = None
        if place == self.at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._trace_instructions


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="sys.settrace sees only a part of the instructions there")
def test_an_interrupted_lock() -> None:
    """The lock is free, so that no thread waits for ever, and the next call isn't taken for a nested one."""
    model = tiny_model("llama", seed=33)
    expected, interrupter = greedy(model, INPUTS, 3), LockInterrupter()
    handle, interrupts = sk.patch(model, random_heads(model)), 0  # unpatching would wait for the lock too
    with interrupter.tracing():
        greedy(model, INPUTS, 3)
    assert len(interrupter.places) > 20
    for place in list(interrupter.places):
        try:
            with interrupter.tracing(place):
                greedy(model, INPUTS, 3)
        except KeyboardInterrupt:
            interrupts += 1
        assert handle.generation_lock.owner is None, place
        lock = handle.generation_lock.mutex()
        assert lock.acquire(blocking=False), place
        lock.release()
        steps = handle.stats.steps
        assert torch.equal(greedy(model, INPUTS, 3), expected), place
        assert handle.stats.steps > steps, place
    assert interrupts > 20
    sk.unpatch(model)


def test_an_interrupted_recording() -> None:
    """torch's mode has begun, and no ``with`` knows of it; or it has ended already."""
    model = tiny_model("llama", seed=31)
    expected, interrupter = greedy(model, INPUTS, 24), Interrupter()
    interrupts = 0
    with sk.patch(model, random_heads(model)) as handle:
        with interrupter.tracing():
            greedy(model, INPUTS, 24)
        assert len(interrupter.places) > 10
        for place in list(interrupter.places):
            handle.release()  # the next steps are recorded again
            try:
                with interrupter.tracing(place):
                    greedy(model, INPUTS, 24)
            except KeyboardInterrupt:
                interrupts += 1
            assert not torch._C._len_torch_dispatch_stack(), place
            assert not torch._C._len_torch_function_stack(), place
            assert not _python_dispatch.is_in_torch_dispatch_mode(), place
            assert torch.equal(greedy(model, INPUTS, 24), expected), place
    assert interrupts > 10
