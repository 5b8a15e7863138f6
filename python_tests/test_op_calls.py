"""Operators take the short way to their kernels only where nobody would miss the long one."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import AttentionCase, attention_inputs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu
from specmemo_kernels.ops import checks, layouts, schema

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


@pytest.fixture(params=["compiled", "python"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was checked and what went through torch's dispatcher, by a tree_attention that remembers nothing yet."""
    heard: list[str] = []

    class Dispatched:
        called = torch.ops.specmemo.tree_attention

        def __call__(self, *args: Any) -> Any:
            heard.append("dispatch")
            return self.called(*args)

        def __getattr__(self, name: str) -> Any:  # torch looks for its overloads
            return getattr(self.called, name)

    def check(*args: Any) -> None:
        heard.append("check")
        checks.tree_attention(*args)

    if request.param == "python":
        monkeypatch.setattr(layouts, "_cpu", None)
        monkeypatch.setattr(schema, "layouts", layouts.layouts_in_python)
    operator = schema.Operator("tree_attention", check)
    monkeypatch.setattr(ops, "_tree_attention", operator)
    monkeypatch.setattr(ops, "tree_attention", operator.shortens(inspect.unwrap(ops.tree_attention)))
    monkeypatch.setattr(torch.ops.specmemo, "tree_attention", Dispatched())
    return heard


@pytest.fixture
def inputs() -> dict[str, Any]:
    return attention_inputs(AttentionCase("calls", (9, 4), (3, 5), head_dim=16), torch.float32)


@pytest.fixture
def attend(inputs: dict[str, Any]) -> Callable[[], Tensor]:
    return lambda: ops.tree_attention(**inputs, backend="cpu")[0]


def test_the_same_result(checked: list[str], attend: Callable[[], Tensor]) -> None:
    long = attend()
    assert checked == ["check", "dispatch"]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(attend(), long)
    assert checked == ["check", "dispatch"]


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    with torch.profiler.profile():
        yield


@pytest.mark.parametrize("watch", [torch.enable_grad, Listener, FunctionListener, profiled])
def test_who_listens_is_heard(checked: list[str], attend: Callable[[], Tensor], watch: Any) -> None:
    with torch.no_grad():
        attend()
        assert checked == ["check"]
        with watch():
            attend()
        heard = checked[1:]
        assert set(heard) == {"dispatch"}, "a mode for functions calls it once more"
        attend()
    assert checked[1:] == heard


@torch.inference_mode()
def test_what_passed_is_not_checked_again_and_all_else_is(checked: list[str], inputs: dict[str, Any]) -> None:
    ops.tree_attention(**inputs)
    for name, value in [("q", inputs["q"].half()), ("q", inputs["q"][:, :3]), ("window", 0), ("softcap", -1.0)]:
        for _ in range(2):
            checked.clear()
            with pytest.raises(ValueError, match=name):
                ops.tree_attention(**inputs | {name: value})
            assert checked == ["check"]
    checked.clear()
    ops.tree_attention(**inputs | {"scale": 0.3, "max_seq_len": None})
    ops.tree_attention(**inputs | {"max_seq_len": 500})
    ops.tree_attention(**inputs | {"max_seq_len": 501})
    assert checked == ["check"], "how long sequences may be changes at every step, and isn't checked"


@torch.inference_mode()
def test_each_backend_is_remembered_for_itself(checked: list[str], inputs: dict[str, Any]) -> None:
    results = {name: ops.tree_attention(**inputs, backend=name)[0] for name in ("reference", "cpu") * 2}
    assert checked == ["check"] * 2
    assert torch.equal(results["cpu"], ops.tree_attention(**inputs)[0])
    assert not torch.equal(results["cpu"], results["reference"])
    with pytest.raises(ops.BackendUnavailable, match="unknown backend 'fast'"):
        ops.tree_attention(**inputs, backend="fast")


@torch.inference_mode()
def test_only_so_much_is_remembered(checked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_REMEMBERED", 2)
    for nodes in (3, 4, 5, 3, 3):
        ops.tree_attention(**attention_inputs(AttentionCase("calls", (9,), (nodes,), head_dim=16), torch.float32))
    assert checked == ["check"] * 4, "the third kind makes the first two forgotten"


def _two(first: Any, second: Any = 2, *, third: Any, backend: Any = None) -> tuple[str, Any, Any, Any, Any]:
    return "long", first, second, third, backend


def _short(first: Any, second: Any, third: Any) -> tuple[str, Any, Any, Any]:
    return "short", first, second, third


def test_arguments_come_in_the_order_of_the_parameters() -> None:
    """However they are given; what doesn't fit goes to the function itself, whose error it is."""
    op = layouts.shortened(_two, (), {layouts.layouts(1, 2, 3, None): _short})
    assert op(1, third=3) == op(1, 2, third=3) == ("short", 1, 2, 3)
    assert op(third=4, backend=None, first=5) == ("short", 5, 2, 4)
    assert op(1, **{"".join("third"): 3}) == ("long", 1, 2, 3, None), "a name made at run time"
    assert op(1, third=-3) == ("long", 1, 2, -3, None)
    assert op(1, 2, third=3, backend="cpu") == ("long", 1, 2, 3, "cpu")
    assert op(1, third=[]) == ("long", 1, 2, [], None)
    for args, kwargs in [
        ((1,), {}),
        ((1, 2, 3), {"third": 3}),
        ((1,), {"third": 3, "fourth": 4}),
        ((1,), {"first": 1, "third": 3}),
    ]:
        with pytest.raises(TypeError, match=r"_two\(\)"):
            op(*args, **kwargs)


def test_an_answer_that_fails_is_an_error() -> None:
    def fails() -> bool:
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        layouts.shortened(_two, (fails,), {})(1, third=3)


def test_a_short_function_is_still_that_function() -> None:
    op = ops.commit_paged_kv
    assert isinstance(op, _cpu.Shortened)
    assert op.__name__ == "commit_paged_kv"
    assert op.__doc__ == inspect.unwrap(op).__doc__
    assert [*inspect.signature(op).parameters][-2:] == ["v_scales", "backend"]
    assert copy.deepcopy(op) is op
    assert pickle.loads(pickle.dumps(op)) is op


def test_parameters_are_those_of_the_schema() -> None:
    """Kernels get their arguments in this order."""
    for name in schema.SCHEMAS.keys() - {"lm_head_topk"}:  # that one isn't shortened: it looks at the value of k
        expected = [argument.name for argument in getattr(torch.ops.specmemo, name).default._schema.arguments]
        assert [*inspect.signature(getattr(ops, name)).parameters] == expected


def test_a_wrong_number_of_arguments_is_an_error() -> None:
    """Only a mistake in this package can make one; nothing is read past the arguments that are there."""
    with pytest.raises(TypeError, match="2 arguments given, expected 19"):
        _cpu.tree_attention(None, None)


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
