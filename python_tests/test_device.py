"""Device profiles: the table against public figures, rooflines by hand, curves between points, and the probe itself."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specmemo_kernels.backends.kernel_target import TARGETS
from specmemo_kernels.planning import device_probe
from specmemo_kernels.planning.device import GIB, DeviceProfile
from specmemo_kernels.planning.device_probe import probe, profile_of
from specmemo_kernels.planning.known_devices import KNOWN_DEVICES, known_device

CURVE = {"float32": ((1, 1e-9), (8, 2e-9))}
TOY = DeviceProfile("toy", 8 * GIB, 1e9, {"float32": 1e10, "float16": 4e10}, 1e-3)


def test_roofline_by_hand() -> None:
    """10^6 weights in 2 bytes: 2 ms to read; 10 rows are 2e7 operations, 0.5 ms; 100 rows 5 ms."""
    assert TOY.linear_seconds(1e6, 2e6, 10, "float16") == pytest.approx(2e-3)
    assert TOY.linear_seconds(1e6, 2e6, 100, "float16") == pytest.approx(5e-3)
    serial = replace(TOY, overlaps=False)
    assert serial.linear_seconds(1e6, 2e6, 10, "float16") == pytest.approx(2.5e-3)


def test_the_host_by_hand() -> None:
    """Of 100 operators 13 are kernels of 3.5 us; a launch takes 1 ms."""
    serial, starts = replace(TOY, overlaps=False), 13 * 3.5e-6
    assert TOY.with_launches(0.2, 100) == TOY.with_launches(0.2, 100, recorded=True) == pytest.approx(0.2 + starts)
    assert TOY.with_launches(5e-3, 100) == pytest.approx(0.1)
    assert TOY.with_launches(5e-3, 100, recorded=True) == pytest.approx(5e-3 + starts)
    assert serial.with_launches(5e-3, 100) == pytest.approx(0.105)
    assert serial.with_launches(5e-3, 100, recorded=True) == pytest.approx(0.018)


def test_curves_replace_the_roofline() -> None:
    """Measured values at the points, linear between and behind them, constant before the first."""
    measured = replace(TOY, curves={"float32": ((2, 1e-9), (4, 3e-9), (8, 4e-9))})
    seconds = [measured.linear_seconds(1e6, 4e6, rows, "float32") for rows in (1, 2, 3, 4, 6, 8, 16)]
    assert seconds == pytest.approx([1e-3, 1e-3, 2e-3, 3e-3, 3.5e-3, 4e-3, 6e-3])
    assert measured.linear_seconds(1e6, 2e6, 10, "float16") == TOY.linear_seconds(1e6, 2e6, 10, "float16")


def test_small_matrices_by_hand() -> None:
    """Each matrix adds its time to that of the weights: 10^6 weights in 7 matrices, 1 ms and 7 x 2 us for a row."""
    curves = {"curves": {"float32": ((1, 1e-9),)}, "matrix_seconds": {"float32": ((1, 2e-6), (4, 1e-6))}}
    measured = replace(TOY, **curves)
    seconds = [measured.linear_seconds(1e6, 4e6, rows, "float32", 7) for rows in (1, 4)]
    assert seconds == pytest.approx([1.014e-3, 1.007e-3])
    assert measured.linear_seconds(1e6, 4e6, 1, "float32") == pytest.approx(1e-3)
    assert replace(TOY, **curves | {"curves": {}}).linear_seconds(1e6, 4e6, 1, "float32", 7) == pytest.approx(4e-3)


def test_passes_by_our_operators_have_curves_of_their_own() -> None:
    curves = {"curves": {"float32": ((1, 1e-9),)}, "operator_curves": {"float32": ((1, 4e-10),)}}
    measured = replace(TOY, **curves)
    assert measured.linear_seconds(1e6, 4e6, 1, "float32") == pytest.approx(1e-3)
    assert measured.of_operators.linear_seconds(1e6, 4e6, 1, "float32") == pytest.approx(4e-4)
    assert TOY.of_operators == TOY
    assert DeviceProfile.from_json(measured.to_json()) == measured


def test_codes_have_a_curve_of_their_own() -> None:
    """Also for passes by our operators; without it, as in older files, they count as the model's dtype."""
    curves = {"operator_curves": {"float32": ((1, 4e-10),)}, "code_curves": {"float32": ((1, 1e-10),)}}
    measured = replace(TOY, curves={"float32": ((1, 1e-9),)}, **curves)
    for profile, dense, coded in (
        (measured.of_operators, 4e-4, 1e-4),
        (replace(measured, code_curves={}).of_operators, 4e-4, 4e-4),
    ):
        assert profile.linear_seconds(1e6, 4e6, 1, "float32") == pytest.approx(dense)
        assert profile.linear_seconds(1e6, 4e6, 1, "float32", coded=True) == pytest.approx(coded)
        assert DeviceProfile.from_json(profile.to_json()) == profile
    older = {key: value for key, value in measured.to_json().items() if key != "code_curves"}
    assert DeviceProfile.from_json(older) == replace(measured, code_curves={})


