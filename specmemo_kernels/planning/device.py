"""Device profiles: memory, bandwidth, matrix rates, overheads; and a table of known devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

GIB = 1024**3

#: Shares of the data sheet's rates that large kernels reach. Measured on an H200: 4.3 of 4.8 TB/s for a copy, 788 of
#: 989 TFLOP/s for a bf16 product.
READ_SHARE, MATMUL_SHARE = 0.9, 0.8
#: Host seconds of an operator in eager mode on a GPU: Python, torch's dispatcher and the launch.
EAGER_LAUNCH = 8e-6

Curve = tuple[tuple[int, float], ...]

#: Protocols of collectives by kind of link: seconds to start, seconds per ring step, share of the link's rate. Tuning
#: constants of NCCL and RCCL (src/graph/tuning.cc, ring, LL and Simple).
LINKS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "pcie": ((6.6e-6, 1.0e-6, 1 / 4), (8.4e-6, 5.7e-6, 1.0)),
    "nvlink": ((6.6e-6, 0.6e-6, 1 / 4), (8.4e-6, 3.4e-6, 1.0)),
    "infinity-fabric": ((12.0e-6, 0.8e-6, 1 / 5), (17.0e-6, 3.6e-6, 1.0)),
}


@dataclass(frozen=True)
class DeviceProfile:
    """Performance figures of a device.

    Attributes:
        memory: total bytes.
        read_rate: bytes per second that a large kernel reads.
        matmul_rate: FLOP/s of large dense products by dtype name (``"float16"``); other dtypes aren't supported.
        launch_seconds: host time of an operator called from a module.
        overlaps: whether reading, computing and the host overlap; else their times add up.
        shared_memory: bytes of shared memory (LDS) per program; 0: none.
        link_rate: bytes per second, each way, to another device of the same kind.
        link: kind of link, a key of :data:`LINKS`.
        kernel_target: name of the Triton target (``"sm_80"``, ``"gfx90a"``), or ``None``.
        curves: by dtype, measured seconds per weight of ``linear`` at some row counts; they replace the roofline.
        matrix_seconds: by dtype, extra seconds per matrix at some row counts: its first bytes aren't prefetched.
        operator_curves, operator_matrix_seconds: the same of :func:`specmemo_kernels.ops.linear`.
        source: origin of the figures.
    """

    name: str
    memory: int
    read_rate: float
    matmul_rate: Mapping[str, float]
    launch_seconds: float
    overlaps: bool = True
    shared_memory: int = 0
    kernel_target: str | None = None
    link_rate: float = 25e9  # PCI Express 4.0 x16, less its overhead
    link: str = "pcie"
    curves: Mapping[str, Curve] = field(default_factory=dict)
    matrix_seconds: Mapping[str, Curve] = field(default_factory=dict)
    operator_curves: Mapping[str, Curve] = field(default_factory=dict)
    operator_matrix_seconds: Mapping[str, Curve] = field(default_factory=dict)
    source: str = "data sheet"

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("memory", "read_rate", "launch_seconds", "link_rate")}
        numbers |= {f"matmul_rate[{name}]": rate for name, rate in self.matmul_rate.items()}
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"DeviceProfile {self.name}: {name} is {value}, it must be above 0")
        if not self.matmul_rate:
            raise ValueError(f"DeviceProfile {self.name}: matmul_rate is empty, it needs at least one dtype")
        if self.link not in LINKS:
            raise ValueError(f"DeviceProfile {self.name}: link is {self.link!r}, known are {', '.join(LINKS)}")

    @property
    def of_operators(self) -> DeviceProfile:
        """The profile for passes whose linear layers are :func:`specmemo_kernels.ops.linear`."""
        if not self.operator_curves:
            return self
        return replace(self, curves=self.operator_curves, matrix_seconds=self.operator_matrix_seconds)

    def compute_dtype(self, dtype: str) -> str:
        """``dtype`` if the device supports it, else its 16-bit or 32-bit type."""
        return next(name for name in (dtype, "float16", "float32", *self.matmul_rate) if name in self.matmul_rate)

    def linear_seconds(self, weights: float, weight_bytes: float, rows: int, dtype: str, matrices: float = 0) -> float:
        """Seconds to multiply ``rows`` rows with ``matrices`` matrices, of ``weights`` elements in total.

        ``weight_bytes``: bytes of all these elements.

        By the measured curve, interpolated, or else by the roofline (:meth:`kernel_seconds`).
        """
        curve = self.curves.get(dtype)
        if curve:
            extra = self.matrix_seconds.get(dtype)
            return weights * _interpolated(curve, rows) + (matrices * _interpolated(extra, rows) if extra else 0.0)
        return self.kernel_seconds(weight_bytes, 2.0 * weights * rows, dtype)

    def kernel_seconds(self, read: float, flops: float, dtype: str) -> float:
        """Roofline (Williams et al. 2009): maximum of reading and computing where they overlap, else their sum."""
        reading, computing = read / self.read_rate, flops / self.matmul_rate[dtype]
        return max(reading, computing) if self.overlaps else reading + computing

    def collective_seconds(self, steps: int, crossing: float) -> float:
        """Seconds of a ring collective with ``crossing`` bytes sent by each device, by the fastest protocol.

        NCCL's estimate: ``start + steps * step + crossing / (share * link_rate)``.
        """
        return min(
            start + steps * step + crossing / (share * self.link_rate) for start, step, share in LINKS[self.link]
        )

    def with_host(self, device_seconds: float, operators: int) -> float:
        """Seconds of a pass of ``device_seconds`` with ``operators`` launches."""
        host = operators * self.launch_seconds
        return max(device_seconds, host) if self.overlaps else device_seconds + host

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """From :meth:`to_json`'s dict.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        curves = {
            name: {k: tuple((int(n), float(s)) for n, s in points) for k, points in data.get(name, {}).items()}
            for name in ("curves", "matrix_seconds", "operator_curves", "operator_matrix_seconds")
        }
        try:
            return cls(**{**data, **curves})
        except TypeError as error:
            raise ValueError(f"not a device profile: {error}; make a new one with `specmemo probe`") from error

    def save(self, path: Path) -> None:
        """Write a JSON file, and its folders."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: not a profile; the message has the path.
        """
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from error


