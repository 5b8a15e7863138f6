"""Recorded operators by torch's own functions: the same operator with the same arguments, or none."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from test_families import batch, greedy
from tiny_models import random_heads, tiny_model

import specmemo_kernels as sk
from specmemo_kernels.engine import host_capture
from specmemo_kernels.engine.direct_calls import direct
from specmemo_kernels.engine.host_capture import HostCapture
from specmemo_kernels.engine.program import Call, View

aten = torch.ops.aten
X, ROWS = torch.arange(6.0).view(2, 3), torch.tensor([1, 0, 1])
VARIABLE = View("x", (2, 3), (3, 1), 0, torch.float32)


@pytest.mark.parametrize(
    ("operator", "arguments", "options"),
    [
        (aten.add.Tensor, (X, 2), {}),
        (aten.add.Tensor, (X, X), {"alpha": 2}),
        (aten.cat.default, ([X, X[:, :1]], 1), {}),
        (aten.clamp.default, (X, 1, 4), {}),
        (aten.index_select.default, (X, 0, ROWS), {}),
        (aten.embedding.default, (X, ROWS), {}),
        (aten.silu.default, (X,), {}),
        (aten.masked_fill.Scalar, (X, X > 2, -1), {}),
        (aten.to.dtype, (X, torch.bfloat16), {}),
        (aten.topk.default, (X, 2, 1), {}),
        (aten.arange.start, (1, 4), {"device": torch.device("cpu"), "pin_memory": False}),
    ],
    ids=count(),
)
def test_operators_with_functions(operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    (call,) = direct([Call(operator, arguments, options)])
    assert call.function is not operator
    result, expected = call.make(lambda _: X), operator(*arguments, **options)
    for got, wanted in zip(*((x if isinstance(x, tuple) else (x,)) for x in (result, expected)), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (aten.add.Scalar, (VARIABLE, 2)),  # torch.add calls add.Tensor
        (aten.div.Tensor_mode, (VARIABLE, VARIABLE)),  # div.Tensor
        (aten.slice.Tensor, (VARIABLE, 0, 1, 2)),  # no function
        (torch.ops.specmemo.rms_norm, (VARIABLE,)),
        (torch.sin, (VARIABLE,)),  # is one already
    ],
    ids=count(),
)
def test_others_stay(operator: Any, arguments: tuple[Any, ...]) -> None:
    (call,) = direct([Call(operator, arguments)])
    assert call.function is operator


def test_nothing_runs() -> None:
    x = X.clone()
    (call,) = direct([Call(aten.add_.Tensor, (x, 1), written=frozenset())])
    assert call.function is torch.Tensor.add_
    assert torch.equal(x, X)


def test_a_step_has_few_other_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a recorded step nearly all operators of torch have functions; the tokens are the model's own."""
    recorded: list[list[Call]] = []
    monkeypatch.setattr(HostCapture, "after", 1)
    compiled = host_capture.compiled
    monkeypatch.setattr(host_capture, "compiled", lambda calls: recorded.append(calls) or compiled(calls))
    model, inputs = tiny_model("gemma2"), batch((8,))
    expected = greedy(model, inputs, 24)
    with sk.patch(model, random_heads(model), tree=5):
        assert torch.equal(greedy(model, inputs, 24), expected)
    assert recorded
    for calls in recorded:
        others = [call.function for call in calls if isinstance(call.function, torch._ops.OpOverload)]
        assert len(others) < len(calls) / 5, others
