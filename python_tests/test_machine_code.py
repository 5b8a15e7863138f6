"""Machine code of the C++ kernels on x86-64: the sums of linear layers stay in registers.

A sum that is stored in every round of its loop costs a quarter of the speed and no result, so that only this shows it.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from specmemo_kernels.backends import _cpu

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="objdump of x86-64 code is needed"
)
ADDRESS = re.compile(r"^ *([0-9a-f]+):\t(.*)")
BACK = re.compile(r"j\w+ +([0-9a-f]+) ")
MULTIPLIES = re.compile(r"vfmadd|vdpbf16ps")
SPILLS = re.compile(r"vmov\w+ +%[yz]mm\d+,[-0-9a-fx]*\(%r[sb]p\)")


def functions(name: str) -> Iterator[list[tuple[int, str]]]:
    """The instructions ``(address, text)`` of each function with ``name`` in its own."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", _cpu.__file__]
    found: list[tuple[int, str]] | None = None
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        if line.endswith(">:"):
            if found:
                yield found
            found = [] if f" {name}<" in line.replace("specmemo::(anonymous namespace)::", "") else None
        elif found is not None and (match := ADDRESS.match(line)):
            found.append((int(match[1], 16), match[2]))
    if found:
        yield found


def loops(instructions: list[tuple[int, str]]) -> Iterator[list[str]]:
    """The instructions of each loop."""
    places = {address: place for place, (address, _) in enumerate(instructions)}
    for place, (_, text) in enumerate(instructions):
        if (jump := BACK.match(text)) and (start := places.get(int(jump[1], 16), place + 1)) <= place:
            yield [text for _, text in instructions[start : place + 1]]


def test_sums_of_linear_layers() -> None:
    """In all loops over the inputs, of every instruction set with FMA, dtype and number of rows."""
    checked = 0
    for function in functions("dot_tile"):
        for loop in loops(function):
            if sum(map(bool, map(MULTIPLIES.match, loop))) >= 3 and any("prefetch" in text for text in loop):
                checked += 1
                assert not [text for text in loop if SPILLS.match(text)]
    assert checked > 30
