"""Work on a GPU that isn't the current one, tested on a CPU with stand-ins for torch.cuda."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreter import INTERPRETING
from torch._subclasses.fake_tensor import FakeTensorMode

import specmemo_kernels as sk
from specmemo_kernels.cli.options import ProbeOptions
from specmemo_kernels.engine import overlap as late_steps
from specmemo_kernels.engine.overlap import OverlappedSteps
from specmemo_kernels.engine.step_graph import CudaCapture
from specmemo_kernels.planning import device_probe
from specmemo_kernels.planning.device import GIB, DeviceProfile

SECOND = torch.device("cuda", 1)
#: The package has a command of the same name.
probe_command = importlib.import_module("specmemo_kernels.cli.probe")


class Machine:
    """torch.cuda with two simulated GPUs.

    Attributes:
        current: index of the current device.
        streams: each device's current stream.
    """

    def __init__(self) -> None:
        self.current = 0
        self.streams = {0: "stream 0", 1: "stream 1"}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = self

        class Guard:
            def __init__(self, device: Any) -> None:
                self.index = torch.device(device).index

            def __enter__(self) -> None:
                self.before, machine.current = machine.current, self.index

            def __exit__(self, *_: object) -> None:
                machine.current = self.before

        monkeypatch.setattr(torch.cuda, "device", Guard)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "current_stream", self.stream_of)
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.version, "hip", None)

    def stream_of(self, device: torch.device | None = None) -> str:
        return self.streams[self.current if device is None else device.index]

    def set_stream(self, stream: str) -> None:
        """Like torch's: also makes the stream's device the current one."""
        self.current = int(stream.split()[-1])
        self.streams[self.current] = stream


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    result = Machine()
    result.install(monkeypatch)
    return result


@pytest.fixture
def launches(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """The Triton backend's launches: kernel and current device."""
    pytest.importorskip("triton")
    if INTERPRETING:
        pytest.skip("the interpreter has no devices")
    from specmemo_kernels.backends.triton import attention, layers, lm_head, paged, products, runtime, verify

    found: list[tuple[str, int]] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, _: object) -> Callable[..., None]:
            return lambda *_, **__: found.append((self.name, machine.current))

    for module, names in (
        (attention, ("tree_attention_kernel", "merge_splits_kernel")),
        (layers, ("rms_norm_kernel", "rotary_kernel", "gate_kernel", "gated_linear_kernel")),
        (products, ("linear_kernel",)),
        (lm_head, ("lm_head_block_kernel", "lm_head_reduce_kernel")),
        (paged, ("append_paged_kv_kernel", "commit_paged_kv_kernel")),
        (verify, ("verify_tree_greedy_kernel",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Kernel(name))
    caches = runtime.target_of, runtime.launch_options, runtime.multiprocessors
    for cache in caches:
        cache.cache_clear()
    yield found
    for cache in caches:
        cache.cache_clear()


def test_kernels_are_launched_on_their_tensors_device(machine: Machine, launches: list[tuple[str, int]]) -> None:
    """All kernels; another device is current before and after."""
    from specmemo_kernels.backends import triton

    with FakeTensorMode():
        half = {"dtype": torch.float16, "device": SECOND}
        ints = {"dtype": torch.int32, "device": SECOND}
        rows, pages = torch.empty(6, 2, 16, **half), torch.empty(400, 16, 2, 16, **half)
        places = [torch.empty(2, 200, **ints), torch.empty(2, **ints), torch.empty(3, **ints)]
        triton.tree_attention(rows, rows, rows, pages, pages, *places, None, 1.0, None, None, None, None, None)
        triton.append_paged_kv(rows, rows, pages, pages, *places)
        path = [torch.empty(2, 4, **ints), torch.empty(2, **ints)]
        triton.commit_paged_kv(*(x.unsqueeze(0) for x in (rows, rows, pages, pages)), *places, *path)
        tokens, parents = torch.empty(6, dtype=torch.int64, device=SECOND), torch.empty(6, **ints)
        triton.verify_tree_greedy(tokens, tokens, parents, places[2], 3)
        triton.lm_head_argmax(rows.select(1, 0), torch.empty(50, 16, **half), None)
        triton.lm_head_topk(rows.select(1, 0), torch.empty(50, 16, **half), None, 3)
        triton.rms_norm(rows, torch.empty(16, **half), 1e-6, 0.0, True)
        triton.rotary(rows, rows.select(1, 0), rows.select(1, 0))
        matrix = torch.empty(16, 16, **half)
        triton.linear(rows, matrix, None, None, False)
        for some in (rows, torch.empty(100, 16, **half)):  # products in our kernel, and torch's
            triton.gated_mlp(some, matrix, matrix, matrix, None, None, None, "silu", False)
    assert {name for name, _ in launches} == {
        "tree_attention_kernel", "merge_splits_kernel", "append_paged_kv_kernel", "commit_paged_kv_kernel",
        "verify_tree_greedy_kernel", "lm_head_block_kernel", "lm_head_reduce_kernel",
        "rms_norm_kernel", "rotary_kernel", "gate_kernel", "gated_linear_kernel", "linear_kernel",
    }  # fmt: skip
    assert {current for _, current in launches} == {1}
    assert machine.current == 0


def test_an_error_leaves_the_current_device(machine: Machine, launches: list[tuple[str, int]]) -> None:
    from specmemo_kernels.backends import triton

    with FakeTensorMode():
        wide, rows = (torch.empty(2, 16, dtype=dtype, device=SECOND) for dtype in (torch.float64, torch.float32))
        with pytest.raises(ValueError, match="float64"):
            triton.lm_head_argmax(wide, wide, None)
        with pytest.raises(IndexError):  # scales of one dimension
            triton.lm_head_topk(rows, rows, None, 3, rows.select(1, 0))
    assert not launches
    assert machine.current == 0


def test_a_step_has_arrived_when_its_own_stream_got_there(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is recorded on the stream that copies the tokens, on the target's device."""
    recorded: list[str] = []

    class Event:
        def record(self, stream: str | None = None) -> None:
            recorded.append(machine.stream_of() if stream is None else stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    tree = sk.DraftTree.from_paths([[0]])
    sequence = SimpleNamespace(prompt=[1, 2], max_new_tokens=5)
    step = SimpleNamespace(emitted=torch.tensor([[3, 4, 0, 1, 1]]))
    steps = SimpleNamespace(
        load=lambda _: None,
        mark_current=lambda _: None,
        host_drafter=None,
        launch=lambda *_: (step, True),
        padded=lambda count, _: count,
        pads=False,
    )
    decoder = SimpleNamespace(
        sequences=[sequence], tree=tree, next_tree=lambda: tree, target=SimpleNamespace(device=SECOND), slots_ahead=3,
        pool=SimpleNamespace(block_table=torch.zeros(1, 4), page_size=16), stats=SimpleNamespace(graph_steps=0),
        drafter=None, reader=None,
    )  # fmt: skip
    unpinned = torch.empty

    def empty(*sizes: int, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert (device, pin_memory) == ("cpu", True)
        return unpinned(*sizes, dtype=dtype)

    monkeypatch.setattr(late_steps.torch, "empty", empty)
    late = OverlappedSteps(steps, 2)  # type: ignore[arg-type]
    late._launch(decoder)  # type: ignore[arg-type]
    assert recorded == ["stream 1"]
    assert machine.current == 0


@pytest.mark.parametrize("failing", ["nothing", "step", "end"])
def test_a_capture_leaves_the_current_device(failing: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a failure, though restoring the stream changes the current device."""
    seen: list[int] = []

    class Capturing:
        def __init__(self, *_: object, stream: str, **__: object) -> None:
            self.stream, self.usual = stream, machine.streams[1]

        def __enter__(self) -> None:
            seen.append(machine.current)
            machine.set_stream(self.stream)

        def __exit__(self, *_: object) -> None:
            if failing == "end":
                raise RuntimeError("the end fails")
            machine.set_stream(self.usual)

    def run() -> None:
        seen.append(machine.current)
        if failing == "step":
            raise RuntimeError("the step fails")

    stand_ins: dict[str, Any] = {
        "graph": Capturing, "CUDAGraph": lambda: SimpleNamespace(replay=None), "graph_pool_handle": tuple,
        "memory_reserved": lambda _: 0, "Stream": lambda _: "side stream 1",
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    capture = CudaCapture(SECOND)
    if failing == "nothing":
        capture(run)
    else:
        with pytest.raises(RuntimeError, match=f"the {failing} fails"):
            capture(run)
    assert set(seen) == {1}
    assert machine.current == 0
    assert machine.streams == {0: "stream 0", 1: "stream 1"}


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_probe_waits_for_its_own_device(name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never for the device that happens to be current."""
    waited: list[Any] = []

    def best(_: object, __: float, sync: Callable[[], None], least: int = 3) -> float:
        sync()
        return 1e-3

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr(device_probe, "_best", best)
    monkeypatch.setattr(device_probe, "_captured", lambda call, _: call)
    monkeypatch.setattr(device_probe, "_launch_seconds", lambda *args: best(*args[-3:]))
    properties = SimpleNamespace(name="a GPU", total_memory=8 * GIB, shared_memory_per_block_optin=1 << 16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(machine, "current", 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        profile = device_probe.probe(name, 0.01)
    assert (profile.name, profile.memory, profile.kernel_target) == ("a GPU", 8 * GIB, "sm_90")
    assert len(waited) > 10
    assert {str(device) for device in waited} == {"cuda:1"}


@pytest.mark.parametrize(
    ("probed", "current", "models"), [("cuda", 0, "cuda:0"), ("cuda", 1, "cuda:1"), ("cuda:1", 0, "cuda:1"),
                                      ("cuda:0", 0, "cuda"), ("cpu", 0, "cpu"), ("cpu:0", 0, "cpu")],
)  # fmt: skip
def test_patching_finds_what_was_probed(
    probed: str, current: int, models: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any spelling of the device: a model's tensors always have an index, except on the CPU."""
    measured = DeviceProfile("some GPU", 8 * GIB, 1.25e12, {"float32": 1e12}, 1e-6, source="measured")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "current", current)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: measured.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=measured.memory))
    monkeypatch.setattr(device_probe, "_machine", lambda: measured.name)
    monkeypatch.setattr(probe_command, "torch_device", torch.device)
    monkeypatch.setattr(probe_command, "probe", lambda *_: measured)
    monkeypatch.setattr(device_probe, "probe", lambda *_, **__: pytest.fail("measured again"))
    device_probe.profile_of.cache_clear()
    try:
        probe_command.run_probe(ProbeOptions(device=probed, seconds=0.1))
        assert device_probe.profile_of(models).read_rate == measured.read_rate
    finally:
        device_probe.profile_of.cache_clear()
