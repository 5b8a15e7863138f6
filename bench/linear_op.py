"""``linear`` over a decoder layer's matrices against torch's own product, for :mod:`bench_ops`."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from shapes import SHAPES
from timing import Yardstick, copies, rotation, take_turns

from specmemo_kernels import ops
from specmemo_kernels.ops.compressed_weights import compress

Tensor = torch.Tensor
MODELS = {"125m": "125m", "1b": "1b", "llama2-7b": "vicuna-7b", "llama3-8b": "llama-3.1-8b"}


def parts(model: str) -> dict[str, list[tuple[int, int]]]:
    """``(outputs, inputs)`` of a layer's matrices, by the call that a step makes."""
    sizes = SHAPES[MODELS[model]]
    hidden, middle, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    key_values = hidden // heads * sizes.get("num_key_value_heads", heads)
    return {
        "query, key, value": [(hidden, hidden), (key_values, hidden), (key_values, hidden)],
        "output": [(hidden, hidden)],
        "gated MLP": [(middle, hidden), (middle, hidden), (hidden, middle)],
    }


def matrices(model: str) -> Counter[tuple[int, int]]:
    """``(outputs, inputs)`` of a layer's linear layers, with their number."""
    return Counter(itertools.chain.from_iterable(parts(model).values()))


def check(x: Tensor, weight: Tensor, result: Tensor) -> None:
    """Compare with float64.

    Raises:
        AssertionError: an error over that of float32 sums and one rounding.
    """
    exact = x.double() @ weight.double().T
    sums = weight.shape[1] * torch.finfo(torch.float32).eps * (x.double().abs() @ weight.double().abs().T)
    budget = sums + torch.finfo(x.dtype).eps * exact.abs()
    assert bool(((result.double() - exact).abs() <= budget).all()), "linear differs from float64"


def rows_for(models: list[str], dtypes: dict[str, torch.dtype], rows: list[int], seconds: float) -> Iterator[Any]:
    """One row for each combination, measured on iteration; ``ms`` is the time of a layer's matrices.

    Columns: ``vs_torch``, and ``worst_vs_torch`` of the matrix that gains least; ``floor_fraction`` of the floor
    max(bytes / read bandwidth, flops / GEMM rate) of the stored weights. In bf16 ``compressed_ms`` and
    ``compressed_vs_torch``: with compressed weights.
    """
    linear = ops.kernels("cpu", torch.device("cpu")).linear
    for dtype, kind in dtypes.items():
        yard = Yardstick(kind, huge=True)
        for model in models:
            layer = matrices(model)
            weights = {shape: (torch.randn(shape) * shape[1] ** -0.5).to(kind) for shape in layer}
            compressed = {shape: _compressed(w) for shape, w in weights.items() if kind == torch.bfloat16}
            for count in rows:
                functions: dict[str, Callable[[], object] | Iterator[Callable[[], object]]] = {}
                for shape, weight in weights.items():
                    x = torch.randn(count, shape[1]).to(kind)
                    check(x[:2], weight[:512], linear(x[:2], weight[:512], None, None, False))
                    own = functools.partial(_ours, linear, x)
                    peer = functools.partial(torch.nn.functional.linear, x)
                    functions[f"ours {shape}"] = rotation(own, copies(weight))
                    functions[f"torch {shape}"] = rotation(peer, copies(weight))
                    if shape in compressed:
                        assert torch.equal(own(compressed[shape]), own(weight)), "compression changes a product"
                        functions[f"compressed {shape}"] = rotation(own, copies(compressed[shape]))
                times = take_turns(functions | yard.functions, seconds=seconds, rounds=(3, 100))
                total = {
                    name: sum(times[f"{name} {shape}"] * number for shape, number in layer.items())
                    for name in ("ours", "torch", *(["compressed"] if compressed else []))
                }
                weights_read = sum(outputs * inputs * number for (outputs, inputs), number in layer.items())
                floor = yard.floor(times, weights_read * kind.itemsize, 2.0 * count * weights_read)
                yield {
                    "op": "linear", "model": model, "dtype": dtype, "rows": count, "ms": total["ours"] * 1e3,
                    "torch_ms": total["torch"] * 1e3, "vs_torch": total["torch"] / total["ours"],
                    "worst_vs_torch": min(times[f"torch {s}"] / times[f"ours {s}"] for s in layer),
                    "floor_fraction": floor / total["ours"],
                    "gigabytes_per_second": weights_read * kind.itemsize / total["ours"] / 1e9,
                    "gigaflops": 2e-9 * count * weights_read / total["ours"],
                } | _compressed_columns(total)  # fmt: skip


def _compressed(weight: Tensor) -> Tensor:
    result = compress(weight)
    assert result is not None, "normally distributed weights can be compressed"
    return result


def _compressed_columns(total: dict[str, float]) -> dict[str, float]:
    seconds = total.get("compressed")
    return {} if seconds is None else {"compressed_ms": seconds * 1e3, "compressed_vs_torch": total["torch"] / seconds}


def _ours(linear: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight, None, None, False)
