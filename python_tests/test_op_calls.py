"""Operators through torch's dispatcher, and the engine's direct calls around it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import AttentionCase, attention_inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specmemo_kernels import ops
from specmemo_kernels.backends import _cpu
from specmemo_kernels.ops import schema

Tensor = torch.Tensor
CPU = torch.device("cpu")


class Recorder(TorchDispatchMode):
    """Records the operators that go through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionRecorder(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def inputs() -> dict[str, Any]:
    return attention_inputs(AttentionCase("calls", (9, 4), (3, 5), head_dim=16), torch.float32)


@pytest.fixture
def attend(inputs: dict[str, Any]) -> Callable[[], Tensor]:
    return lambda: ops.tree_attention(**inputs, backend="cpu")[0]


def positional(inputs: dict[str, Any]) -> list[Any]:
    """The arguments in the order of the schema, without the backend."""
    bound = inspect.signature(ops.tree_attention).bind(**inputs)
    bound.apply_defaults()
    return [*bound.arguments.values()][:-1]


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    with torch.profiler.profile():
        yield


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_direct_calls_give_the_same_result(inputs: dict[str, Any], backend: str) -> None:
    direct = ops.kernels(backend, CPU).tree_attention(*positional(inputs))
    for ours, expected in zip(direct, ops.tree_attention(**inputs, backend=backend), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("watch", [Recorder, FunctionRecorder, profiled])
def test_direct_calls_go_through_the_dispatcher_while_it_is_observed(inputs: dict[str, Any], watch: Any) -> None:
    direct = ops.kernels("cpu", CPU)
    with watch():
        observed = ops.kernels("cpu", CPU)
        assert observed is not direct
        out = observed.tree_attention(*positional(inputs))[0]
    assert ops.kernels("cpu", CPU) is direct
    assert torch.equal(out, direct.tree_attention(*positional(inputs))[0])


def test_an_observed_engine_shows_the_operators(inputs: dict[str, Any]) -> None:
    with torch.inference_mode(), Recorder() as recorder:
        ops.kernels("cpu", CPU).tree_attention(*positional(inputs))
    assert "specmemo.tree_attention.default" in recorder.names


def test_every_call_is_checked(inputs: dict[str, Any]) -> None:
    for name, value in [("q", inputs["q"].half()), ("q", inputs["q"][:, :3]), ("window", 0), ("softcap", -1.0)]:
        for _ in range(2):
            with pytest.raises(ValueError, match=name):
                ops.tree_attention(**inputs | {name: value})
    ops.tree_attention(**inputs)


@torch.inference_mode()
def test_each_backend_by_its_name(inputs: dict[str, Any]) -> None:
    results = {name: ops.tree_attention(**inputs, backend=name)[0] for name in ("reference", "cpu") * 2}
    assert torch.equal(results["cpu"], ops.tree_attention(**inputs)[0])
    assert not torch.equal(results["cpu"], results["reference"])
    with pytest.raises(ops.BackendUnavailable, match="unknown backend 'fast'"):
        ops.tree_attention(**inputs, backend="fast")
    with pytest.raises(ops.BackendUnavailable, match="unknown backend 'fast'"):
        ops.kernels("fast", CPU)


class Derived(Tensor):
    """A tensor subclass over the same memory."""


def test_tensors_without_memory_are_refused(inputs: dict[str, Any]) -> None:
    """Fake and wrapped tensors have no elements for a kernel; subclasses with memory do."""
    attend = ops.kernels("cpu", CPU).tree_attention
    derived = attend(*positional(inputs | {"q": inputs["q"].as_subclass(Derived)}))
    assert torch.equal(derived[0], attend(*positional(inputs))[0])
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(inputs["q"])
    with pytest.raises(ValueError, match="memory of their own"):
        attend(*positional(inputs | {"q": fake}))


def test_parameters_are_those_of_the_schema() -> None:
    """Kernels get their arguments in this order."""
    for name in schema.SCHEMAS:
        expected = [argument.name for argument in getattr(torch.ops.specmemo, name).default._schema.arguments]
        assert [*inspect.signature(getattr(ops, name)).parameters] == expected
    assert set(ops.Kernels.__annotations__) == set(schema.SCHEMAS)


def test_empty_and_flat_tensors_are_named() -> None:
    ints = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="qo_indptr is empty"):
        ops.verify_tree_greedy(ints, ints, ints.int(), torch.zeros(0, dtype=torch.int32), max_depth=3)
    with pytest.raises(ValueError, match="columns is -5"):
        ops.decompress(torch.zeros(2, 64, dtype=torch.uint8), -5)
    pages, table, lengths = (
        torch.zeros(1, 2, 4, 1, 8),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    rows = torch.tensor([0, 1], dtype=torch.int32)
    for scratch in (torch.tensor(0.0), torch.zeros(8)):
        with pytest.raises(ValueError, match="k_scratch has shape"):
            ops.commit_paged_kv(scratch, scratch, pages, pages.clone(), table, lengths, rows, lengths[None], lengths)


def test_a_wrong_number_of_arguments_is_an_error() -> None:
    """Only a bug in this package can cause it; nothing is read past the given arguments."""
    with pytest.raises(TypeError, match="2 arguments given, expected 19"):
        _cpu.tree_attention(None, None)


def test_a_dispatch_mode_sees_the_operator(attend: Callable[[], Tensor]) -> None:
    with torch.inference_mode(), Recorder() as recorder:
        attend()
    assert "specmemo.tree_attention.default" in recorder.names


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


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_no_gradient_is_lost_silently(backend: str) -> None:
    """A backward pass through an operator raises, also where another term has a gradient."""
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(20, 8)
    values, _ = ops.lm_head_topk(hidden, weight, k=2, backend=backend)
    assert values.requires_grad
    with pytest.raises(NotImplementedError, match="specmemo::lm_head_topk has no gradient"):
        (values.sum() + (hidden @ weight.T).sum()).backward()
    assert hidden.grad is None


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("needs", ["rows", "pages"])
def test_writes_refuse_gradients(backend: str, needs: str) -> None:
    """Rows that are copied to pages would lose theirs; pages would be changed beside it."""
    rows, pages = torch.randn(2, 1, 8), torch.zeros(2, 4, 1, 8)
    (rows if needs == "rows" else pages).requires_grad_()
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    indptr, path, length = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [[0, 1]], [1]))

    def append() -> None:
        other = pages.detach().clone()
        ops.append_paged_kv(rows, rows.detach(), pages, other, table, lengths, indptr, backend=backend)

    def commit() -> None:
        other = pages.detach().clone()
        arguments = rows[None], rows.detach()[None], pages[None], other[None], table, lengths, indptr, path, length
        ops.commit_paged_kv(*arguments, backend=backend)

    for name, write in (("append", append), ("commit", commit)):
        with pytest.raises(NotImplementedError, match=f"specmemo::{name}_paged_kv has no gradient"):
            write()
        assert not pages.any()
    with torch.no_grad():
        append()
    assert torch.equal(pages[0, :2], rows)
