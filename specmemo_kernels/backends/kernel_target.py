"""GPU families as targets of the Triton kernels, and the target of a GPU; needs neither triton nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INTERPRETER = "interpreter"


@dataclass(frozen=True)
class Target:
    """Limits of one program on a GPU family.

    Attributes:
        shared_bytes: maximum shared memory (LDS).
        matrix: instruction family of Triton's dots; ``None``: multiply-adds.
        multiprocessors: number of the family's largest GPU, for plans.
        bf16: whether bfloat16 is supported.
        max_head_dim: largest padded head dimension in 16 bits for which a 16 x 16 tile doesn't spill registers.
        overlaps: whether a kernel can start before the one before it ends (programmatic dependent launch).
    """

    name: str
    shared_bytes: int
    matrix: str | None
    multiprocessors: int
    bf16: bool = True
    max_head_dim: int = 512
    overlaps: bool = False

    def head_dim_limit(self, dtype: torch.dtype) -> int:
        """The largest padded head dimension in ``dtype``."""
        return self.max_head_dim if dtype != torch.float32 or self.name == INTERPRETER else min(256, self.max_head_dim)

    @property
    def hip(self) -> bool:
        return self.name.startswith("gfx")


# sm_75 has tensor cores, but Triton has generated no code for them since 3.3.
TARGETS = {
    target.name: target
    for target in (
        Target("sm_75", 64 << 10, None, 72, bf16=False, max_head_dim=256),
        Target("sm_80", 163 << 10, "mma", 108),
        Target("sm_86", 99 << 10, "mma", 84),
        Target("sm_89", 99 << 10, "mma", 142),
        Target("sm_90", 227 << 10, "wgmma", 132, overlaps=True),
        Target("gfx90a", 64 << 10, "mfma", 110),
        Target("gfx942", 64 << 10, "mfma", 304),
        Target("gfx1100", 64 << 10, "wmma", 96, max_head_dim=128),
        Target(INTERPRETER, 1 << 30, None, 8, max_head_dim=1 << 20),
    )
}


def supporting(name: str, dtype: torch.dtype) -> Target:
    """The target ``name``.

    Raises:
        ValueError: an unknown target, or an unsupported dtype.
    """
    if name not in TARGETS:
        raise ValueError(f"unknown target {name!r}, there are {', '.join(TARGETS)}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"the triton backend computes in float16, bfloat16 or float32, not {dtype}")
    if dtype == torch.bfloat16 and not TARGETS[name].bf16:
        raise ValueError(f"{name} has no bfloat16 arithmetic; load the model in torch.float16")
    return TARGETS[name]


def target_for_capability(major: int, minor: int) -> str:
    """The target of a CUDA device by its compute capability.

    Raises:
        ValueError: older than 7.5.
    """
    if (major, minor) < (7, 5):
        raise ValueError(f"the triton backend needs compute capability 7.5 or newer, this GPU has {major}.{minor}")
    if major >= 12:  # consumer Blackwell: mma and 99 KiB of shared memory, as Ada
        return "sm_89"
    if major >= 9:
        return "sm_90"
    return [name for name in ("sm_75", "sm_80", "sm_86", "sm_89") if int(name[3:]) <= 10 * major + minor][-1]


def target_for_arch(arch: str) -> str:
    """The target of an AMD device by its ``gcnArchName`` (``"gfx90a:sramecc+:xnack-"``).

    Raises:
        ValueError: an unsupported architecture.
    """
    name = arch.split(":")[0]
    for prefix, target in (("gfx90a", "gfx90a"), ("gfx94", "gfx942"), ("gfx95", "gfx942"), ("gfx11", "gfx1100")):
        if name.startswith(prefix):
            return target
    raise ValueError(f"the triton backend has no block sizes for {arch}; it supports gfx90a, gfx942 and gfx11")


def target_of_gpu(device: torch.device) -> str:
    """The target of a GPU of this machine.

    Raises:
        ValueError: an unsupported GPU.
    """
    if torch.version.hip:
        return target_for_arch(torch.cuda.get_device_properties(device).gcnArchName)
    return target_for_capability(*torch.cuda.get_device_capability(device))