def _interpolated(curve: Curve, rows: int) -> float:
    """Piecewise linear; constant below the first point, extrapolated beyond the last."""
    if rows <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    right = next((i for i in range(1, len(curve)) if rows <= curve[i][0]), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), y0 if rows > x1 else 0.0)


def _gpu(
    name: str,
    gib: int,
    tb_per_s: float,
    tflops16: float,
    tflops32: float,
    shared_kib: int,
    target: str,
    bf16: bool,
    link_gb: float = 25.0,
    link: str = "pcie",
) -> DeviceProfile:
    """A GPU from its data sheet: dense 16-bit matrix rate with float32 sums, float32 vector rate."""
    tflops = {"float16": tflops16, "float32": tflops32} | ({"bfloat16": tflops16} if bf16 else {})
    return DeviceProfile(
        name, gib * GIB, tb_per_s * 1e12 * READ_SHARE, {k: v * 1e12 * MATMUL_SHARE for k, v in tflops.items()},
        EAGER_LAUNCH, True, shared_kib << 10, target, link_gb * 1e9, link,
    )  # fmt: skip


#: Known devices by their command line names; a GPU's profile has its full driver name. Links: NVLink 3 and 4, one
#: Infinity Fabric link, else PCI Express. Shared memory per program: CUDA C++ programming guide, table of compute
#: capabilities; 64 KiB of LDS on CDNA.
KNOWN_DEVICES: dict[str, DeviceProfile] = {
    # NVIDIA Titan RTX product page: 24 GB, 672 GB/s, 130 TFLOPS tensor, 16.3 float32. Turing has no bfloat16.
    "titan-rtx": _gpu("NVIDIA TITAN RTX", 24, 0.672, 130.5, 16.3, 64, "sm_75", bf16=False),
    # NVIDIA Ampere GA102/GA106 whitepapers: 12 GB, 360 GB/s, 25.5 TFLOPS fp16 with fp32 sums (half of 51), 12.7.
    "rtx-3060": _gpu("NVIDIA GeForce RTX 3060", 12, 0.360, 25.5, 12.7, 99, "sm_86", bf16=True),
    # NVIDIA Ada GPU architecture whitepaper, appendix A: 24 GB, 1008 GB/s, 165.2 with fp32 sums, 82.6.
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090", 24, 1.008, 165.2, 82.6, 99, "sm_89", bf16=True),
    # NVIDIA A100 80GB SXM data sheet: 2039 GB/s, 312, 19.5.
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 80, 2.039, 312.0, 19.5, 163, "sm_80", True, 300.0, "nvlink"),
    # NVIDIA H100 SXM data sheet: 80 GB, 3.35 TB/s, 989 dense (1979 with sparsity), 67.
    "h100": _gpu("NVIDIA H100 80GB HBM3", 80, 3.35, 989.4, 66.9, 227, "sm_90", True, 450.0, "nvlink"),
    # NVIDIA H200 data sheet: 141 GB (140 GiB as the driver counts), 4.8 TB/s, rates of the H100.
    "h200": _gpu("NVIDIA H200", 140, 4.8, 989.4, 66.9, 227, "sm_90", True, 450.0, "nvlink"),
    # AMD Instinct MI250 data sheet, halved: the card is two devices. 128 GB, 3.2768 TB/s, 362.1, 45.3 in all.
    "mi250": _gpu("AMD Instinct MI250", 64, 1.638, 181.0, 22.6, 64, "gfx90a", True, 50.0, "infinity-fabric"),
    # AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, 1307.4, 163.4.
    "mi300x": _gpu("AMD Instinct MI300X", 192, 5.3, 1307.4, 163.4, 64, "gfx942", True, 64.0, "infinity-fabric"),
    # NVIDIA Jetson AGX Orin series technical brief: 64 GB shared with the host, 204.8 GB/s, 42.5 dense fp16, 5.3.
    "jetson-orin": _gpu("Jetson AGX Orin", 64, 0.2048, 42.5, 5.3, 163, "sm_86", bf16=True),
    # Eight cores with AVX2 at 3.5 GHz (32 float32 operations a cycle and core), two channels of DDR4-3200.
    "cpu": DeviceProfile(
        "CPU, 8 cores", 16 * GIB, 51.2e9 * 0.7, {"float32": 8 * 3.5e9 * 32 * 0.7}, 5e-6, overlaps=False
    ),
}


def same_name(one: str, other: str) -> bool:
    """Whether two driver names are equal apart from case, spaces and vendor."""
    a, b = (" ".join(n.casefold().split()).removeprefix("nvidia ").removeprefix("amd ") for n in (one, other))
    return a == b


def known_device(name: str) -> DeviceProfile:
    """The entry of :data:`KNOWN_DEVICES` with this key or full driver name; case is ignored.

    A part of a name doesn't match, as laptop, Ti, PCIe and MIG variants are other devices.

    Raises:
        ValueError: unknown device; the message lists the known ones.
    """
    if name.casefold() in KNOWN_DEVICES:
        return KNOWN_DEVICES[name.casefold()]
    match = next((profile for profile in KNOWN_DEVICES.values() if same_name(profile.name, name)), None)
    if match is None:
        raise ValueError(
            f"unknown device {name!r}, known are {', '.join(KNOWN_DEVICES)} and their full driver names; measure "
            "others: specmemo probe"
        )
    return match
