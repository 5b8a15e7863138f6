"""Operators take the short way to their kernels only where nobody would miss the long one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import AttentionCase, attention_inputs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specmemo_kernels import ops
from specmemo_kernels.ops import schema

Tensor = torch.Tensor


class Listener(TorchDispatchMode):
    """Writes down what passes the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionListener(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def attend() -> Callable[[], Tensor]:
    inputs = attention_inputs(AttentionCase("calls", (9, 4), (3, 5), head_dim=16), torch.float32)
    return lambda: ops.tree_attention(**inputs, backend="cpu")[0]


def is_short(plain: bool = True) -> bool:
    return schema.operator("tree_attention", plain) is schema.KERNELS["tree_attention"]


def test_the_same_result(attend: Callable[[], Tensor]) -> None:
    long = attend()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert is_short()
            assert torch.equal(attend(), long)


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    with torch.profiler.profile():
        yield


@pytest.mark.parametrize("watch", [torch.enable_grad, Listener, FunctionListener, profiled])
def test_who_listens_is_heard(watch: Any) -> None:
    with torch.no_grad():
        with watch():
            assert not is_short()
        assert is_short()
        assert not is_short(plain=False)


def test_a_dispatch_mode_sees_the_operator(attend: Callable[[], Tensor]) -> None:
    with torch.inference_mode(), Listener() as listener:
        attend()
    assert "specmemo.tree_attention.default" in listener.heard


def test_a_profile_shows_the_operator(attend: Callable[[], Tensor]) -> None:
    with torch.inference_mode(), torch.profiler.profile() as profile:
        attend()
    assert "specmemo::tree_attention" in {event.name for event in profile.events()}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_trace_holds_the_operator() -> None:
    hidden, weight = torch.randn(3, 8), torch.randn(20, 8)

    def best(x: Tensor) -> Tensor:
        return ops.lm_head_argmax(x, weight, backend="cpu")

    with torch.no_grad():
        for graph in (make_fx(best)(hidden).graph, torch.jit.trace(best, hidden).graph):
            assert "lm_head_argmax" in str(graph)


@pytest.mark.filterwarnings("error")
def test_no_gradient_is_lost_silently() -> None:
    """With gradients on, autograd sees the call and says that there is no formula, rather than a constant."""
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(20, 8)
    values, _ = ops.lm_head_topk(hidden, weight, k=2, backend="cpu")
    assert values.requires_grad
    with pytest.raises(UserWarning, match="autograd kernel was not registered"):
        values.sum().backward()
