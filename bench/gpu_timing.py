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
    function(*sets[0])
    replay = captured(lambda: [function(*arguments) for arguments in sets])
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(sets))
    return statistics.median(times[2:])


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """A function that replays the kernels of ``function`` from a graph; it runs once before the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    del results
    return graph.replay


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 1 GiB (or an eighth of the memory) by a kernel.

    ``copy_`` would become a copy node of the graph, which is slower: 2.7 TB/s instead of 4.1 on an H200.
    """
    free, _ = torch.cuda.mem_get_info()
    source = torch.ones(min(2**30, free // 8) // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds(lambda x: torch.neg(x, out=target), (source,))


def matmul_rate(dtype: torch.dtype) -> float:
    """Flops per second of an 8192 x 8192 x 8192 product."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
    return 2 * 8192**3 / graph_seconds(lambda x, y: x @ y, (a, b))
