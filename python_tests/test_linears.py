"""Linear layers in the passes of ``patch``: which of them are computed without torch's library, and what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples
from tiny_models import random_heads, tiny_model
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf.linears import Linears, exact_linear

#: Half a unit in the last place of a rounding, relative.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 5), st.integers(1, 700), st.integers(1, 900), st.booleans(), st.sampled_from(list(ROUNDING)))
def test_exact_products(rows: int, inputs: int, outputs: int, biased: bool, dtype: torch.dtype) -> None:
    """Float64's results within one rounding and float32 sums, over several slices of the weights."""
    g = torch.Generator().manual_seed(rows + inputs)
    x, weight = (torch.randn(n, inputs, generator=g).to(dtype) for n in (rows, outputs))
    bias = torch.randn(outputs, generator=g).to(dtype) if biased else None
    got = exact_linear(x[None], weight, bias)
    wanted = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    sums = functional.linear(x.double().abs(), weight.double().abs()) + (0 if bias is None else bias.double().abs())
    budget = ROUNDING[dtype] * wanted.abs() + (inputs + 1) * 2.0**-24 * sums + 1e-7
    assert got.dtype == dtype
    assert got.shape == (1, rows, outputs)
    assert bool(((got[0].double() - wanted).abs() <= budget).all())


def test_wide_matrices_are_converted_in_slices() -> None:
    weight = torch.randn(2000, 300).bfloat16()
    x = torch.randn(2, 300).bfloat16()
    torch.testing.assert_close(exact_linear(x, weight, None), functional.linear(x, weight), rtol=0.02, atol=0.02)


class Wrapped(torch.Tensor):
    """A subclass, as quantised weights are."""


def test_what_is_replaced() -> None:
    """Plain tensors in 16 bits; everything else is the library's."""
    calls: list[torch.dtype] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(x.dtype)
        return x.new_zeros(*x.shape[:-1], len(weight))

    layer, x = nn.Linear(8, 3), torch.randn(2, 8)
    short, y = nn.Linear(8, 3).bfloat16(), torch.randn(2, 8).bfloat16()
    odd = nn.Parameter(torch.randn(8, 3).bfloat16().T, requires_grad=False)
    with torch.no_grad(), Linears(linear):
        assert bool(layer(x).any())
        assert bool(functional.linear(y, short.weight.as_subclass(Wrapped)).any())
        assert bool(functional.linear(y, odd).any())
        with pytest.raises(RuntimeError):
            short(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert bool(short(x).any())
        assert not calls
        assert not bool(short(y).any())
    assert calls == [torch.bfloat16]
    assert bool(short(y).any())


class Products(TorchDispatchMode):
    """Notes products of matrices in 16 bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        products = {"aten.mm", "aten.addmm", "aten.linear", "aten.matmul"}
        name = str(func).rpartition(".")[0]
        if name in products and args[-1].dtype in ROUNDING and args[-1].device.type == "cpu":
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_patch_leaves_no_compiled_kernels(family: str) -> None:
    """None of its passes multiplies 16-bit matrices by torch, whose library would keep kernels."""
    model = tiny_model(family).bfloat16()
    with Products() as products:
        model(torch.tensor([[1, 2, 3]]))
    assert products.seen, "the model's own pass is seen"
    with Products() as products, sk.patch(model, random_heads(model), tree=4):
        assert not products.seen
