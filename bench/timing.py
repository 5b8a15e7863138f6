"""Medians of functions that take turns, and what the machine can do, measured in the same run."""

from __future__ import annotations

import datetime
import functools
import itertools
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.cache.huge_pages import prefer_huge_pages
from specmemo_kernels.cli.env import collect_env


def copies(*data: torch.Tensor, nbytes: int = 128 * 2**20) -> Iterator[tuple[torch.Tensor, ...]]:
    """Copies of tensors without an end, of which whoever asks gets the next, so that no call finds its data in a cache.

    Between two steps of a decoder all layers' weights pass through the caches, so a layer's keys have left them. The
    copies of a (dense) tensor lie side by side in one piece of memory in huge pages, as the layers of a pool do. The
    tensor itself becomes the first of them: the largest shapes have no room for it twice.
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

    Each is called ``rounds[0]`` to ``rounds[1]`` times. Taking turns exposes all of them to the same noise of the
    machine, so that their ratios mean something. ``between`` is called before each, untimed, so that all find the
    caches alike; each round has another order, or whoever always came after the one that sweeps most would find less
    of its code there. Whose turn it is in a rotation isn't timed either.
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
    """What the machine does at best, as two functions that take turns with what is measured."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._block = torch.ones(64 * 1024 * 1024)
        self._a = torch.ones(2048, 4096, dtype=dtype)
        self._b = torch.ones(4096, 1024, dtype=dtype)
        self._layer = torch.ones(4096, 4096, dtype=dtype)
        self.functions: dict[str, Callable[[], object]] = {"read": self._block.sum, "gemm": lambda: self._a @ self._b}

    def layer(self) -> torch.Tensor:
        """What lies between two calls of attention in a decoder: a product with a layer's weights."""
        return self._a[:8] @ self._layer

    def floor(self, times: dict[str, float], nbytes: float, flops: float) -> float:
        """Seconds that reading ``nbytes`` or computing ``flops`` takes at least, whichever is longer.

        The rates are those of a sum over 256 MiB and of a 2048 x 4096 x 1024 product, medians in the same turns; both
        are taken out of ``times``.
        """
        read = self._block.nbytes / times.pop("read")
        gemm = 2 * 2048 * 4096 * 1024 / times.pop("gemm")
        return max(nbytes / read, flops / gemm)


def environment() -> dict[str, str]:
    """Where, when and with what a result was measured."""
    root = Path(__file__).resolve().parents[1]
    git = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "commit": git.stdout.strip(), **collect_env()}
