"""Built-in functions in recorded steps: the same operator with the same arguments."""

from __future__ import annotations

from dataclasses import replace
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


class Squaring(torch.Tensor):
    """A tensor for which torch.add squares the sum."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result**2 if func is torch.add else result


@pytest.mark.parametrize(
    ("operator", "arguments", "options"),
    [
        (aten.add.Tensor, (VARIABLE, 2), {}),
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
    result, expected = (replace(call, function=f).make(lambda _: X) for f in (call.function, operator))
    for got, wanted in zip(*((x if isinstance(x, tuple) else (x,)) for x in (result, expected)), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (aten.add.Scalar, (VARIABLE, 2)),  # torch.add dispatches to add.Tensor
        (aten.arange.start, (1, 4)),  # torch.arange adds a device
        (aten.slice.Tensor, (VARIABLE, 0, 1, 2)),  # without a function of that name
        (aten.add.Tensor, (Squaring(X), 2)),  # with a function of its own
        (torch.ops.specmemo.rms_norm.default, (VARIABLE,)),
        (torch.sin, (VARIABLE,)),  # a function
    ],
    ids=count(),
)
def test_others_stay(operator: Any, arguments: tuple[Any, ...]) -> None:
    (call,) = direct([Call(operator, arguments)])
    assert call.function is operator


def test_nothing_runs() -> None:
    x = X.clone()
    (call,) = direct([Call(aten.add_.Tensor, (x, 1))])
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
        assert len(others) <= 2, others
