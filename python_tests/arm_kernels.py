"""The C++ kernels for ARM in an emulator, called in place of ``specmemo_kernels.backends._cpu``.

``pytest -p arm_kernels --arm neon`` runs tests with them (with ``PYTHONPATH=.:python_tests``): the kernels are compiled
for aarch64 without Python (``arm/program.cpp``); every call is sent to the program, and its result is read back.
``test_arm.py`` does this in processes of its own.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
#: Processors by the instruction set that they select, which is the best one that they have.
PROCESSORS = {"neonbf16": "max", "neon": "cortex-a57"}
MODULE = "specmemo_kernels.backends._cpu"

# Kinds of values, and type codes and bits of tensors (arm/messages.h).
NONE, INTEGER, NUMBER, TEXT, TENSOR = range(5)
TYPES = {
    torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.float8_e4m3fn: (10, 8),
    torch.int8: (0, 8), torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8),
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in TYPES.items()}

#: Arguments that a call changes.
CHANGED = {
    "append_paged_kv": (2, 3, 7, 8),
    "commit_paged_kv": (2, 3, 9, 10),
    "lm_head_topk": (5, 6, 7),
    "compress": (1,),
    "decompress": (1,),
}
OPERATORS = (
    "tree_attention", "append_paged_kv", "commit_paged_kv", "verify_tree_greedy", "lm_head_topk", "linear",
    "grouped_linear", "gated_mlp", "rms_norm", "add_rms_norm", "rotary", "compress", "decompress",
    "attention_workspace", "linear_workspace",
)  # fmt: skip
#: Arguments that are floats, by position.
NUMBERS = {"tree_attention": (9, 11), "rms_norm": (2, 3), "add_rms_norm": (3, 4)}


def missing() -> str | None:
    """Why the kernels can't run here; ``None`` if they can."""
    programs = [name for name in (COMPILER, EMULATOR, "cmake", "ninja") if shutil.which(name) is None]
    return f"not installed: {', '.join(programs)}" if programs else None


def build(folder: Path, root: Path = ROOT) -> Path:
    """Compile the program of ``root`` for aarch64 in ``folder``, with the wheels' flags; returns its file."""
    configure = [
        "cmake", "-S", root, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DSPECMEMO_TEST_PROGRAM=ON",
        "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}",
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        for command in (configure, ["cmake", "--build", folder]):
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    return folder / "_cpu"


def packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory between a tensor's first and last element, as a view ``[bytes]``."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span if tensor.numel() else 0,), (1,)).view(torch.uint8)


class Emulator:
    """The program on an emulated processor."""

    def __init__(self, program: Path, processor: str, **environment: str) -> None:
        command = [EMULATOR, "-cpu", processor, str(program)]
        env = os.environ | environment
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self.name = f"{EMULATOR} -cpu {processor}"

    def close(self) -> None:
        self.process.communicate(timeout=60)

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Results of a call; arguments that it changes (``CHANGED``) are written in place.

        Raises:
            ValueError: the call failed.
            RuntimeError: the program ended, for example by an access to memory behind a tensor.
        """
        changed = [i for i in CHANGED.get(name, ()) if torch.is_tensor(arguments[i])]
        message = [packed(len(name)), name.encode(), packed(len(arguments))]
        for i, value in enumerate(arguments):
            message += self._value(float(value or 0) if i in NUMBERS.get(name, ()) else value, i in changed)
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(message))
        self.process.stdin.flush()
        error = self._text()
        results = [self._result() for _ in range(self._integer())]
        for i, tensor in zip(changed, results[len(results) - len(changed) :], strict=True):
            flat_bytes(arguments[i]).copy_(flat_bytes(tensor))
        if error:
            raise ValueError(error)
        return results[: len(results) - len(changed)]

    def _value(self, value: Any, changed: bool) -> list[bytes]:
        if value is None:
            return [packed(NONE)]
        if isinstance(value, float):
            return [packed(NUMBER), struct.pack("<d", value)]
        if isinstance(value, int):
            return [packed(INTEGER, value)]
        data = flat_bytes(value).numpy().tobytes()
        head = packed(TENSOR, *TYPES[value.dtype], changed, value.ndim, *value.shape, *value.stride(), len(data))
        return [head, data]

    def _read(self, size: int) -> bytes:
        assert self.process.stdout is not None
        data = self.process.stdout.read(size)
        if len(data) < size:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait(60)}")
        return data

    def _integer(self) -> int:
        return int(struct.unpack("<q", self._read(8))[0])

    def _text(self) -> str:
        return self._read(self._integer()).decode()

    def _result(self) -> Any:
        kind = self._integer()
        if kind == INTEGER:
            return self._integer()
        if kind == TEXT:
            return self._text()
        code, bits, _, ndim = (self._integer() for _ in range(4))
        shape, strides = ([self._integer() for _ in range(ndim)] for _ in range(2))
        data = bytearray(self._read(self._integer()))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(DTYPES[code, bits]).as_strided(shape, strides)


class ArmKernels(types.ModuleType):
    """What tests and the ``cpu`` backend use of the Python module ``_cpu``."""

    def __init__(self, program: Path, isa: str) -> None:
        super().__init__(MODULE, self.__doc__)
        self.__spec__ = importlib.machinery.ModuleSpec(MODULE, None)
        self._emulator, self._isa = Emulator(program, PROCESSORS[isa]), isa
        self.close = self._emulator.close
        for name in OPERATORS:
            setattr(self, name, self._operator(name))

    def _operator(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == "tree_attention" and (sinks := arguments[12]) is not None and sinks.dtype != arguments[0].dtype:
                arguments = (*arguments[:12], sinks.float(), *arguments[13:])
            results = self._emulator.call(name, *arguments, torch.get_num_threads())
            return results[0] if len(results) == 1 else tuple(results) or None

        call.__name__ = name
        return call

    def isas(self) -> list[str]:
        return [self._isa]

    def isa(self) -> str:
        return self._isa

    def use_isa(self, name: str) -> None:
        if name != self._isa:
            raise ValueError(f"instruction set '{name}' can't be used here; there are {self._isa}")

    def thread_runtime(self) -> str:
        return "std::thread"

    def release_threads(self) -> None:
        """No OpenMP workers."""

    def fill_new_tensors(self, fill: bool) -> None:
        """The program always fills them."""

    def copy_rows(self, *_: Any) -> Any:
        """Of recorded steps, which the program doesn't have."""
        raise NotImplementedError

    record = Blocks = copy_rows


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--arm", choices=PROCESSORS, required=True, help="instruction set of the emulated processor")


def pytest_configure(config: pytest.Config) -> None:
    from specmemo_kernels import backends

    kernels = ArmKernels(build(ROOT / "build" / "arm"), config.getoption("--arm"))
    sys.modules[MODULE] = backends._cpu = kernels  # type: ignore[attr-defined]
    config.add_cleanup(kernels.close)
