"""Device profiles: the table against public figures, rooflines by hand, curves between points, and the probe itself."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specmemo_kernels import device_probe
from specmemo_kernels.device import GIB, KNOWN_DEVICES, DeviceProfile, known_device
from specmemo_kernels.device_probe import probe, profile_of
from specmemo_kernels.kernel_target import TARGETS

CURVE = {"float32": ((1, 1e-9), (8, 2e-9))}
TOY = DeviceProfile("toy", 8 * GIB, 1e9, {"float32": 1e10, "float16": 4e10}, 1e-3)


def test_roofline_by_hand() -> None:
    """10^6 weights in 2 bytes: 2 ms to read; 10 rows are 2e7 operations, 0.5 ms; 100 rows 5 ms."""
    assert TOY.linear_seconds(1e6, 2e6, 10, "float16") == pytest.approx(2e-3)
    assert TOY.linear_seconds(1e6, 2e6, 100, "float16") == pytest.approx(5e-3)
    serial = replace(TOY, overlaps=False)
    assert serial.linear_seconds(1e6, 2e6, 10, "float16") == pytest.approx(2.5e-3)
    assert TOY.with_host(5e-3, 3) == pytest.approx(5e-3)
    assert TOY.with_host(5e-3, 8) == pytest.approx(8e-3)
    assert serial.with_host(5e-3, 3) == pytest.approx(8e-3)


def test_curves_replace_the_roofline() -> None:
    """At the points what was measured, straight between them, going on behind the last, flat before the first."""
    measured = replace(TOY, curves={"float32": ((2, 1e-9), (4, 3e-9), (8, 4e-9))})
    seconds = [measured.linear_seconds(1e6, 4e6, rows, "float32") for rows in (1, 2, 3, 4, 6, 8, 16)]
    assert seconds == pytest.approx([1e-3, 1e-3, 2e-3, 3e-3, 3.5e-3, 4e-3, 6e-3])
    assert measured.linear_seconds(1e6, 2e6, 10, "float16") == TOY.linear_seconds(1e6, 2e6, 10, "float16")


def test_small_matrices_by_hand() -> None:
    """Each takes its part beside that of the weights: 10^6 weights in 7 matrices, 1 ms and 7 x 2 us for a row."""
    curves = {"curves": {"float32": ((1, 1e-9),)}, "matrix_seconds": {"float32": ((1, 2e-6), (4, 1e-6))}}
    measured = replace(TOY, **curves)
    seconds = [measured.linear_seconds(1e6, 4e6, rows, "float32", 7) for rows in (1, 4)]
    assert seconds == pytest.approx([1.014e-3, 1.007e-3])
    assert measured.linear_seconds(1e6, 4e6, 1, "float32") == pytest.approx(1e-3)
    assert replace(TOY, **curves | {"curves": {}}).linear_seconds(1e6, 4e6, 1, "float32", 7) == pytest.approx(4e-3)


def test_dtypes_that_a_device_lacks() -> None:
    """Turing has no bfloat16, the plain CPU no 16-bit rate; what is there is left alone."""
    assert known_device("titan-rtx").compute_dtype("bfloat16") == "float16"
    assert known_device("a100").compute_dtype("bfloat16") == "bfloat16"
    assert known_device("cpu").compute_dtype("bfloat16") == "float32"


def test_known_devices() -> None:
    """Every one that is promised; newer ones of a maker are faster; rates lie below the data sheet's."""
    promised = {"titan-rtx", "rtx-3060", "rtx-4090", "a100", "h100", "h200", "mi250", "mi300x", "jetson-orin", "cpu"}
    assert set(KNOWN_DEVICES) == promised
    for slow, fast in itertools.pairwise(["jetson-orin", "rtx-3060", "titan-rtx", "rtx-4090", "a100", "h100", "h200"]):
        assert known_device(slow).read_rate < known_device(fast).read_rate
    assert known_device("titan-rtx").read_rate < 672e9
    assert known_device("h200").read_rate == pytest.approx(4.3e12, rel=0.03), "a copy on an H200 moves 4.3 TB/s"
    assert known_device("h200").matmul_rate["bfloat16"] == pytest.approx(788e12, rel=0.03)


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA TITAN RTX", "titan-rtx"), ("NVIDIA A100-SXM4-80GB", "a100"), ("AMD Instinct MI300X", "mi300x"),
     ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 3060", "rtx-3060")],
)  # fmt: skip
def test_names_that_drivers_give(name: str, key: str) -> None:
    assert replace(known_device(name), name="") == replace(KNOWN_DEVICES[key], name="")