def test_dtypes_that_a_device_lacks() -> None:
    """Turing has no bfloat16, the plain CPU no 16-bit rate; supported dtypes are unchanged."""
    assert known_device("titan-rtx").compute_dtype("bfloat16") == "float16"
    assert known_device("a100").compute_dtype("bfloat16") == "bfloat16"
    assert known_device("cpu").compute_dtype("bfloat16") == "float32"


def test_known_devices() -> None:
    """All documented devices; newer devices of a vendor are faster; rates are below the data sheet's."""
    page = (Path(__file__).parents[1] / "docs" / "planning.md").read_text()
    table = page[page.index("| kernels | devices |") : page.index("- Sources are in")]
    assert set(re.findall(r"`([\w-]+)`", table)) - {"triton"} == set(KNOWN_DEVICES)
    for slow, fast in itertools.pairwise(["jetson-orin", "rtx-3060", "titan-rtx", "rtx-4090", "a100", "h100", "h200"]):
        assert known_device(slow).read_rate < known_device(fast).read_rate
    assert known_device("titan-rtx").read_rate < 672e9
    assert known_device("h200").read_rate == pytest.approx(4.3e12, rel=0.03), "a copy on an H200 moves 4.3 TB/s"
    assert known_device("h200").matmul_rate["bfloat16"] == pytest.approx(788e12, rel=0.03)


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA TITAN RTX", "titan-rtx"), ("TITAN RTX", "titan-rtx"), ("NVIDIA A100-SXM4-80GB", "a100"),
     ("AMD Instinct MI300X", "mi300x"), ("amd instinct mi250", "mi250"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
     ("GeForce  RTX 3060", "rtx-3060"), ("NVIDIA H100 80GB HBM3", "h100"), ("nvidia h200", "h200"),
     ("Jetson AGX Orin", "jetson-orin")],
)  # fmt: skip
def test_names_that_drivers_give(name: str, key: str) -> None:
    """Full names; case, spaces and the vendor don't matter."""
    assert known_device(name) == KNOWN_DEVICES[key]


#: Drivers' names of chips that the table doesn't have, though each holds a known one's name or nearly.
OTHER_GPUS = (
    "NVIDIA RTX A1000 Laptop GPU", "NVIDIA RTX A1000",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3060 Ti", "NVIDIA GeForce RTX 3060 Laptop GPU", "Quadro RTX 3060",
    "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "GRID A100D-10C", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H100", "NVIDIA H800", "NVIDIA H200 NVL",
    "NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e", "AMD Instinct MI250X", "AMD Instinct MI250X / MI250",
    "AMD Instinct MI300A", "AMD Instinct MI300X VF", "AMD Instinct MI325X", "Orin", "NVIDIA", "AMD", "RTX", "",
)  # fmt: skip


