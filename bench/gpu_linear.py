"""A decoder layer's linear layers on a GPU, as a step calls them, against torch's; for :mod:`bench_ops`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_timing import copy_bandwidth, graph_seconds
from linear_op import check, parts
from torch.nn import functional

from specmemo_kernels.backends.layers import gated_mlp

Tensor = torch.Tensor
Call = Callable[..., Any]
#: Arguments of ``gated_mlp`` behind the matrices: no biases, the activation, not invariant.
_SILU: Any = (None, None, None, "silu", False)


def calls(x: Tensor, part: str) -> tuple[Call, Call]:
    """Our call and torch's, as functions of the matrices."""
    from specmemo_kernels.backends import triton

    if part == "gated MLP":
        return lambda *weights: triton.gated_mlp(x, *weights, *_SILU), lambda *weights: gated_mlp(x, *weights, *_SILU)
    return (
        lambda *weights: triton.linears(x, weights, [None] * len(weights)),
        lambda *weights: [functional.linear(x, weight) for weight in weights],
    )


def check_part(x: Tensor, weights: tuple[Tensor, ...], part: str, result: Any) -> None:
    """Compare with float64.

    Raises:
        AssertionError: an error over that of float32 sums and the roundings of separate operators.
    """
    if part != "gated MLP":
        for weight, found in zip(weights, result, strict=True):
            check(x, weight, found)
        return
    exact = gated_mlp(x.double(), *(weight.double() for weight in weights), *_SILU)
    error = (result.double() - exact).norm() / exact.norm()
    assert float(error) <= 3 * torch.finfo(x.dtype).eps, f"gated MLP differs from float64 by {float(error):.1e}"


def rows_for(models: list[str], dtypes: dict[str, torch.dtype], rows: list[int]) -> Iterator[Any]:
    """One row for each combination; ``ms`` is the time of a layer's linear layers.

    Columns: ``vs_torch``; ``floor_fraction`` of reading the weights at the speed of a copy; by part microseconds
    (``us``) and torch's (``torch_us``).
    """
    bandwidth = copy_bandwidth()
    for label, dtype in dtypes.items():
        for model in models:
            for count in rows:
                ours, torchs, read = {}, {}, 0
                for part, shapes in parts(model).items():
                    weights = tuple(
                        torch.randn(shape, device="cuda", dtype=dtype) * shape[1] ** -0.5 for shape in shapes
                    )
                    x = torch.randn(count, shapes[0][1], device="cuda", dtype=dtype)
                    own, peer = calls(x, part)
                    check_part(x, weights, part, own(*weights))
                    ours[part], torchs[part] = (1e6 * graph_seconds(call, weights) for call in (own, peer))
                    read += sum(weight.nbytes for weight in weights)
                total, peers = sum(ours.values()), sum(torchs.values())
                yield {
                    "op": "linear", "model": model, "dtype": label, "rows": count, "ms": total / 1e3,
                    "torch_ms": peers / 1e3, "vs_torch": peers / total,
                    "floor_fraction": 1e6 * read / bandwidth / total, "us": ours, "torch_us": torchs,
                }  # fmt: skip
