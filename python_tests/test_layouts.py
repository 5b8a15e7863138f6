"""What operators remember of their arguments tells apart whatever a check could tell apart."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from specmemo_kernels.backends import _cpu
from specmemo_kernels.ops.layouts import layouts, layouts_in_python

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.int32, torch.int64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Small ones, as they are, transposed, cut or with gaps; now and then a parameter."""
    shape = draw(st.lists(st.integers(0, 2), min_size=0, max_size=3))
    tensor = torch.zeros(shape, dtype=draw(st.sampled_from(DTYPES)))
    change = draw(st.sampled_from(["none", "transposed", "cut", "gaps", "parameter"]))
    if change == "parameter" and tensor.is_floating_point():
        return torch.nn.Parameter(tensor)
    if not shape or change in ("none", "parameter"):
        return tensor
    return {"transposed": tensor.mT if len(shape) > 1 else tensor, "cut": tensor[1:], "gaps": tensor[..., ::2]}[change]


numbers = st.one_of(st.integers(-3, 3), st.booleans(), st.sampled_from([-0.5, -0.0, 0.5, float("nan")]))
values = st.one_of(st.none(), numbers, st.sampled_from(["cpu", "", "é"]), tensors())


@given(st.lists(values, max_size=2), st.lists(values, max_size=2))
def test_equal_when_the_arguments_are(first: list[Any], second: list[Any]) -> None:
    """The C++ function and the one in Python agree on what is equal."""
    same = layouts_in_python(*first) == layouts_in_python(*second)
    assert (_cpu.layouts(*first) == _cpu.layouts(*second)) == same
    assert _cpu.layouts(*first) is not None


def test_what_has_no_layout() -> None:
    """Tensors whose sizes may be symbols, or that aren't plain, and other objects."""

    class Wrapped(torch.Tensor):
        pass

    with FakeTensorMode():
        fake = torch.ones(2)
    for function in (layouts, layouts_in_python):
        for value in (fake, torch.ones(2).as_subclass(Wrapped), (torch.ones(2),), b"cpu", 1j):
            assert function(torch.ones(2), value) is None


def test_more_than_there_is_room_for_has_no_layout() -> None:
    assert _cpu.layouts(*[1] * 512) != _cpu.layouts(*[1] * 511, -1)
    for too_many in ([1] * 513, [1] * 512 + [None], [1] * 512 + [""], [1] * 512 + [torch.zeros(1)], ["a" * 5000]):
        assert _cpu.layouts(*too_many) is None


def test_the_compiled_one_is_used() -> None:
    assert layouts is _cpu.layouts
