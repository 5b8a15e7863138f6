"""``specmemo serve`` as a process of its own, and what it holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

WAIT = 120.0


@dataclass(frozen=True)
class ServedProcess:
    """A server that answers. ``process``: it, or torchrun."""

    address: str
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def place(self) -> tuple[str, int]:
        host, port = self.address.removeprefix("http://").split(":")
        return host, int(port)

    def status(self, name: str) -> int:
        """A field of ``/proc/PID/status``, in bytes."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        (size,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]
        return size

    @property
    def resident(self) -> int:
        """Resident bytes without files."""
        return self.status("RssAnon") + self.status("RssShmem")

    @property
    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.address}/stats", timeout=WAIT).json()
        return found

    def reset_peak(self) -> None:
        """Let ``VmHWM`` begin anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def wait_until_gone(self) -> None:
        """The process has ended by itself."""
        self.process.wait(WAIT)

    def wait_until_idle(self) -> None:
        """No request runs or waits, no page is held by one, and connections are closed."""
        deadline = time.monotonic() + WAIT
        while (state := self.state)["running"] or state["waiting"] or state["pages_used"] > state["pages_cached"]:
            assert time.monotonic() < deadline, state
            time.sleep(0.05)


@contextmanager
def served_process(*options: str, launch: Sequence[str] = ()) -> Iterator[ServedProcess]:
    """A server with these options on any free port; it is killed at the end.

    Args:
        launch: arguments of Python that launch the module in several processes.
    """
    command = [sys.executable, *launch, "-m", "specmemo_kernels.cli", "serve", "--port", "0", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert " on " in line, "the server hasn't started"
            address = line.split(" on ")[1].removesuffix("/v1\n")
            while True:
                try:
                    httpx.get(f"{address}/health", timeout=WAIT)
                    break
                except httpx.TransportError:
                    assert process.poll() is None
                    time.sleep(0.05)
            yield ServedProcess(address, process)
        finally:
            process.kill()