@pytest.mark.parametrize("name", OTHER_GPUS)
def test_names_of_other_gpus(name: str) -> None:
    """They are refused: their rates are unknown."""
    with pytest.raises(ValueError, match=f"unknown device {re.escape(repr(name))}, .*measure others: specmemo probe"):
        known_device(name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, float], DeviceProfile]]:
    """``profile_of`` on a machine with a GPU of this name and memory in GiB; the probe returns ``TOY``'s rates."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def of(name: str, gib: float) -> DeviceProfile:
        memory = int(gib * GIB)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
        measured = replace(TOY, name=name, memory=memory, source="measured")
        monkeypatch.setattr(device_probe, "probe", lambda *_, **__: measured)
        profile_of.cache_clear()
        return profile_of("cuda:0")

    yield of
    profile_of.cache_clear()


def test_profile_of_a_known_gpu(gpu: Callable[[str, float], DeviceProfile]) -> None:
    """The table's rates, and this GPU's memory."""
    for name, gib, key in (("NVIDIA A100-SXM4-80GB", 79.15, "a100"), ("NVIDIA GeForce RTX 3060", 11.76, "rtx-3060")):
        assert gpu(name, gib) == replace(KNOWN_DEVICES[key], memory=int(gib * GIB))


@pytest.mark.parametrize(
    ("name", "gib"),
    [*((name, 24.0) for name in OTHER_GPUS), ("NVIDIA GeForce RTX 3060", 7.99), ("NVIDIA A100-SXM4-80GB", 9.5)],
)
def test_profile_of_another_gpu(name: str, gib: float, gpu: Callable[[str, float], DeviceProfile]) -> None:
    """Measured; also if only the memory differs (an RTX 3060 of 8 GB, a slice of an A100)."""
    profile = gpu(name, gib)
    assert profile.source == "measured"
    assert (profile.read_rate, profile.memory) == (TOY.read_rate, int(gib * GIB))


def test_a_kept_profile_of_a_gpu(gpu: Callable[[str, float], DeviceProfile]) -> None:
    """A cached profile has precedence over the table, but not for another card of the same name."""
    kept = replace(TOY, name="NVIDIA GeForce RTX 3060", memory=8 * GIB, read_rate=2e11, source="kept")
    kept.save(device_probe.cache_file("cuda:0"))
    assert gpu(kept.name, 7.9) == replace(kept, memory=int(7.9 * GIB))
    assert gpu(kept.name, 11.9).source == "data sheet"
    assert gpu(kept.name, 16).source == "measured"
    assert gpu("NVIDIA GeForce RTX 3060 Ti", 7.9).source == "measured"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_profile_of_no_gpu() -> None:
    with pytest.raises(ValueError, match="device 'cuda:0': "):
        profile_of("cuda")
    with pytest.raises(ValueError, match="device 'gpu7': "):
        profile_of("gpu7")


def test_targets_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probed GPU gets its architecture's kernel target, so plans count its workspace; older GPUs get none."""
    for profile in KNOWN_DEVICES.values():
        assert (profile.kernel_target in TARGETS) == (profile.backend == "triton") == (profile.shared_memory > 0)
        assert (profile.backend == "cpu") != profile.overlaps
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, target in (((9, 0), "sm_90"), ((8, 6), "sm_86"), ((7, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert device_probe.kernel_target(torch.device("cuda")) == target


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
    """A saved profile is loaded; other files are refused by name."""
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
    """A profile of this machine. Patching may probe, so later random numbers must be the same as without."""
    torch.manual_seed(5)
    profile = probe("cpu", seconds=0.7)
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))
    return profile


def test_probe(measured: DeviceProfile) -> None:
    assert measured.memory == device_probe.host_memory() > 2**28
    assert measured.launch_seconds > 0
    assert measured.read_rate > 0
    assert not measured.overlaps
    assert measured.source == "measured"
    assert measured.matrix_seconds.keys() == measured.curves.keys() == measured.matmul_rate.keys()
    assert all(seconds >= 0 for points in measured.matrix_seconds.values() for _, seconds in points)
    assert measured.operator_curves.keys() == measured.operator_matrix_seconds.keys() == measured.curves.keys()
    assert measured.operator_curves != measured.curves
    assert measured.code_curves.keys() == measured.curves.keys()


#: Prints resident MiB beyond those before a probe as ``patch`` makes it, and of them those that the allocator can't
#: return.
LEFT_BY_A_PROBE = """
import ctypes, gc
from pathlib import Path
import torch, transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from specmemo_kernels.planning.device_probe import probe

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

torch.ones(64, 64) @ torch.ones(64, 64)
trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
trim(0)
before = resident()
probe("cpu", 0.7, torch_products=False)
gc.collect()
found = resident()
trim(0)
print(found - before, resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_probe_leaves_little_memory() -> None:
    """Measured: 10 and 1.3 MiB. With torch's 16-bit products 19.5 stay (their library's compiled kernels); with a block
    for each small matrix the heap keeps 115 until it is trimmed.
    """
    run = subprocess.run([sys.executable, "-c", LEFT_BY_A_PROBE], capture_output=True, text=True, check=True)
    found, kept = map(float, run.stdout.split())
    assert found < 32
    assert kept < 6


@pytest.mark.slow
def test_probe_agrees_with_a_clock() -> None:
    """Compared with a timed product, within a factor of two, in at least one of several attempts."""
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


@pytest.mark.parametrize("points", [5, [1, 2], [[1, None]]])
def test_curves_without_points(tmp_path: Path, points: object) -> None:
    profile = DeviceProfile("x", 1 << 34, 1e10, {"float32": 1e12}, 1e-6)
    file = tmp_path / "device.json"
    file.write_text(json.dumps(profile.to_json() | {"curves": {"float32": points}}))
    with pytest.raises(ValueError, match=r"device\.json: not a device profile"):
        DeviceProfile.load(file)


def test_probe_of_nothing() -> None:
    with pytest.raises(ValueError, match="device 'gpu7'"):
        probe("gpu7")


def test_profile_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: DeviceProfile) -> None:
    """A cached profile of the same machine is used, one of another machine isn't; nothing is probed twice."""
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


def test_probing_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """All measurements together take the requested seconds; ``patch`` waits for them."""
    shares: list[float] = []

    def once(run: Callable[[], object], share: float, sync: Callable[[], None]) -> float:
        shares.append(share)
        return 1e-3

    monkeypatch.setattr(device_probe, "_best", once)
    probe("cpu", seconds=0.7)
    assert len(shares) > 10
    assert 0.5 < sum(shares) < 0.8


@pytest.mark.parametrize(("variable", "folder"), [("/tmp/elsewhere", "/tmp/elsewhere"), ("relative", None), ("", None)])
def test_cache_folder(variable: str, folder: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the XDG base directory specification: an absolute path, else ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    expected = Path(folder) if folder else Path.home() / ".cache"
    assert device_probe.cache_file("cuda:1") == expected / "specmemo_kernels" / "device-cuda-1.json"
    assert device_probe.cache_file("cpu:0") == device_probe.cache_file("cpu")
