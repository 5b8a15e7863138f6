"""``specmemo env``: versions, devices and backends for a bug report."""

from __future__ import annotations

import importlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version

from specmemo_kernels import __version__
from specmemo_kernels.ops.dispatch import BACKENDS, unavailable
from specmemo_kernels.planning.host_memory import cpu_name

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "triton")


def collect_env() -> dict[str, str]:
    """Versions, devices and backends in print order."""
    import torch

    facts = {
        "specmemo-kernels": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "processor": f"{cpu_name()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads",
    }
    facts |= {name: _version(name) for name in _PACKAGES}
    facts["torch"] = torch.__version__  # the package's metadata may lack the build
    facts["gpu"] = _gpus()
    for name in BACKENDS:
        facts[f"backend {name}"] = _backend(name)
    return facts


def _backend(name: str) -> str:
    """Whether a backend can be used here, and why not."""
    try:
        return unavailable(name) or "available" + _details(name)
    except (RuntimeError, ValueError) as error:  # a wrong SPECMEMO_CPU_ISA
        return str(error)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    kind = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{', '.join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))} ({kind})"


def _details(backend: str) -> str:
    """The instruction set of the C++ kernels; empty for other backends."""
    isa = getattr(importlib.import_module(BACKENDS[backend], "specmemo_kernels.ops"), "isa", None)
    return f" ({isa()})" if callable(isa) else ""
