"""Compile one Triton kernel ahead of time, without the GPU, and read its resources from the binary."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from machine_code import Loop, amd_loops, nvidia_loops
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MATRIX_PATTERNS = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "mfma": r"\bv_mfma_",
    "wmma": r"\bv_wmma_",
}


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel.

    Attributes:
        registers: per thread (on CDNA: VGPRs and AGPRs together).
        stack_bytes: per thread, local or scratch memory.
        spills: spilled registers, from the binary on AMD, else stack_bytes / 4.
        shared_bytes: shared memory or LDS of a program.
        matrix: number of matrix instructions by family.
        loops: the innermost loops, in the order of the code.
    """

    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    matrix: dict[str, int]
    loops: tuple[Loop, ...]


def gpu_target(name: str) -> GPUTarget:
    """Triton's target for ``"sm_80"`` or ``"gfx942"``; CDNA has wavefronts of 64, other GPUs of 32."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def compile_kernel(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], target: str, options: Mapping[str, Any],
    aligned: frozenset[str] = frozenset(),
) -> Resources:  # fmt: skip
    """Compile ``kernel`` for ``target``.

    Args:
        types: Triton type of each run-time argument, such as ``"*fp16"`` or ``"i32"``.
        constants: values of the constexpr arguments (``None`` for an absent tensor).
        options: num_warps, num_stages, ...
        aligned: integers that are multiples of 16; pointers always are.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in constants and (types[name].startswith("*") or name in aligned)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attrs)
    compiled = triton.compile(source, target=gpu_target(target), options=dict(options))
    read = _read_nvidia if target.startswith("sm_") else _read_amd
    return read(compiled.asm, compiled.metadata.shared)


def _count(text: str) -> dict[str, int]:
    counts = {family: len(re.findall(pattern, text)) for family, pattern in MATRIX_PATTERNS.items()}
    return {family: count for family, count in counts.items() if count}


def _read_nvidia(asm: Mapping[str, Any], shared: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
        loops = nvidia_loops(_output("nvdisasm", "-c", file.name))
    registers, stack = (max(map(int, re.findall(rf"{word}:(\d+)", usage))) for word in ("REG", "STACK"))
    return Resources(registers, stack, stack // 4, shared, _count(asm["ptx"]), tuple(loops))


def _read_amd(asm: Mapping[str, Any], shared: int) -> Resources:
    text = asm["amdgcn"]

    def value(key: str) -> int:
        return sum(map(int, re.findall(rf"^\s*-?\s*\.{key}:\s*(\d+)", text, re.MULTILINE)))

    # .vgpr_count holds the AGPRs as well on CDNA 2 and 3.
    spills = value("vgpr_spill_count")
    stack, loops = value("private_segment_fixed_size"), tuple(amd_loops(text))
    return Resources(value("vgpr_count"), stack, spills, shared, _count(text), loops)


def _output(tool: str, *arguments: str) -> str:
    """The output of one of NVIDIA's tools in Triton's wheel."""
    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([binary, *arguments], capture_output=True, text=True, check=True).stdout
