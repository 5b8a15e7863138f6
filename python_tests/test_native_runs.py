"""Operators of a recorded step that run as one call: the same results, within their memory, and only where possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples, sample
from test_families import batch, greedy
from tiny_models import random_heads, tiny_model

import specmemo_kernels as sk
from specmemo_kernels.engine import host_capture
from specmemo_kernels.engine.host_capture import HostCapture
from specmemo_kernels.integrations.hf import target

cpu: Any = pytest.importorskip("specmemo_kernels.backends.cpu")

CPU = torch.device("cpu")
SIZE = 48
WEIGHTS = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * SIZE**-0.5
NORM = torch.linspace(0.5, 1.5, SIZE)
ANGLES = torch.randn(2, 9, SIZE // 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def recorded_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a test's own modes are active."""
    monkeypatch.setattr(host_capture, "dispatcher_active", lambda: False)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of programs, and of other calls, of the last recording."""
    found = [0, 0]
    original = host_capture.compiled

    def compiled(calls: Any) -> Any:
        found[0] = sum(type(call.function).__name__ == "Program" for call in calls)
        found[1] = len(calls) - found[0]
        return original(calls)

    monkeypatch.setattr(host_capture, "compiled", compiled)
    return found


def linear(x: torch.Tensor, i: int) -> torch.Tensor:
    return sk.ops.linear(x, WEIGHTS[i], backend="cpu")


def norm(x: torch.Tensor) -> torch.Tensor:
    return sk.ops.rms_norm(x, NORM, eps=1e-5, backend="cpu")


def _change(y: torch.Tensor, choice: int, rows: torch.Tensor) -> torch.Tensor:
    """One of several functions of ``[n, SIZE]``, some of which the backend can't record."""
    if choice < 3:
        return linear(y, choice)
    if choice == 3:
        return norm(y)
    if choice == 4:
        return norm(y + linear(y, 0))
    if choice == 5:
        rows.view(len(y), 4, -1).copy_(y.view(len(y), 4, -1))
        return y
    if choice == 6:
        x, cos, sin = y.view(len(y), 4, -1), *(ANGLES[:, : len(y), None] * 1)
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return (x * cos + turned * sin).reshape(len(y), SIZE)
    if choice == 7:
        return linear(y[:, : SIZE // 2].repeat(1, 2), 1)
    return y.sin() if choice == 8 else torch.relu_(linear(y, 2))


@settings(max_examples=examples(100), deadline=None)
@given(
    choices=st.lists(st.integers(0, 9), min_size=1, max_size=14), rows=st.integers(1, 9), seed=st.integers(0, 1000),
    limit=st.sampled_from([0, 16 << 10, 2 << 20]),
)  # fmt: skip
def test_random_functions(choices: list[int], rows: int, seed: int, limit: int) -> None:
    """Replays on new input have the function's bits, whatever the memory; it is never exceeded."""
    generator = torch.Generator().manual_seed(seed)
    x, out = torch.empty(rows, SIZE), torch.zeros(2, rows, SIZE)
    copied = torch.zeros(2, rows, SIZE)

    def run(i: int) -> None:
        y = x * 1
        for choice in choices:
            y = _change(y, choice, copied[i])
        out[i].copy_(y)

    x.normal_(generator=generator)
    capture = HostCapture(CPU, limit)
    replay = capture(lambda: run(0))
    assert capture.block_bytes <= limit // 2
    for trim in (False, False, True):
        x.normal_(generator=generator)
        if trim:
            capture.trim()
        replay()
        run(1)
        assert torch.equal(out[0], out[1])
        assert torch.equal(copied[0], copied[1])


def _replayed(function: Callable[[torch.Tensor], torch.Tensor], limit: int = 1 << 20) -> HostCapture:
    x, out = torch.randn(5, SIZE), torch.zeros(5, SIZE)

    def run() -> None:
        out.copy_(function(x * 1))

    capture = HostCapture(CPU, limit)
    replay = capture(run)
    x.normal_()
    replay()
    assert torch.equal(out, function(x * 1))
    return capture


def test_a_run_is_one_call(programs: list[int]) -> None:
    """Beside it: the product in front of it, and the copy to the result."""
    capture = _replayed(lambda x: norm(linear(linear(norm(x), 0), 1)))
    assert programs == [1, 2]
    assert 3 * 5 * SIZE * 4 <= capture.block_bytes <= 64 << 10


def test_blocks_are_used_again(programs: list[int]) -> None:
    """Four hundred operators need no more memory than four."""

    def chain(x: torch.Tensor, length: int) -> torch.Tensor:
        for i in range(length):
            x = linear(x, i % 3)
        return x

    assert _replayed(lambda x: chain(x, 400)).block_bytes == _replayed(lambda x: chain(x, 4)).block_bytes
    assert programs == [1, 2]


def test_too_little_memory(programs: list[int]) -> None:
    """The operators are called one by one."""
    assert _replayed(lambda x: norm(linear(linear(norm(x), 0), 1)), limit=1000).block_bytes <= 500
    assert programs == [0, 6]


def test_other_temporaries_take_the_limit(programs: list[int]) -> None:
    """A step that needs more than half of it outside of its blocks has none."""

    for copies, expected in ((1, 1), (3, 0)):

        def function(x: torch.Tensor, copies: int = copies) -> torch.Tensor:
            return norm(linear(x.repeat(10, copies)[:, :SIZE].contiguous(), 0))[:5]

        _replayed(function, limit=72 << 10)
        assert programs[0] == expected


def test_trimmed_memory() -> None:
    """It is returned to the system, and the next run has the same results."""
    x, weight = torch.randn(64, 2048), torch.randn(4096, 2048) / 64
    blocks = cpu.Blocks(8 << 20)
    program = cpu.record(blocks, [x], lambda x: [cpu.linear(x, weight, None, None, False)], None)
    blocks.trim()
    expected, empty = program(x)[0], _resident()
    assert blocks.resident
    blocks.trim()
    assert not blocks.resident
    assert empty - _resident() > 0.9 * (x.nbytes + expected.nbytes)
    assert torch.equal(program(x)[0], expected)


def _resident() -> int:
    """Bytes of anonymous resident memory."""
    if not (status := Path("/proc/self/status")).exists():
        pytest.skip("resident memory is read from /proc")
    return 1024 * int(next(line for line in status.read_text().splitlines() if line.startswith("RssAnon")).split()[1])


def test_input_that_changes_shape() -> None:
    """A program isn't run on other shapes or types than it was recorded for."""
    x = torch.randn(4, SIZE)
    program = cpu.record(cpu.Blocks(1 << 16), [x], lambda x: [cpu.linear(x, WEIGHTS[0], None, None, False)], None)
    assert torch.equal(program(x)[0], cpu.linear(x, WEIGHTS[0], None, None, False))
    for other in (x[:2], x.double(), x.view(1, 4, SIZE)):
        with pytest.raises(ValueError, match="input 0 differs in shape or type"):
            program(other)
    with pytest.raises(ValueError, match="0 inputs given, expected 1"):
        program()
    with pytest.raises(ValueError, match="dimension 0 has stride 96"):
        program(torch.randn(4, 2 * SIZE)[:, :SIZE])


def test_a_failed_recording_ends() -> None:
    """Operators run again afterwards."""
    x = torch.randn(4, SIZE)

    def fail(x: torch.Tensor) -> list[torch.Tensor]:
        cpu.linear(x, WEIGHTS[0], None, None, False)
        raise KeyError("failed")

    with pytest.raises(KeyError, match="failed"):
        cpu.record(cpu.Blocks(1 << 16), [x], fail, None)
    with pytest.raises(MemoryError):
        cpu.record(cpu.Blocks(64), [x], lambda x: [cpu.linear(x, WEIGHTS[0], None, None, False)], None)
    budget = 4 * SIZE * torch.finfo(torch.float32).eps * 10
    assert torch.allclose(cpu.linear(x, WEIGHTS[0], None, None, False), x @ WEIGHTS[0].T, atol=budget)


def test_a_program_keeps_its_tensors() -> None:
    """Weights that nothing else holds live as long as the program."""
    weight, x = torch.randn(SIZE, SIZE), torch.randn(4, SIZE)
    expected = cpu.linear(x, weight, None, None, False)

    def recorded(weight: torch.Tensor) -> Any:
        return cpu.record(cpu.Blocks(1 << 16), [x], lambda x: [cpu.linear(x, weight, None, None, False)], weight)

    program = recorded(weight.clone())
    others = [torch.full((SIZE, SIZE), float("nan")) for _ in range(20)]
    assert torch.equal(program(x)[0], expected)
    assert len(others) == 20


@pytest.mark.parametrize("small", [False, True], ids=["unlimited", "small_budget"])
@pytest.mark.parametrize("tree", sample([1, 6], [6]))
@pytest.mark.parametrize("family", sample(["llama", "qwen3", "gemma2", "gpt_oss"], ["llama", "gpt_oss"]))
def test_layers_of_a_model(
    family: str, tree: int, small: bool, programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the unpatched model; all layers of a Llama are one program, and so is each layer of the heads."""
    monkeypatch.setattr(HostCapture, "after", 1)
    model, inputs = tiny_model(family), batch((40, 9))
    expected, heads = greedy(model, inputs, 40), random_heads(model)
    budget = None
    if small:
        with sk.patch(model, heads, tree=tree, graph=True) as handle:
            budget = handle.plan.parts["workspace"] + (2 << 20)  # MKL's buffers are 0 to 8 MiB of it
    with sk.patch(model, heads, tree=tree, graph=True, memory_budget=budget) as handle:
        assert torch.equal(greedy(model, inputs, 40), expected)
        assert handle.stats.graph_steps > 10
        assert 0 < handle._pools.steps._capture.block_bytes <= handle.plan.pass_bytes // 2
        of_heads = 2 if tree > 1 else 0
        assert programs[0] == 1 + of_heads if family in ("llama", "qwen3") else programs[0] > of_heads


@pytest.mark.parametrize("drafter", sample(["heads", "prompt-lookup", "model"], ["heads"]))
def test_other_passes_have_the_memory(drafter: str, programs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, steps before a recording, and a draft model's passes run while no blocks are in memory."""
    monkeypatch.setattr(HostCapture, "after", 2)
    model, passes, run = tiny_model("llama"), [0, 0], target.run_packed
    heads = {"heads": random_heads(model), "model": tiny_model("qwen3")}.get(drafter, drafter)

    with sk.patch(model, heads, tree=4, graph=True, prefill_chunk=16) as handle:

        def packed(*args: Any, **kwargs: Any) -> Any:
            capture = handle._pools.steps and handle._pools.steps._capture
            blocks = capture and capture._blocks
            passes[blocks is not None] += 1
            assert blocks is None or not blocks.resident
            return run(*args, **kwargs)

        monkeypatch.setattr(target, "run_packed", packed)
        for lengths in ((40, 9), (30,), (5, 50, 11)):
            inputs = batch(lengths)
            assert torch.equal(greedy(model, inputs, 20), greedy(tiny_model("llama"), inputs, 20))
        assert handle.stats.graph_steps > 10
    assert programs[0] > 0
    assert passes[1] > 5
