"""Fused operators of recorded steps: the same bits as separate operators, and only where nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples, sample
from tiny_models import FAMILIES, random_heads, tiny_model

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.engine import host_capture
from specmemo_kernels.engine.fusion import fused
from specmemo_kernels.engine.host_capture import HostCapture
from specmemo_kernels.engine.program import Call, View

cpu: Any = pytest.importorskip("specmemo_kernels.backends.cpu")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = {dtype: torch.linspace(0.5, 1.5, 200).to(dtype) for dtype in DTYPES}


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return (x * cos) + (rotate_half(x) * sin)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that the last recorded program calls."""
    monkeypatch.setattr(host_capture, "dispatcher_active", lambda: False)
    names: list[str] = []
    original = host_capture.record

    def record(run: Callable[[], None]) -> Any:
        calls, kernels = original(run)
        names[:] = [getattr(call.function, "__name__", str(call.function)) for call in calls]
        return calls, kernels

    monkeypatch.setattr(host_capture, "record", record)
    return names


def replayed(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of the function, and of its replay on input that came later."""
    later = x.clone()
    out = torch.zeros_like(function(x))
    x.zero_()

    def run() -> None:
        out.copy_(function(x))

    replay = HostCapture(CPU, limit=1 << 20)(run)
    x.copy_(later)
    replay()
    found = out.clone()
    x.copy_(later)  # the function may write to it
    return function(x), found


def mark(x: torch.Tensor) -> torch.Tensor:
    """One of our operators, which names the backend of the program."""
    return ops.rms_norm(x, WEIGHTS[x.dtype][: x.shape[-1]], eps=1e-6, backend="cpu")


@settings(max_examples=examples(60), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES), tokens=st.integers(1, 9), heads=st.integers(1, 5), half=st.integers(1, 70),
    pad=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_rotary(dtype: torch.dtype, tokens: int, heads: int, half: int, pad: int, seed: int) -> None:
    """Bit for bit torch's operators, with rows and heads apart in memory."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads + pad, 2 * half + pad, generator=generator).to(dtype)[:, pad:, : 2 * half]
    cos, sin = (torch.randn(tokens, 2 * half + pad, generator=generator).to(dtype)[:, : 2 * half] for _ in range(2))
    assert torch.equal(cpu.rotary(x, cos, sin), rotary(x, cos[:, None], sin[:, None]))


@settings(max_examples=examples(60), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES), rows=st.integers(1, 9), size=st.integers(1, 200), offset=st.sampled_from([0.0, 1.0]),
    round_first=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_add_rms_norm(dtype: torch.dtype, rows: int, size: int, offset: float, round_first: bool, seed: int) -> None:
    """Bit for bit an addition and ``rms_norm``."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=generator).to(dtype)
    total, normed = cpu.add_rms_norm(x, residual, weight, 1e-5, offset, round_first)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, cpu.rms_norm(total, weight, 1e-5, offset, round_first))


@pytest.mark.parametrize("shape", [(1, 4, 7, 16), (1, 4, 1, 16), (1, 1, 7, 16), (1, 1, 1, 6), (3, 4, 1, 16)])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_is_fused(shape: tuple[int, ...], transposed: bool, dtype: torch.dtype, recorded: list[str]) -> None:
    """As transformers writes it, for ``[batch, heads, tokens, size]``: a view of ``[batch, tokens, heads, size]``."""
    batch, heads, tokens, size = shape
    memory = (batch, tokens, heads, size) if transposed else shape
    angles = torch.randn(2, batch, tokens, size).to(dtype)

    def function(x: torch.Tensor) -> torch.Tensor:
        rows = mark(x).view(memory)
        cos, sin = (angles * 1)[:, :, None]
        return rotary(rows.transpose(1, 2) if transposed else rows, cos, sin)

    expected, out = replayed(function, torch.randn(batch * tokens * heads, size).to(dtype))
    assert torch.equal(expected, out)
    in_order = transposed or heads == 1 or tokens == 1
    assert ("rotary" in recorded) == in_order, recorded
    assert not in_order or {"neg.default", "cat.default"}.isdisjoint(recorded)


def _kept(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = rotate_half(x)
    return (x * cos + turned * sin) + turned


def _written(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first = x * cos
    turned = rotate_half(x)
    x.add_(1)
    return first + turned * sin + x


def _swapped(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., :half], x[..., half:]), dim=-1) * sin


def _scaled(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.add(x * cos, rotate_half(x) * sin, alpha=2)


def _other_angles(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + rotate_half(x) * sin[:1]


def _wider(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos.double() + rotate_half(x) * sin.double()


def _constant_angles(x: torch.Tensor, _: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * ANGLES + rotate_half(x) * sin


ANGLES = torch.randn(5, 1, 8)


@pytest.mark.parametrize("change", [_kept, _written, _swapped, _scaled, _other_angles, _wider, _constant_angles])
def test_almost_rotary_is_not_fused(change: Callable[..., torch.Tensor], recorded: list[str]) -> None:
    angles = torch.randn(2, 5, 1, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        return change(mark(x), *(angles * 1))

    expected, out = replayed(function, torch.randn(5, 3, 8))
    assert torch.equal(expected, out)
    assert "rotary" not in recorded


def _norm_of_sum(x: torch.Tensor) -> torch.Tensor:
    total = x + x * 2
    return mark(total) + total


def _written_sum(x: torch.Tensor) -> torch.Tensor:
    total = x + x * 2
    total.mul_(3)
    return mark(total)


def _broadcast_sum(x: torch.Tensor) -> torch.Tensor:
    return mark(x + (x * 2)[:1])


def _scaled_sum(x: torch.Tensor) -> torch.Tensor:
    return mark(torch.add(x, x * 2, alpha=3))


def _part_of_sum(x: torch.Tensor) -> torch.Tensor:
    return mark((x + x * 2)[1:])


@pytest.mark.parametrize(
    ("function", "fused"),
    [(_norm_of_sum, True), (_written_sum, False), (_broadcast_sum, False), (_scaled_sum, False), (_part_of_sum, False)],
)
def test_norms_of_sums(function: Callable[[torch.Tensor], torch.Tensor], fused: bool, recorded: list[str]) -> None:
    expected, out = replayed(lambda x: function(x * 1), torch.randn(4, 12))
    assert torch.equal(expected, out)
    assert ("add_rms_norm" in recorded) == fused


def operators_per_layer(backend: str, monkeypatch: pytest.MonkeyPatch, recorded: list[str], new: int = 12) -> int:
    """Calls of a recorded Llama step, as the difference of models with two layers and one; ``new`` tokens."""
    monkeypatch.setattr(HostCapture, "after", 1)
    counts = []
    for layers in (1, 2):
        model = tiny_model("llama", num_hidden_layers=layers)
        ids = torch.randint(1, 60, (1, 12), generator=torch.Generator().manual_seed(1))
        expected = model.generate(ids, max_new_tokens=new, do_sample=False)
        with sk.patch(model, random_heads(model), tree=5, graph=True, backend=backend) as handle:
            assert torch.equal(model.generate(ids, max_new_tokens=new, do_sample=False), expected)
            assert handle.stats.graph_steps > 2
        counts.append(len(recorded))
    return counts[1] - counts[0]


@pytest.mark.parametrize("family", sample([f for f in FAMILIES if f != "gptj"], ["llama", "qwen3", "phi3"]))
def test_bits_of_families(family: str, monkeypatch: pytest.MonkeyPatch, recorded: list[str]) -> None:
    """A replayed step of each family has the same hidden states as its unfused recording."""
    model = tiny_model(family).to(torch.bfloat16)
    ids = torch.randint(1, 60, (1, 20), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(HostCapture, "after", 1)
    written = []
    for fuse in (True, False):
        if not fuse:
            monkeypatch.setattr(host_capture, "fused", lambda calls, kernels: list(calls))
        with sk.patch(model, random_heads(model).to(torch.bfloat16), tree=7, graph=True) as handle:
            tokens = model.generate(ids, max_new_tokens=25, do_sample=False)
            assert handle.stats.graph_steps > 2
            written.append((tokens, handle._pools.steps.hidden(1)[0]))
        if fuse and family in ("llama", "qwen3"):
            assert {"rotary", "add_rms_norm"} <= set(recorded)
    assert torch.equal(written[0][0], written[1][0])
    assert torch.equal(written[0][1], written[1][1])


def test_operators_of_a_layer(monkeypatch: pytest.MonkeyPatch, recorded: list[str]) -> None:
    """Four projections (two calls), two rotary embeddings, attention, two copies, gated MLP, two norms of sums."""
    assert operators_per_layer("cpu", monkeypatch, recorded) == 10


CHANGES = (
    "none", "values late", "keys written", "values written", "store read", "store in a list", "no values",
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_stored_rotary(change: str) -> None:
    """One call rotates and copies to scratch, unless that would read or write something at another time."""

    def view(name: str) -> View:
        return View(name, (3, 2, 8), (16, 8, 1), 0, torch.float32)

    def call(name: str, *args: Any, results: tuple[View, ...] = (), written: tuple[str, ...] = ()) -> Call:
        return Call(getattr(kernels, name), args, results=results, single=False, written=frozenset(written))

    kernels = SimpleNamespace(
        **{n: lambda *_: None for n in ("make", "rotary", "rotary_pair", "rotary_stored", "attention")}
    )
    x, y, v, q, k = map(view, "xyvqk")
    keys, values = torch.empty(5, 3, 2, 8)[1], torch.empty(5, 3, 2, 8)[1]
    copies = [Call(torch.ops.aten.copy_.default, (to, rows)) for to, rows in ((keys, k), (values, v))]
    pair = call("rotary_pair", x, y, view("cos"), view("sin"), results=(q, k))
    calls = [call("make", results=(x, y, view("cos"), view("sin"), v)), pair, call("attention", q, k, v), *copies]
    match change:
        case "values late":
            calls[:3] = call("make", results=(x, y, view("cos"), view("sin"))), pair, call("make", results=(v,))
        case "keys written":
            calls.insert(2, call("make", k, written=("k",)))
        case "values written":
            calls.insert(4, call("make", v, written=("v",)))
        case "store read":
            calls.insert(2, call("attention", keys[:1]))
        case "store in a list":
            calls.insert(2, call("attention", [k, values]))
        case "no values":
            calls.pop()
    found = fused(calls, kernels)
    if change != "none":
        assert found == calls
        return
    assert [c.function for c in found] == [kernels.make, kernels.rotary_stored, kernels.attention]
    assert found[1].args[:5] == (x, y, v, view("cos"), view("sin"))
    assert found[1].args[5] is keys
    assert found[1].args[6] is values
    assert found[1].results == (q, k)
