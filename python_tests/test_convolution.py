"""Depthwise convolutions of 16-bit rows against torch's in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrid_models import hybrid_model
from selection import sample
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import specmemo_kernels as sk
from specmemo_kernels.integrations.hf import convolution
from specmemo_kernels.integrations.hf.convolution import depthwise_conv1d, fast_convolutions

Tensor = torch.Tensor
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 5, 1), (3, 7, 4), (2, 64, 33), (9, 6)])
@pytest.mark.parametrize(("taps", "padding"), [(1, 0), (4, 3), (3, 1), (2, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values(dtype: torch.dtype, shape: tuple[int, ...], taps: int, padding: int, has_bias: bool) -> None:
    """The error is that of sums in float32 and of one rounding."""
    channels = shape[-2]
    x, weight = torch.randn(shape).to(dtype), torch.randn(channels, 1, taps).to(dtype)
    bias = torch.randn(channels).to(dtype) if has_bias else None
    exact = (x.double(), weight.double(), None if bias is None else bias.double())
    expected = nn.functional.conv1d(*exact, padding=padding, groups=channels)
    magnitudes = nn.functional.conv1d(
        exact[0].abs(), exact[1].abs(), None if bias is None else exact[2].abs(), padding=padding, groups=channels
    )
    found = depthwise_conv1d(x, weight, bias, padding)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    limit = expected.abs() * torch.finfo(dtype).eps / 2 + magnitudes * (taps + 1) * torch.finfo(torch.float32).eps
    assert ((found.double() - expected).abs() <= limit + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_have_their_own_bits(dtype: torch.dtype) -> None:
    """A row's result depends on neither the number of sequences nor the number of rows behind it."""
    x, weight = torch.randn(4, 33, 21).to(dtype), torch.randn(33, 1, 4).to(dtype)
    together = depthwise_conv1d(x, weight, None, 3)
    for i in range(4):
        assert torch.equal(depthwise_conv1d(x[i : i + 1, :, :6], weight, None, 3)[..., :6], together[i : i + 1, :, :6])


def test_other_convolutions_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides, dilations, several channels per group, named padding, float32."""

    def unexpected(*_: Any) -> None:
        raise AssertionError("not a depthwise convolution of 16-bit rows")

    monkeypatch.setattr(convolution, "depthwise_conv1d", unexpected)
    x, weight = torch.randn(2, 6, 12).bfloat16(), torch.randn(6, 1, 3).bfloat16()
    calls: list[dict[str, Any]] = [
        {"stride": 2}, {"dilation": 2}, {"stride": (3,)}, {"padding": "same"}, {"padding": "valid"}
    ]  # fmt: skip
    for call in calls:
        expected = torch.conv1d(x, weight, groups=6, **call)
        with fast_convolutions(x):
            assert torch.equal(torch.conv1d(x, weight, groups=6, **call), expected)
    two, twice = torch.randn(6, 2, 3).bfloat16(), torch.randn(12, 1, 3).bfloat16()
    expected = [torch.conv1d(x, two, groups=3), torch.conv1d(x, twice, groups=6)]
    with fast_convolutions(x):
        found = [torch.conv1d(x, two, groups=3), torch.conv1d(x, twice, groups=6)]
        assert torch.equal(torch.conv1d(x.float(), weight.float(), groups=6).bfloat16(), depthwise(x, weight))
        with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            torch.conv1d(x[..., :2], weight, groups=6)
        with pytest.raises(RuntimeError, match="type"):
            torch.conv1d(x, weight.float(), groups=6)
        with pytest.raises(RuntimeError, match="type"):
            torch.conv1d(x, weight, torch.zeros(6), groups=6)
    assert all(map(torch.equal, found, expected))


class UsedOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def depthwise(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.conv1d(x.double(), weight.double(), groups=len(weight)).bfloat16()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", sample(["lfm2", "lfm3", "falcon_h1", "qwen3_next", "zamba2"], ["lfm2", "lfm3"]))
def test_passes_use_it(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """``patch`` compares each kind of layer with its own code; then no step reaches torch's convolution."""
    model = hybrid_model(family).to(dtype)
    prompt, results, ours = torch.arange(3, 20)[None], list[Tensor](), convolution.depthwise_conv1d

    def counted(*args: Any) -> Tensor:
        results.append(ours(*args))
        return results[-1]

    monkeypatch.setattr(convolution, "depthwise_conv1d", counted)
    with sk.patch(model, "prompt-lookup", tree=3):
        results.clear()
        with UsedOperators() as used:
            model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert results
    assert torch.ops.aten.add in used.found
    assert torch.ops.aten.convolution not in used.found
