"""Devices that are described or known by name, and plans for them."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples, sample

from specmemo_kernels.backends.kernel_target import TARGETS
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.described_device import described_device, is_description
from specmemo_kernels.planning.device import GIB, DeviceProfile
from specmemo_kernels.planning.known_devices import known_device
from specmemo_kernels.planning.planner import plan_memory

TEXT = "8GiB, 100GB/s, 5TFLOP/s fp16, 2.5 TFLOP/s fp32"


def test_a_description() -> None:
    """Rates as given; a GPU without kernels unless its family is named."""
    device = described_device(TEXT)
    assert (device.memory, device.read_rate, device.source) == (8 * GIB, 1e11, "described")
    assert device.matmul_rate == {"float16": 5e12, "float32": 2.5e12}
    assert (device.backend, device.kernel_target, device.overlaps) == (None, None, True)
    ampere = described_device("12 GB, 0.36 TB/s, 25 tflops, sm_86")
    assert (ampere.memory, ampere.read_rate, ampere.backend) == (12 * 10**9, 3.6e11, "triton")
    assert ampere.matmul_rate == dict.fromkeys(("float16", "float32", "bfloat16"), 2.5e13)
    assert ampere.shared_memory == TARGETS["sm_86"].shared_bytes
    board = described_device("4GiB, 17GB/s, 150 GFLOP/s fp32, cpu")
    assert (board.backend, board.overlaps, board.kernel_target) == ("cpu", False, None)
    assert DeviceProfile.from_json(json.loads(json.dumps(device.to_json()))) == device


UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(1, 10**6), st.sampled_from(["MiB", "GiB", "MB", "GB", "gb", "TB"]), st.floats(1, 9999),
    st.sampled_from(sorted(UNITS)),
    st.dictionaries(st.sampled_from(["fp32", "fp16", "bf16"]), st.floats(0.01, 999), min_size=1),
    st.sampled_from(["FLOP/s", "flops", "FLOPS"]), st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_description(
    memory: int, unit: str, bandwidth: float, scale: str, rates: dict[str, float], flops: str, order: Any
) -> None:
    """Parts in any order give what they say, to the digits that are written."""
    written = {name: f"{rate:.4g}" for name, rate in rates.items()}
    parts = [f"{memory}{unit}", f"{bandwidth:.5f} {scale}B/s", *(f"{r}T{flops} {name}" for name, r in written.items())]
    order.shuffle(parts)
    device = described_device(" , ".join(parts))
    base = 1024 if "i" in unit else 1000
    assert device.memory == memory * base ** " KMGT".index(unit[0].upper())
    assert device.read_rate == pytest.approx(float(f"{bandwidth:.5f}") * UNITS[scale])
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    assert device.matmul_rate == pytest.approx({names[k]: float(v) * 1e12 for k, v in written.items()})


@settings(max_examples=examples(300), deadline=None)
@given(st.text(st.sampled_from("0123456789.,eGTiB/sFLOPfp163sm_8 cpu\n-+")))
def test_any_text(text: str) -> None:
    """A profile that can be planned with, or a ValueError."""
    with suppress(ValueError):
        device = described_device(text)
        assert 0 < device.memory < 1 << 63
        assert 0 < device.read_rate < math.inf


@pytest.mark.parametrize(
    ("text", "message"),
    [("8GiB, 100GB/s", r"lacks a rate; an example: \"8GiB, 100GB/s"), ("100GB/s, 1TFLOP/s", "lacks memory"),
     ("8GiB", "lacks bandwidth and a rate"), ("8GiB, 9GiB, 1GB/s, 1TFLOP/s", "'9GiB' gives memory a second time"),
     ("8GiB, 1GB/s, 1TFLOP/s, 2TFLOP/s fp16", "gives float16 a second time"),
     ("8GiB, 1GB/s, 1TFLOP/s int8", "dtype int8, expected fp32, fp16 or bf16"),
     ("8GiB fp16, 1GB/s, 1TFLOP/s", "has a dtype, which only rates have"),
     ("8 bananas, 1GB/s, 1TFLOP/s", r"'8 bananas' is no memory .*family \(cpu, sm_75"),
     ("8GiB, 1GB/s, 1TFLOP/s, sm_70", "'sm_70' is no memory"), ("8iB, 1GB/s, 1TFLOP/s", "a unit that doesn't exist"),
     ("0GiB, 1GB/s, 1TFLOP/s", "'0GiB' is too small"), ("1e999GiB, 1GB/s, 1TFLOP/s", "'1e999GiB' is too large"),
     ("1GiB, 1e-300B/s, 1TFLOP/s", "'1e-300B/s' is too small"), ("1GiB, 1GB/s, 0.5FLOP/s", "'0.5FLOP/s' is too small"),
     ("", "'' is no memory")],
)  # fmt: skip
def test_descriptions_that_say_too_little(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        described_device(text)


def test_what_is_a_description() -> None:
    """Names and files aren't."""
    assert is_description(TEXT)
    assert is_description("8GiB")
    for name in ("rtx-3060", "m2-8gb", "device.json", "cuda:0", "8", "gtx-970"):
        assert not is_description(name)


@pytest.mark.parametrize(
    ("name", "fits"),
    sample(
        [("rtx-2060", True), ("rtx-3050-laptop", True), ("rtx-4060", True), ("rtx-5060-ti-16gb", True),
         ("rx-7600", True), ("arc-b580", True), ("m1-8gb", True), ("m4-pro-24gb", True), ("jetson-orin-nano", True),
         ("raspberry-pi-5-8gb", True), ("snapdragon-8-gen-3", True), ("3GiB, 60GB/s, 1TFLOP/s, gfx1100", True),
         ("2GiB, 20GB/s, 100GFLOP/s fp32, cpu", False)],
        [("rtx-2060", True), ("raspberry-pi-5-8gb", True), ("2GiB, 20GB/s, 100GFLOP/s fp32, cpu", False)],
    ),
)  # fmt: skip
def test_small_devices(name: str, fits: bool) -> None:
    """Llama-3.2-1B of 2.3 GiB; without kernels the plan says so."""
    device = described_device(name) if is_description(name) else known_device(name)
    if not fits:
        with pytest.raises(ValueError, match=r"2\.00 GiB is too small for llama-3.2-1b on .*weights in 8 bits"):
            plan_memory("llama-3.2-1b", device, None, Workload(256))
        return
    # Turing has no bfloat16; elsewhere the model's dtype or what the device has.
    from specmemo_kernels.planning.model_spec import ModelSpec

    spec = ModelSpec.load("llama-3.2-1b").with_dtype("float16")
    plan = plan_memory(spec, device, None, Workload(256))
    assert plan.total_bytes <= device.memory
    assert any("reference backend" in line for line in plan.reasons) == (device.backend is None)


def test_unified_memory() -> None:
    """What Metal recommends: two thirds of small memories, three quarters of large ones."""
    for name, gib in (("m2-8gb", 16 / 3), ("m1-max-32gb", 64 / 3), ("m3-max-48gb", 36), ("m4-max-64gb", 48)):
        assert known_device(name).memory == pytest.approx(gib * GIB, abs=1)


def test_files_of_earlier_versions(tmp_path: Path) -> None:
    """A profile without a backend has that of its target."""
    for name in ("rtx-3060", "cpu"):
        data = known_device(name).to_json()
        del data["backend"]
        (tmp_path / "device.json").write_text(json.dumps(data))
        assert DeviceProfile.load(tmp_path / "device.json") == known_device(name)
