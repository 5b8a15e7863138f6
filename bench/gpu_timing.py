"""Times on a GPU: calls over rotated data, captured in a graph, replayed and timed by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

#: More than any L2 cache, so that no call finds its keys there.
COLD_BYTES = 512 * 2**20


def graph_seconds(
    function: Callable[..., Any], data: tuple[torch.Tensor, ...], *, replays: int = 20, max_copies: int = 16
) -> float:
    """Median seconds of one call of ``function`` over copies of ``data`` in turn, without launch overhead.

    Raises:
        RuntimeError: the function can't be captured in a graph (it synchronises, or allocates outside of torch).
    """
    copies = min(max_copies, 1 + COLD_BYTES // max(1, sum(x.nbytes for x in data)))
    sets = [data, *(tuple(x.clone() for x in data) for _ in range(copies - 1))]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function(*sets[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [function(*arguments) for arguments in sets]
    del results
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(sets))
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 1 GiB (or an eighth of the memory)."""
    free, _ = torch.cuda.mem_get_info()
    source = torch.ones(min(2**30, free // 8), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds(lambda x: target.copy_(x), (source,))


def matmul_rate(dtype: torch.dtype) -> float:
    """Flops per second of an 8192 x 8192 x 8192 product."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
    return 2 * 8192**3 / graph_seconds(lambda x, y: x @ y, (a, b))
