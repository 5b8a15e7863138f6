"""Device profiles: memory, bandwidth, matrix rates, overheads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

GIB = 1024**3

Curve = tuple[tuple[int, float], ...]

#: Kernels per operator of an eager step, views included, and a kernel's seconds that are neither reading nor computing:
#: Vicuna-7B's step of 2613 operators is a graph of 337 kernels, 4.43 ms on an H200, of which 3.23 ms read weights.
KERNEL_SHARE, KERNEL_START = 0.13, 3.5e-6

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
        backend: this package's kernels there, ``"triton"`` or ``"cpu"``; ``None``: it has none.
        curves: by dtype, measured seconds per weight of ``linear`` at some row counts; they replace the roofline.
        matrix_seconds: by dtype, extra seconds per matrix at some row counts: its first bytes aren't prefetched.
        operator_curves, operator_matrix_seconds: the same of :func:`specmemo_kernels.ops.linear`.
        code_curves: as ``operator_curves``, with matrices in 4-bit codes.
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
    backend: str | None = "cpu"
    link_rate: float = 25e9  # PCI Express 4.0 x16, less its overhead
    link: str = "pcie"
    curves: Mapping[str, Curve] = field(default_factory=dict)
    matrix_seconds: Mapping[str, Curve] = field(default_factory=dict)
    operator_curves: Mapping[str, Curve] = field(default_factory=dict)
    operator_matrix_seconds: Mapping[str, Curve] = field(default_factory=dict)
    code_curves: Mapping[str, Curve] = field(default_factory=dict)
    source: str = "data sheet"

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("memory", "read_rate", "launch_seconds", "link_rate")}
        numbers |= {f"matmul_rate[{name}]": rate for name, rate in self.matmul_rate.items()}
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"DeviceProfile {self.name}: {name} is {value}, it must be above 0")
        if not self.matmul_rate:
            raise ValueError(f"DeviceProfile {self.name}: matmul_rate is empty, it needs at least one dtype")
        if self.backend not in ("triton", "cpu", None):
            raise ValueError(f"DeviceProfile {self.name}: backend is {self.backend!r}, it is triton, cpu or None")
        if self.link not in LINKS:
            raise ValueError(f"DeviceProfile {self.name}: link is {self.link!r}, known are {', '.join(LINKS)}")

    @property
    def without_kernels(self) -> str:
        """Why a plan for a device without a ``backend`` says less than others."""
        if self.source == "described":
            return (
                "its family isn't given (cpu, sm_86, gfx1100, ...), so limits and workspace of kernels aren't counted"
            )
        return "this package has no kernels for it, and patch uses the reference backend, which is slower than planned"

    @property
    def of_operators(self) -> DeviceProfile:
        """The profile for passes whose linear layers are :func:`specmemo_kernels.ops.linear`."""
        if not self.operator_curves:
            return self
        return replace(self, curves=self.operator_curves, matrix_seconds=self.operator_matrix_seconds)

    def compute_dtype(self, dtype: str) -> str:
        """``dtype`` if the device supports it, else its 16-bit or 32-bit type."""
        return next(name for name in (dtype, "float16", "float32", *self.matmul_rate) if name in self.matmul_rate)

    def linear_seconds(
        self, weights: float, weight_bytes: float, rows: int, dtype: str, matrices: float = 0, coded: bool = False
    ) -> float:
        """Seconds to multiply ``rows`` rows with ``matrices`` matrices, of ``weights`` elements in total.

        By the measured curve, interpolated, or else by the roofline (:meth:`kernel_seconds`).

        Args:
            weight_bytes: of all these elements. coded: they are 4-bit codes; without a curve of its own, ``dtype``'s.
        """
        curve = self.code_curves.get(dtype) if coded else None
        curve = curve or self.curves.get(dtype)
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

    def with_launches(self, device_seconds: float, operators: int, recorded: bool = False) -> float:
        """Seconds of a pass of ``device_seconds`` with ``operators`` operators.

        On a GPU its kernels start one by one; unless the pass is ``recorded``, it takes at least the host's launches.
        On a CPU launches add up; a recorded pass is taken to have as few as a graph has kernels.
        """
        kernels = KERNEL_SHARE * operators
        if not self.overlaps:
            return device_seconds + (kernels if recorded else operators) * self.launch_seconds
        device_seconds += kernels * KERNEL_START
        return device_seconds if recorded else max(device_seconds, operators * self.launch_seconds)

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """From :meth:`to_json`'s dict.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        try:
            curves: dict[str, Any] = {
                name: {k: tuple((int(n), float(s)) for n, s in points) for k, points in data.get(name, {}).items()}
                for name in ("curves", "matrix_seconds", "operator_curves", "operator_matrix_seconds", "code_curves")
            }
            if "backend" not in data:  # files of earlier versions
                curves["backend"] = "triton" if data.get("kernel_target") else "cpu"
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
