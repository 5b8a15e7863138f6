"""A device described in words: ``"8GiB, 100GB/s, 5TFLOP/s fp16, 2.5TFLOP/s fp32"``."""

from __future__ import annotations

import re

from specmemo_kernels.backends.kernel_target import INTERPRETER, TARGETS
from specmemo_kernels.planning.device import DeviceProfile
from specmemo_kernels.planning.known_devices import CPU_LAUNCH, EAGER_LAUNCH

_DTYPES = {
    "fp32": "float32", "float32": "float32", "fp16": "float16", "float16": "float16", "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}  # fmt: skip
_SCALES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_PART = re.compile(rf"{_NUMBER}\s*([KMGTP]?)(i?)(B|B/s|FLOP/s|FLOPS)(?:\s+(\w+))?", re.IGNORECASE)
_EXAMPLE = '"8GiB, 100GB/s, 5TFLOP/s fp16, 2.5TFLOP/s fp32"'


def is_description(text: str) -> bool:
    """Whether ``text`` is meant as a description: a list, or a number with a unit."""
    return "," in text or _PART.fullmatch(text.strip()) is not None


def described_device(text: str) -> DeviceProfile:
    """The profile of a description, with rates as given: they aren't reduced to what large kernels reach.

    Parts, separated by commas: memory; bandwidth; FLOP/s of large products, each with ``fp32``, ``fp16`` or ``bf16``
    (without a dtype: of all three); and, if known, the GPU's Triton target (``sm_86``, ``gfx1100``) or ``cpu``.
    Without that the device is a GPU for which this package may have no kernels.

    Raises:
        ValueError: a part that isn't one of these, is missing or is given twice; the message has an example.
    """
    found: dict[str, float | str] = {}

    def put(key: str, value: float | str, part: str) -> None:
        if key in found:
            raise ValueError(f"device {text!r}: {part!r} gives {key} a second time")
        found[key] = value

    for part in (part.strip() for part in text.split(",")):
        if part in (targets := [name for name in TARGETS if name != INTERPRETER]) or part == "cpu":
            put("family", part, part)
            continue
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(
                f"device {text!r}: {part!r} is no memory (8GiB), bandwidth (100GB/s), rate (5TFLOP/s fp16) or family "
                f"(cpu, {', '.join(targets)}); an example: {_EXAMPLE}"
            )
        number, scale, binary, unit, dtype = match.groups()
        if binary and not scale:
            raise ValueError(f"device {text!r}: {part!r} has a unit that doesn't exist; an example: {_EXAMPLE}")
        factor = 1024.0 ** (" KMGTP".index(scale.upper())) if binary else _SCALES[scale.upper()]
        value = float(number) * factor
        if not 1 <= value < 1 << 63:
            raise ValueError(f"device {text!r}: {part!r} is too {'small' if value < 1 else 'large'}")
        if "flop" not in unit.lower():
            if dtype is not None:
                raise ValueError(f"device {text!r}: {part!r} has a dtype, which only rates have")
            put("bandwidth" if "/" in unit else "memory", value, part)
        elif dtype is not None and dtype.lower() not in _DTYPES:
            raise ValueError(f"device {text!r}: {part!r} has dtype {dtype}, expected fp32, fp16 or bf16")
        else:
            for name in set(_DTYPES.values()) if dtype is None else (_DTYPES[dtype.lower()],):
                put(name, value, part)
    rates: dict[str, float] = {n: float(found[n]) for n in ("float32", "float16", "bfloat16") if n in found}
    missing = [name for name in ("memory", "bandwidth") if name not in found] + ([] if rates else ["a rate"])
    if missing:
        raise ValueError(f"device {text!r} lacks {' and '.join(missing)}; an example: {_EXAMPLE}")
    return _profile(text, found, rates)


def _profile(text: str, found: dict[str, float | str], rates: dict[str, float]) -> DeviceProfile:
    family = found.get("family")
    target = None if family in (None, "cpu") else str(family)
    return DeviceProfile(
        text.strip(), int(found["memory"]), float(found["bandwidth"]), rates,
        CPU_LAUNCH if family == "cpu" else EAGER_LAUNCH, overlaps=family != "cpu",
        shared_memory=0 if target is None else TARGETS[target].shared_bytes, kernel_target=target,
        backend="cpu" if family == "cpu" else "triton" if target else None, source="described",
    )  # fmt: skip
