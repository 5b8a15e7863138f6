"""Median times of functions that take turns, the machine's own rates in the same run, and results as files."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specmemo_kernels.cache.huge_pages import prefer_huge_pages
from specmemo_kernels.cli.env import collect_env


def copies(*data: torch.Tensor, nbytes: int = 128 * 2**20) -> Iterator[tuple[torch.Tensor, ...]]:
    """An endless cycle of copies of tensors, so that no call finds its data in a cache.

    In a decoder all layers' weights pass through the caches between two steps and evict a layer's keys. The copies of a
    (dense) tensor are contiguous in huge pages, like the layers of a pool. The tensor becomes the first copy: the
    largest shapes don't fit twice.
    """
    count = min(1 + nbytes // max(1, sum(x.nbytes for x in data)), 64)
    return itertools.cycle(list(zip(*(_copies_of(x, count) for x in data), strict=True)))


def _copies_of(data: torch.Tensor, count: int) -> list[torch.Tensor]:
    room = torch.empty(count * data.numel(), dtype=data.dtype)
    prefer_huge_pages(room)
    strides = torch.empty_like(data).stride()
    result = [room.as_strided(data.shape, strides, i * data.numel()).copy_(data) for i in range(count)]
    data.set_(result[0])  # type: ignore[call-overload]
    return result


def rotation(function: Callable[..., Any], arguments: Iterator[tuple[Any, ...]]) -> Iterator[Callable[[], Any]]:
    """Calls of the function, each with the next arguments."""
    return (functools.partial(function, *each) for each in arguments)


def _call(function: Callable[[], object] | Iterator[Callable[[], object]]) -> Callable[[], object]:
    return next(function) if isinstance(function, Iterator) else function


def take_turns(
    functions: Mapping[str, Callable[[], object] | Iterator[Callable[[], object]]],
    *,
    seconds: float = 1.0,
    rounds: tuple[int, int] = (5, 200),
    between: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Median seconds of each function: one call each, in turn, until its share of ``seconds`` is spent.

    Each is called ``rounds[0]`` to ``rounds[1]`` times. Taking turns exposes all functions to the same machine noise,
    so their ratios are meaningful. The order is shuffled every round, because a call's evictions slow the next one. A
    rotation's ``next`` isn't timed.

    Args:
        between: called untimed before each call, so that all calls find the same caches.
    """
    for function in functions.values():
        _call(function)()
    share, shuffle = seconds / len(functions), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in functions}
    spent = dict.fromkeys(functions, 0.0)
    for done in range(rounds[1]):
        order = [name for name in functions if done < rounds[0] or spent[name] < share]
        if not order:
            break
        shuffle(order)
        for name in order:
            started = time.perf_counter()
            call = _call(functions[name])
            if between is not None:
                between()
            begin = time.perf_counter()
            call()
            end = time.perf_counter()
            times[name].append(end - begin)
            spent[name] += end - started
    return {name: statistics.median(values) for name, values in times.items()}


class Yardstick:
    """The machine's read bandwidth and GEMM rate, as two functions that take turns with the measured functions.

    The rate is that of ``dtype``, or of float32 on a CPU without instructions for ``dtype``. ``huge``: memory is read
    in huge pages, where :func:`copies` are; in pages of 4 KiB the same sum takes 1.1 to 1.6 times as long.
    """

    def __init__(self, dtype: torch.dtype, huge: bool = False) -> None:
        if not _has_fast_gemm(dtype):  # torch would convert element by element
            dtype = torch.float32
        self._block = torch.empty(64 * 1024 * 1024)
        if huge:
            prefer_huge_pages(self._block)
        self._block.fill_(1)
        self._a = torch.ones(2048, 4096, dtype=dtype)
        self._b = torch.ones(4096, 1024, dtype=dtype)
        self._layer = torch.ones(4096, 4096, dtype=dtype)
        self.functions: dict[str, Callable[[], object]] = {"read": self._block.sum, "gemm": lambda: self._a @ self._b}

    def layer(self) -> torch.Tensor:
        """A product with a layer's weights, as between two calls of attention in a decoder."""
        return self._a[:8] @ self._layer

    def floor(self, times: dict[str, float], nbytes: float, flops: float) -> float:
        """Minimum seconds: the longer of reading ``nbytes`` and computing ``flops``.

        The rates are those of a sum over 256 MiB and of a 2048 x 4096 x 1024 product; both are removed from ``times``.
        """
        read = self._block.nbytes / times.pop("read")
        gemm = 2 * 2048 * 4096 * 1024 / times.pop("gemm")
        return max(nbytes / read, flops / gemm)


def _has_fast_gemm(dtype: torch.dtype) -> bool:
    from specmemo_kernels.backends import cpu  # GPU machines may lack the C++ module

    return not cpu.slow_in_torch(dtype)


def environment() -> dict[str, str]:
    """Date, commit, versions and devices of a result."""
    root = Path(__file__).resolve().parents[1]
    git = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "commit": git.stdout.strip(), **collect_env()}


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write ``result`` and its environment as JSON, ``rows`` with one per line; without a path, nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    rest = {name: value for name, value in result.items() if name != "rows"}
    text = json.dumps({"environment": environment(), **rest}, indent=1)
    if "rows" in result:
        rows = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
        text = f'{text.removesuffix("}").rstrip()},\n "rows": [\n{rows}\n ]\n}}'
    path.write_text(text + "\n")


def print_rows(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, title: str | None = None
) -> None:
    """Print rows as a table with these columns, by default those of the first row; absent cells are blank."""
    names = list(rows[0]) if columns is None else columns
    table = Table(*names, title=title)
    for row in rows:
        cells = [row.get(name) for name in names]
        table.add_row(*("" if c is None else f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells))
    Console(width=180).print(table)
