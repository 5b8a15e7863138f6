"""Loops of a kernel's machine code: their instructions, exponentials, matrix instructions and loads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: Widths in bits of loads from global memory, by a part of the instruction.
_NVIDIA_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\b(\S*)")
_NVIDIA_BITS = (("128", 128), ("64", 64), ("U16", 16), ("S16", 16), ("U8", 8), ("S8", 8))
_AMD_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(?:lds_)?(\w+)")
_AMD_BITS = {"dwordx4": 128, "b128": 128, "dwordx3": 96, "b96": 96, "dwordx2": 64, "b64": 64, "dword": 32, "b32": 32}
_MATRIX = re.compile(r"\b(HMMA|HGMMA|IMMA|QGMMA|v_mfma_\w+|v_wmma_\w+)")


@dataclass(frozen=True)
class Loop:
    """An innermost loop.

    Attributes:
        instructions, exponentials, matrix: number of instructions per iteration, for a warp.
        loads: number of loads from global memory by their bits per thread.
    """

    instructions: int
    exponentials: int
    matrix: int
    loads: tuple[tuple[int, int], ...]

    @property
    def load_bits(self) -> int:
        """The width of the load that has the median byte: page ids and scales have few bytes. 0: no loads."""
        total, seen = sum(bits * count for bits, count in self.loads), 0
        for bits, count in sorted(self.loads):
            seen += bits * count
            if 2 * seen >= total:
                return bits
        return 0

    @property
    def load_bytes(self) -> int:
        """Bytes that a thread loads in an iteration."""
        return sum(bits // 8 * count for bits, count in self.loads)


def nvidia_loops(disassembly: str) -> list[Loop]:
    """The innermost loops of ``nvdisasm -c``, in the order of the code."""
    return _loops(disassembly, r"(\.L_\w+):", r"/\*[0-9a-f]{4,}\*/\s+(.*?);", r"\bBRA\b.*`\((\.L_\w+)\)", _nvidia_bits)


def amd_loops(assembly: str) -> list[Loop]:
    """The innermost loops of the ``amdgcn`` text, in the order of the code."""
    branch = r"^s_(?:cbranch_\w+|branch)\s+(\.LBB\w+)"
    return _loops(assembly, r"(\.LBB\w+):", r"([a-z]+_[a-z0-9_]+(?:\s[^;]*)?)", branch, _amd_bits)


def _loops(text: str, label: str, instruction: str, branch: str, load_bits: Callable[[str], int]) -> list[Loop]:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if found := re.match(rf"\s*{label}", line):
            labels[found.group(1)] = len(code)
        elif found := re.match(rf"\s*{instruction}", line):
            code.append(found.group(1).strip())
    spans: dict[int, int] = {}
    for position, line in enumerate(code):
        if (found := re.search(branch, line)) and labels.get(found.group(1), len(code)) <= position:
            spans[labels[found.group(1)]] = position
    inner = [
        (first, last)
        for first, last in sorted(spans.items())
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans.items())
    ]
    return [_loop(code[first : last + 1], load_bits) for first, last in inner]


def _loop(code: Sequence[str], load_bits: Callable[[str], int]) -> Loop:
    loads = Counter(bits for line in code if (bits := load_bits(line)))
    exponentials = _count(code, r"\bMUFU\.EX2\b|\bv_exp_f32")
    return Loop(len(code), exponentials, _count(code, _MATRIX.pattern), tuple(sorted(loads.items())))


def _count(code: Iterable[str], pattern: str) -> int:
    return sum(bool(re.search(pattern, line)) for line in code)


def _nvidia_bits(line: str) -> int:
    found = _NVIDIA_LOAD.search(line)
    if found is None:
        return 0
    return next((bits for part, bits in _NVIDIA_BITS if part in found.group(1).split(".")), 32)


def _amd_bits(line: str) -> int:
    found = _AMD_LOAD.search(line)
    if found is None:
        return 0
    kind = found.group(1).removesuffix("_lds")
    return _AMD_BITS.get(kind, 16 if "short" in kind or "16" in kind else 8)
