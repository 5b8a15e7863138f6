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


def functions(name: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The name and the instructions ``(address, text)`` of each function with ``name`` in its own."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", _cpu.__file__]
    found: list[tuple[int, str]] | None = None
    heading = ""
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        if line.endswith(">:"):
            if found:
                yield heading, found
            heading = line
            found = [] if f" {name}<" in line.replace("specmemo::(anonymous namespace)::", "") else None
        elif found is not None and (match := ADDRESS.match(line)):
            found.append((int(match[1], 16), match[2]))
    if found:
        yield heading, found


def loops(instructions: list[tuple[int, str]]) -> Iterator[list[str]]:
    """The instructions of each loop."""
    places = {address: place for place, (address, _) in enumerate(instructions)}
    for place, (_, text) in enumerate(instructions):
        if (jump := BACK.match(text)) and (start := places.get(int(jump[1], 16), place + 1)) <= place:
            yield [text for _, text in instructions[start : place + 1]]


def test_sums_of_linear_layers() -> None:
    """In all loops over the inputs, of every instruction set with FMA, dtype and number of rows.

    With compressed weights a round stores a decompressed block of three rows, and may store few other values.
    """
    checked = {False: 0, True: 0}
    for name, function in functions("dot_tile"):
        compressed = "CompressedWeights" in name
        for loop in loops(function):
            multiplies = sum(map(bool, map(MULTIPLIES.match, loop)))
            if multiplies >= 3 and any("prefetch" in text for text in loop):
                checked[compressed] += 1
                stores = [text for text in loop if SPILLS.match(text)]
                block = 3 * 2 * 128 // (64 if any("zmm" in text for text in loop) else 32)
                assert len(stores) <= (block + multiplies // 8 if compressed else 0), (name, stores)
    assert checked[False] > 30
    assert checked[True] > 20