def test_targets_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probed GPU gets the rule of its architecture, so that plans for it count what a GPU takes; older ones none."""
    assert all(p.kernel_target in TARGETS for name, p in KNOWN_DEVICES.items() if name != "cpu")
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, target in (((9, 0), "sm_90"), ((8, 6), "sm_86"), ((7, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert device_probe._kernel_target(torch.device("cuda")) == target


def test_unknown_device() -> None:
    with pytest.raises(ValueError, match=r"unknown device 'gtx-970', known are titan-rtx, .*specmemo probe"):
        known_device("gtx-970")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"memory": 0}, "memory is 0"), ({"read_rate": float("nan")}, "read_rate is nan"),
     ({"matmul_rate": {"float32": -1.0}}, r"matmul_rate\[float32\] is -1.0"), ({"matmul_rate": {}}, "empty")],
)  # fmt: skip
def test_profiles_that_make_no_sense(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TOY, **changes)  # type: ignore[arg-type]


def test_files(tmp_path: Path) -> None:
    """What is saved is loaded; another file is refused by name."""
    path = tmp_path / "new" / "device.json"
    for profile in (*KNOWN_DEVICES.values(), replace(TOY, curves=CURVE, matrix_seconds=CURVE)):
        profile.save(path)
        assert DeviceProfile.load(path) == profile
    for content in ("[]", "{}", "{", json.dumps(TOY.to_json() | {"colour": "green"})):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"device\.json"):
            DeviceProfile.load(path)


@pytest.fixture(scope="module")
def measured() -> DeviceProfile:
    return probe("cpu", seconds=0.7)


def test_probe(measured: DeviceProfile) -> None:
    assert measured.memory == device_probe._host_memory() > 2**28
    assert measured.launch_seconds > 0
    assert measured.read_rate > 0
    assert not measured.overlaps
    assert measured.source == "measured"
    assert measured.matrix_seconds.keys() == measured.curves.keys() == measured.matmul_rate.keys()
    assert all(seconds >= 0 for points in measured.matrix_seconds.values() for _, seconds in points)


def test_probe_agrees_with_a_clock() -> None:
    """Held against one product of its own, within a factor of two, once in a while at least on a busy machine."""
    weights, x = [torch.ones(2048, 2048) for _ in range(8)], torch.ones(64, 2048)
    for _ in range(10):
        seconds = []
        profile = probe("cpu", seconds=0.2)
        for weight in weights:
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            seconds.append(time.perf_counter() - start)
        ratio = profile.linear_seconds(2048**2, 4 * 2048**2, 64, "float32") / min(seconds)
        if 0.5 < ratio < 2:
            return
    pytest.fail(f"predicted over measured is {ratio}")


def test_probe_of_nothing() -> None:
    with pytest.raises(ValueError, match="device 'gpu7'"):
        probe("gpu7")


def test_profile_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: DeviceProfile) -> None:
    """A cached profile of the same machine is taken as it is; one of another machine isn't; nothing is probed twice."""
    file = tmp_path / "cpu.json"
    monkeypatch.setattr(device_probe, "cache_file", lambda _: file)
    probes = []
    monkeypatch.setattr(device_probe, "probe", lambda *_, **__: probes.append(1) or measured)
    for content, expected in ((replace(measured, launch_seconds=1.0), 1.0), (replace(TOY, name="other"), None)):
        profile_of.cache_clear()
        content.save(file)
        assert profile_of("cpu").launch_seconds == (expected or measured.launch_seconds)
        assert profile_of("cpu") is profile_of("cpu")
    assert len(probes) == 1
    profile_of.cache_clear()


def test_probing_leaves_the_seed_alone() -> None:
    """Patching may probe, and what is drawn after it must be what would have been drawn without."""
    torch.manual_seed(5)
    probe("cpu", seconds=0.2)
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))


def test_probing_is_quick() -> None:
    """What patch waits for when nothing is cached: about a second, were nobody else there."""
    start = time.process_time()
    probe("cpu", seconds=0.7)
    assert time.process_time() - start < 3 * torch.get_num_threads()


@pytest.mark.parametrize(("variable", "folder"), [("/tmp/elsewhere", "/tmp/elsewhere"), ("relative", None), ("", None)])
def test_cache_folder(variable: str, folder: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG base directory specification says: absolute, else ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    expected = Path(folder) if folder else Path.home() / ".cache"
    assert device_probe.cache_file("cuda:1") == expected / "specmemo_kernels" / "device-cuda-1.json"
